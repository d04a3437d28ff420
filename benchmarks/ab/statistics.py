"""Intervals for what is compared. The round is the unit: requests of one round share queues, caches and the machine's
mood, so only rounds are independent of each other.

Ratios are of logarithms, round by round, between the same requests at two endpoints. Their interval is Student's t. Of
equal endpoints these logarithms lie symmetrically around 0, whatever a round's noise is, and there t covers as often as
it says or more: heavy tails, stalls and rounds of unlike spread make it wider than it need be (Efron, "Student's t-test
under symmetry conditions", 1969; Benjamini, "Is the t test really conservative when the parent distribution is
long-tailed?", 1983). Bootstraps of so few rounds are too narrow; `benchmarks.ab.coverage` measures both. What an endpoint
has alone for longer than a round (where its process happens to lie in memory) no interval can tell from a difference.
Of several verdicts that are said together each has its share of the 5 % (Bonferroni).

t has an interval from two rounds on, if one believes in its distribution. With fewer than six all rounds lie on one side
by chance more often than 5 % (2/2⁵), so that no test without a distribution could tell: no interval is given there, and
of several verdicts with more rounds than that.

Quantiles of one endpoint, which are not compared, have the percentile bootstrap with quantiles widened for few rounds
(Hesterberg, "What Teachers Should Know About the Bootstrap", 2014: the expanded percentile interval).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats  # type: ignore[import-untyped]

CONFIDENCE = 0.95
FEWEST_ROUNDS = 6
_RESAMPLES = 4000
_SEED = 20260101

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate, its interval (None: too few rounds), and the number of rounds and values behind it."""

    value: float
    low: float | None
    high: float | None
    rounds: int
    values: int

    def covers(self, value: float) -> bool:
        """Whether the interval of a positive quantity holds `value`. Raises ValueError when there is no interval."""
        if self.low is None or self.high is None:
            raise ValueError(
                f"{self.rounds} rounds give no interval; --rounds must be at least {FEWEST_ROUNDS}"
            )
        rounding = 1e-9
        return self.low * (1 - rounding) <= value <= self.high * (1 + rounding)


def fewest_rounds(verdicts: int = 1) -> int:
    """Rounds without which no test of so many verdicts holds CONFIDENCE unless it believes in a distribution."""
    return math.ceil(math.log2(2 * verdicts / (1 - CONFIDENCE)))


def expanded_tail(rounds: int, confidence: float = CONFIDENCE) -> float:
    """Probability below the lower end: what makes the percentile bootstrap as wide as Student's t would be."""
    t = stats.t.ppf((1 - confidence) / 2, rounds - 1)
    return float(stats.norm.cdf(t * math.sqrt(rounds / (rounds - 1))))


def student(values: Values, confidence: float = CONFIDENCE) -> Values:
    """Lower and upper end of Student's t interval for the mean; `values`: […, rounds], returns […, 2]."""
    middle = values.mean(axis=-1)
    reach = stats.t.ppf((1 + confidence) / 2, values.shape[-1] - 1) * stats.sem(values, axis=-1)
    return np.stack([middle - reach, middle + reach], axis=-1)


def ratio(by_round: Sequence[Sequence[float]], verdicts: int = 1) -> Interval | None:
    """The geometric mean of ratios and its interval; `by_round` holds each round's ratios, pair by pair.

    Every round weighs the same. None without any pair. verdicts: how many intervals are to hold together.
    """
    full = [np.asarray(values, dtype=np.float64) for values in by_round if len(values)]
    if not full:
        return None
    means = np.array([np.log(values).mean() for values in full])
    count = sum(values.size for values in full)
    low = high = None
    if means.size >= fewest_rounds(verdicts):
        low, high = np.exp(student(means, 1 - (1 - CONFIDENCE) / verdicts)).tolist()
    return Interval(float(np.exp(means.mean())), low, high, int(means.size), count)


def quantile(by_round: Sequence[Sequence[float]], q: float) -> Interval | None:
    """A quantile of all values and its interval from resampled rounds. None without any value."""
    full: list[Values] = [np.asarray(values, dtype=np.float64) for values in by_round if len(values)]
    if not full:
        return None
    everything = np.concatenate(full)
    low = high = None
    if len(full) >= FEWEST_ROUNDS:
        tail = expanded_tail(len(full))
        low, high = np.quantile(_resampled(full, q), (tail, 1 - tail)).tolist()
    return Interval(float(np.quantile(everything, q)), low, high, len(full), int(everything.size))


def _resampled(rounds: Sequence[Values], q: float) -> Values:
    """The quantile of each of some hundred resamples of whole rounds."""
    size = sum(values.size for values in rounds)
    resamples = max(200, min(1000, 20_000_000 // size))
    draw = np.random.default_rng(_SEED).integers(0, len(rounds), (resamples, len(rounds)))
    if len({values.size for values in rounds}) == 1:
        table = np.stack(rounds)
        # In parts, which bounds the memory.
        parts = np.array_split(draw, max(1, resamples * size // 4_000_000))
        return np.concatenate([np.quantile(table[p].reshape(len(p), -1), q, axis=1) for p in parts])
    return np.array([np.quantile(np.concatenate([rounds[i] for i in one]), q) for one in draw])
