"""Coverage and power by laws: t's of normal rounds, the sign-flip test's exact level; under every noise that rounds of
equal endpoints may have, runs are right as often as is claimed.
"""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from scipy import stats  # type: ignore[import-untyped]

from benchmarks.ab import coverage, records, rivals
from benchmarks.ab.client import Sample
from benchmarks.ab.comparison import drawn_orders
from benchmarks.ab.load import Round
from benchmarks.ab.noises import ALONE, SD, noises, resampled
from benchmarks.ab.prove import EQUAL, POINTS, ROUNDS
from benchmarks.ab.statistics import CONFIDENCE, Values, student

TRIALS = 4000


def within(share: float, truth: float, trials: int = TRIALS) -> bool:
    """Whether so many trials may come to `share`: two binomial quantiles, one in a thousand beyond each."""
    low, high = stats.binom.ppf((0.001, 0.999), trials, truth)
    return bool(low <= round(share * trials) <= high)


@pytest.mark.parametrize(("points", "endpoints", "rounds"), coverage.RUNS)
def test_runs_of_equal_endpoints_are_right_under_every_noise_that_rounds_share_or_have_alone(
    points: int, endpoints: int, rounds: int
) -> None:
    """A percent less is let pass where rounds are not quite independent; what one endpoint has alone is beyond them."""
    for kind, noise in noises(np.random.default_rng(11), TRIALS, points, endpoints, rounds):
        right = coverage.judge(noise, student)["right"]
        if kind.startswith(ALONE):
            assert right < CONFIDENCE - 0.01, (kind, right)
        else:
            least = CONFIDENCE - 0.01 * kind.startswith("moods of the machine")
            assert right * TRIALS >= stats.binom.ppf(0.001, TRIALS, least), (kind, right)


def test_t_is_exact_for_normal_rounds_and_finds_what_the_noncentral_t_says() -> None:
    rounds = 8
    normal = dict(noises(np.random.default_rng(2), TRIALS, 1, 2, rounds))["normal"]
    error = math.sqrt(2) * SD / math.sqrt(rounds)
    edge = stats.t.ppf((1 + CONFIDENCE) / 2, rounds - 1)
    for shift in (SD, 2 * SD):
        found = coverage.judge(normal, student, shift)
        power = stats.nct.sf(edge, rounds - 1, shift / error) + stats.nct.cdf(
            -edge, rounds - 1, shift / error
        )
        assert within(found["right"], CONFIDENCE), found
        assert within(found["finds"], power), (found, power)
    chi = math.sqrt(2 / (rounds - 1)) * math.exp(math.lgamma(rounds / 2) - math.lgamma((rounds - 1) / 2))
    assert found["width"] == pytest.approx(2 * edge * chi * error, rel=0.01)


def test_bootstraps_of_eight_rounds_are_too_narrow() -> None:
    """Why they are not what is used. The plain one is short of Student's t by about sqrt(7/8) · z / t."""
    normal = dict(noises(np.random.default_rng(3), 1000, 1, 2, 8))["normal"]
    t, plain, bca = (coverage.judge(normal, m) for m in (student, rivals.percentile, rivals.bca))
    ratio = math.sqrt(7 / 8) * stats.norm.ppf(0.975) / stats.t.ppf(0.975, 7)
    assert plain["width"] / t["width"] == pytest.approx(ratio, rel=0.03)
    highest = stats.binom.ppf(0.001, 1000, CONFIDENCE) / 1000
    assert plain["right"] < highest
    assert bca["right"] < highest


@pytest.mark.parametrize("rounds", [6, 8])
def test_sign_flips_are_exact_for_symmetric_rounds_of_any_spread(rounds: int) -> None:
    """Each end is beyond the truth in 1 of so many subsets (Hartigan)."""
    noise = dict(noises(np.random.default_rng(6), TRIALS, 1, 2, rounds))["rounds of unlike spread"]
    exact = 1 - 2 * math.floor(0.025 * 2**rounds) / 2**rounds
    assert within(coverage.judge(noise, rivals.sign_flips)["right"], exact)
    with pytest.raises(ValueError, match="5 rounds are too few"):
        rivals.sign_flips(noise[:, 0, :5, 0], CONFIDENCE)


def test_the_ends_of_sign_flips_are_where_scipys_test_turns() -> None:
    values = np.random.default_rng(7).normal(0, 1, (1, 8))
    ends = rivals.sign_flips(values, CONFIDENCE)[0]

    def p(truth: float) -> float:
        test = stats.permutation_test(
            (values[0] - truth,), np.mean, permutation_type="samples", n_resamples=math.inf
        )
        return float(test.pvalue)

    for end, outwards in zip(ends, (-1e-6, 1e-6), strict=True):
        assert p(end + outwards) <= 0.05 < p(end - outwards)


def test_the_bootstrap_t_of_symmetric_rounds_is_about_students() -> None:
    """Of many rounds, where both are the normal interval."""
    values = np.random.default_rng(8).normal(0, 1, (50, 60))
    widths = [
        np.diff(method(values, CONFIDENCE)).mean()
        for method in (rivals.bootstrap_t, student, rivals.expanded)
    ]
    assert widths[0] == pytest.approx(widths[1], rel=0.03)
    assert widths[2] == pytest.approx(widths[1], rel=0.03)


