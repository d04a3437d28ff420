"""Small MoE layers and routings that the MegaMoE tests share: seeded, at widths the real kernels accept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from glm_kernels.mega_moe import MASKED, ExpertWeights, numerics
from glm_kernels.mega_moe.weights_sm100 import requantize

SCALING = 2.5  # GLM's routed_scaling_factor


@dataclass(frozen=True)
class Tokens:
    """x [T, H] bf16, ids [T, K] int32, weights [T, K] fp32, as a router hands them over."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def __getitem__(self, rows: torch.Tensor | slice) -> Tokens:
        return Tokens(self.x[rows], self.ids[rows], self.weights[rows])


def checkpoint(seed: int, experts: int, hidden: int = 512, intermediate: int = 256) -> ExpertWeights:
    """FP8 experts with 128 x 128 fp32 scales, of weights that keep the layer's output near unit size."""
    draw = torch.Generator().manual_seed(seed)
    w13 = torch.randn(experts, 2 * intermediate, hidden, generator=draw) * hidden**-0.5
    w2 = torch.randn(experts, hidden, intermediate, generator=draw) * 2 * intermediate**-0.5
    codes13, scale13 = numerics.quantize_blocks(w13)
    codes2, scale2 = numerics.quantize_blocks(w2)
    return ExpertWeights(codes13, codes2, scale13, scale2)


def requantized(weights: ExpertWeights) -> ExpertWeights:
    """The checkpoint under UE8M0 scales over 1 x 32, rows in checkpoint order."""
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    pairs13 = [requantize(w, s) for w, s in zip(weights.w13, weights.w13_scale, strict=True)]
    pairs2 = [requantize(w, s) for w, s in zip(weights.w2, weights.w2_scale, strict=True)]
    codes13, scale13 = (torch.stack(part) for part in zip(*pairs13, strict=True))
    codes2, scale2 = (torch.stack(part) for part in zip(*pairs2, strict=True))
    return ExpertWeights(codes13, codes2, scale13, scale2)


def shard(weights: ExpertWeights, rank: int, ranks: int) -> ExpertWeights:
    """The experts that `rank` of `ranks` owns."""
    per_rank = weights.num_experts // ranks
    mine = slice(rank * per_rank, (rank + 1) * per_rank)
    return ExpertWeights(
        weights.w13[mine],
        weights.w2[mine],
        None if weights.w13_scale is None else weights.w13_scale[mine],
        None if weights.w2_scale is None else weights.w2_scale[mine],
    )


ROUTINGS = ("random", "skewed", "one_hot", "last_rank_empty", "masked", "all_masked")


def tokens(
    seed: int, count: int, experts: int, top_k: int, hidden: int = 512, routing: str = "random"
) -> Tokens:
    """`count` tokens under a named routing.

    skewed: low ids preferred, geometrically. one_hot: every token sends one slot to expert 0, the others are
    masked. last_rank_empty: the upper half of the experts gets nothing. masked: half of the slots are.
    """
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, hidden, generator=draw).bfloat16()
    score = torch.rand(count, experts, generator=draw)
    if routing == "skewed":
        score = score * torch.logspace(0, -3, experts)
    elif routing == "last_rank_empty":
        score[:, experts // 2 :] = -1.0
    ids = score.topk(top_k, dim=-1).indices.to(torch.int32)
    weights = torch.rand(count, top_k, generator=draw) + 0.1
    weights = weights / weights.sum(-1, keepdim=True)
    if routing == "one_hot":
        ids = torch.full_like(ids, MASKED)
        ids[:, 0] = 0
    elif routing == "masked":
        ids[torch.rand(count, top_k, generator=draw) < 0.5] = MASKED
    elif routing == "all_masked":
        ids = torch.full_like(ids, MASKED)
    return Tokens(x, ids, weights)
