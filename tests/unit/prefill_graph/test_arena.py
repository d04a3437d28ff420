"""The arena on a CPU: what a step leaves in it, and that padding rows never read anything but a slot of the pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm_sglang.prefill_graph.arena import PADDED_LENGTH, Arena

TOPK = 8


def arena(rows: int = 16) -> Arena:
    return Arena.create(rows, index_topk=TOPK, index_heads=2, head_dim=4, group_ends=(0,), device="cpu")


class Selection:
    """In place of SGLang's indexer metadata: row r's selection is r + 1 slots, then −1."""

    def __init__(self) -> None:
        self.calls = 0

    def topk_transform(self, scores: torch.Tensor, topk: int) -> torch.Tensor:
        self.calls += 1
        columns = torch.arange(topk)
        lengths = torch.arange(1, len(scores) + 1)[:, None]
        return torch.where(columns < lengths, columns + 64, -1).int()


def step(tokens: int, prefix: int = 0, padded_to: int = 0) -> tuple[Any, Any]:
    """A batch of one request and its metadata; `padded_to`: as SGLang pads a step that it syncs over ranks."""
    total = prefix + tokens
    lengths = torch.arange(prefix + 1, total + 1).clamp(max=TOPK).int()
    padding = torch.zeros(max(padded_to - tokens, 0), dtype=torch.int32)
    batch = SimpleNamespace(
        extend_num_tokens=padded_to or tokens,
        extend_seq_lens_cpu=[tokens],
        seq_lens_cpu=torch.tensor([total]),
    )
    return batch, SimpleNamespace(dsa_cache_seqlens_int32=torch.cat((lengths, padding)))


def test_addresses_never_change() -> None:
    held = arena()
    before = [t.data_ptr() for t in (held.topk, held.query, held.gate, held.lengths)]
    for tokens, bucket in ((16, 16), (3, 8), (1, 16), (7, 8)):
        held.load(*step(tokens), Selection(), bucket)
    assert [t.data_ptr() for t in (held.topk, held.query, held.gate, held.lengths)] == before


def test_a_short_context_is_selected_once_for_all_layers() -> None:
    held, selection = arena(), Selection()
    held.load(*step(5), selection, 8)
    assert held.dense
    assert selection.calls == 1
    assert held.rows == 5
    assert held.lengths[:5].tolist() == [1, 2, 3, 4, 5]
    assert held.topk[2].tolist() == [64, 65, 66, -1, -1, -1, -1, -1]


@pytest.mark.parametrize(
    ("tokens", "prefix", "dense"), [(8, 0, True), (9, 0, False), (1, 7, True), (1, 8, False)]
)
def test_a_context_beyond_the_top_k_is_left_to_the_breaks(tokens: int, prefix: int, dense: bool) -> None:
    held, selection = arena(), Selection()
    held.load(*step(tokens, prefix), selection, 16)
    assert held.dense is dense
    assert selection.calls == int(dense)


def test_padding_rows_count_one_index_and_it_is_a_slot() -> None:
    held = arena()
    for tokens, bucket in ((16, 16), (2, 16), (9, 16), (1, 8)):
        held.load(*step(tokens), Selection(), bucket)
        assert (held.lengths[tokens:bucket] == PADDED_LENGTH).all()
        assert (held.topk[:, 0] >= 0).all(), (
            "every row's first index is a slot of the pool, from the start on"
        )


@pytest.mark.parametrize("prefix", [0, 20])
def test_a_step_that_sglang_padded_to_its_bucket_has_its_own_rows(prefix: int) -> None:
    held, selection = arena(), Selection()
    held.lengths.fill_(7)
    held.load(*step(5, prefix, padded_to=16), selection, 16)
    assert held.rows == 5
    assert held.lengths.tolist() == [min(prefix + row, TOPK) for row in range(1, 6)] + [1] * 11


def test_memory_is_what_the_buffers_hold() -> None:
    # 16 rows: 8 indices of 4 bytes, 2 heads of 4 E4M3 values, 2 gates and a length of 4 bytes each.
    # And the boundaries of eight requests.
    assert arena().bytes == 16 * (8 * 4 + 2 * 4 + 2 * 4 + 4) + 9 * 4
