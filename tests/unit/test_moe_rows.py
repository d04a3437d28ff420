"""Rows of a rank: what the buffer is sized for, and the count that all ranks know without asking."""

from __future__ import annotations

import pytest
from glm_kernels.mega_moe.chunks import plan_chunks
from hypothesis import given
from hypothesis import strategies as st

from glm_sglang.moe.rows import Attention, agreed, largest, shard


@pytest.mark.parametrize(
    ("tokens", "attention", "over_cp", "expected"),
    [
        (8192, Attention(), True, 8192),
        (8192, Attention(tp=2), True, 4096),
        (8191, Attention(tp=2), True, 4096),  # padded to attention TP
        (16384, Attention(cp=8), True, 2048),
        (16385, Attention(cp=8), True, 2056),  # 2,049 tokens, aligned to the CP size
        (16384, Attention(cp=8), False, 16384),  # a decode batch is on every CP rank
        (16384, Attention(cp=4, tp=2), True, 2048),
        (0, Attention(cp=8), True, 0),
    ],
)
def test_a_ranks_share(tokens: int, attention: Attention, over_cp: bool, expected: int) -> None:
    assert shard(tokens, attention, over_cp=over_cp) == expected


def test_the_buffer_is_for_the_largest_pass() -> None:
    prefill = {"chunk": 16384, "prefill_tokens": 16384, "attention": Attention(cp=8)}
    assert largest(requests=4096, prefill_only=True, **prefill) == 2048  # type: ignore[arg-type]
    assert largest(requests=4096, prefill_only=False, **prefill) == 4096  # type: ignore[arg-type]
    assert largest(requests=None, prefill_only=False, **prefill) == 2048  # type: ignore[arg-type]
    unchunked = largest(
        chunk=-1, prefill_tokens=32768, requests=1, prefill_only=True, attention=Attention(tp=2)
    )
    assert unchunked == 16384


def test_without_attention_dp_a_rank_knows_by_itself() -> None:
    assert agreed(1024, attention=Attention(tp=2), global_tokens=None) == 1024
    assert agreed(1024, attention=Attention(cp=2), global_tokens=[7]) == 1024  # stale counts are not asked


@given(
    tokens=st.lists(st.integers(0, 5000), min_size=2, max_size=8),
    tp=st.sampled_from([1, 2, 4]),
    capacity=st.integers(1, 3000),
)
def test_every_rank_plans_the_same(tokens: list[int], tp: int, capacity: int) -> None:
    """Attention DP: uneven and empty ranks make as many calls, and no call of a rank exceeds what it was told."""
    padded = [-(-count // tp) * tp for count in tokens]  # UPSTREAM: prepare_mlp_sync_batch
    attention = Attention(dp=len(tokens), tp=tp)
    plans = []
    for count in padded:
        rows = count // tp
        plan = plan_chunks(agreed(rows, attention=attention, global_tokens=padded), capacity)
        shares = [plan.rows(rows, chunk) for chunk in range(plan.count)]
        assert sum(share.stop - share.start for share in shares) == rows
        assert all(share.stop - share.start <= plan.bound <= capacity for share in shares)
        plans.append(plan)
    assert len(set(plans)) == 1


def test_contradictions_stop_the_pass() -> None:
    attention = Attention(dp=2)
    with pytest.raises(RuntimeError, match="no rank has more than 10"):
        agreed(11, attention=attention, global_tokens=[10, 3])
    for counts in (None, [], [11]):  # [11]: what a rank has where SGLang shares no counts
        with pytest.raises(RuntimeError, match="token counts"):
            agreed(11, attention=attention, global_tokens=counts)
