"""One MoE layer in chunks: every row once, in calls that all ranks make, counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from glm_kernels.mega_moe import Arithmetic, mega_moe_reference
from mega_moe_cases import SCALING, checkpoint, tokens

from glm_sglang.moe.counters import Counters
from glm_sglang.moe.kernels import Rows
from glm_sglang.moe.layer import RoutedExperts
from glm_sglang.moe.rows import Attention

EXPERTS, TOP_K = 6, 3


class OneRank:
    """A kernel that holds every expert: the exact reference; keeps what it was called with."""

    name = "one rank"
    buffer_bytes = 0

    def __init__(self) -> None:
        self.weights = checkpoint(7, EXPERTS).dequantized()
        self.calls: list[tuple[int, int]] = []

    def __call__(
        self, experts: Any, rows: Rows, out: torch.Tensor, *, bound: int, scaling: float, clamp: float | None
    ) -> None:
        self.calls.append((rows.x.shape[0], bound))
        assert rows.ids.dtype == torch.int32
        assert rows.weights.dtype == torch.float32
        assert all(t.is_contiguous() for t in (rows.x, rows.ids, rows.weights))
        out.copy_(
            mega_moe_reference(
                rows.x,
                rows.ids,
                rows.weights,
                self.weights,
                arithmetic=Arithmetic.EXACT,
                routed_scaling_factor=scaling,
                activation_clamp=clamp,
            )
        )


def layer(kernel: OneRank, capacity: int, **options: Any) -> RoutedExperts:
    given = {"attention": Attention(), "global_tokens": lambda: None, **options}
    return RoutedExperts(kernel, capacity, **given)


def run(routed: RoutedExperts, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the layer makes of `count` tokens, and what one call over all of them would be."""
    batch = tokens(count + 1, count, EXPERTS, TOP_K)
    x = batch.x.float()  # no rounding of the result that a different grouping of rows could tip
    got = routed(None, x, batch.ids.long(), batch.weights.double(), top_k=TOP_K, scaling=SCALING, clamp=None)
    kernel = routed.kernel
    assert isinstance(kernel, OneRank)
    whole = mega_moe_reference(
        x,
        batch.ids,
        batch.weights,
        kernel.weights,
        arithmetic=Arithmetic.EXACT,
        routed_scaling_factor=SCALING,
    )
    return got, whole


@pytest.mark.parametrize(("count", "calls"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3), (100, 7)])
def test_chunks_change_nothing(count: int, calls: int) -> None:
    kernel = OneRank()
    got, whole = run(layer(kernel, 16), count)
    torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-4)
    assert len(kernel.calls) == calls
    assert sum(rows for rows, _ in kernel.calls) == count
    assert {bound for _, bound in kernel.calls} == {-(-count // calls)}


def test_a_rank_with_fewer_tokens_makes_every_call() -> None:
    """40 tokens elsewhere, 3 here, none here: three calls each."""
    for mine in (3, 0):
        kernel = OneRank()
        routed = layer(kernel, 16, attention=Attention(dp=2), global_tokens=lambda mine=mine: [mine, 40])
        if mine:
            got, whole = run(routed, mine)
            torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-4)
        else:
            empty = torch.empty(0, 512, dtype=torch.bfloat16)
            assert routed(None, empty, None, None, top_k=TOP_K, scaling=1.0, clamp=None).shape == (0, 512)
        assert [bound for _, bound in kernel.calls] == [14, 14, 14]
        assert sum(rows for rows, _ in kernel.calls) == mine


def test_no_tokens_anywhere_is_no_call() -> None:
    kernel = OneRank()
    routed = layer(kernel, 16)
    empty = torch.empty(0, 512, dtype=torch.bfloat16)
    assert routed(None, empty, None, None, top_k=TOP_K, scaling=1.0, clamp=None).shape == (0, 512)
    assert kernel.calls == []
    assert routed.counters.open.calls == 1


def test_rows_without_their_routing_are_refused() -> None:
    routed = layer(OneRank(), 16)
    batch = tokens(1, 4, EXPERTS, TOP_K)
    with pytest.raises(RuntimeError, match="without routing"):
        routed(None, batch.x, None, None, top_k=TOP_K, scaling=1.0, clamp=None)
    with pytest.raises(RuntimeError, match="--disable-shared-experts-fusion"):
        routed(None, batch.x, batch.ids, batch.weights, top_k=TOP_K + 1, scaling=1.0, clamp=None)


def test_counts() -> None:
    counters = Counters()
    counters.layer(rows=128, chunks=4)
    counters.discard()  # a capture
    for _ in range(2):
        counters.layer(rows=128, chunks=4)
    counters.close(path="megamoe", layers=2, tokens=255)
    counters.close(path="megamoe", layers=2, tokens=8)  # replayed: no layer reported
    counters.close(path="stock", layers=2, tokens=5)
    assert counters.report() == {
        "megamoe": {"calls": 2, "tokens": 510, "chunks": 8, "rows": 256},
        "megamoe-graph": {"calls": 2, "tokens": 16, "chunks": 0, "rows": 0},
        "stock": {"calls": 2, "tokens": 10, "chunks": 0, "rows": 0},
    }
