"""Compiles deep_gemm's grouped GEMMs for `benchmarks.moe_layer` ahead and side by side, not one by one as arms come up.

A kernel is compiled for the number of SMs that it may use, and for a tile that its rows decide, in about ten seconds;
each process here compiles what one GEMM needs on one number of SMs, into the cache that the benchmark reads. What is
not foreseen, or fails, the benchmark compiles itself.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from glm_kernels.overlapped_moe import Geometry, exact_plan
from glm_kernels.overlapped_moe.plan import sources_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks._moe_overlapped import Variant
    from benchmarks.moe_layer import Layer


def rows_by_side_sms(
    layer: Layer, tokens: Iterable[int], variants: Iterable[Variant]
) -> dict[int, tuple[int, ...]]:
    """Rows of the GEMMs under even routing, by the SMs that they leave: the variants' chunks, and all rows at once."""
    experts = layer.experts // layer.ranks
    found: dict[int, set[int]] = {0: set()}
    variants = tuple(variants)
    for size in tokens:
        geometry = Geometry(layer.ranks, 0, experts, layer.top_k, layer.hidden, layer.intermediate, size)
        for variant in variants:
            counts = [
                [source.tokens * layer.top_k // layer.experts] * experts
                for source in sources_of(geometry, variant.shares)
            ]
            plan = exact_plan(geometry, counts, shares=variant.shares, expert_splits=variant.expert_splits)
            sides = {variant.side_sms, *variant.step_sms} if variant.leave_sms else {0}
            for side in sides:
                found.setdefault(side, set()).update(chunk.rows for chunk in plan.chunks if chunk.rows)
            found[0].add(plan.rows)
    return {side: tuple(sorted(rows)) for side, rows in found.items() if rows}


def start(layer: Layer, tokens: Iterable[int], variants: Iterable[Variant]) -> list[subprocess.Popen[bytes]]:
    """One process for each GEMM and number of SMs, on this process's first GPU. `finish` waits for them."""
    shape = [str(n) for n in (layer.hidden, layer.intermediate, layer.experts // layer.ranks)]
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks._moe_compile",
                *shape,
                f"--gemm={gemm}",
                f"--side-sms={side}",
                f"--rows={','.join(map(str, rows))}",
            ],
            stdout=subprocess.DEVNULL,
        )
        for side, rows in rows_by_side_sms(layer, tokens, variants).items()
        for gemm in (1, 2)
    ]


def finish(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Waits, a minute and a half at most; a process that failed has said why on stderr, and costs time only."""
    deadline = time.monotonic() + 90
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()


def main() -> None:
    """Runs one GEMM once for each number of rows, over zeros."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks._moe_compile", description=__doc__)
    for name in ("hidden", "width", "experts"):
        parser.add_argument(name, type=int)
    parser.add_argument("--gemm", type=int, choices=(1, 2), required=True)
    parser.add_argument("--side-sms", type=int, required=True)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], required=True)
    args = parser.parse_args()
    import deep_gemm
    import torch

    k, n = (args.hidden, 2 * args.width) if args.gemm == 1 else (args.width, args.hidden)
    weight = torch.zeros(args.experts, n, k, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    scale = torch.ones(args.experts, n // 128, k // 128, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    deep_gemm.set_num_sms(sms - args.side_sms)
    for rows in args.rows:
        a = torch.zeros(rows, k, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        out = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
        expert = torch.zeros(rows, dtype=torch.int32, device="cuda")
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (a, torch.ones(k // 128, rows, device="cuda").T), (weight, scale), out, expert
        )
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
