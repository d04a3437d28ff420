"""Sections of A/B runs and of the ablation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.ab.summary import remark_words
from benchmarks.report import plots
from benchmarks.report.blocks import Block, Code, Facts, Figure, Section, Table, interval, number, share

ALL = "all"
_WORDS = {
    "two_turn": "Two-turn chat over real text",
    "long_context": "One long prompt",
    "mixed": "Mixed lengths behind a shared system prompt",
    "mooncake": "A Mooncake trace",
    "long_agent": "Long agent turns, mostly seen before",
}


def comparison(result: dict[str, Any]) -> Section:
    """An A/B run."""
    names = list(result["endpoints"])
    base = result["baseline"]
    title = f"{_WORDS.get(result['workload'], result['workload'])}: {' against '.join(_ordered(names, base))}"
    blocks: list[Block] = []
    for point in result["points"]:
        blocks += _point(point, base, len(result["points"]) > 1)
    if len(result["points"]) > 1:
        blocks.append(_sweep(result["points"], names))
    parameters = [(key, _plain(value)) for key, value in result["parameters"].items()]
    rounds = ("rounds", f"{result['rounds']}; {share(result['confidence'])} intervals, resampled by round")
    blocks.append(Facts([*parameters, rounds]))
    blocks.append(Facts([(key.replace("_", " "), _plain(v)) for key, v in result["discipline"].items()]))
    for name, about in result["endpoints"].items():
        blocks.append(Code(_endpoint(about), title=f"how {name} was started, and what it says of itself"))
    return Section(title, " ".join(_sentences(result)), blocks)


def _ordered(names: Sequence[str], base: str) -> list[str]:
    return [name for name in names if name != base] + [base]


def _sentences(result: dict[str, Any]) -> list[str]:
    found = []
    for point in result["points"]:
        for name, speedups in point["speedups"].items():
            times = speedups["by_label"][ALL]["ttft"]
            rate = speedups["input_tokens_per_s"]
            if not times or not rate:
                found.append(f"{name}, {point['point']}: no pair of requests succeeded at both.")
                continue
            first = f"first token {number(times['value'], 3)}× as fast"
            tokens = f"input tokens per second {number(rate['value'], 3)}×"
            if _judged(point) == ("ttft", ALL):
                first += f" ({times['says']})"
            else:
                tokens += f" ({rate['says']})"
            found.append(f"{name} against {result['baseline']}, {point['point']}: {tokens}, {first}.")
            if unlike := (speedups.get("unlike_prompts") or {}).get("pairs"):
                most = share(speedups["unlike_prompts"]["most"])
                found.append(
                    f"{unlike} of its prompts have another number of tokens there, by {most} at most."
                )
    return found


def _judged(point: dict[str, Any]) -> tuple[str, str]:
    """Which ratio of a point is its verdict, metric and label. Results from before it was said judged the input rate."""
    of = (point.get("verdict") or {}).get("of") or {}
    return of.get("metric", "input_tokens_per_s"), of.get("label", ALL)


def _point(point: dict[str, Any], base: str, swept: bool) -> list[Block]:
    head = (
        "endpoint",
        "requests",
        "TTFT p50 ms",
        "TTFT p99 ms",
        "ITL p50 ms",
        "ITL p99 ms",
        "end-to-end p50 ms",
    )
    rows = []
    for name, one in point["endpoints"].items():
        for label, times in one["by_label"].items():
            figures = [
                interval(times[metric][q], 4)
                for metric, q in (
                    ("ttft_ms", "median"),
                    ("ttft_ms", "p99"),
                    ("itl_ms", "median"),
                    ("itl_ms", "p99"),
                    ("e2e_ms", "median"),
                )
            ]
            who = name if label == ALL else f"{name}, {label}"
            rows.append((who, number(times["requests"]), *figures, share(times["cached_share"])))
    blocks: list[Block] = [Table((*head, "cached"), rows, point["point"])]
    rates = [
        (
            name,
            interval(one["input_tokens_per_s"]),
            interval(one["output_tokens_per_s"]),
            number(one["errors"]),
            "; ".join(one["error_examples"]) or "none",
        )
        for name, one in point["endpoints"].items()
    ]
    blocks.append(
        Table(("endpoint", "input tokens/s", "output tokens/s", "errors", "which"), rates, point["point"])
    )
    if point["speedups"]:
        blocks.append(_speedups(point, base))
    if not swept:
        blocks.append(_curves(point))
    return blocks


def _speedups(point: dict[str, Any], base: str) -> Table:
    chosen = _judged(point)
    rows = []
    for name, speedups in point["speedups"].items():
        found = [("input_tokens_per_s", ALL, "input tokens/s", speedups["input_tokens_per_s"])]
        for label, metrics in speedups["by_label"].items():
            for metric, words in (("ttft", "first token"), ("tpot", "time per token"), ("e2e", "end to end")):
                found.append((metric, label, words, metrics[metric]))
        for metric, label, words, one in found:
            if one:
                judged = (metric, label) == chosen
                said = one["says"] if judged else remark_words(one)
                rows.append((name, label, words, interval(one, 3), "verdict" if judged else "", said))
    head = ("endpoint", "requests", "of what", f"speed-up over {base}", "", "which says")
    return Table(
        head,
        rows,
        f"{point['point']}; pair by pair, above 1 is faster than {base}. One of them is judged; of the others together "
        "one leaves 1 out in every fifth comparison of equals",
    )


def _curves(point: dict[str, Any]) -> Figure:
    series = []
    for name, one in point["endpoints"].items():
        for label, times in one["by_label"].items():
            curve = times["ttft_curve_ms"]
            if curve and (label != ALL or len(one["by_label"]) == 2):
                series.append(
                    (f"{name}, {label}", curve, [100 * i / (len(curve) - 1) for i in range(len(curve))])
                )
    svg = plots.lines(series, "time to first token, ms", "% of requests that had it", marker="")
    return Figure(svg, f"Share of requests whose first token had come, {point['point']}")


def _sweep(points: Sequence[dict[str, Any]], names: Sequence[str]) -> Figure:
    places = list(range(len(points)))
    series = []
    for name in names:
        rates = [p["endpoints"][name]["input_tokens_per_s"] for p in points]
        series.append((name, places, [r["value"] if r else 0.0 for r in rates]))
    ticks = [(float(i), p["point"].replace("concurrency ", "")) for i, p in enumerate(points)]
    return Figure(
        plots.lines(series, "load", "input tokens/s", ticks=ticks), "Input tokens per second by load"
    )


def _endpoint(about: dict[str, Any]) -> str:
    parts = []
    if url := about.get("url"):
        parts.append(str(url))
    for name, command in about.get("processes", {}).items():
        variables = " ".join(f"{key}={value}" for key, value in about.get("env", {}).items())
        parts.append(f"# {name}\n{variables} {command}".strip())
    parts += [f"{key}: {_plain(value)}" for key, value in about.get("about", {}).items()]
    return "\n".join(parts)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_plain(one)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return number(value)


def ablation(result: dict[str, Any]) -> Section:
    """Each change alone, all, none, case by case; the article's figures in a column of their own."""
    blocks: list[Block] = []
    for name, case in result.get("cases", {"": result}).items():
        blocks += _ablation_case(case, f"{name.replace('_', ' ')}: " if name else "")
    lead = result.get("answer") or "What each change brings alone, all together, and none."
    return Section("Ablation of the five changes", lead, blocks)


