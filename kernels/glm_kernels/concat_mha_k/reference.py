"""What the kernel computes, in PyTorch on any device, and what both take."""

from __future__ import annotations

import torch


def refuse(k_nope: torch.Tensor, k_pe: torch.Tensor) -> str:
    """Why these are not the two parts of keys that `concat_mha_k` takes; "" where they are."""
    if k_nope.dtype != torch.bfloat16 or k_pe.dtype != torch.bfloat16:
        return f"dtypes are {k_nope.dtype} and {k_pe.dtype}, bfloat16 is expected"
    if k_nope.dim() != 3 or k_pe.dim() != 3 or k_pe.shape[:2] != (k_nope.shape[0], 1):
        return (
            f"shapes are {list(k_nope.shape)} and {list(k_pe.shape)}, [T, H, Dn] and [T, 1, Dr] are expected"
        )
    if k_nope.shape[2] % 8 or k_pe.shape[2] % 8 or not k_nope.shape[2] or not k_pe.shape[2]:
        return f"widths are {k_nope.shape[2]} and {k_pe.shape[2]}, multiples of 8 are expected"
    if k_nope.stride(2) != 1 or k_pe.stride(2) != 1:
        return f"strides in a head are {k_nope.stride(2)} and {k_pe.stride(2)}, 1 is expected"
    if k_nope.device != k_pe.device:
        return f"devices are {k_nope.device} and {k_pe.device}, one is expected"
    return ""


def concat_mha_k_reference(k_nope: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    """As `concat_mha_k`.

    >>> concat_mha_k_reference(torch.zeros(1, 2, 8).bfloat16(), torch.ones(1, 1, 8).bfloat16()).sum(-1).tolist()
    [[8.0, 8.0]]
    """
    if reason := refuse(k_nope, k_pe):
        raise ValueError(f"concat_mha_k: {reason}")
    return torch.cat([k_nope, k_pe.expand(-1, k_nope.shape[1], -1)], dim=-1).contiguous()
