"""What every arm of `benchmarks.moe_layer` sees: weights, tokens under a named routing, and the exact result."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from glm_kernels.mega_moe import Arithmetic, ExpertWeights, mega_moe_reference, numerics

from benchmarks._moe_arms import ROUTED_SCALING, Batch
from benchmarks.moe_layer import CHECKED_TOKENS, Layer


def weights_of(layer: Layer, rank: int) -> ExpertWeights:
    """This rank's experts, drawn expert by expert: fp32 copies of all would not fit beside the arms."""
    torch.manual_seed(7 + rank)
    parts: list[list[torch.Tensor]] = [[], [], [], []]
    for _ in range(layer.experts // layer.ranks):
        w13 = torch.randn(2 * layer.intermediate, layer.hidden, device="cuda") * layer.hidden**-0.5
        w2 = torch.randn(layer.hidden, layer.intermediate, device="cuda") * 2 * layer.intermediate**-0.5
        for i, tensor in enumerate((*numerics.quantize_blocks(w13), *numerics.quantize_blocks(w2))):
            parts[i].append(tensor)
    codes13, scale13, codes2, scale2 = (torch.stack(part) for part in parts)
    return ExpertWeights(codes13, codes2, scale13, scale2)


def batch_of(layer: Layer, tokens: int, args: argparse.Namespace) -> Batch:
    """This rank's tokens under the named routing; the rows past its own count are masked."""
    rank = dist.get_rank()
    torch.manual_seed(1000 + rank)
    score = torch.rand(tokens, layer.experts, device="cuda")
    if args.routing == "skewed":
        score = score * torch.logspace(0, -1, layer.experts, device="cuda")
    elif args.routing == "one_rank":
        score[:, layer.experts // layer.ranks :] = -1.0
    ids = score.topk(layer.top_k, dim=-1).indices.int()
    weights = torch.rand(tokens, layer.top_k, device="cuda") + 0.1
    count = tokens // (rank + 1) if args.uneven else tokens
    ids[count:] = -1
    x = torch.randn(tokens, layer.hidden, device="cuda").bfloat16()
    return Batch(x, ids.contiguous(), weights / weights.sum(-1, keepdim=True), count)


def reference(batch: Batch, weights: ExpertWeights, group: Any) -> torch.Tensor:
    """The layer's exact result for the first tokens of each rank, [CHECKED_TOKENS or fewer, H]."""
    rows = slice(0, min(batch.count, CHECKED_TOKENS))
    return mega_moe_reference(
        batch.x[rows],
        batch.ids[rows],
        batch.weights[rows],
        weights,
        arithmetic=Arithmetic.SM90,
        routed_scaling_factor=ROUTED_SCALING,
        group=group,
    )
