"""Steps that SGLang pads to their bucket before a runner has them: the arena takes their own rows only."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from glm_sglang.prefill_graph.arena import Arena
from tests.unit.prefill_graph import synced

BUCKETS = (256, 512, 1024)
TOPK = 2048


@pytest.mark.parametrize(("tokens", "prefix"), [(300, 1000), (300, 8700), (512, 0), (2, 0), (257, 1791)])
def test_padded_steps_load(monkeypatch: pytest.MonkeyPatch, tokens: int, prefix: int) -> None:
    from sglang.srt.layers.attention.dsa import utils
    from sglang.srt.layers.attention.dsa.dsa_indexer_metadata import DSAIndexerMetadata
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import TopkTransformMethod

    runner = synced.install(monkeypatch, BUCKETS)
    batch = synced.step(tokens, prefix)
    batch.prepare_mlp_sync_batch(runner)
    bucket = min(size for size in BUCKETS if size >= tokens)
    assert len(batch.input_ids) == batch.extend_num_tokens == bucket, "so SGLang pads it"
    assert batch.extend_seq_lens_cpu == [tokens]

    expanded = torch.arange(prefix + 1, prefix + tokens + 1, dtype=torch.int32)
    monkeypatch.setattr(utils, "get_parallel", lambda: SimpleNamespace(attn_cp_size=1))
    monkeypatch.setattr(utils, "cal_padded_tokens", lambda _: bucket)
    metadata: Any = SimpleNamespace(
        dsa_cache_seqlens_int32=utils.pad_dsa_cache_seqlens(batch, expanded.clamp(max=TOPK)),
        dsa_seqlens_expanded=expanded,
        cu_seqlens_q=torch.tensor([0, tokens]),
        topk_indices_offset=None,
        page_table_1=torch.zeros(1, TOPK, dtype=torch.int32),
        real_page_table=torch.zeros(1, 32, dtype=torch.int32),
        token_to_batch_idx=None,
    )
    kernel = ModuleType("sgl_kernel")
    vars(kernel).update(fast_topk_transform_fused=topk_to_slots, fast_topk_transform_ragged_fused=None)
    monkeypatch.setitem(sys.modules, "sgl_kernel", kernel)

    arena = Arena.create(1024, index_topk=TOPK, index_heads=2, head_dim=4, group_ends=(0,), device="cpu")
    arena.lengths.fill_(77)
    arena.load(batch, metadata, DSAIndexerMetadata(metadata, TopkTransformMethod.PAGED), bucket)
    assert arena.rows == tokens
    assert arena.lengths[:tokens].tolist() == [min(prefix + row, TOPK) for row in range(1, tokens + 1)]
    assert (arena.lengths[tokens:bucket] == 1).all()
    assert (arena.lengths[bucket:] == 77).all()


def topk_to_slots(*, score: torch.Tensor, lengths: torch.Tensor, topk: int, **_: Any) -> torch.Tensor:
    """fast_topk_transform_fused, as far as its host checks go."""
    if lengths.shape[0] != score.shape[0]:
        raise RuntimeError("expected lengths.size(0) == B to be true, but got false")
    return torch.full((score.shape[0], topk), 64, dtype=torch.int32)
