"""The sweep of `stalled_valkey`: stall length, conversations that arrive together, deadline; and its plot."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from typing import Any

from benchmarks import _stalled_signals
from benchmarks._stalled_servers import Bench

STALLS = (0.0, 0.5, 1.5, 3.0)
TOGETHER = (1, 8)
WAITS = ("500", "1000", "2000")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """A point for each combination. The deadlines are measured beside each other: a server B each, on the same turns."""
    points: list[dict[str, Any]] = []
    with ExitStack() as stack:
        bench = Bench(args, stack, WAITS)
        for together in TOGETHER:
            for stall in STALLS:
                found = bench.run(
                    args,
                    turns=args.sweep,
                    stall=stall,
                    together=together,
                    salt=10 + len(points),
                    oracle=False,
                )
                points.append(found)
                rates = {wait: arm["hit_rate"] for wait, arm in found["by_wait"].items()}
                print(f"  {stall:g} s, {together} together: {rates}", file=sys.stderr, flush=True)
        pages = bench.check_pages()
    return {
        "turns_a_point": args.sweep,
        "conversations_per_second": args.rate,
        "think_s": [args.think, args.think + args.period],
        "period_s": args.period,
        "scheduler_stall_p99_ms": max(point["scheduler_stall_p99_ms"] for point in points),
        "scheduler_stall_by_the_wall_p99_ms": max(
            point["scheduler_stall_by_the_wall_p99_ms"] for point in points
        ),
        "answers_that_differ": sum(point["answers_that_differ"] for point in points),
        **_stalled_signals.worst(points),
        **pages,
        "points": points,
    }


def plot(result: dict[str, Any], path: str) -> None:
    """Hit rate, with what waiting can reach, and p90 of the time to the first token; a line a deadline."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = ("second-turn hit rate", "time to the first token, s\n(p90, and largest dotted)")
    figure, axes = plt.subplots(len(rows), len(TOGETHER), sharex=True, sharey="row", figsize=(10, 7))
    for column, together in enumerate(TOGETHER):
        points = [point for point in result["points"] if point["together"] == together]
        stalls = [point["stall_s"] for point in points]
        for wait in WAITS:
            arms = [point["by_wait"][wait] for point in points]
            (line,) = axes[0][column].plot(
                stalls, [arm["hit_rate"] for arm in arms], marker="o", label=f"--glm-cache-wait {wait}"
            )
            colour = line.get_color()
            axes[0][column].plot(
                stalls,
                [arm["hit_rate_possible"] for arm in arms],
                color=colour,
                linestyle="--",
                alpha=0.5,
            )
            for name, style in (("p90", "-"), ("max", ":")):
                axes[1][column].plot(
                    stalls,
                    [arm["ttft_s"][name] for arm in arms],
                    color=colour,
                    linestyle=style,
                    marker="o",
                )
        axes[0][column].set_title(f"{together} at a time, {result['conversations_per_second']:g} a second")
        axes[-1][column].set_xlabel(f"seconds of every {result['period_s']:g} that Valkey is stopped")
    for row, label in enumerate(rows):
        axes[row][0].set_ylabel(label)
        axes[row][0].set_ylim(bottom=0)
    axes[0][0].legend(title="dashed: turns that arrive with less than\nthe deadline left of a stall")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"saved {path}", file=sys.stderr)
