"""Which buffer row each (token, slot) pair gets: static tables from a plan, and the exact reference of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from glm_kernels.overlapped_moe.plan import TILE, Plan, sources_of

NOWHERE = -1
"""Row of a pair whose expert lives elsewhere or is masked, and expert of a row that holds no pair."""


@dataclass
class Layout:
    """What a step's ids come to, on the device.

    place int32 [R, T, K]: the buffer row of each pair in arrival order, or -1. expert int32 [rows]: the local expert
    of each buffer row, or -1 (deep_gemm's m_indices: half a tile of -1 is not multiplied). overflow int32 [1]: not 0
    where a plan's rows did not suffice; pairs without room have place -1. Only an exact plan under another routing
    can do that.
    """

    place: torch.Tensor
    expert: torch.Tensor
    overflow: torch.Tensor

    @classmethod
    def empty(cls, plan: Plan, device: torch.device) -> Layout:
        of = plan.geometry
        place = torch.full((of.ranks, of.tokens, of.top_k), NOWHERE, dtype=torch.int32, device=device)
        expert = torch.full((plan.rows,), NOWHERE, dtype=torch.int32, device=device)
        return cls(place, expert, torch.zeros(1, dtype=torch.int32, device=device))


def spans(plan: Plan) -> list[tuple[int, int]]:
    """First and last + 1 pair of each source, of the R * T * K in arrival order. Contiguous, in order."""
    of = plan.geometry
    return [
        (
            (source.peer * of.tokens + source.start) * of.top_k,
            (source.peer * of.tokens + source.stop) * of.top_k,
        )
        for source in plan.sources
    ]


def pair_counts(ids: torch.Tensor, plan: Plan) -> torch.Tensor:
    """int64 [S, E]: pairs of each source and local expert. ids [R, T, K] global, in arrival order."""
    of = plan.geometry
    local = ids.flatten().long() - of.rank * of.experts
    rows = []
    for first, last in spans(plan):
        part = local[first:last]
        rows.append(torch.bincount(part[(part >= 0) & (part < of.experts)], minlength=of.experts))
    return torch.stack(rows)


def counts_for(plan_geometry: object, ids: torch.Tensor, shares: Sequence[int] = (1, 1)) -> list[list[int]]:
    """What `exact_plan` takes, of ids [R, T, K] in arrival order. Waits for the device."""
    from glm_kernels.overlapped_moe.plan import Geometry

    assert isinstance(plan_geometry, Geometry)
    sources = sources_of(plan_geometry, shares)
    return pair_counts(ids, Plan(plan_geometry, sources, (), exact=False)).tolist()


def layout_reference(ids: torch.Tensor, plan: Plan, out: Layout) -> None:
    """Fills `out` for ids int32 [R, T, K], global, in arrival order; -1, or another rank's, is nowhere.

    Pair number j of an expert lies in tile j // 128, which belongs to the first region in which that tile is whole, or
    to the last one. In its chunk, an expert's tiles follow those of the experts before it.
    """
    of, counts = plan.geometry, pair_counts(ids, plan)
    ends = counts.cumsum(0) // TILE * TILE
    total = counts.sum(0)
    ends[-1] = (total + TILE - 1) // TILE * TILE
    starts = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    out.expert.fill_(NOWHERE)
    out.overflow.zero_()
    local = (ids.flatten().long() - of.rank * of.experts).cpu()
    place = torch.full_like(local, NOWHERE)
    for chunk in plan.chunks:
        row = chunk.start
        for expert in range(chunk.first, chunk.last):
            low, high = int(starts[chunk.region, expert]), int(ends[chunk.region, expert])
            pairs = (local == expert).nonzero().flatten()[low:high]
            room = max(min(len(pairs), chunk.start + chunk.rows - row), 0)
            place[pairs[:room]] = torch.arange(row, row + room)
            out.expert[row : row + room] = expert
            if row + high - low > chunk.start + chunk.rows:
                out.overflow.fill_(1)
            row += high - low
    out.place.copy_(place.view(out.place.shape))
