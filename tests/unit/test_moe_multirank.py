"""Two gloo ranks run a MoE layer in chunks: uneven, empty, above the cap; each gets what one rank would compute."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from glm_kernels.mega_moe import Arithmetic, mega_moe_reference
from mega_moe_cases import SCALING, Tokens, checkpoint, shard, tokens
from test_mega_moe_multirank import RANKS, Pair

from glm_sglang.moe.kernels import Reference
from glm_sglang.moe.layer import RoutedExperts
from glm_sglang.moe.rows import Attention

EXPERTS, TOP_K = 6, 3


def on_rank(rank: int, batches: list[Tokens], capacity: int) -> tuple[torch.Tensor, dict[str, int]]:
    """One layer of attention DP on this rank, weights as the reference platform holds them."""
    wide = shard(checkpoint(31, EXPERTS), rank, RANKS).dequantized()
    experts = SimpleNamespace(
        w13_weight=torch.nn.Parameter(wide.w13, requires_grad=False),
        w2_weight=torch.nn.Parameter(wide.w2, requires_grad=False),
    )
    group = dist.group.WORLD
    assert group is not None
    counts = [len(batch.x) for batch in batches]
    routed = RoutedExperts(Reference(group), capacity, Attention(dp=RANKS), lambda: counts)
    mine = batches[rank]
    given = (mine.ids, mine.weights) if len(mine.x) else (None, None)
    out = routed(experts, mine.x.float(), *given, top_k=TOP_K, scaling=SCALING, clamp=None)
    return out, routed.counters.open.as_dict()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    ranks = Pair(tmp_path_factory.mktemp("gloo") / "store")
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    ("counts", "capacity", "calls"),
    [
        ((12, 12), 64, 1),
        ((40, 3), 16, 3),
        ((0, 33), 16, 3),
        ((1, 0), 16, 1),
        ((17, 16), 16, 2),
        ((0, 0), 16, 0),
    ],
)
def test_ranks_agree_and_are_right(pair: Pair, counts: tuple[int, int], capacity: int, calls: int) -> None:
    batches = [tokens(50 + rank, count, EXPERTS, TOP_K) for rank, count in enumerate(counts)]
    weights = checkpoint(31, EXPERTS).dequantized()
    for (out, done), batch in zip(pair.results(on_rank, batches, capacity), batches, strict=True):
        expected = mega_moe_reference(
            batch.x.float(),
            batch.ids,
            batch.weights,
            weights,
            arithmetic=Arithmetic.EXACT,
            routed_scaling_factor=SCALING,
        )
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        assert done["chunks"] == calls
        assert done["rows"] == len(batch.x)
