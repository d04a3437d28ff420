"""From the records of all rounds to what is said: medians, p99, hits and errors of every endpoint, ratios pair by pair.

All ratios are speed-ups over the baseline: its time over the other's, or the other's rate over its. Above 1:
the other one is faster. One ratio of a pair of endpoints at a point is judged, chosen before anything is measured; the
rest are nine more, of which one leaves 1 out in every fifth run of equal endpoints: remarks, not verdicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.ab.client import Sample
from benchmarks.ab.records import samples_of
from benchmarks.ab.statistics import Interval, fewest_rounds, quantile, ratio

ALL = "all"
#: Two endpoints may count a prompt differently (a token that begins it, another template), but not by more than this
#: share: then one of them reads less than the other, and is no faster for it.
_UNLIKE = 0.01
_CURVE = np.linspace(0, 1, 41)
METRICS = {"input_tokens_per_s": "input tokens/s", "ttft": "time to first token", "e2e": "end-to-end time"}
_TIMES: dict[str, Callable[[Sample], float | None]] = {
    "ttft": lambda s: s.ttft,
    "tpot": lambda s: s.tpot,
    "e2e": lambda s: s.e2e,
}


@dataclass(frozen=True, slots=True)
class Judged:
    """Which ratio is a verdict: a rate, or a time of the requests with a label."""

    metric: str = "input_tokens_per_s"
    label: str = ALL


def judged(record: dict[str, Any]) -> Judged:
    """What is judged where nobody chose: the input rate in a closed loop; where arrivals fix it, the first token."""
    return Judged() if record["max_concurrency"] is not None else Judged("ttft")


def summarise(
    records: Sequence[dict[str, Any]], endpoints: Sequence[str], baseline: str
) -> list[dict[str, Any]]:
    """One object for every point of the sweep, in the order of first appearance. The verdicts of all points and
    endpoints hold together: where endpoints are equal, no run in twenty has a wrong one.
    """
    points = list(dict.fromkeys(record["glm_ab"]["point"] for record in records))
    verdicts = len(points) * (len(endpoints) - 1)
    found = []
    for point in points:
        of = aligned(records, endpoints, point)
        chosen = judged(next(record for record in records if record["glm_ab"]["point"] == point))
        found.append(
            {
                "point": point,
                "rounds": len(of[baseline]),
                "verdict": {"of": asdict(chosen), "verdicts": verdicts},
                "endpoints": {name: _endpoint(of[name]) for name in endpoints},
                "speedups": {
                    name: _speedups(of[baseline], of[name], chosen, verdicts)
                    for name in endpoints
                    if name != baseline
                },
            }
        )
    return found


def aligned(
    records: Sequence[dict[str, Any]], endpoints: Sequence[str], point: str
) -> dict[str, list[dict[str, Any]]]:
    """Each endpoint's records of a point, of the rounds that all were asked, in the order of the rounds."""
    rows = [record for record in records if record["glm_ab"]["point"] == point]
    of = {name: {r["glm_ab"]["round"]: r for r in rows if r["tag"] == name} for name in endpoints}
    common = sorted(set.intersection(*(set(rounds) for rounds in of.values())))
    return {name: [rounds[n] for n in common] for name, rounds in of.items()}


def by_round(
    base: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], metric: str, label: str
) -> list[list[float]]:
    """The speed-ups in each round: of the input rate one, of a time one for every pair of requests."""
    if metric == "input_tokens_per_s":
        return [_rates(a, b) for a, b in zip(base, other, strict=True)]
    pairs = [_pairs(samples_of(a), samples_of(b)) for a, b in zip(base, other, strict=True)]
    chosen = [[(a, b) for a, b in one if label in (ALL, a.label)] for one in pairs]
    return [list(_ratios(one, _TIMES[metric])) for one in chosen]


