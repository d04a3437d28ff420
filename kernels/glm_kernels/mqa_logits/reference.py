"""What the MQA logits kernels compute, in PyTorch on any device.

logits[t, s] = scale[s] · Σ_h w[t, h] · relu(q[t, h] · k[s]), fp32, for E4M3 q and k (DeepSeek-V3.2 report, section 2.1).
"""

from __future__ import annotations

import torch


def ragged(
    q: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """q [rows, heads, d] E4M3, keys [n, d] E4M3, scales [n] fp32, weights [rows, heads] fp32; starts, ends [rows].

    Returns [rows, n] fp32, −inf outside starts[t] … ends[t] − 1.
    """
    dots = torch.einsum("thd,sd->ths", q.float(), keys.float()).relu_()
    logits = torch.einsum("th,ths->ts", weights.float(), dots) * scales.float()
    position = torch.arange(keys.shape[0], device=q.device)
    outside = (position < starts[:, None]) | (position >= ends[:, None])
    return logits.masked_fill_(outside, float("-inf"))


def unpack_pages(
    cache: torch.Tensor, page_size: int = 64, dim: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """cache [pages, page_size · (dim + 4)] uint8 → E4M3 keys [pages · page_size, dim], fp32 scales [pages · page_size].

    A page holds its keys, then its scales.
    """
    flat = cache.reshape(cache.shape[0], -1)
    keys = flat[:, : page_size * dim].reshape(-1, dim).view(torch.float8_e4m3fn)
    scales = flat[:, page_size * dim :].contiguous().view(torch.float32).reshape(-1)
    return keys, scales
