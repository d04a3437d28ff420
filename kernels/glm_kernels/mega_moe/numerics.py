"""How MegaMoE rounds: E4M3 codes under fp32 scales (SM90) or power-of-two scales (SM100), and the measure of
a difference.

Every function works on any device and never on more than one operand's worth of extra memory.
"""

from __future__ import annotations

import functools

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
"""Largest finite E4M3 value, 1.75 * 2**8."""

SM90_GROUP = 128
"""Columns under one activation scale on SM90, for both GEMMs.
UPSTREAM: sm90_fp8_mega_moe.cuh kL2ActsSFGranK (0.2.5; 0.2.3.post2 had 64 for the second GEMM)."""

SM100_GROUP = 32
"""Columns under one UE8M0 scale on SM100 and SM103. UPSTREAM: types.cuh get_sf_gran_k."""

WEIGHT_BLOCK = 128
"""Side of a checkpoint's square weight block (`weight_block_size` of the quantization config)."""

# UPSTREAM: sm90_mega_moe_pre_dispatch_kernel, sm90_fp8_mega_moe_get_e4m3_sf_and_sf_inv
_SM90_AMAX_FLOOR = 1e-10
# UPSTREAM: mega_moe_pre_dispatch_kernel; the second quantisation has no floor
_SM100_INPUT_AMAX_FLOOR = 1e-4
_E4M3_MAX_MANTISSA = 0x600000  # fraction bits of 1.75, the significand of 448


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """DeepGEMM's measure, 1 - 2<x, y> / (<x, x> + <y, y>), in float64: half the squared relative error.

    Two tensors of zeros differ by 0; a NaN or infinity on either side gives NaN, which passes no bound.
    """
    if x.shape != y.shape:
        raise ValueError(f"calc_diff needs equal shapes, got {tuple(x.shape)} and {tuple(y.shape)}")
    a, b = x.double(), y.double()
    denominator = float((a * a + b * b).sum())
    if denominator == 0.0:
        return 0.0
    return 1.0 - 2.0 * float((a * b).sum()) / denominator


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Nearest E4M3 value, ties to even, saturating at 448 (torch alone turns an overflow into NaN)."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


@functools.cache
def _e4m3_table() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(E4M3).float()


def widen(x: torch.Tensor) -> torch.Tensor:
    """x as new fp32. E4M3 on a CPU goes through a table of its 256 values: a third of torch's time."""
    if x.dtype != E4M3 or x.is_cuda:
        return x.to(torch.float32, copy=True)
    indices = x.contiguous().view(torch.uint8).flatten().int()
    return _e4m3_table().index_select(0, indices).view(x.shape)


