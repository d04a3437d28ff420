"""The intervals' law: they cover the truth as often as they say, and are not so wide that they say nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats  # type: ignore[import-untyped]

from benchmarks.ab import statistics
from benchmarks.ab.summary import verdict

TRIALS = 400


def rounds_of(rng: np.random.Generator, rounds: int, pairs: int, truth: float) -> list[list[float]]:
    """Ratios with heavy-tailed noise of requests, and a noise that all requests of a round share."""
    shared = rng.normal(0, 0.05, (rounds, 1))
    noise = rng.standard_t(4, (rounds, pairs)) * 0.2
    return (truth * np.exp(shared + noise)).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("rounds", [6, 10, 20])
def test_a_against_a_is_no_difference_in_nineteen_of_twenty(rounds: int) -> None:
    rng = np.random.default_rng(rounds)
    covered = 0
    for _ in range(TRIALS):
        found = statistics.ratio(rounds_of(rng, rounds, 12, 1.0))
        assert found is not None
        covered += found.covers(1.0)
    # A true 95 % passes with 399 in 400: the lower end is its binomial quantile.
    low = stats.binom.ppf(0.0025, TRIALS, statistics.CONFIDENCE)
    assert low <= covered < TRIALS, covered / TRIALS


def test_twenty_seeded_trials_cover_one_at_least_nineteen_times() -> None:
    covered = 0
    for seed in range(20):
        found = statistics.ratio(rounds_of(np.random.default_rng(1000 + seed), 8, 12, 1.0))
        covered += verdict(found)["says"] == "no difference"  # type: ignore[index]
    assert covered >= 19


@pytest.mark.parametrize(("truth", "says"), [(1.3, "faster"), (1 / 1.3, "slower")])
def test_a_real_difference_is_found_and_measured(truth: float, says: str) -> None:
    rng = np.random.default_rng(3)
    found = [statistics.ratio(rounds_of(rng, 8, 12, truth)) for _ in range(50)]
    assert sum(verdict(one)["says"] == says for one in found) >= 48  # type: ignore[index]
    logs = [math.log(one.value / truth) for one in found if one is not None]
    assert abs(np.mean(logs)) < 3 * np.std(logs) / math.sqrt(len(logs))


def test_rounds_are_the_unit_not_requests() -> None:
    """The same six round means from more requests give the same interval: repeating requests adds no certainty."""
    few = [[1.0], [1.1], [0.9], [1.05], [0.95], [1.02]]
    many = [values * 50 for values in few]
    a, b = statistics.ratio(few), statistics.ratio(many)
    assert a is not None
    assert b is not None
    assert (a.low, a.high) == pytest.approx((b.low, b.high))


def test_five_rounds_give_a_ratio_but_no_interval() -> None:
    found = statistics.ratio([[2.0, 0.5]] * 4 + [[32.0]])
    assert found is not None
    assert found.value == pytest.approx(2.0)  # log2: (0+0+0+0+5)/5
    assert found.low is None
    assert (found.rounds, found.values) == (5, 9)
    with pytest.raises(ValueError, match="--rounds must be at least 6"):
        found.covers(1.0)
    assert verdict(found)["says"] == "undecided: too few rounds"  # type: ignore[index]
    assert statistics.ratio([[], []]) is None


def test_the_tail_is_students() -> None:
    """With many rounds it is the normal one; with few it is as much smaller as t is wider."""
    assert statistics.expanded_tail(100_000) == pytest.approx(0.025, rel=1e-3)
    wide = -stats.norm.ppf(statistics.expanded_tail(8)) * math.sqrt(7 / 8)
    assert wide == pytest.approx(stats.t.ppf(0.975, 7))


@pytest.mark.parametrize(("equal", "trials"), [(True, 60), (False, 8)])
def test_quantiles_are_numpys_and_their_interval_covers(equal: bool, trials: int) -> None:
    rng = np.random.default_rng(5)
    true_median = 10.0
    covered = 0
    for _ in range(trials):
        sizes = [20] * 8 if equal else [20, 20, 20, 20, 20, 20, 20, 19]
        rounds = [(true_median * np.exp(rng.normal(0, 0.3, n))).tolist() for n in sizes]
        found = statistics.quantile(rounds, 0.5)
        assert found is not None
        assert found.value == pytest.approx(np.median(np.concatenate(rounds)))
        covered += found.covers(true_median)
    assert covered >= stats.binom.ppf(0.005, trials, 0.95)
