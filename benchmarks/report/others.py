"""Sections of the roofline, of accuracy, of the decode fan-in, and of any result that has no section of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.report import plots
from benchmarks.report.blocks import Block, Code, Facts, Figure, Section, Table, interval, number, share

_ROWS = 24


def roofline(result: dict[str, Any]) -> Section:
    """The roof by context length, and a measured run's share of it."""
    points = result["points"]
    rows = [
        (
            number(p["context"]),
            number(p["flop_per_token"] / 1e9),
            number(p["roof_tokens_per_s"]),
            number(p["measured_tokens_per_s"]),
            share(p["share"]),
        )
        for p in points
    ]
    head = ("context", "GFLOP a token", "roof, tokens/s", "measured, tokens/s", "share")
    ticks = [(float(p["context"]), f"{p['context'] // 1024}k") for p in points]
    marks = [
        (f"measured, {p['context'] // 1024}k", p["context"], p["measured_tokens_per_s"])
        for p in points
        if p["measured_tokens_per_s"]
    ]
    series = [("roof", [p["context"] for p in points], [p["roof_tokens_per_s"] for p in points])]
    svg = plots.lines(
        series, "context, tokens", "input tokens/s a node", log_x=True, ticks=ticks, marks=marks
    )
    facts = [(key.replace("_", " "), number(value)) for key, value in result["per_token"].items()]
    blocks: list[Block] = [Table(head, rows), Figure(svg, "What the tensor cores allow"), Facts(facts)]
    gpu = f"{result['gpus']}×{result['gpu']}"
    reached = [p for p in points if p["share"]]
    lead = f"The most that {gpu} can prefill of {result['model']}, were nothing but arithmetic in the way."
    if reached:
        best = max(reached, key=lambda p: float(p["share"]))
        lead += f" The measured run reaches {share(best['share'])} of it at {best['context']:,} tokens."
    return Section(f"Prefill roofline, {gpu}", lead, blocks)


def accuracy(result: dict[str, Any]) -> Section:
    """Paired answers of two endpoints."""
    rows = []
    for suite, found in result["suites"].items():
        rows.append(
            (
                suite,
                number(found["questions"]),
                share(found["correct"]["a"]),
                share(found["correct"]["b"]),
                f"{found['only_a']} / {found['only_b']}",
                number(found["mcnemar_p"]),
                share(found["agreement"]),
                number(found["errors"]),
            )
        )
    a, b = result["endpoints"]["a"], result["endpoints"]["b"]
    head = (
        "suite",
        "questions",
        "A right",
        "B right",
        "only A / only B",
        "McNemar p",
        "same answer",
        "errors",
    )
    lead = " ".join(found["says"] for found in result["suites"].values())
    return Section("Accuracy, paired", lead, [Table(head, rows), Facts([("A", a), ("B", b)])])


def fanin(result: dict[str, Any]) -> Section:
    """One decode behind one to four prefill servers, and how many streams it carries."""
    rows = [
        (
            number(arm["prefills"]),
            interval(arm["direct_tokens_per_s"]),
            interval(arm["pair_tokens_per_s"]),
            interval(arm["survives"], 3),
            number(arm["errors"]),
        )
        for arm in result["arms"]
    ]
    head = (
        "prefill servers",
        "without handoff, tokens/s",
        "through the handoff, tokens/s",
        "survives",
        "errors",
    )
    blocks: list[Block] = [Table(head, rows)]
    counts = [float(arm["prefills"]) for arm in result["arms"]]
    series = [
        (name, counts, [arm[key]["value"] for arm in result["arms"]])
        for name, key in (
            ("without handoff", "direct_tokens_per_s"),
            ("through the handoff", "pair_tokens_per_s"),
        )
    ]
    svg = plots.lines(series, "prefill servers", "input tokens/s", ticks=[(c, str(int(c))) for c in counts])
    blocks.append(Figure(svg, "Prefill rate with and without the handoff to decode"))
    if streams := result.get("streams"):
        cells = [
            (
                number(s["streams"]),
                number(s.get("decoding"), 3),
                interval(s["itl_ms"]["median"]),
                interval(s["itl_ms"]["p99"]),
                number(s["output_tokens_per_s"]),
                number(s["errors"]),
            )
            for s in streams
        ]
        columns = (
            "streams at once",
            "decoding, mean",
            "ITL p50 ms",
            "ITL p99 ms",
            "output tokens/s",
            "errors",
        )
        blocks.append(Table(columns, cells))
    return Section("The handoff: one decode, several prefill servers", result["answer"], blocks)


_SHARED = {"question", "kind", "command", "commit", "machine", "versions", "date", "not_measured"}


def anything(result: dict[str, Any]) -> Section:
    """A result without a section of its own: its scalars (deeper ones folded away), its lists as tables."""
    own = {key: value for key, value in result.items() if key not in _SHARED}
    facts = list(_scalars({key: value for key, value in own.items() if not isinstance(value, dict)}))
    blocks: list[Block] = [Facts(facts)]
    nested = {key: value for key, value in own.items() if isinstance(value, dict)}
    if deeper := "\n".join(f"{name}: {value}" for name, value in _scalars(nested)):
        blocks.append(Code(deeper, title="further figures"))
    for key, value in own.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            blocks.append(_records(key, value))
    return Section(result["question"].replace("_", " "), "", blocks)


def _scalars(value: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for key, one in value.items():
        name = f"{path}{key}".replace("_", " ")
        if isinstance(one, dict):
            yield from _scalars(one, f"{path}{key} / ")
        elif isinstance(one, list):
            if one and not any(isinstance(x, (dict, list)) for x in one):
                yield name, ", ".join(number(x) for x in one)
        else:
            yield name, number(one)


def _records(key: str, rows: list[dict[str, Any]]) -> Table:
    flat = [dict(_scalars(row)) for row in rows]
    head = list(dict.fromkeys(name for row in flat for name in row))
    note = key.replace("_", " ")
    if len(flat) > _ROWS:
        note += f": the first {_ROWS} of {len(flat)}; all are in the raw result"
    return Table(head, [[row.get(name, "") for name in head] for row in flat[:_ROWS]], note)
