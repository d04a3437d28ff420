"""The row order of the first GEMM's weights: 8 gate rows, then the 8 up rows that belong to them.

A tile of the kernel then holds both halves of a SwiGLU output. UPSTREAM: deep_gemm
transform_weights_for_mega_moe_sm90 and _interleave_weights; on SM90 the scales stay as they are, on SM100
they follow their rows.
"""

from __future__ import annotations

import torch

from glm_kernels.mega_moe.reload import PartState, TransformState, fingerprints

GRANULARITY = 8
"""Rows of gate (and of up) in a row. UPSTREAM: gran of _interleave_weights."""


def interleave_gate_up(rows: torch.Tensor) -> torch.Tensor:
    """[gate; up] of [2I, ...], I % 8 == 0, any dtype -> a new [2I, ...], alternating every 8 rows."""
    half = rows.shape[0] // 2
    if rows.shape[0] % (2 * GRANULARITY):
        raise ValueError(f"{rows.shape[0]} gate and up rows are no multiple of {2 * GRANULARITY}")
    return (
        torch.unflatten(rows, 0, (2, half // GRANULARITY, GRANULARITY))
        .transpose(0, 1)
        .flatten(0, 2)
        .contiguous()
    )


def deinterleave_gate_up(rows: torch.Tensor) -> torch.Tensor:
    """Inverse of `interleave_gate_up`."""
    half = rows.shape[0] // 2
    if rows.shape[0] % (2 * GRANULARITY):
        raise ValueError(f"{rows.shape[0]} gate and up rows are no multiple of {2 * GRANULARITY}")
    return (
        torch.unflatten(rows, 0, (half // GRANULARITY, 2, GRANULARITY))
        .transpose(0, 1)
        .flatten(0, 2)
        .contiguous()
    )


def gate_up_parts(w13: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two halves of one expert's rows that a loader fills one after the other: [0, I) and [I, 2I)."""
    half = w13.shape[0] // 2
    return w13[:half], w13[half:]


def prepare_sm90_(w13: torch.Tensor, state: TransformState) -> int:
    """Brings w13 [E, 2I, H] E4M3 into the SM90 kernel's order, in place, expert by expert; w2 and all scales
    stay.

    Safe to call after every load: experts that are in order already are left alone. Returns how many were
    rearranged. Extra memory: two experts' bytes at most, whatever E is. Raises ValueError on a half-loaded
    expert.
    """
    if w13.dim() != 3 or w13.dtype != torch.float8_e4m3fn or not w13.is_contiguous():
        raise ValueError(
            f"w13 is {w13.dtype} {tuple(w13.shape)}; the SM90 kernel takes contiguous E4M3 "
            "[experts, 2 * intermediate, hidden]"
        )
    arranged = 0
    for expert in range(w13.shape[0]):
        rows = w13[expert].view(torch.uint8)
        before = fingerprints(gate_up_parts(rows))
        if state.classify(expert, before) is PartState.LOADED:
            rows.copy_(interleave_gate_up(rows))
            state.record(expert, before, fingerprints(gate_up_parts(rows)))
            arranged += 1
    return arranged
