"""The intervals' law: they cover the truth as often as they say, and are not so wide that they say nothing."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats  # type: ignore[import-untyped]

from benchmarks.ab import records, statistics, summary
from benchmarks.ab.client import Sample
from benchmarks.ab.load import Point, Round
from benchmarks.ab.prove import wrong
from benchmarks.ab.summary import verdict

TRIALS = 2000


def rounds_of(rng: np.random.Generator, rounds: int, pairs: int, truth: float) -> list[list[float]]:
    """Ratios with heavy-tailed noise of requests, and a noise that all requests of a round share."""
    shared = rng.normal(0, 0.05, (rounds, 1))
    noise = rng.standard_t(4, (rounds, pairs)) * 0.2
    return (truth * np.exp(shared + noise)).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("rounds", [6, 8, 20])
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


@pytest.mark.parametrize("verdicts", [1, 4])
def test_a_ratio_has_the_interval_of_scipys_t_test(verdicts: int) -> None:
    values = rounds_of(np.random.default_rng(4), 8, 12, 1.1)
    found = statistics.ratio(values, verdicts)
    means = [np.log(one).mean() for one in values]
    ends = stats.ttest_1samp(means, 0).confidence_interval(1 - 0.05 / verdicts)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((math.exp(ends.low), math.exp(ends.high)))


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
    assert verdict(found)["says"] == "undecided: too few rounds (6 at least)"  # type: ignore[index]
    assert statistics.ratio([[], []]) is None


@pytest.mark.parametrize(("verdicts", "rounds"), [(1, 6), (2, 7), (3, 7), (4, 8), (10, 9)])
def test_several_verdicts_need_more_rounds(verdicts: int, rounds: int) -> None:
    """All rounds on one side happens by chance in 2 of 2ⁿ runs: no more than 5 % over the verdicts, and no round less."""
    assert statistics.fewest_rounds(verdicts) == rounds
    assert 2 / 2**rounds <= 0.05 / verdicts < 2 / 2 ** (rounds - 1)
    enough, few = (statistics.ratio([[2.0]] * n, verdicts) for n in (rounds, rounds - 1))
    assert enough is not None
    assert few is not None
    assert (enough.low, few.low) == (pytest.approx(2.0), None)
    assert f"({rounds} at least)" in verdict(few, verdicts=verdicts)["says"]  # type: ignore[index]


def test_an_interval_of_several_holds_the_one_that_is_alone() -> None:
    values = rounds_of(np.random.default_rng(9), 10, 12, 1.0)
    alone, one_of_four = statistics.ratio(values), statistics.ratio(values, 4)
    assert alone is not None
    assert one_of_four is not None
    assert one_of_four.low < alone.low < alone.high < one_of_four.high  # type: ignore[operator]


def equal(rng: np.random.Generator, names: str, points: tuple[Point, ...]) -> list[dict[str, Any]]:
    """Eight rounds at endpoints that are one: moods of rounds, two turns, everything that a summary compares."""
    lines = []
    for number, point, name in itertools.product(range(8), points, names):
        mood = np.exp(rng.normal(0, 0.05))
        sessions = []
        for _ in range(6):
            row = []
            for label in ("turn 1", "turn 2"):
                ttft = float(0.1 * mood * np.exp(rng.normal(0, 0.2)))
                itls = (0.01 * mood * np.exp(rng.normal(0, 0.2, 3))).tolist()
                row.append(Sample(label, 0.0, ttft, ttft + sum(itls), itls, 1000, 0, 4))
            sessions.append(row)
        took = sum(s.e2e for row in sessions for s in row) / 4
        lines.append(records.line(name, "two_turn", point, number, 0, "", Round(sessions, took), {}))
    return lines


@pytest.mark.parametrize(
    ("names", "points"),
    [
        ("ab", (Point(4),)),
        ("abc", (Point(1), Point(4))),  # four verdicts
        ("ab", (Point(rate=2.0), Point(rate=4.0))),  # of the first token
    ],
)
def test_all_that_is_called_a_verdict_is_right_in_nineteen_of_twenty_runs(
    names: str, points: tuple[Point, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten ratios a pair once had a verdict each: one at least was wrong in every fifth run of equals."""
    monkeypatch.setattr(summary, "quantile", lambda values, q: None)  # of one endpoint alone: not compared
    rng, trials, right, apart = np.random.default_rng(1), 150, 0, 0
    for _ in range(trials):
        found = wrong(summary.summarise(equal(rng, names, points), list(names), "a"))
        assert found["verdicts"] == (len(names) - 1) * len(points)
        assert found["remarks"] == 9 * found["verdicts"]
        right += not found["wrong"]
        apart += bool(found["remarks_apart"])
    assert right >= stats.binom.ppf(0.0025, trials, statistics.CONFIDENCE)
    # The further intervals together would not do: that is why they are no verdicts.
    assert apart > stats.binom.ppf(0.9975, trials, 1 - statistics.CONFIDENCE)


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
