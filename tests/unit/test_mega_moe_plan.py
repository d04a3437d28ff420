"""Chunk counts that ranks agree on, and buffer sizes and limits against the pinned library itself."""

from __future__ import annotations

import deep_gemm
import pytest
from glm_kernels.mega_moe import buffer_capacity, plan_chunks, plan_for_ranks
from glm_kernels.mega_moe.buffer import SM90_TOKEN_ALIGNMENT, sm90_buffer_bytes
from glm_kernels.mega_moe.limits import Arch, check_shape
from hypothesis import assume, given, settings
from hypothesis import strategies as st

_COUNTS = st.lists(st.integers(0, 40_000), min_size=1, max_size=8)


@settings(deadline=None)
@given(tokens=_COUNTS, capacity=st.integers(16, 9_000))
def test_every_rank_makes_the_same_calls_and_each_row_is_in_one(tokens: list[int], capacity: int) -> None:
    plan = plan_for_ranks(tokens, capacity)
    assert plan == plan_chunks(max(tokens), capacity)  # from the maximum alone: nothing else need be known
    assert plan.bound <= capacity
    for count in tokens:
        shares = [plan.rows(count, chunk) for chunk in range(plan.count)]
        edges = [0, *(share.stop for share in shares)]
        assert edges[-1] == (count if plan.count else 0)
        assert [share.start for share in shares] == edges[:-1]
        sizes = [share.stop - share.start for share in shares]
        assert max(sizes, default=0) <= plan.bound
        assert max(sizes, default=0) - min(sizes, default=0) <= 1


@given(tokens=_COUNTS, capacity=st.integers(1, 9_000))
def test_one_call_fewer_would_not_fit(tokens: list[int], capacity: int) -> None:
    plan = plan_for_ranks(tokens, capacity)
    assert (plan.count - 1) * capacity < max(tokens) or plan.count == 0
    assert (plan.count == 0) == (max(tokens) == 0)


@pytest.mark.parametrize(
    ("tokens", "capacity", "count", "bound"),
    [
        ([0, 0], 8192, 0, 0),
        ([0, 1], 8192, 1, 1),
        ([8192, 8192], 8192, 1, 8192),
        ([8193, 0], 8192, 2, 4097),
        ([16384, 100, 0, 5], 8192, 2, 8192),
        ([1920], 64, 30, 64),
    ],
)
def test_counts_that_can_be_done_by_hand(tokens: list[int], capacity: int, count: int, bound: int) -> None:
    plan = plan_for_ranks(tokens, capacity)
    assert (plan.count, plan.bound) == (count, bound)


def test_a_plan_is_not_for_a_larger_batch() -> None:
    plan = plan_chunks(100, 64)
    with pytest.raises(ValueError, match="another batch"):
        plan.rows(200, 0)
    with pytest.raises(IndexError):
        plan.rows(100, 2)
    with pytest.raises(ValueError, match="not negative"):
        plan_chunks(-1, 64)
    with pytest.raises(ValueError, match="at least 1"):
        plan_chunks(1, 0)


