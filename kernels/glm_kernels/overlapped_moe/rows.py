"""What happens to rows between the GEMMs, exactly, in PyTorch; and the grouped GEMM for machines without deep_gemm.

Scales of GEMM operands lie as deep_gemm reads them, group by group: [K / 128, rows] of one chunk, so that it need not
transpose them. UPSTREAM: get_mn_major_tma_aligned_tensor returns a tensor of strides (1, rows) as it is.
"""

from __future__ import annotations

import torch

from glm_kernels.mega_moe import numerics
from glm_kernels.mega_moe.experts import _linear_sm90
from glm_kernels.overlapped_moe.layout import NOWHERE
from glm_kernels.overlapped_moe.plan import Chunk, Plan


def chunk_scales(flat: torch.Tensor, chunk: Chunk, groups: int) -> torch.Tensor:
    """Scales of a chunk's rows as [rows, groups] with strides (1, rows), of the plan's flat buffer of all chunks."""
    part = flat[chunk.start * groups : (chunk.start + chunk.rows) * groups]
    return part.view(groups, chunk.rows).T


def scale_table(plan: Plan, groups: int) -> torch.Tensor:
    """int32 [rows / 128, 2]: where the first scale of a tile's first row is in the flat buffer, and how far the next
    group's is."""
    lines = [
        (chunk.start * groups + tile * 128, chunk.rows)
        for chunk in plan.chunks
        for tile in range(chunk.rows // 128)
    ]
    return torch.tensor(lines or [(0, 0)], dtype=torch.int32)


def quantise_reference(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """x [T, H] bf16 -> codes [T, H] E4M3, scales [T, H / 128] fp32: scale = max(amax, 1e-10) / 448."""
    made = numerics.quantize_sm90(x)
    codes.view(torch.uint8).copy_(made[0].view(torch.uint8))
    scales.copy_(made[1])


def place_reference(
    codes: torch.Tensor,
    scales: torch.Tensor,
    place: torch.Tensor,
    a: torch.Tensor,
    a_scale: torch.Tensor,
    table: torch.Tensor,
) -> None:
    """Copies token t to every buffer row place[t, k] that is not -1.

    codes [T, H] E4M3, scales [T, G] fp32, place [T, K] int32; a [rows, H] E4M3, a_scale flat, table of `scale_table`.
    """
    token, slot = (place != NOWHERE).nonzero(as_tuple=True)
    row = place[token, slot].long()
    a.view(torch.uint8)[row] = codes.view(torch.uint8)[token]
    line = table[row // 128].long()
    groups = torch.arange(scales.shape[1], device=scales.device)
    a_scale[(line[:, 0] + row % 128)[:, None] + groups * line[:, 1:]] = scales[token]


def swiglu_reference(
    gate_up: torch.Tensor, expert: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """codes, scales of silu(gate) * up of one chunk's rows that hold a pair; the others are left alone.

    gate_up [M, 2I] bf16, gate first; expert [M] int32, -1 where no pair is; codes [M, I] E4M3; scales [M, I / 128] fp32
    of any strides. Nothing is rounded to bf16 between activation and quantisation.
    """
    row = (expert != NOWHERE).nonzero().flatten()
    gate, up = gate_up[row].float().chunk(2, dim=-1)
    made = numerics.quantize_sm90(torch.nn.functional.silu(gate) * up)
    codes.view(torch.uint8)[row] = made[0].view(torch.uint8)
    scales[row] = made[1]


def reduce_reference(
    rows: torch.Tensor,
    place: torch.Tensor,
    weights: torch.Tensor,
    scaling: float,
    partials: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """out[t] = scaling * sum over slots of weights[t, k] * rows[place[t, k]], then + partials[0, t] + partials[1, t] …

    rows [M, H] bf16, place [T, K] int32 (-1 adds nothing, whatever the weight is), weights [T, K] fp32, partials
    [P, T, H] bf16 or None, out [T, H] bf16. In fp32, slots ascending, then partials in their order: the same bits
    every time.
    """
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for slot in range(place.shape[1]):
        row = place[:, slot].long()
        live = (row != NOWHERE)[:, None]
        weight = weights[:, slot, None].float() * scaling
        total += torch.where(live, weight * rows[row.clamp_min(0)].float(), 0.0)
    for partial in partials if partials is not None else ():
        total += partial.float()
    out.copy_(total)


def grouped_gemm_reference(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    out: torch.Tensor,
    expert: torch.Tensor,
) -> None:
    """out [M, N] bf16 = a [M, K] E4M3 times its row's expert of w [E, N, K] E4M3, transposed; rows of -1 get zeros.

    a_scale [M, K / 128], w_scale [E, N / 128, K / 128] fp32. UPSTREAM: m_grouped_fp8_gemm_nt_contiguous.
    """
    out.zero_()
    for number in sorted(set(expert.tolist())):
        if number != NOWHERE:
            row = (expert == number).nonzero().flatten()
            codes = a.view(torch.uint8)[row].view(numerics.E4M3)
            out[row] = _linear_sm90(codes, a_scale[row], w[number], w_scale[number]).to(out.dtype)
