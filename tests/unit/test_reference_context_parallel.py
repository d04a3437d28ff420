"""Prefill CP on the reference platform: every token on one rank, each with its own position and history."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_sglang.reference_platform.context_parallel import Shard
from glm_sglang.reference_platform.sequences import sequences


@given(
    size=st.integers(1, 5),
    requests=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_shards_hold_every_token_once(size: int, requests: list[tuple[int, int]]) -> None:
    """requests: (cached prefix, new tokens). UPSTREAM: InterleaveCPStrategy gives rank r tokens r, r + size, …"""
    batch = SimpleNamespace(
        seq_lens=torch.tensor([prefix + new for prefix, new in requests]),
        req_pool_indices=torch.arange(len(requests)),
        extend_prefix_lens=torch.tensor([prefix for prefix, _ in requests]),
        forward_mode=SimpleNamespace(is_decode_or_idle=lambda: False),
    )
    table = torch.arange(20 * len(requests)).view(len(requests), 20)
    total = sum(new for _, new in requests)
    # What every row of the whole batch may see: (request, number of its tokens).
    expected = {}
    row = 0
    for request, (prefix, new) in enumerate(requests):
        for i in range(new):
            expected[row] = (request, prefix + i + 1)
            row += 1
    seen = {}
    for rank in range(size):
        shard = Shard(rank, size)
        for seq in sequences(batch, table, total, shard):
            request = int(seq.slots[0]) // 20
            visible = seq.visible().tolist()
            assert len(visible) == seq.rows.stop - seq.rows.start > 0
            assert seq.length == sum(requests[request])
            for local, count in zip(range(seq.rows.start, seq.rows.stop), visible, strict=True):
                assert shard.token(local) not in seen
                seen[shard.token(local)] = (request, count)
    assert seen == expected