def _grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    columns = x.shape[-1]
    if columns % group:
        raise ValueError(f"{columns} columns are no multiple of the scale group, {group}")
    return torch.unflatten(x.float(), -1, (columns // group, group))


def _blocked(w: torch.Tensor, row_blocks: int, column_blocks: int) -> torch.Tensor:
    """[..., N, K] -> fp32 [..., row blocks, N / row blocks, column blocks, K / column blocks]."""
    rows, columns = w.shape[-2:]
    shape = (*w.shape[:-2], row_blocks, rows // row_blocks, column_blocks, columns // column_blocks)
    return widen(w).reshape(shape)


def quantize_sm90(x: torch.Tensor, *, by_reciprocal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations as the SM90 kernel quantises them: scale = max(amax, 1e-10) / 448 over 128 columns of a
    row.

    x: [..., K], K % 128 == 0. `by_reciprocal` multiplies by the fp32 constant 1/448 instead of dividing: what
    the epilogue of the first GEMM does (one ulp apart). Returns codes [..., K] E4M3 and scales [..., K / 128]
    fp32.
    """
    groups = _grouped(x, SM90_GROUP)
    amax = groups.abs().amax(-1).clamp_min(_SM90_AMAX_FLOOR)
    scale = amax * (1.0 / E4M3_MAX) if by_reciprocal else amax / E4M3_MAX
    codes = to_e4m3(groups * (1.0 / scale).unsqueeze(-1))
    return codes.flatten(-2), scale


def ue8m0_exponent(amax: torch.Tensor) -> torch.Tensor:
    """Biased exponent (the UE8M0 byte) of the smallest power of two 2**(byte - 127) with amax <= 448 *
    2**(byte - 127).

    amax: fp32, not negative, finite. Exact, by integer carry: the exponent rises when the significand exceeds
    1.75. Returns int32 in [1, 254] of the same shape; an all-zero group gets 1.
    """
    bits = amax.contiguous().view(torch.int32)
    carried = (bits + (0x7FFFFF - _E4M3_MAX_MANTISSA)) >> 23
    return (carried - 8).clamp(1, 254)


def ue8m0_value(exponent: torch.Tensor) -> torch.Tensor:
    """2**(byte - 127) as fp32; exponent: any integer dtype, values in [1, 254]."""
    return (exponent.to(torch.int32) << 23).view(torch.float32)


def quantize_ue8m0(x: torch.Tensor, *, amax_floor: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes under the smallest power-of-two scale that keeps 32 columns of a row within +-448.

    The smallest one loses least: the relative rounding error of normal E4M3 values doesn't depend on the
    exponent, and fewer values become subnormal. x: [..., K], K % 32 == 0. Returns codes [..., K] E4M3,
    exponents [..., K / 32] uint8.
    """
    groups = _grouped(x, SM100_GROUP)
    exponent = ue8m0_exponent(groups.abs().amax(-1).clamp_min(amax_floor))
    codes = to_e4m3(groups * ue8m0_value(254 - exponent).unsqueeze(-1))
    return codes.flatten(-2), exponent.to(torch.uint8)


def quantize_sm100_input(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's input quantisation: `quantize_ue8m0` with amax no smaller than 1e-4."""
    return quantize_ue8m0(x, amax_floor=_SM100_INPUT_AMAX_FLOOR)


def dequantize_groups(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes [..., K] times scales [..., K / group] (fp32, or uint8 UE8M0 exponents), as fp32 [..., K]."""
    if scales.dtype == torch.uint8:
        scales = ue8m0_value(scales)
    groups = torch.unflatten(widen(codes), -1, (scales.shape[-1], -1))
    return groups.mul_(scales.unsqueeze(-1)).flatten(-2)


def dequantize_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes [..., N, K] times scales [..., N / a, K / b] over a x b (fp32, or uint8 UE8M0), as fp32."""
    rows, columns = codes.shape[-2:]
    row_blocks, column_blocks = scales.shape[-2:]
    if rows % row_blocks or columns % column_blocks:
        raise ValueError(f"scales {tuple(scales.shape)} do not tile weights {tuple(codes.shape)}")
    if scales.dtype == torch.uint8:
        scales = ue8m0_value(scales)
    blocks = _blocked(codes, row_blocks, column_blocks)
    return blocks.mul_(scales.unsqueeze(-1).unsqueeze(-3)).view(codes.shape)


def quantize_blocks(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A checkpoint's form of w [..., N, K]: E4M3 codes, fp32 scales [..., N / 128, K / 128] of amax / 448."""
    rows, columns = w.shape[-2:]
    if rows % WEIGHT_BLOCK or columns % WEIGHT_BLOCK:
        raise ValueError(
            f"weights of {rows} x {columns} are not whole blocks of {WEIGHT_BLOCK} x {WEIGHT_BLOCK}"
        )
    blocks = _blocked(w, rows // WEIGHT_BLOCK, columns // WEIGHT_BLOCK)
    scale = blocks.abs().amax(dim=(-3, -1)).clamp_min(_SM90_AMAX_FLOOR) / E4M3_MAX
    codes = to_e4m3(blocks / scale.unsqueeze(-1).unsqueeze(-3))
    return codes.flatten(-2).flatten(-3, -2), scale
