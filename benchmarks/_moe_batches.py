"""What every arm of `benchmarks.moe_layer` sees: weights, tokens under a named routing, the exact result of every row;
and how far from it an arm is, once or in many calls.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from glm_kernels.mega_moe import Arithmetic, ExpertWeights, mega_moe_reference, numerics

from benchmarks import _moe_arms
from benchmarks._moe_arms import ROUTED_SCALING, Arm, Batch
from benchmarks.moe_layer import Layer

SLAB = 4096  # rows, of all ranks together, that are computed or compared at once: about 2 GiB at GLM's widths
EDGES = (1, 63, 64, 1919, 1920)  # token counts that a soak has for certain, where it may


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


def reference(batch: Batch, weights: ExpertWeights, group: Any, slab: int = SLAB) -> torch.Tensor:
    """The layer's exact result for every row of this rank, [padded, H]: zeros for masked ones. In plain PyTorch, none of
    the arms' kernels. All ranks call it, with as many rows.
    """
    ranks = dist.get_world_size(group)
    step = max(1, slab // ranks)
    truth = torch.empty_like(batch.x)
    for start in range(0, batch.padded, step):
        rows = slice(start, start + step)
        truth[rows] = mega_moe_reference(
            batch.x[rows],
            batch.ids[rows],
            batch.weights[rows],
            weights,
            arithmetic=Arithmetic.SM90,
            routed_scaling_factor=ROUTED_SCALING,
            group=None if ranks == 1 else group,
        )
    return truth


def difference(out: torch.Tensor, truth: torch.Tensor, slab: int = SLAB) -> torch.Tensor:
    """`calc_diff` of all rows together and of the row that differs most, fp64 [2] on their device; of none 0.

    One wrong row among thousands is nothing in the first and near 1 in the second. What is not finite differs infinitely:
    a maximum over ranks must not lose a NaN.
    """
    product, square, worst = (torch.zeros((), dtype=torch.float64, device=out.device) for _ in range(3))
    for start in range(0, len(truth), slab):
        a, b = (rows[start : start + slab].double() for rows in (out, truth))
        products, squares = (a * b).sum(-1), (a * a + b * b).sum(-1)
        worst = torch.maximum(worst, _relative(products, squares).max())
        product, square = product + products.sum(), square + squares.sum()
    return torch.stack([_relative(product, square), worst])


def _relative(product: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    """1 - 2 product / square; 0 where both sides are zeros."""
    found = torch.where(square == 0, 0.0, 1.0 - 2.0 * product / square)
    return found.nan_to_num(nan=torch.inf, posinf=torch.inf)


def soak(layer: Layer, weights: ExpertWeights, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """`args.soak` eager calls of MegaMoE whose token counts change every time and differ between ranks, zero included."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    full = batch_of(layer, tokens, args)
    counts = soak_counts(args.soak, layer.ranks, tokens)
    holder = dataclasses.replace(full, count=0)
    arm = _moe_arms.megamoe(holder, weights, layer, max(tokens, 1), max(tokens, 1), group)
    found = soaked(arm, holder, reference(full, weights, group), counts[:, rank].tolist())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    whole, row, behind = found.tolist()
    return {
        "calls": args.soak,
        "calc_diff": whole,
        "row_diff": row,
        "rows_checked": int(counts.sum()),
        "written_behind": int(behind),
    }


def soak_counts(calls: int, ranks: int, tokens: int) -> torch.Tensor:
    """Each rank's tokens in each call, [calls, ranks]: any number, each edge in one call of 50, none on one rank or two
    in some.
    """
    counts = torch.randint(0, tokens + 1, (calls, ranks), generator=torch.Generator().manual_seed(5))
    for place, edge in enumerate(sorted({*EDGES, tokens})):
        if edge <= tokens:
            counts[place + 1 :: 50] = edge
    counts[::7, 0], counts[::11, -1] = 0, 0
    return counts


def soaked(arm: Arm, holder: Batch, truth: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Calls the arm with so many of the holder's rows each time. The largest `difference` of any call, all of its rows
    compared, and how many values at most a call wrote behind them: fp64 [3]. What the call before wrote is gone by then.
    """
    found = torch.zeros(3, dtype=torch.float64, device=truth.device)
    for count in counts:
        arm.out.fill_(torch.nan)
        holder.count = count
        arm.run()
        behind = (~arm.out[count:].isnan()).sum().double()
        now = torch.cat([difference(arm.out[:count], truth[:count]), behind[None]])
        found = torch.maximum(found, now)
    return found