@given(tokens=st.integers(1, 200_000), cap=st.integers(128, 40_000))
def test_capacity_is_aligned_within_the_cap_and_no_larger_than_the_plan_needs(tokens: int, cap: int) -> None:
    capacity = buffer_capacity(tokens, cap, 128)
    plan = plan_chunks(tokens, capacity)
    assert capacity % 128 == 0
    assert capacity <= cap
    assert capacity - plan.bound < 128
    assert plan.count == plan_chunks(tokens, cap // 128 * 128).count


def test_capacity_refuses_a_cap_below_the_alignment() -> None:
    with pytest.raises(ValueError, match="token cap is 100; it must be at least the kernel's alignment, 128"):
        buffer_capacity(1000, 100, 128)
    with pytest.raises(ValueError, match="at least 1"):
        buffer_capacity(0, 1000, 128)


# --- bytes ---


def library_bytes(ranks: int, experts: int, capacity: int, top_k: int, hidden: int, intermediate: int) -> int:
    return int(
        deep_gemm._C.get_symm_buffer_size_for_sm90_mega_moe(
            ranks, experts, capacity, top_k, hidden, intermediate, True, "swiglu"
        )
    )


def our_bytes(ranks: int, experts: int, capacity: int, top_k: int, hidden: int, intermediate: int) -> int:
    return sm90_buffer_bytes(
        ranks=ranks, experts=experts, capacity=capacity, top_k=top_k, hidden=hidden, intermediate=intermediate
    )


def test_alignment_is_the_librarys() -> None:
    assert deep_gemm._C.get_token_alignment_for_sm90_mega_moe() == SM90_TOKEN_ALIGNMENT


@settings(max_examples=400, deadline=None)
@given(
    ranks=st.sampled_from([1, 2, 4, 8, 16, 32]),
    local=st.integers(1, 256),
    units=st.integers(1, 256),
    top_k=st.integers(1, 16),
    hidden=st.integers(1, 16).map(lambda n: 512 * n),
    intermediate=st.integers(1, 16).map(lambda n: 256 * n),
)
def test_bytes_are_the_librarys(
    ranks: int, local: int, units: int, top_k: int, hidden: int, intermediate: int
) -> None:
    assume(top_k <= local * ranks)
    shape = (ranks, local * ranks, 128 * units, top_k, hidden, intermediate)
    # the library counts in 32-bit words for shapes no GPU could hold
    assume(ranks * local * ranks * 128 * units * 4 < 2**31)
    assert our_bytes(*shape) == library_bytes(*shape)


@pytest.mark.parametrize("capacity", [128, 896, 1024, 1920, 2048, 4096, 4224, 8192, 12288, 16384, 32768])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_bytes_are_the_librarys_at_glms_shape(ranks: int, capacity: int) -> None:
    for experts in (256, 32 * ranks):
        shape = (ranks, experts, capacity, 8, 6144, 2048)
        assert our_bytes(*shape) == library_bytes(*shape)


@pytest.mark.parametrize(("capacity", "gib"), [(1024, 0.25), (4096, 0.56), (8192, 1.08), (16384, 2.13)])
def test_bytes_are_those_measured_on_two_h200(capacity: int, gib: float) -> None:
    assert our_bytes(2, 64, capacity, 8, 6144, 2048) / 2**30 == pytest.approx(gib, abs=0.005)


def test_bytes_refuse_what_cannot_be_allocated() -> None:
    with pytest.raises(ValueError, match="capacity is 100 tokens a rank"):
        our_bytes(2, 64, 100, 8, 6144, 2048)
    with pytest.raises(ValueError, match="63 experts do not divide"):
        our_bytes(2, 63, 128, 8, 6144, 2048)


# --- limits ---


@settings(max_examples=200, deadline=None)
@given(
    hidden=st.integers(1, 32).map(lambda n: 256 * n),
    intermediate=st.integers(1, 40).map(lambda n: 128 * n),
    experts=st.integers(1, 80),
    ranks=st.integers(1, 40),
    top_k=st.integers(1, 8),
)
def test_sm90_shapes_are_refused_where_the_library_refuses(
    hidden: int, intermediate: int, experts: int, ranks: int, top_k: int
) -> None:
    assume(top_k <= experts)
    try:
        library_bytes(ranks, experts, 128, top_k, hidden, intermediate)
        accepted = True
    except RuntimeError:
        accepted = False
    if accepted:
        check_shape(
            Arch.SM90, hidden=hidden, intermediate=intermediate, experts=experts, ranks=ranks, top_k=top_k
        )
    else:
        with pytest.raises(ValueError, match="is"):
            check_shape(
                Arch.SM90, hidden=hidden, intermediate=intermediate, experts=experts, ranks=ranks, top_k=top_k
            )


def test_refusals_name_the_flag_and_both_values() -> None:
    glm = {"hidden": 6144, "intermediate": 2048, "experts": 256, "ranks": 8, "top_k": 8}
    for arch in Arch:
        check_shape(arch, **glm)
    with pytest.raises(ValueError, match="hidden_size is 6400; MegaMoE on SM90 takes multiples of 512 up to"):
        check_shape(Arch.SM90, **{**glm, "hidden": 6400})
    with pytest.raises(ValueError, match="moe_intermediate_size is 128; MegaMoE on SM90 takes"):
        check_shape(Arch.SM90, **{**glm, "intermediate": 128})
    check_shape(Arch.SM100, **{**glm, "intermediate": 128})
    with pytest.raises(ValueError, match="n_routed_experts is 256; it must be a multiple of --ep-size, 3"):
        check_shape(Arch.SM90, **{**glm, "ranks": 3})
    with pytest.raises(ValueError, match="--ep-size is 64; MegaMoE on SM90 takes 1 to 32"):
        check_shape(Arch.SM90, **{**glm, "ranks": 64})
    with pytest.raises(ValueError, match="num_experts_per_tok is 40"):
        check_shape(Arch.SM90, **{**glm, "top_k": 40})
