"""FP8 weights in 128x128 blocks, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from glm_sglang.tiny_model.shape import FP8_BLOCK

FP8_MAX = 448.0  # largest finite float8_e4m3fn
_SCALE = "_scale_inv"


def quantise_block(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises [out, in] float32 to (float8_e4m3fn [out, in], float32 scale [ceil(out/128), ceil(in/128)]).

    scale = amax of the block / 448, weight ~= q * scale: GLM's `weight_scale_inv`. A block of zeros has scale
    1.
    """
    out, inner = weight.shape
    rows, cols = -(-out // FP8_BLOCK), -(-inner // FP8_BLOCK)
    padded = weight.new_zeros(rows * FP8_BLOCK, cols * FP8_BLOCK)
    padded[:out, :inner] = weight
    blocks = padded.view(rows, FP8_BLOCK, cols, FP8_BLOCK)
    amax = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(amax > 0, amax / FP8_MAX, torch.ones_like(amax))
    q = (blocks / scale[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).view_as(padded)[:out, :inner]
    return q.to(torch.float8_e4m3fn).contiguous(), scale.contiguous()


def dequantise_block(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Float32 [out, in] of a quantised weight; the inverse layout of `quantise_block`."""
    out, inner = q.shape
    wide = scale.float().repeat_interleave(FP8_BLOCK, 0)[:out].repeat_interleave(FP8_BLOCK, 1)[:, :inner]
    return q.float() * wide


def dequantise(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors with every FP8 weight as float32 and no scales; the others as they are.

    Raises KeyError when an FP8 weight has no `weight_scale_inv`.
    """
    result: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if name.endswith(_SCALE):
            continue
        result[name] = (
            dequantise_block(tensor, state[name + _SCALE]) if tensor.dtype == torch.float8_e4m3fn else tensor
        )
    return result
