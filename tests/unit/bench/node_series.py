"""SYNTHETIC results of every stage of `benchmarks/eight_gpus.sh`: invented figures, for tests only."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from benchmarks import _node
from benchmarks._gpu_trace import Interval, Step
from benchmarks.roofline import GPUS, Model
from glm_sglang.tiny_model.shape import hf_config


def series(ranks: int = 2) -> dict[str, dict[str, Any]]:
    """By the name of the stage's file, as `ranks` GPUs would give them."""
    about: dict[str, Any] = {
        "command": "python -m SYNTHETIC",
        "machine": {"gpu": "SYNTHETIC", "gpus": ranks},
        "versions": {"python": "3.12"},
        "date": "2026-01-03T00:00:00+00:00",
    }

    def size(tokens: int) -> dict[str, Any]:
        arms = {"megamoe": {"ms": 2.0, "exposed_share": 0.05}, "gathered": {"ms": 3.2, "exposed_share": 0.4}}
        return {"tokens": tokens, "speedup": 1.6, "speedup_over_stock": 2.0, "arms": arms}

    def traced(exposed: float, fused: float, idle: float) -> Step:
        """100 ms: a GEMM, MegaMoE, a collective, nothing."""
        marks = [0.0, 1e5 * (1 - exposed - fused - idle)]
        marks += [marks[1] + 1e5 * fused, marks[1] + 1e5 * (fused + exposed)]
        return Step(
            [
                Interval(marks[0], marks[1], "gemm"),
                Interval(marks[1], marks[2], "sm90_fp8_mega_moe_impl"),
                Interval(marks[2], marks[3], "ncclDevKernel_AllGather"),
                Interval(1e5 - 1e-6, 1e5, "argmax"),
            ]
        )

    rows = []
    for tokens in (131_072, 16_384):
        lone = {"stock": [2.0, 3.0, 2.5] * 2, "all": [1.25, 1.0, 1.5] * 2}
        rates = {"stock": [50_000.0] * 6, "all": [90_000.0] * 6}
        rows.append(_node.cold_row(tokens, lone, rates))
    shapes = {"ranks": ranks, "layers": 8, "experts": 32 * ranks, "chunk": 2048 * ranks}
    args = Namespace(layers=8, experts=256)
    model = Model.from_config(hf_config(_node.wide(args), "fp8"))
    turns = {"stock": [(2.0, 0), (2.0, 0)], "all": [(0.5, 131_072), (0.5, 65_536)]}
    arms = {
        "stock": _node.trace_row([traced(0.35, 0.0, 0.1)] * ranks, [0.05] * ranks),
        "all": _node.trace_row([traced(0.04, 0.2, 0.015)] * ranks, [0.002] * ranks),
    }
    verdict = {"kl_below_cap": 1e-4, "kl_above_cap": 2e-4, "answers": 16, "greedy_equal": 15}
    return {
        f"layer_ep{ranks}": {
            "question": "moe_layer",
            "layer": {"ranks": ranks},
            "largest_diff": 2e-4,
            "sizes": [size(8192), size(2048)],
            **about,
        },
        "node": {
            "question": "moe_server",
            **shapes,
            "cold": rows,
            "roof": _node.roof_rows(model, GPUS["h200"], ranks, rows),
            "second_turn": [_node.turn_row(131_072, 1024, turns)],
            "node_graphs_failed": ["graphs ended with status 1"],
            **about,
        },
        "exposed": {
            "question": "moe_server",
            **shapes,
            "exposed": [{"tokens": tokens, "arms": arms} for tokens in (131_072, 16_384)],
            **about,
        },
        "same": {
            "question": "moe_server",
            "same": [],
            "same_verdict": {"kl_bound": 0.0025, "all": verdict, "ok": True},
            "same_complete": True,
            **about,
        },
    }