def _endpoint(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    samples = [list(samples_of(record).values()) for record in rounds]
    everything = [s for one in samples for s in one]
    errors = Counter(s.error for s in everything if s.error)
    labels = list(dict.fromkeys(s.label for s in everything))
    return {
        "requests": len(everything),
        "errors": sum(errors.values()),
        "error_examples": [f"{times}×: {text}" for text, times in errors.most_common(3)],
        "input_tokens_per_s": _interval(quantile([[r["input_throughput"]] for r in rounds], 0.5)),
        "output_tokens_per_s": _interval(quantile([[r["output_throughput"]] for r in rounds], 0.5)),
        "by_label": {
            label: _times([[s for s in one if not s.error and label in (ALL, s.label)] for one in samples])
            for label in (ALL, *labels)
        },
    }


def _times(rounds: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    good = [s for one in rounds for s in one]
    result: dict[str, Any] = {"requests": len(good)}
    values: dict[str, list[list[float]]] = {
        name: [[v * 1e3 for s in one if (v := of(s)) is not None] for one in rounds]
        for name, of in _TIMES.items()
    }
    values["itl"] = [[gap * 1e3 for s in one for gap in s.itls] for one in rounds]
    for name, by_round in values.items():
        result[f"{name}_ms"] = {
            "median": _interval(quantile(by_round, 0.5)),
            "p99": _interval(quantile(by_round, 0.99)),
        }
    flat = [v for one in values["ttft"] for v in one]
    result["ttft_curve_ms"] = [round(v, 3) for v in np.quantile(flat, _CURVE).tolist()] if flat else []
    result["prompt_tokens"] = sum(s.prompt_tokens for s in good)
    counted = [s for s in good if s.cached_tokens is not None]
    result["cached_tokens"] = sum(s.cached_tokens or 0 for s in counted) if counted else None
    prompts = sum(s.prompt_tokens for s in counted)
    result["cached_share"] = round(result["cached_tokens"] / prompts, 4) if prompts else None
    return result


def speedup(
    base: Sequence[dict[str, Any]],
    other: Sequence[dict[str, Any]],
    metric: str = "input_tokens_per_s",
    label: str = ALL,
    verdicts: int = 0,
) -> dict[str, Any] | None:
    """One ratio of aligned rounds: with `verdicts` a verdict, one of so many that hold together; without, a remark."""
    values = by_round(base, other, metric, label)
    doubt = doubts(base, other)
    if verdicts:
        return verdict(ratio(values, verdicts), doubt, verdicts)
    return remark(ratio(values), doubt)


def _speedups(
    base: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], chosen: Judged, verdicts: int
) -> dict[str, Any]:
    pairs = [_pairs(samples_of(a), samples_of(b)) for a, b in zip(base, other, strict=True)]
    labels = list(dict.fromkeys(a.label for one in pairs for a, _ in one))
    apart = _apart(pairs)

    def one(metric: str, label: str) -> dict[str, Any] | None:
        return speedup(base, other, metric, label, verdicts if Judged(metric, label) == chosen else 0)

    return {
        "input_tokens_per_s": one("input_tokens_per_s", ALL),
        "unlike_prompts": {"pairs": sum(map(bool, apart)), "most": round(max(apart, default=0.0), 4)},
        "errors": _errors(base, other),
        "dropped_pairs": sum(r["glm_ab"]["planned"] for r in base) - sum(map(len, pairs)),
        "by_label": {label: {name: one(name, label) for name in _TIMES} for label in (ALL, *labels)},
    }


def _apart(pairs: Sequence[Sequence[tuple[Sample, Sample]]]) -> list[float]:
    """By how large a share of its tokens the prompt of each pair differs."""
    return [
        abs(a.prompt_tokens - b.prompt_tokens) / max(a.prompt_tokens, b.prompt_tokens, 1)
        for one in pairs
        for a, b in one
    ]


def _errors(base: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> int:
    return sum(1 for r in (*base, *other) for error in r["errors"] if error)


def doubts(base: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> str:
    """Why nothing can be said of two endpoints, whatever the figures; "" when there is no such reason."""
    pairs = [_pairs(samples_of(a), samples_of(b)) for a, b in zip(base, other, strict=True)]
    return _doubt(_errors(base, other), _apart(pairs))


def _doubt(errors: int, apart: Sequence[float]) -> str:
    """Why nothing can be said of two endpoints, whatever the figures; "" when there is no such reason.

    What failed is missing from times, and takes work off those that remain.
    """
    if errors:
        return f"{errors} errors"
    if unlike := sum(share > _UNLIKE for share in apart):
        return f"{unlike} prompts with unlike numbers of tokens"
    return ""


def _pairs(base: dict[str, Sample], other: dict[str, Sample]) -> list[tuple[Sample, Sample]]:
    both = [(a, other[key]) for key, a in base.items() if key in other]
    return [(a, b) for a, b in both if not a.error and not b.error]


def _ratios(pairs: Iterable[tuple[Sample, Sample]], of: Callable[[Sample], float | None]) -> Iterable[float]:
    for a, b in pairs:
        if (x := of(a)) and (y := of(b)):
            yield x / y


def _rates(base: dict[str, Any], other: dict[str, Any]) -> list[float]:
    x, y = base["input_throughput"], other["input_throughput"]
    return [y / x] if x and y else []


def verdict(interval: Interval | None, doubt: str = "", verdicts: int = 1) -> dict[str, Any] | None:
    """The interval with what it says in words; nothing where there is a reason to doubt it. verdicts: those that hold
    together with it, as `ratio` was told.
    """
    if interval is None:
        return None
    if doubt:
        says = f"undecided: {doubt}"
    elif interval.low is None or interval.high is None:
        says = f"undecided: too few rounds ({fewest_rounds(verdicts)} at least)"
    elif interval.covers(1.0):
        says = "no difference"
    else:
        says = "faster" if interval.value > 1 else "slower"
    return {**_interval(interval), "says": says}  # type: ignore[dict-item]


#: What is said of an interval that is looked at besides, and judged by nobody.
ABOVE, BELOW, HOLDS = "interval above 1", "interval below 1", "interval holds 1"


def remark(interval: Interval | None, doubt: str = "") -> dict[str, Any] | None:
    """The interval and where it lies, which is no verdict."""
    found = verdict(interval, doubt)
    return found and {**found, "says": remark_words(found)}


def remark_words(found: dict[str, Any]) -> str:
    """Where an interval lies, whatever was said of it."""
    if str(found["says"]).startswith("undecided"):
        return str(found["says"])
    return ABOVE if found["low"] > 1 else BELOW if found["high"] < 1 else HOLDS


def _interval(interval: Interval | None) -> dict[str, Any] | None:
    if interval is None:
        return None
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(interval).items()}
