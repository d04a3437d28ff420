"""FP8 checkpoints for the SM100 and SM103 kernel: power-of-two scales over 1 x 32, in the layout it reads.

The kernel multiplies E4M3 by E4M3 under UE8M0 scales (UPSTREAM: sm100_fp8_fp4_mega_moe_impl with
weight_dtype_t = float_e4m3_t), while checkpoints carry fp32 scales over 128 x 128. So each block is
dequantised and each 32 columns of each row get the smallest power of two that keeps them within 448. One
exponent a row group costs nothing, since the layout has it anyway, and loses no more than one a block: both
round normal values alike, and the smaller exponent leaves fewer subnormals.

What is lost is one more E4M3 rounding, unless a block's scale was a power of two already: then nothing is.
Weights of a normal distribution lose 2.6 % rms (calc_diff 3.5e-4), 1/16 at most where E4M3 is normal; the
output of a layer of them moves by a calc_diff of 1.1e-3, as much as the kernel's own rounding of
activations.

No machine with this GPU is at hand: values and layout are proved on a CPU, the kernel is compiled, never
run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm_kernels.mega_moe import numerics
from glm_kernels.mega_moe.interleave import gate_up_parts, interleave_gate_up
from glm_kernels.mega_moe.reload import PartState, TransformState, fingerprints

_SLAB_ROWS = 512
"""Rows requantised at a time: bounds the fp32 temporaries to a few slabs (12 MiB each at hidden 6144)."""

_UTCCP_ROWS, _UTCCP_LANES = 128, 32


@dataclass(frozen=True)
class Sm100Operand:
    """One GEMM's weights: codes [E, N, K] E4M3 and packed scales [E, N, K / 128] int32 of strides (N * K /
    128, 1, N).

    Byte b of an int32 is the UE8M0 exponent of columns [128 k + 32 b, +32).
    """

    codes: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True)
class Sm100Weights:
    """l1_weights and l2_weights of `fp8_fp4_mega_moe`. The layer owns it as long as it may run."""

    l1: Sm100Operand
    l2: Sm100Operand


def requantize(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One expert's matrix under UE8M0 scales over 1 x 32.

    codes: [N, K] E4M3, scale: [N / 128, K / 128] fp32. Returns codes [N, K] E4M3 and exponents [N, K / 32]
    uint8, rows in the same order. Raises ValueError for scales that are not finite.
    """
    rows = codes.shape[0]
    if tuple(scale.shape) != (rows // numerics.WEIGHT_BLOCK, codes.shape[1] // numerics.WEIGHT_BLOCK):
        raise ValueError(
            f"scales {tuple(scale.shape)} are not those of 128 x 128 blocks of {tuple(codes.shape)}"
        )
    if not bool(torch.isfinite(scale).all()):
        raise ValueError(
            "the checkpoint holds weight scales that are not finite; MegaMoE cannot requantise them"
        )
    out = torch.empty_like(codes)
    exponents = torch.empty(
        (rows, codes.shape[1] // numerics.SM100_GROUP), dtype=torch.uint8, device=codes.device
    )
    for start in range(0, rows, _SLAB_ROWS):
        slab = slice(start, min(start + _SLAB_ROWS, rows))
        blocks = slice(slab.start // numerics.WEIGHT_BLOCK, slab.stop // numerics.WEIGHT_BLOCK)
        wide = numerics.dequantize_blocks(codes[slab], scale[blocks])
        out[slab], exponents[slab] = numerics.quantize_ue8m0(wide)
    return out, exponents


def pack_scales(exponents: torch.Tensor) -> torch.Tensor:
    """exponents [N, K / 32] uint8 -> [K / 128, N] int32 as the kernel's TMA reads them; N % 128 == 0, K % 128
    == 0.

    Four bytes of K make a word, words run along N first, and within 128 rows the order is the transposition
    that the copy to tensor memory undoes: row 32 q + r goes to 4 r + q. UPSTREAM: deep_gemm
    _transpose_sf_for_utccp.
    """
    rows, groups = exponents.shape
    if rows % _UTCCP_ROWS or groups % 4:
        raise ValueError(f"scale exponents {(rows, groups)} must be multiples of ({_UTCCP_ROWS}, 4)")
    words = exponents.contiguous().view(torch.int32)
    moved = (
        torch.unflatten(words, 0, (-1, _UTCCP_ROWS // _UTCCP_LANES, _UTCCP_LANES))
        .transpose(1, 2)
        .flatten(0, 2)
    )
    return moved.T.contiguous()


def unpack_scales(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_scales`."""
    words = (
        torch.unflatten(packed.T, 0, (-1, _UTCCP_LANES, _UTCCP_ROWS // _UTCCP_LANES))
        .transpose(1, 2)
        .flatten(0, 2)
    )
    return words.contiguous().view(torch.uint8)


def allocate(w13: torch.Tensor, w2: torch.Tensor) -> Sm100Weights:
    """Codes in the parameters' memory, scales in new memory: a byte per 32 weights, 3.1 % of the experts."""
    return Sm100Weights(_operand(w13), _operand(w2))


def _operand(w: torch.Tensor) -> Sm100Operand:
    experts, rows, columns = w.shape
    storage = torch.zeros(
        (experts, columns // numerics.WEIGHT_BLOCK, rows), dtype=torch.int32, device=w.device
    )
    return Sm100Operand(w, storage.transpose(1, 2))


def prepare_sm100_(
    weights: Sm100Weights, w13_scale: torch.Tensor, w2_scale: torch.Tensor, state: TransformState
) -> int:
    """Requantises and lays out every expert in place: codes in the parameters' own memory, scales in
    `weights`'.

    `weights`: from `allocate`, its codes in checkpoint layout wherever they were (re)loaded. w13_scale [E,
    2I/128, H/128] and w2_scale [E, H/128, I/128] fp32 are the checkpoint's and stay untouched, so a loader
    can write them again; addresses never change, so captured graphs stay valid. Returns how many experts were
    converted; those converted before and not loaded since are left alone. Extra memory: a few experts' bytes
    at most, whatever E is.
    """
    w13, w2 = weights.l1.codes, weights.l2.codes
    for name, w, scale in (("w13", w13, w13_scale), ("w2", w2, w2_scale)):
        if w.dtype != numerics.E4M3 or not w.is_contiguous() or scale.dtype != torch.float32:
            raise ValueError(
                f"{name} must be contiguous E4M3 with fp32 scales; found {w.dtype} and {scale.dtype}"
            )
    converted = 0
    for expert in range(w13.shape[0]):
        parts = (
            *gate_up_parts(w13[expert]),
            *gate_up_parts(w13_scale[expert]),
            w2[expert],
            w2_scale[expert],
        )
        before = fingerprints(parts)
        if state.classify(expert, before) is PartState.TRANSFORMED:
            continue
        codes, exponents = requantize(w13[expert], w13_scale[expert])
        w13[expert].view(torch.uint8).copy_(interleave_gate_up(codes.view(torch.uint8)))
        weights.l1.scales[expert].T.copy_(pack_scales(interleave_gate_up(exponents)))
        codes, exponents = requantize(w2[expert], w2_scale[expert])
        w2[expert].copy_(codes)
        weights.l2.scales[expert].T.copy_(pack_scales(exponents))
        state.record(expert, before, fingerprints(parts))
        converted += 1
    return converted
