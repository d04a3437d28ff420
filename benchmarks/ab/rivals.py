"""Intervals for the mean of a few rounds, beside the one that `statistics.ratio` has: for `benchmarks.ab.coverage` only.

Each takes log ratios […, rounds] and a confidence, and returns lower and upper ends […, 2].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from benchmarks.ab.statistics import Values, expanded_tail, student

Method = Callable[[Values, float], Values]
_SEED = 20260101
_AT_ONCE = 20_000_000  # numbers in memory


def resamples(confidence: float) -> int:
    """2,000 for 95 %, and more for more: as many lie beyond an end."""
    return round(2000 * 0.05 / (1 - confidence))


def _bootstrap(values: Values, confidence: float, method: str, count: int) -> Values:
    """scipy.stats.bootstrap of the mean; `values`: [trials, rounds]."""
    found = []
    for part in np.array_split(values, max(1, values.size * count // _AT_ONCE)):
        ends = stats.bootstrap(
            (part,),
            np.mean,
            n_resamples=count,
            axis=-1,
            confidence_level=confidence,
            method=method,
            rng=np.random.default_rng(_SEED),
        ).confidence_interval
        found.append(np.stack([ends.low, ends.high], axis=-1))
    return np.concatenate(found)


def percentile(values: Values, confidence: float) -> Values:
    """The percentile bootstrap."""
    return _bootstrap(values, confidence, "percentile", resamples(confidence))


def bca(values: Values, confidence: float) -> Values:
    """The bias-corrected and accelerated bootstrap (Efron, 1987)."""
    return _bootstrap(values, confidence, "BCa", resamples(confidence))


def expanded(values: Values, confidence: float) -> Values:
    """The expanded percentile bootstrap, and Student's t where one of several verdicts is wider with it: what
    `statistics.ratio` had before.
    """
    wider = 1 - 2 * expanded_tail(values.shape[-1], confidence)
    found = _bootstrap(values, wider, "percentile", 2 * resamples(confidence))
    if confidence <= 0.95:
        return found
    t = student(values, confidence)
    return np.stack([np.minimum(found[:, 0], t[:, 0]), np.maximum(found[:, 1], t[:, 1])], axis=-1)


def bootstrap_t(values: Values, confidence: float) -> Values:
    """The bootstrap of the studentised mean (Efron & Tibshirani, "An Introduction to the Bootstrap", 1993, 12.5)."""
    count, rounds = resamples(confidence), values.shape[-1]
    draw = np.random.default_rng(_SEED).integers(0, rounds, (count, rounds))
    found = []
    for part in np.array_split(values, max(1, values.size * count // _AT_ONCE)):
        again = part[:, draw]
        mean, error = part.mean(axis=-1, keepdims=True), stats.sem(part, axis=-1)
        spread = stats.sem(again, axis=-1)
        t = (again.mean(axis=-1) - mean) / np.where(
            spread > 0, spread, np.nan
        )  # one round alone, drawn again and again
        low, high = np.nanquantile(t, ((1 - confidence) / 2, (1 + confidence) / 2), axis=1)
        found.append(np.stack([mean[:, 0] - high * error, mean[:, 0] - low * error], axis=-1))
    return np.concatenate(found)


@cache
def _subsets(rounds: int) -> Values:
    weights = np.array(list(itertools.product((0.0, 1.0), repeat=rounds)))[1:]
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def sign_flips(values: Values, confidence: float) -> Values:
    """The inverted sign-flip test of the mean: exact for independent symmetric rounds of whatever spread. Its ends are
    order statistics of the means of all subsets (Hartigan, "Using subsample values as typical values", 1969).
    """
    rounds = values.shape[-1]
    rank = math.floor((1 - confidence) / 2 * 2**rounds + 1e-9)
    if rank < 1:
        raise ValueError(f"{rounds} rounds are too few for {confidence:.4f}")
    found = []
    for part in np.array_split(values, max(1, len(values) * 2**rounds // _AT_ONCE)):
        means = np.sort(part @ _subsets(rounds).T, axis=-1)
        found.append(means[:, [rank - 1, -rank]])
    return np.concatenate(found)


METHODS: dict[str, Method] = {
    "Student's t": student,
    "expanded percentile bootstrap (before)": expanded,
    "percentile bootstrap": percentile,
    "BCa bootstrap": bca,
    "bootstrap-t": bootstrap_t,
    "sign flips": sign_flips,
}