@pytest.mark.parametrize(("count", "rounds"), [(2, 6), (2, 7), (3, 8), (7, 6)])
def test_orders_are_drawn_and_nobody_has_a_place_more_often(count: int, rounds: int) -> None:
    before = 0
    for seed in range(400):
        orders = drawn_orders(count, rounds, random.Random(seed))
        assert orders == drawn_orders(count, rounds, random.Random(seed))
        assert all(sorted(order) == list(range(count)) for order in orders)
        places = np.array(
            [np.bincount([order[i] for order in orders], minlength=count) for i in range(count)]
        )
        assert places.max() - places.min() <= 1
        before += sum(order.index(0) < order.index(1) for order in orders[:1])
    assert within(before / 400, 0.5, 400)
    assert len({str(drawn_orders(count, rounds, random.Random(seed))) for seed in range(400)}) > 10


def test_recorded_rounds_are_drawn_whole() -> None:
    """All endpoints of a round together, and neighbours where rows are drawn."""
    rates = np.arange(5 * 2 * 8 * 3, dtype=np.float64).reshape(5, 2, 8, 3)
    one, four = (found for _, found in resampled(np.random.default_rng(1), rates, 50, 2, 2, 6))
    assert one.shape == four.shape == (50, 2, 6, 2)
    # Less each one's mean, endpoints no longer differ.
    assert np.ptp(one, axis=-1).max() < 1e-9
    assert np.diff(four, axis=2)[:, :, :3] == pytest.approx(3.0)
    assert not np.allclose(np.diff(one, axis=2), 3.0)


def rows(seed: int, slower_first: float = 0.0) -> list[dict[str, Any]]:
    """Records of a trial whose rates fall with the place in the order."""
    lines = []
    for point, number in itertools.product(POINTS, range(ROUNDS)):
        for i, name in enumerate(EQUAL):
            place = (i + number) % len(EQUAL)
            seconds = math.exp(slower_first * (place == 0) + 1e-3 * ((7 * seed + 3 * number + i) % 5))
            result = Round([[Sample("", 0.0, 0.1, 0.1, [], 1000, 0, 1)]], seconds)
            lines.append(
                records.line(
                    name, "two_turn", point, number, place, f"{seed}{point}{number}{name}", result, {}
                )
            )
    return lines


def test_trials_that_are_there_are_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def equal_trial(seed: int, folder: Path) -> list[dict[str, Any]]:
        asked.append(seed)
        for line in (lines := rows(seed)):
            records.append(folder / f"{seed}.jsonl", line)
        return lines

    monkeypatch.setattr(coverage, "equal_trial", equal_trial)
    first, places = coverage.real(tmp_path, 2)
    second, _ = coverage.real(tmp_path, 3)
    assert asked == [1000, 1001, 1002]
    assert np.array_equal(first, second[:2])
    assert places[0, 0, 1].tolist() == [1, 2, 0]
    # One that was cut off is asked from its beginning.
    file = tmp_path / "1000.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    third, _ = coverage.real(tmp_path, 3)
    assert asked == [1000, 1001, 1002, 1000]
    assert np.array_equal(second, third)


def test_a_first_place_that_is_slower_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "equal_trial", lambda seed, folder: rows(seed, slower_first=0.06))
    rates, places = coverage.real(tmp_path, 5)
    found = coverage.order(rates, places)
    # Relative to the mean of three, of which one is 0.06 slower.
    assert [one["log"] for one in found] == pytest.approx([-0.04, 0.02, 0.02], abs=2e-3)
    assert found[0]["high"] < 0 < found[1]["low"]


def test_the_answer_names_the_least_and_the_noise_that_is_not_covered() -> None:
    def row(right: float) -> dict[str, Any]:
        return {"Student's t": {"right": right}}

    found = {"trials": 120, "right": 114, "share_low": 0.894, "share_high": 0.981}
    simulations = [{"noises": {"normal": row(0.95), "skewed": row(0.98), f"{ALONE}: x": row(0.6)}}]
    said = coverage.answer(found, simulations)
    assert "114 of 120 real trials" in said
    assert "0.950 to 0.980 of runs with Student's t, down to 0.600" in said


def test_every_method_is_judged_under_every_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "RUNS", ((1, 2, 6),))
    rates: Values = np.random.default_rng(1).normal(0, 0.1, (4, 2, 8, 3))
    (found,) = coverage.simulated(20, rates)
    assert (found["verdicts"], found["rounds"]) == (1, 6)
    assert len(found["noises"]) == 12
    assert all(set(one) == set(rivals.METHODS) for one in found["noises"].values())


def test_the_command_prints_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(coverage, "RUNS", ((1, 2, 6),))
    monkeypatch.setattr(coverage, "equal_trial", lambda seed, folder: rows(seed))
    words = ["coverage", "--trials", "4", "--simulated", "20", "--records", str(tmp_path), "--json"]
    monkeypatch.setattr("sys.argv", words)
    assert coverage.main() == 0
    result = orjson.loads(capsys.readouterr().out)
    assert result["question"] == "ab_coverage"
    # Clopper and Pearson's interval of four of four.
    assert (result["real"]["right"], result["real"]["share_low"], result["real"]["share_high"]) == (
        4,
        round(0.025 ** (1 / 4), 4),
        1.0,
    )
    assert [one["asked_before"] for one in result["real"]["order"]] == [0, 1, 2]
