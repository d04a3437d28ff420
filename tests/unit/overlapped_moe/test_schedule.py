"""What must happen before what, for every order and way of overlapping: the schedule's own words taken literally."""

from __future__ import annotations

from typing import Any

import pytest
from glm_kernels.overlapped_moe.backend import Options
from glm_kernels.overlapped_moe.plan import Geometry, Plan, exact_plan, worst_case_plan
from glm_kernels.overlapped_moe.schedule import ORDERS, Kind, Op, gemm_order, schedule
from hypothesis import given
from hypothesis import strategies as st

GEMMS = (Kind.GEMM1, Kind.GEMM2)


def ancestors(ops: tuple[Op, ...]) -> list[set[int]]:
    """For each operation, those that are over when it starts: by `after`, and by the order of a stream."""
    last: dict[str, int] = {}
    before: list[set[int]] = []
    for position, op in enumerate(ops):
        direct = {*op.after, *([last[op.stream]] if op.stream in last else [])}
        assert all(i < position for i in direct)
        before.append(set().union(direct, *(before[i] for i in direct)))
        last[op.stream] = position
    return before


@st.composite
def plans(draw: Any) -> Plan:
    ranks = draw(st.integers(1, 4))
    of = Geometry(ranks, 0, 3, 2, 128, 128, draw(st.integers(1, 600)))
    cut: dict[str, Any] = {
        "shares": tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))),
        "expert_splits": draw(st.integers(1, 2)),
    }
    bound = worst_case_plan(of, **cut)
    if draw(st.booleans()):
        return bound
    some = st.integers(0, 300)
    return exact_plan(of, [[draw(some) for _ in range(3)] for _ in bound.sources], **cut)


options = st.fixed_dictionaries(
    {
        "order": st.sampled_from(ORDERS),
        "overlap": st.booleans(),
        "push": st.booleans(),
        "early_finish": st.booleans(),
    }
)


@given(plans(), options)
def test_everything_is_ready_when_it_is_used(plan: Plan, how: dict[str, Any]) -> None:
    ops = schedule(plan, **how)
    at = {(op.kind, op.index): i for i, op in enumerate(ops)}
    assert len(at) == len(ops)
    before = ancestors(ops)
    filled = [i for i, chunk in enumerate(plan.chunks) if chunk.rows]
    sources = range(len(plan.sources))
    peers = [i for i in sources if plan.sources[i].peer]

    def over(first: tuple[Kind, int], second: tuple[Kind, int]) -> bool:
        return at[first] in before[at[second]]

    for i in filled:
        for source in range(plan.chunks[i].region + 1):
            assert over((Kind.PLACE, source), (Kind.GEMM1, i))
        assert over((Kind.GEMM1, i), (Kind.SWIGLU, i))
        assert over((Kind.SWIGLU, i), (Kind.GEMM2, i))
    for source in sources:
        if (Kind.PLACE, source) in at:
            assert over((Kind.LAYOUT, 0), (Kind.PLACE, source))
            come = (Kind.PULL, plan.sources[source].peer) if source in peers else (Kind.QUANTISE, 0)
            assert over(come, (Kind.PLACE, source))
        leave = (Kind.REDUCE if source in peers else Kind.FINISH, source)
        for i in filled:
            if plan.chunks[i].region >= source:
                assert over((Kind.GEMM2, i), leave)
        assert over((Kind.LAYOUT, 0), leave)
    if peers:
        assert over((Kind.ROUTING, 0), (Kind.ANNOUNCE, 0))
        assert over((Kind.QUANTISE, 0), (Kind.ANNOUNCE, 0))
        for source in peers:
            assert over((Kind.ANNOUNCE, 0), (Kind.PULL, plan.sources[source].peer))
            assert over((Kind.PUSH if how["push"] else Kind.REDUCE, source), (Kind.MEET, 0))
            # Own rows may be written again after MEET, so a peer must not read them any more.
            assert over((Kind.PULL, plan.sources[source].peer), (Kind.MEET, 0))
        for source in plan.own:
            assert over((Kind.MEET, 0), (Kind.FINISH, source))


@given(plans(), options)
def test_nothing_narrow_comes_between_two_gemms(plan: Plan, how: dict[str, Any]) -> None:
    """What runs on few SMs is gated behind whatever the GEMM beside it follows; without overlap there is none."""
    ops = schedule(plan, **how)
    gemm_stream: list[int] = []
    for i, op in enumerate(ops):
        if op.stream == "gemm":
            gemm_stream.append(i)
        if op.stream != "side":
            continue
        assert how["overlap"]
        assert not op.wide
        assert op.gated
        last = max(n for n, j in enumerate(gemm_stream) if ops[j].kind in GEMMS)
        assert gemm_stream[last - 1] in ancestors(ops)[i]


@given(plans(), options)
def test_ranks_meet_in_one_order(plan: Plan, how: dict[str, Any]) -> None:
    """Whatever the rows of a rank are: routing, announcement, meeting."""
    met = [op.kind for op in schedule(plan, **how) if op.kind in (Kind.ROUTING, Kind.ANNOUNCE, Kind.MEET)]
    assert met == [Kind.ROUTING, Kind.ANNOUNCE, Kind.MEET][: 3 if plan.geometry.ranks > 1 else 1]


def test_orders_on_two_ranks() -> None:
    plan = exact_plan(Geometry(2, 0, 1, 1, 128, 128, 512), [[256], [256], [512]])
    first, second = Kind.GEMM1, Kind.GEMM2
    assert gemm_order(plan) == [(first, 0), (first, 2), (first, 1), (second, 2), (second, 1), (second, 0)]
    assert gemm_order(plan, "peers_early") == [
        (first, 0), (first, 2), (second, 0), (second, 2), (first, 1), (second, 1),
    ]  # fmt: skip
    assert gemm_order(plan, "own_first") == [
        (first, 0), (first, 1), (first, 2), (second, 2), (second, 1), (second, 0),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="order is 'best'; allowed are peers_second, peers_early, own_first"):
        gemm_order(plan, "best")


def test_steps_count_the_gemms_and_what_runs_beside_them() -> None:
    """Two ranks: both other sources are placed beside the first GEMM, each activation runs beside the GEMM after it."""
    plan = exact_plan(Geometry(2, 0, 1, 1, 128, 128, 512), [[256], [256], [512]])
    ops = schedule(plan)
    assert [op.step for op in ops if op.kind in GEMMS] == list(range(6))
    beside = {(op.kind, op.index): op.step for op in ops if op.stream == "side"}
    assert beside == {
        (Kind.PLACE, 1): 0,
        (Kind.PLACE, 2): 0,
        (Kind.SWIGLU, 0): 1,
        (Kind.SWIGLU, 2): 2,
        (Kind.SWIGLU, 1): 3,
        (Kind.REDUCE, 2): 4,
    }
    options = Options(side_sms=12, step_sms=(16, 8))
    assert [options.sms(step) for step in range(4)] == [16, 8, 12, 12]


def test_an_activation_that_the_next_gemm_waits_for_has_all_sms() -> None:
    plan = exact_plan(Geometry(2, 0, 1, 1, 128, 128, 512), [[512], [512]], shares=(1,))
    wide = {op.index: (op.stream, op.wide) for op in schedule(plan) if op.kind is Kind.SWIGLU}
    assert wide == {0: ("side", False), 1: ("gemm", True)}
