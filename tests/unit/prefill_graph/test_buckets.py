"""The bucket planner's laws: it covers, it is monotone, it bounds padding and memory; and the flag's parser."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_sglang.errors import UsageError
from glm_sglang.prefill_graph import buckets
from glm_sglang.prefill_graph.buckets import Memory, plan

CP = st.sampled_from([1, 2, 4, 8])
LARGEST = st.integers(1, 40_000)


@given(largest=LARGEST, cp=CP, data=st.data())
def test_every_step_up_to_the_chunk_has_a_bucket(largest: int, cp: int, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, largest))
    bucket = plan(largest, cp_size=cp).bucket(tokens)
    assert bucket is not None
    assert bucket >= tokens


@given(largest=LARGEST, cp=CP)
def test_buckets_ascend_and_are_whole_tiles_on_every_rank(largest: int, cp: int) -> None:
    found = plan(largest, cp_size=cp).buckets
    assert list(found) == sorted(set(found))
    for bucket in found:
        rows, rest = divmod(bucket, cp)
        assert rest == 0
        assert buckets.local_rows(bucket, cp) == rows, "SGLang pads no rank's rows further"
        assert rows % 64 == 0 or rows in (8, 16, 32)


@pytest.mark.parametrize(("cp", "least"), [(1, 4), (2, 8), (8, 32)])
def test_a_few_new_tokens_replay_too(cp: int, least: int) -> None:
    # SGLang's PrefillCudaGraphRunner refuses a bucket of more than twice the tokens.
    planned = plan(16384, cp_size=cp)
    for tokens in range(least, 2000):
        bucket = planned.bucket(tokens)
        assert bucket is not None
        assert bucket <= 2 * tokens


@pytest.mark.parametrize(("chunk", "cp"), [(8192, 1), (16384, 1), (32768, 1), (16384, 2), (32768, 4)])
def test_padding_stays_under_an_eighth_above_1k_and_a_half_below(chunk: int, cp: int) -> None:
    planned = plan(chunk, cp_size=cp)
    step = buckets.unit(cp)
    for tokens in range(1, chunk + 1):
        bucket = planned.bucket(tokens)
        assert bucket is not None
        if tokens > max(1024, 8 * step):
            assert bucket - tokens <= tokens / 8
        elif tokens > 2 * step:
            assert bucket - tokens <= tokens / 2


@pytest.mark.parametrize(("chunk", "cp"), [(16384, 8), (32768, 8)])
def test_under_wide_cp_no_step_pads_more_than_the_tile_forces(chunk: int, cp: int) -> None:
    planned = plan(chunk, cp_size=cp)
    step = buckets.unit(cp)
    for tokens in range(step, chunk + 1):
        bucket = planned.bucket(tokens)
        assert bucket is not None
        assert bucket - tokens <= max(step, tokens / 8)


@pytest.mark.parametrize("chunk", [2048, 8192, 16384, 32768])
def test_the_chunk_itself_is_a_bucket(chunk: int) -> None:
    assert plan(chunk).covers == chunk
    assert plan(chunk, cp_size=8).covers == chunk


def test_capture_time_is_bounded_by_few_buckets() -> None:
    # Geometric: ln(16) / ln(9/8) = 23.5 buckets from 1k to 16k, ln(16) / ln(3/2) = 6.8 below.
    assert len(plan(16384).buckets) <= 36
    assert len(plan(32768).buckets) <= 42


@given(small=LARGEST, more=st.integers(0, 20_000), cp=CP)
def test_a_larger_chunk_never_covers_less(small: int, more: int, cp: int) -> None:
    assert plan(small + more, cp_size=cp).covers >= plan(small, cp_size=cp).covers


@given(
    largest=LARGEST,
    cp=CP,
    limit=st.integers(1, 10**9),
    more=st.integers(0, 10**9),
    peak=st.integers(0, 50_000),
    kept=st.integers(0, 5_000),
    each=st.integers(0, 10**7),
)
def test_memory_is_bounded_and_more_of_it_never_covers_less(
    largest: int, cp: int, limit: int, more: int, peak: int, kept: int, each: int
) -> None:
    def at(bound: int) -> buckets.Plan:
        return plan(largest, cp_size=cp, memory=Memory(peak, kept, each, bound))

    planned = at(limit)
    rows = [bucket // cp for bucket in planned.buckets]
    held = peak * max(rows, default=0) + kept * sum(rows) + each * len(rows)
    assert planned.bytes_held == held
    assert held <= limit
    assert at(limit + more).covers >= planned.covers
    assert planned.wanted == plan(largest, cp_size=cp).covers


@given(largest=LARGEST, dense=st.integers(1, 4096), data=st.data())
def test_a_step_that_may_be_dense_replays_a_bucket_that_may_be_dense(
    largest: int, dense: int, data: st.DataObject
) -> None:
    planned = plan(largest, dense=dense)
    tiles = dense // 64 * 64
    tokens = data.draw(st.integers(1, max(1, min(largest, tiles))))
    bucket = planned.bucket(tokens)
    assert bucket is not None
    assert bucket <= dense or tiles < tokens or largest < tiles


def test_prompts_just_below_the_indexers_top_k_are_dense_at_the_default_chunk() -> None:
    assert plan(8192).bucket(2000) == 2112
    assert plan(8192, dense=2048).bucket(2000) == 2048
    assert len(plan(8192, dense=2048).buckets) <= len(plan(8192).buckets) + 1


def test_without_memory_nothing_is_captured() -> None:
    planned = plan(16384, memory=Memory(row_peak=10, limit=5))
    assert planned.buckets == ()
    assert planned.covers == 0
    assert planned.bucket(1) is None


def test_the_flag_takes_counts_in_any_order() -> None:
    assert buckets.parse("2048, 512,2048") == (512, 2048)
    assert buckets.parse("auto") is None


@pytest.mark.parametrize("text", ["2k", "512,,1024", "0", "-5", "512;1024"])
def test_the_flag_refuses_what_is_no_count(text: str) -> None:
    with pytest.raises(UsageError, match="--glm-prefill-graph-buckets"):
        buckets.parse(text)


@pytest.mark.parametrize(
    ("chunked", "most", "limits", "expected"),
    [
        (16384, 16384, (None,), 16384),
        (-1, 32768, (None,), 32768),
        (16384, 16384, (4096, None), 4096),
        (None, None, (), 8192),
    ],
)
def test_the_largest_step_is_the_schedulers(
    chunked: int | None, most: int | None, limits: tuple[int | None, ...], expected: int
) -> None:
    assert buckets.chunk(chunked, most, limits) == expected
