"""Padded steps under tensor parallelism with MegaMoE, without context parallelism: a replay leaves what eager does.

Two processes over gloo, each a rank with SGLang's own runners and its padding of synced steps (tp_rank.py). With
flashmla_sparse attention is captured on the arena; with flashmla_kv it is at SGLang's breaks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from glm_sglang.prefill_graph import buckets
from tests.unit.prefill_graph.cp_kernels import PAGE
from tests.unit.prefill_graph.cp_rank import HIDDEN, LAYERS, RANKS, VOCABULARY, Step, normal
from tests.unit.prefill_graph.ranks import both, near
from tests.unit.prefill_graph.tp_rank import TensorParallelRank

PLAN = buckets.plan(128)
STEPS = {
    "a full bucket": Step(((0, 64),)),
    "one token less": Step(((0, 63),)),
    "an odd number": Step(((0, 35),)),
    "a context that is selected whole": Step(((0, 4),)),
    "several requests": Step(((0, 9), (0, 1), (0, 13))),
    "a cached prefix": Step(((70, 21),)),
    "a chunk amid a prompt": Step(((64, 101),)),
    "prefixes and none": Step(((40, 17), (0, 20), (5, 1))),
}


@pytest.fixture(scope="module", params=["flashmla_sparse", "flashmla_kv"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = tmp_path_factory.mktemp("gloo") / "store"
    answers = both(store, TensorParallelRank, PLAN.buckets, request.param, STEPS)
    for answer in answers:
        assert isinstance(answer, dict), answer[1]
    return answers


@pytest.mark.parametrize("name", STEPS)
def test_the_replay_of_the_steps_bucket_is_the_eager_pass(ranks: Any, name: str) -> None:
    step = STEPS[name]
    assert sorted(ranks[0]) == sorted(STEPS)
    written = [
        PAGE + request * ranks[0][name][0].table + position
        for request, (prefix, new) in enumerate(step.prompts)
        for position in range(prefix, prefix + new)
    ]
    for passes in ranks:
        eager, graph = passes[name]
        assert (eager.graph, graph.graph) == (False, True)
        assert graph.padded_to == PLAN.bucket(step.tokens)
        assert torch.isfinite(graph.hidden).all()
        near(graph.logits, eager.logits)
        near(graph.hidden[: step.tokens], eager.hidden[: step.tokens])
        near(graph.logits, ranks[0][name][1].logits)
        pages = slice(PAGE, None)  # page 0 takes the padding's writes
        near(graph.pool.kv[:, pages], eager.pool.kv[:, pages])
        assert torch.equal(graph.pool.keys[:, pages], eager.pool.keys[:, pages])
        assert (graph.pool.kv != graph.before.kv)[:, written].flatten(2).any(-1).all()


@pytest.mark.parametrize("name", STEPS)
def test_padding_goes_to_no_expert_and_ranks_make_the_same_calls(ranks: Any, name: str) -> None:
    assert ranks[0][name][1].bounds == ranks[1][name][1].bounds
    share = ranks[0][name][1].padded_to // RANKS
    for rank, passes in enumerate(ranks):
        calls = passes[name][1].experts
        mine = min(max(STEPS[name].tokens - rank * share, 0), share)
        parts = [
            calls[i : i + len(calls) // len(LAYERS)] for i in range(0, len(calls), len(calls) // len(LAYERS))
        ]
        for part in parts:
            ids = torch.cat([ids for ids, _ in part])
            assert len(ids) == share
            assert (ids[mine:] == -1).all()
            assert (ids[:mine] >= 0).all()


@pytest.mark.parametrize("name", STEPS)
def test_at_the_break_attention_leaves_zeros_behind_the_steps_rows(ranks: Any, name: str) -> None:
    """As eagerly: a padding's row is its token's embedding still, for it goes to no expert. On the arena it attends."""
    for passes in ranks:
        eager, graph = passes[name]
        if graph.impl == "flashmla_kv":
            near(graph.hidden, eager.hidden)
            embedded = normal(2, VOCABULARY, HIDDEN)[0]
            rows = graph.hidden[STEPS[name].tokens :]
            near(rows, (embedded / embedded.abs().max()).expand_as(rows))


def test_breaks_own_none_of_the_graphs_memory(ranks: Any) -> None:
    """On the arena, and SGLang's own: the indexer, and attention at its break."""
    kept = [seen.kept for passes in ranks for both in passes.values() for seen in both]
    assert kept == [0] * (len(ranks) * len(STEPS) * 2)


def test_sglangs_breaks_are_as_many_as_where_it_keeps_them(ranks: Any) -> None:
    """With flashmla_kv they are SGLang's own, in these layers; on the arena, what is counted in their place."""
    test_own = 2 * len(LAYERS)  # between the ranks
    sglang = test_own + len(LAYERS) + sum(LAYERS)
    for passes in ranks:
        for _, graph in passes.values():
            captured = test_own + sum(LAYERS) if graph.impl == "flashmla_sparse" else sglang
            assert graph.breaks == (captured, sglang)


def test_without_the_cut_attention_at_the_break_has_the_paddings_lengths(tmp_path: Path) -> None:
    steps = {"a cached prefix": STEPS["a cached prefix"]}
    answers = both(
        tmp_path / "store",
        TensorParallelRank,
        PLAN.buckets,
        "flashmla_kv",
        steps,
        without=["rows:cached_lengths"],
    )
    for error, trace in answers:
        assert error == "Size mismatch for cache_seqlens: expected 21 but got 32", trace