def _arm_says(arm: dict[str, Any], verdict: dict[str, Any] | None) -> str:
    """The verdict where this arm's speed-up is it, or where its interval lies."""
    own = arm.get("speedup")
    if not own:
        return "n/a"
    return f"verdict: {own['says']}" if verdict and verdict["arm"] == arm["name"] else remark_words(own)


def _ablation_case(result: dict[str, Any], named: str) -> list[Block]:
    arms = result["arms"]
    rows = []
    for arm in arms:
        rows.append(
            (
                arm["name"],
                arm["state"],
                interval(arm.get("speedup"), 3),
                _arm_says(arm, result.get("speedup")),
                share(arm.get("share")),
                share(arm.get("cached_share")),
                arm.get("article") or "n/a",
            )
        )
    head = (
        "arm",
        "state",
        f"speed-up over {result['baseline']}",
        "which says",
        "share of the gain",
        "cached",
    )
    note = (
        f"{named}the last column is quoted from the article (8×B300, vLLM); nothing in it was measured here."
    )
    note = note[:1].upper() + note[1:]
    blocks: list[Block] = [Table((*head, "the article's figure"), rows, note)]
    measured = [arm for arm in arms if arm.get("speedup")]
    if measured:
        svg = plots.bars(
            [arm["name"] for arm in measured],
            [(result["metric"], [arm["speedup"] for arm in measured])],
            f"{named}speed-up over {result['baseline']} ({result['metric']})",
        )
        blocks.append(Figure(svg, f"{named}what each change brings alone, and all together".capitalize()))
    if found := result.get("interaction"):
        blocks.append(Facts([("interaction", found["says"])]))
    return blocks
