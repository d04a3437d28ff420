"""The layout's laws: every pair of a local expert has one row, tiles hold one expert, regions keep their promise."""

from __future__ import annotations

from typing import Any

import torch
from glm_kernels.overlapped_moe.layout import NOWHERE, Layout, counts_for, layout_reference, spans
from glm_kernels.overlapped_moe.plan import TILE, Geometry, Plan, exact_plan, worst_case_plan
from hypothesis import given, settings
from hypothesis import strategies as st

CPU = torch.device("cpu")


def made(ids: torch.Tensor, plan: Plan) -> Layout:
    out = Layout.empty(plan, CPU)
    layout_reference(ids, plan, out)
    return out


@st.composite
def cases(draw: Any) -> tuple[Plan, torch.Tensor]:
    ranks, experts = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    tokens, top_k = draw(st.integers(1, 300)), draw(st.integers(1, 3))
    of = Geometry(ranks, draw(st.integers(0, ranks - 1)), experts, top_k, 128, 128, tokens)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    ids = torch.randint(-1, ranks * experts, (ranks, tokens, top_k), generator=generator, dtype=torch.int32)
    if draw(st.booleans()):
        ids[ids >= 0] = of.rank * experts  # all to one expert
    shares = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    cut: dict[str, Any] = {"shares": shares, "expert_splits": draw(st.integers(1, 2))}
    if draw(st.booleans()):
        return exact_plan(of, counts_for(of, ids, shares), **cut), ids
    return worst_case_plan(of, **cut), ids


@settings(max_examples=60, deadline=None)
@given(cases())
def test_laws(case: tuple[Plan, torch.Tensor]) -> None:
    plan, ids = case
    of, layout = plan.geometry, made(*reversed(case))
    assert int(layout.overflow) == 0
    local = (ids - of.rank * of.experts).flatten()
    here = (local >= 0) & (local < of.experts)
    place = layout.place.flatten()
    assert ((place != NOWHERE) == here).all()
    rows = place[here].long()
    assert len(rows.unique()) == len(rows)
    assert torch.equal(layout.expert[rows], local[here])
    assert int((layout.expert != NOWHERE).sum()) == len(rows)
    # A tile has one expert, and its pairs come first.
    for tile in layout.expert.split(TILE):
        held = int((tile != NOWHERE).sum())
        assert (tile[:held] == tile[0]).all()
        assert (tile[held:] == NOWHERE).all()
    # Region s holds nothing of later sources, and only the last region's tiles are not full.
    for chunk in plan.chunks:
        part = slice(chunk.start, chunk.start + chunk.rows)
        if chunk.region < len(plan.sources) - 1:
            for tile in layout.expert[part].split(TILE):
                assert int((tile == NOWHERE).sum()) in (0, TILE)
        held = layout.expert[part]
        assert ((held == NOWHERE) | ((held >= chunk.first) & (held < chunk.last))).all()
    region_of = torch.full((plan.rows,), NOWHERE)
    for chunk in plan.chunks:
        region_of[chunk.start : chunk.start + chunk.rows] = chunk.region
    for source, (first, last) in enumerate(spans(plan)):
        mine = place[first:last]
        assert (region_of[mine[mine != NOWHERE].long()] >= source).all()


def test_another_routing_than_the_plans_is_told() -> None:
    of = Geometry(1, 0, 2, 1, 128, 128, 200)
    planned = torch.zeros(1, 200, 1, dtype=torch.int32)
    plan = exact_plan(of, counts_for(of, planned))
    other = planned.clone()
    other[0, ::2] = 1  # 100 pairs each: still 256 rows
    assert int(made(other, plan).overflow) == 0
    assert int(made(other, plan).place.max()) < plan.rows
    mixed = made(torch.ones_like(planned), exact_plan(of, counts_for(of, torch.full_like(planned, -1))))
    assert int(mixed.overflow) == 1
    assert (mixed.place == NOWHERE).all()


def test_by_hand() -> None:
    """Two parts of 100 own tokens, one expert: 128 rows are whole in part 2's region only, so all are there."""
    of = Geometry(1, 0, 1, 1, 128, 128, 200)
    ids = torch.zeros(1, 200, 1, dtype=torch.int32)
    plan = exact_plan(of, counts_for(of, ids))
    assert [(chunk.start, chunk.rows) for chunk in plan.chunks] == [(0, 0), (0, 256)]
    assert made(ids, plan).place.flatten().tolist() == list(range(200))
    # Three parts of 150: tile 0 in the first region, 1 in the second, 2 and the rest in the last.
    of = Geometry(1, 0, 1, 1, 128, 128, 450)
    ids = torch.zeros(1, 450, 1, dtype=torch.int32)
    plan = exact_plan(of, counts_for(of, ids, (1, 1, 1)), shares=(1, 1, 1))
    assert [chunk.rows for chunk in plan.chunks] == [128, 128, 256]
    assert made(ids, plan).place.flatten().tolist() == list(range(450))
