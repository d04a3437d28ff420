"""The article's node: one result out of the stages of `benchmarks/eight_gpus.sh`, and its section of the page.

python -m benchmarks.report.node STAGES… -o eight_gpus.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks.ab.statistics import FEWEST_ROUNDS
from benchmarks.report.blocks import Block, Facts, Section, Table, number, share

GPUS = 8  # the targets are for so many
ARMS = {
    "stock": "stock",
    "megamoe": "MegaMoE",
    "graphs": "MegaMoE + graphs",
    "cache": "MegaMoE + cache",
    "all": "all",
}
BEST = "all"
PARTS = {
    "cold": "cold prompts",
    "second_turn": "second turns",
    "exposed": "traced steps",
    "same": "answers against stock",
}
_QUOTED = "The article's column is quoted (8×B300, vLLM); nothing in it was measured here."


class StageError(ValueError):
    """A file is no stage's result, or stages are of different machines; the message names it."""


def join(stages: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """One result of what the stages found, by file name; one that was cut short names no machine. Raises StageError."""
    whole = [result for result in stages.values() if "machine" in result]
    if not whole:
        raise StageError("STAGES: none of them ended by itself")
    gpus = {(result["machine"].get("gpu"), result["machine"].get("gpus")) for result in whole}
    if len(gpus) > 1:
        raise StageError(
            f"STAGES: of different machines: {', '.join(f'{n}×{g}' for g, n in sorted(gpus, key=str))}"
        )
    joined: dict[str, Any] = {"question": "eight_gpus", "kind": "node", "layer": []}
    for name, result in stages.items():
        question = result.get("question", "moe_server")  # cut short: no other writes what it has as it goes
        if question == "moe_layer":
            joined["layer"].append(layer(result))
        elif question == "moe_server":
            kept = ("reference", "ranks", "layers", "experts", "chunk", "roof", "cold", "second_turn")
            joined |= {key: result[key] for key in kept if key in result}
            if "exposed" in result:
                joined["exposed"] = [without_kernels(row) for row in result["exposed"]]
            if "same" in result:
                joined["same"] = result["same_verdict"]
                joined["same_complete"] = bool(result.get("same_complete"))
        else:
            raise StageError(f"STAGES: {name} answers {question}, not moe_layer or moe_server")
    joined["layer"].sort(key=lambda one: -one["ranks"])
    joined["not_measured"] = absent(joined, stages)
    newest = max(whole, key=lambda result: str(result["date"]))
    return joined | {
        "command": "; ".join(str(result["command"]) for result in whole),
        **{key: newest[key] for key in ("commit", "machine", "versions", "date") if key in newest},
    }


def layer(result: Mapping[str, Any]) -> dict[str, Any]:
    """What the tables need of a moe_layer result."""
    sizes = []
    for size in result["sizes"]:
        arms = size["arms"]
        sizes.append(
            {
                "tokens": size["tokens"],
                "speedup": size["speedup"],
                "speedup_over_stock": size["speedup_over_stock"],
                "ms": {name: arm["ms"] for name, arm in arms.items()},
                "exposed_share": {name: arm["exposed_share"] for name, arm in arms.items()},
            }
        )
    return {"ranks": result["layer"]["ranks"], "largest_diff": result["largest_diff"], "sizes": sizes}


def without_kernels(row: Mapping[str, Any]) -> dict[str, Any]:
    """An exposed row without each rank's figures and the first rank's kernels."""
    kept = {
        name: {key: value for key, value in arm.items() if key not in ("ranks", "kernels")}
        for name, arm in row["arms"].items()
    }
    return {**row, "arms": kept}


def absent(joined: Mapping[str, Any], stages: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What the series lacks: stages, and servers that did not answer with the first line of why."""
    lines = [f"eight_gpus, {words}: no result" for key, words in PARTS.items() if key not in joined]
    if not joined["layer"]:
        lines.append("eight_gpus, MoE layer: no result")
    for name, result in stages.items():
        if "machine" not in result:
            lines.append(f"eight_gpus, {name}: ended by its limit, what it had until then is in")
        for key, why in result.items():
            if key.endswith("_failed") and isinstance(why, list):
                lines.append(
                    f"eight_gpus, {key.removesuffix('_failed').replace('_', ', ')}: {str(why[0])[:200]}"
                )
    lines.append("eight_gpus: decode attached (all GPUs prefill)")
    return lines


def at(rows: Sequence[Mapping[str, Any]], tokens: int) -> Mapping[str, Any] | None:
    """The row of a length, or of the longest there is; None of none."""
    exact = [row for row in rows if row["tokens"] == tokens]
    return exact[0] if exact else max(rows, key=lambda row: int(row["tokens"]), default=None)


def inside(result: Mapping[str, Any]) -> float | None:
    """The share of MegaMoE's kernel that the layer's measurement found exposed at the step's rows; None if unknown."""
    rows = result.get("chunk", 0) // max(1, result.get("ranks", 1))
    for one in result["layer"]:
        if one["ranks"] == result.get("ranks"):
            for size in one["sizes"]:
                if size["tokens"] == rows:
                    return float(size["exposed_share"]["megamoe"])
    return None


def exposed_share(arm: Mapping[str, Any], within: float | None) -> float:
    """Exposed communication of a step: what the trace shows, and what MegaMoE's kernel exposes inside."""
    return float(arm["exposed_share"]) + (within or 0.0) * float(arm["fused_share"])


Target = tuple[str, str, str, bool | None, str]


def targets(result: Mapping[str, Any]) -> list[Target]:
    """(question, measured, must reach, whether it does, the article's figure) for what was measured."""
    return [
        *_layer_target(result),
        *_trace_targets(result),
        *_prefill_targets(result),
        *_accuracy_target(result),
    ]


def _layer_target(result: Mapping[str, Any]) -> list[Target]:
    if not result["layer"]:
        return []
    first = result["layer"][0]
    size = at(first["sizes"], 8192)
    if size is None:
        return []
    words = f"MoE layer at EP{first['ranks']}, {number(size['tokens'])} tokens a rank: MegaMoE over all-gather, GEMMs, RS"
    reached = size["speedup"] >= 1.5
    return [(words, f"{number(size['speedup'], 3)}×", "≥ 1.5×", reached, "step time −38 % at 128k")]


def _trace_targets(result: Mapping[str, Any]) -> list[Target]:
    found: list[Target] = []
    rows = [row for row in result.get("exposed", ()) if "exposed_share" in row["arms"].get(BEST, {})]
    if row := at(rows, 131_072):
        within, stock = inside(result), row["arms"].get("stock", {})
        value = exposed_share(row["arms"][BEST], within)
        before = f" (stock {share(stock['exposed_share'])})" if "exposed_share" in stock else ""
        unknown = "" if within is not None else ", without what MegaMoE's kernel exposes inside"
        words = f"exposed communication of a step, {number(row['tokens'])} tokens{unknown}"
        reached = value <= 0.08 if within is not None else None
        found.append((words, share(value) + before, "≤ 8 %", reached, "35 % → 5 to 8 %"))
    if row := at(rows, 16_384):
        idle, queued = row["arms"][BEST]["idle_share"], row["arms"][BEST]["idle_share_queue"]
        words = f"GPU idle, one prompt of {number(row['tokens'])} tokens"
        found.append(
            (
                words,
                f"{share(idle)} (in a queue {share(queued)})",
                "≤ 2 %",
                idle <= 0.02,
                "19.5 %, most of it removed",
            )
        )
    return found


def _prefill_targets(result: Mapping[str, Any]) -> list[Target]:
    found: list[Target] = []
    rows = [row for row in result.get("cold", ()) if "speedup" in row["arms"].get(BEST, {})]
    if row := at(rows, 131_072):
        arm = row["arms"][BEST]
        words = f"cold prefill of {number(row['tokens'])} tokens, all against stock"
        measured = f"{number(arm['speedup'], 3)}×{_between(arm.get('speedup_interval'))}"
        reached = _at_least(arm.get("speedup_interval"), 1.7)
        article = "53k → ~94k tokens/s (1.77×), projected"
        found.append((words, measured, "≥ 1.7×", reached, article))
    roof = [row for row in result.get("roof", ()) if BEST in row["shares"]]
    if row := at(roof, 131_072):
        within = row.get("share_intervals", {}).get(BEST)
        words = f"share of the roof of these layers, {number(row['tokens'])} tokens"
        measured = f"{share(row['shares'][BEST])}{_between(within, share)}"
        found.append((words, measured, "≥ 40 %", _at_least(within, 0.4), "43 % of its own (94k of 217k)"))
    return found


def _between(interval: Sequence[float] | None, words: Callable[[float], str] = number) -> str:
    """The interval behind a figure, or that there is none."""
    if interval is None:
        return f" (undecided: fewer than {FEWEST_ROUNDS} turns)"
    return f" [{words(interval[0])}, {words(interval[1])}]"


def _at_least(interval: Sequence[float] | None, bound: float) -> bool | None:
    """Whether what was measured reaches a bound; None where its interval holds the bound, or there is none."""
    if interval is None or interval[0] < bound <= interval[1]:
        return None
    return interval[0] >= bound


def _accuracy_target(result: Mapping[str, Any]) -> list[Target]:
    verdict = result.get("same")
    if not verdict:
        return []
    arms = {name: one for name, one in verdict.items() if isinstance(one, dict)}
    values = [
        one[key] for one in arms.values() for key in ("kl_below_cap", "kl_above_cap") if one[key] is not None
    ]
    equal = ", ".join(
        f"{ARMS.get(n, n)} {one['greedy_equal']} of {one['answers']}" for n, one in arms.items()
    )
    words = f"worst KL against stock (nats); greedy tokens equal: {equal}"
    undefined = sum(one.get("kl_undefined", 0) for one in arms.values())
    measured = f"undefined for {undefined} answers" if undefined else number(max(values)) if values else "n/a"
    # Of arms that did not answer nothing is known; one that answered wrongly is enough for a no.
    reached: bool | None = bool(verdict["ok"]) and not undefined
    complete = bool(result.get("same_complete"))
    if not complete:
        missing = [title for name, title in ARMS.items() if name not in ("stock", *arms)]
        words += "; not all arms answered all" + (f", none of {', '.join(missing)}" if missing else "")
    if reached and not (complete and BEST in arms):
        reached = None
    return [(words, measured, f"< {verdict['kl_bound']}", reached, "GSM8K 96.36 → 96.59 %")]


def section(result: dict[str, Any]) -> Section:
    """The targets beside the article's figures, then each stage's table."""
    ranks = result.get("ranks") or (result["layer"][0]["ranks"] if result["layer"] else 0)
    found = targets(result)
    rows = [
        (words, measured, wanted, _reached(reached, ranks), article)
        for words, measured, wanted, reached, article in found
    ]
    head = ("question", "measured", f"must reach on {GPUS} GPUs", "reached", "the article's figure")
    blocks: list[Block] = [Table(head, rows, _QUOTED)] if rows else []
    blocks += [*_cold(result), *_second_turn(result), *_exposed(result), *_layers(result)]
    where = f"{ranks} ranks on a CPU" if result.get("reference") else f"{ranks} GPUs"
    widths = "a small model" if result.get("reference") else "of GLM-5.3's 78, true widths"
    facts = [
        ("parallelism", f"prefill CP and EP over {where}"),
        ("layers", f"{number(result.get('layers'))} {widths}"),
        ("experts", number(result.get("experts"))),
        ("tokens of a chunk", number(result.get("chunk"))),
        ("the roof", "of the layers that run, on these GPUs (benchmarks.roofline)"),
    ]
    blocks.append(Facts(facts))
    return Section(f"The article's node on {where}: all five changes", _lead(found, ranks, where), blocks)


def _reached(reached: bool | None, ranks: int) -> str:
    if ranks != GPUS:
        return f"not judged on {ranks}"
    return "undecided" if reached is None else number(reached)


def _lead(found: Sequence[Target], ranks: int, where: str) -> str:
    if ranks != GPUS:
        return f"The series of {GPUS} GPUs, on {where}: it shows that the series runs; the targets are for {GPUS} GPUs."
    if not found:
        return "No target could be judged."
    judged = [reached for *_, reached, _ in found if reached is not None]
    return f"{sum(judged)} of the {len(judged)} targets that could be judged are reached."


def _cold(result: Mapping[str, Any]) -> list[Block]:
    shares = {row["tokens"]: row["shares"] for row in result.get("roof", ())}
    rows = [
        (
            number(row["tokens"]),
            ARMS.get(name, name),
            number(arm["ms"]),
            number(arm["tokens_s"]),
            _speedup(arm, "speedup"),
            _speedup(arm, "speedup_alone"),
            share(shares.get(row["tokens"], {}).get(name)),
        )
        for row in result.get("cold", ())
        for name, arm in row["arms"].items()
    ]
    head = (
        "tokens",
        "arm",
        "ms alone",
        "tokens/s in a queue",
        "speed-up in a queue",
        "speed-up alone",
        "of the roof",
    )
    note = f"Cold prompts that share nothing; speed-ups turn by turn, undecided with fewer than {FEWEST_ROUNDS} turns"
    return [Table(head, rows, note)] if rows else []


def _speedup(arm: Mapping[str, Any], key: str) -> str:
    """The ratio and its interval; "undecided" beside one of fewer than six turns."""
    if arm.get(key) is None:
        return "n/a"
    within = arm.get(f"{key}_interval")
    return number(arm[key], 3) + (
        _between(within, lambda value: number(value, 3)) if within else " (undecided)"
    )


def _second_turn(result: Mapping[str, Any]) -> list[Block]:
    rows = [
        (
            number(row["tokens"]),
            number(row["new_tokens"]),
            ARMS.get(name, name),
            number(arm["ms"]),
            share(arm["cached_share"]),
            _speedup(arm, "speedup"),
        )
        for row in result.get("second_turn", ())
        for name, arm in row["arms"].items()
    ]
    head = ("first turn, tokens", "new tokens", "arm", "ms", "cached of the first turn", "speed-up")
    return [Table(head, rows, "Second turns, after the device has lost the first")] if rows else []


def _exposed(result: Mapping[str, Any]) -> list[Block]:
    within = inside(result)
    rows = []
    for row in result.get("exposed", ()):
        for name, arm in row["arms"].items():
            if "error" in arm:
                rows.append((number(row["tokens"]), ARMS.get(name, name), arm["error"], *["n/a"] * 5))
                continue
            rows.append(
                (
                    number(row["tokens"]),
                    ARMS.get(name, name),
                    number(arm["span_ms"]),
                    share(arm["exposed_share"]),
                    share(exposed_share(arm, within)) if within is not None else "n/a",
                    share(arm["communication_share"]),
                    share(arm["idle_share"]),
                    share(arm["idle_share_queue"]),
                )
            )
    head = (
        "tokens",
        "arm",
        "span ms",
        "exposed, traced",
        "with MegaMoE's inside",
        "communicating",
        "idle",
        "idle in a queue",
    )
    note = "Traced, medians over the ranks. MegaMoE's inside: what the layer's own measurement found exposed"
    return [Table(head, rows, note)] if rows else []


def _layers(result: Mapping[str, Any]) -> list[Block]:
    rows = [
        (
            f"EP{one['ranks']}",
            number(size["tokens"]),
            number(size["ms"].get("gathered")),
            number(size["ms"].get("megamoe")),
            number(size["speedup"], 3),
            number(size["speedup_over_stock"], 3),
            share(size["exposed_share"].get("gathered")),
            share(size["exposed_share"].get("megamoe")),
        )
        for one in result["layer"]
        for size in one["sizes"]
    ]
    head = (
        "ranks",
        "tokens a rank",
        "gathered ms",
        "MegaMoE ms",
        "speed-up",
        "over stock's kernels",
        "gathered exposed",
        "MegaMoE exposed",
    )
    return [Table(head, rows, "One MoE layer; exposed: above the two GEMMs alone")] if rows else []


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.report.node",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("stages", nargs="+", type=Path, metavar="STAGES")
    p.add_argument("-o", "--output", type=Path, required=True)
    return p


def main() -> int:
    """Exit status: 0, or 2 for files that are no series."""
    args = parser().parse_args()
    try:
        joined = join({path.name: orjson.loads(path.read_bytes()) for path in args.stages})
    except (OSError, ValueError, KeyError) as error:
        print(f"report.node: {error}", file=sys.stderr)
        return 2
    args.output.write_bytes(orjson.dumps(joined, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    for words, measured, wanted, _, article in targets(joined):
        print(f"{words}: {measured} (must reach {wanted}; the article: {article})", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
