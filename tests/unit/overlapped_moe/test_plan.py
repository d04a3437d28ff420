"""Plans: no padding beside an expert's last tile, and bounds that hold for any routing."""

from __future__ import annotations

from typing import Any

import pytest
from glm_kernels.overlapped_moe.plan import TILE, Geometry, exact_plan, sources_of, tiles_of, worst_case_plan
from hypothesis import given
from hypothesis import strategies as st

GLM = Geometry(ranks=2, rank=0, experts=32, top_k=8, hidden=6144, intermediate=2048, tokens=8192)


@st.composite
def routed(draw: Any) -> tuple[Geometry, tuple[int, ...], int, list[list[int]]]:
    """A geometry, shares, expert splits, and counts that its tokens can have."""
    ranks, experts = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    geometry = Geometry(
        ranks,
        draw(st.integers(0, ranks - 1)),
        experts,
        draw(st.integers(1, 4)),
        128,
        128,
        draw(st.integers(1, 700)),
    )
    shares = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    counts = []
    for source in sources_of(geometry, shares):
        left, row = source.tokens * geometry.top_k, []
        for _ in range(experts):
            row.append(draw(st.integers(0, left)))
            left -= row[-1]
        counts.append(row)
    return geometry, shares, draw(st.integers(1, 3)), counts


@given(routed())
def test_chunks_cost_no_padding(case: tuple[Geometry, tuple[int, ...], int, list[list[int]]]) -> None:
    geometry, shares, splits, counts = case
    whole = [-(-sum(column) // TILE) for column in zip(*counts, strict=True)]
    assert [sum(column) for column in zip(*tiles_of(counts), strict=True)] == whole
    plan = exact_plan(geometry, counts, shares=shares, expert_splits=splits)
    assert sum(chunk.rows for chunk in plan.chunks) == TILE * sum(whole)


@given(routed())
def test_the_worst_case_holds_any_routing(
    case: tuple[Geometry, tuple[int, ...], int, list[list[int]]],
) -> None:
    geometry, shares, splits, counts = case
    exact = exact_plan(geometry, counts, shares=shares, expert_splits=splits)
    bound = worst_case_plan(geometry, shares=shares, expert_splits=splits)
    assert len(exact.chunks) == len(bound.chunks)
    for found, allowed in zip(exact.chunks, bound.chunks, strict=True):
        assert (found.region, found.first, found.last) == (allowed.region, allowed.first, allowed.last)
        assert found.rows <= allowed.rows
    for plan in (exact, bound):
        ends = [0, *(chunk.start + chunk.rows for chunk in plan.chunks)]
        assert [chunk.start for chunk in plan.chunks] == ends[:-1]
        assert all(chunk.rows % TILE == 0 for chunk in plan.chunks)


def test_own_tokens_are_cut_by_shares_and_peers_follow_in_ring_order() -> None:
    spans = [(source.peer, source.start, source.stop) for source in sources_of(GLM, (3, 1))]
    assert spans == [(0, 0, 6144), (0, 6144, 8192), (1, 0, 8192)]
    one = Geometry(3, 1, 4, 2, 128, 128, 1)
    assert [(s.peer, s.tokens) for s in sources_of(one, (1, 1))] == [(0, 1), (1, 1), (2, 1)]


def test_the_layer_of_the_benchmark_fits_two_gib_of_rows() -> None:
    """8,192 tokens, even routing: 1,024 pairs of each source half and expert, 2,048 of the peer: no padding at all."""
    plan = exact_plan(GLM, [[512] * 32, [512] * 32, [1024] * 32])
    assert plan.rows == 65_536
    # H + I codes, their scales, 2I and H in bf16, the expert
    assert plan.row_bytes == 65_536 * (6144 + 2048 + (6144 + 2048) // 32 + 2 * 4096 + 2 * 6144 + 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 6000}, "hidden is 6000; the overlapped path takes multiples of 128"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"tokens": 0}, "must be positive"),
    ],
)
def test_shapes_that_cannot_work_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Geometry(**{**GLM.__dict__, **change})


def test_plans_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="3 sources by 32 experts"):
        exact_plan(GLM, [[1] * 32] * 2)
    with pytest.raises(ValueError, match="shares"):
        worst_case_plan(GLM, shares=(1, 0))
    with pytest.raises(ValueError, match="expert_splits is 0"):
        worst_case_plan(GLM, expert_splits=0)
