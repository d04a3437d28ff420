"""Padded steps under interleaved CP with MegaMoE: a replay leaves in the pool, and gives the logits, what eager does.

Two processes over gloo, each a rank with SGLang's own runners (cp_rank.py says what is SGLang's and what is not). The
graphs' memory is one pool (recorded_graph.py): layers and buckets use each other's blocks, and before each step
whatever no tensor owns there is not a number, or a huge index.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from glm_sglang.prefill_graph import buckets
from tests.unit.prefill_graph import recorded_graph
from tests.unit.prefill_graph.cp_kernels import PAGE
from tests.unit.prefill_graph.cp_rank import (
    HIDDEN,
    LATENT,
    LAYERS,
    RANKS,
    ROPE,
    TABLE,
    Layer,
    Rank,
    Seen,
    Step,
)
from tests.unit.prefill_graph.ranks import both, near

PLAN = buckets.plan(128, cp_size=RANKS)
STEPS = {
    "a full bucket": Step(((0, 64),)),
    "one token less": Step(((0, 63),)),
    "an odd number": Step(((0, 35),)),
    "few tokens": Step(((0, 9),)),
    "several requests": Step(((0, 9), (0, 1), (0, 13))),
    "a cached prefix": Step(((70, 21),)),
    "a chunk amid a prompt": Step(((64, 101),)),
    "prefixes and none": Step(((40, 17), (0, 20), (5, 1))),
}
Passes = dict[str, tuple[Seen, Seen]]  # eager, replayed


@pytest.fixture(scope="module", params=["flashmla_sparse", "flashmla_kv"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Passes]:
    """Both ranks' passes, by the attention that SGLang takes on an H200 for BF16 and for FP8 KV."""
    answers = both(tmp_path_factory.mktemp("gloo") / "store", Rank, PLAN.buckets, request.param, STEPS)
    for answer in answers:
        assert isinstance(answer, dict), answer[1]
    return answers


def rows_of(rank: int, step: Step) -> int:
    """Rank r has the step's tokens r, r + 2, …"""
    return len(range(rank, step.tokens, RANKS))


def slots_of(step: Step) -> list[int]:
    return [
        PAGE + request * TABLE + position
        for request, (prefix, new) in enumerate(step.prompts)
        for position in range(prefix, prefix + new)
    ]


@pytest.mark.parametrize("name", STEPS)
def test_the_step_is_padded_to_its_bucket_and_replayed(ranks: list[Passes], name: str) -> None:
    for passes in ranks:
        eager, graph = passes[name]
        assert (eager.graph, graph.graph) == (False, True)
        assert eager.padded_to == graph.padded_to == PLAN.bucket(STEPS[name].tokens)


@pytest.mark.parametrize("name", STEPS)
def test_the_pool_gets_the_steps_tokens_and_no_padding(ranks: list[Passes], name: str) -> None:
    step = STEPS[name]
    untouched = torch.ones(len(ranks[0][name][0].pool.keys[0]), dtype=torch.bool)
    untouched[slots_of(step)] = False
    for passes in ranks:
        eager, graph = passes[name]
        near(graph.pool.kv, eager.pool.kv)
        assert torch.equal(graph.pool.keys, eager.pool.keys)
        near(graph.pool.kv, ranks[0][name][0].pool.kv)
        before = graph.before
        assert torch.equal(graph.pool.kv[:, untouched], before.kv[:, untouched])
        assert torch.equal(graph.pool.keys[:, untouched], before.keys[:, untouched])
        assert (graph.pool.kv != before.kv)[:, ~untouched].flatten(2).any(-1).all()
        selecting = [layer for layer, selects in enumerate(LAYERS) if selects]
        assert (graph.pool.keys != before.keys)[selecting][:, ~untouched].any(-1).all()


@pytest.mark.parametrize("name", STEPS)
def test_attention_sees_the_ranks_tokens_and_their_selection(ranks: list[Passes], name: str) -> None:
    for rank, passes in enumerate(ranks):
        rows = rows_of(rank, STEPS[name])
        eager, graph = passes[name]
        assert len(graph.attention) == len(eager.attention) == len(LAYERS)
        for found, expected in zip(graph.attention, eager.attention, strict=True):
            assert [None if given is None else len(given) for given in found] == [rows] * 3
            near(found[0], expected[0][:rows])
            for given, eagerly in zip(found[1:], expected[1:], strict=True):
                assert given is not None
                assert eagerly is not None
                assert torch.equal(given, eagerly[:rows])


@pytest.mark.parametrize("name", STEPS)
def test_the_logits_get_every_token_once_in_order(ranks: list[Passes], name: str) -> None:
    for passes in ranks:
        eager, graph = passes[name]
        assert len(graph.hidden) == STEPS[name].tokens
        assert torch.isfinite(graph.hidden).all()
        near(graph.hidden, eager.hidden)
        near(graph.hidden, ranks[0][name][0].hidden)
        assert len(graph.logits) == len(STEPS[name].prompts)
        near(graph.logits, eager.logits)


@pytest.mark.parametrize("name", STEPS)
def test_padding_goes_to_no_expert_and_ranks_make_the_same_calls(ranks: list[Passes], name: str) -> None:
    assert ranks[0][name][1].bounds == ranks[1][name][1].bounds
    for rank, passes in enumerate(ranks):
        rows = rows_of(rank, STEPS[name])
        eager, graph = (by_layer(seen) for seen in passes[name])
        for (ids, weights), (eager_ids, eager_weights) in zip(graph, eager, strict=True):
            assert len(ids) == buckets.local_rows(passes[name][1].padded_to, RANKS)
            assert (ids[rows:] == -1).all()
            assert (eager_ids[rows:] == -1).all()
            assert (ids[:rows] >= 0).all()
            assert torch.equal(ids[:rows], eager_ids[:rows])
            near(weights[:rows], eager_weights[:rows])


def by_layer(seen: Seen) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and weights of a layer's rows, its calls put together."""
    calls, remainder = divmod(len(seen.experts), len(LAYERS))
    assert not remainder
    parts = [seen.experts[layer * calls : (layer + 1) * calls] for layer in range(len(LAYERS))]
    return [(torch.cat([ids for ids, _ in part]), torch.cat([w for _, w in part])) for part in parts]


def test_too_few_tokens_for_both_ranks_run_eagerly(tmp_path: Path) -> None:
    assert (
        both(tmp_path / "store", Rank, PLAN.buckets, "flashmla_sparse", {"one": Step(((30, 1),))})
        == [{"one": False}] * RANKS
    )


def test_breaks_own_none_of_the_graphs_memory(ranks: list[Passes]) -> None:
    assert [seen.kept for passes in ranks for both in passes.values() for seen in both] == [0] * (
        len(ranks) * len(STEPS) * 2
    )


def test_a_shared_layers_gather_is_a_break_that_sglang_has_not(ranks: list[Passes]) -> None:
    found = {graph.breaks for passes in ranks for _, graph in passes.values()}
    ours = len(LAYERS) + sum(LAYERS) + LAYERS.count(False)
    assert found == {(ours, ours - LAYERS.count(False))}


def test_a_break_that_is_not_known_owns_what_it_is_given_in_every_layer_and_bucket(tmp_path: Path) -> None:
    """Then results are the same; what it costs is at least attention's queries and output."""
    steps = {"a cached prefix": STEPS["a cached prefix"]}
    answers = both(
        tmp_path / "store",
        Rank,
        PLAN.buckets,
        "flashmla_sparse",
        steps,
        without=["context_parallel:indexer_with_kv"],
    )
    for passes in answers:
        assert isinstance(passes, dict), passes[1]
        eager, graph = passes["a cached prefix"]
        near(graph.logits, eager.logits)
        rows = sum(buckets.local_rows(bucket, RANKS) for bucket in PLAN.buckets)
        assert graph.kept >= sum(LAYERS) * rows * (HIDDEN + LATENT + ROPE) * 8


def test_a_selection_that_nobody_holds_until_its_last_reader_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So this device gives blocks away as a GPU's allocator does, and finds what breaks must not do."""
    run = Layer.__call__

    def forgetful(self: Layer, positions: Any, x: Any, batch: Any, topk: Any) -> Any:
        x, topk = run(self, positions, x, batch, topk)
        return x, recorded_graph.POOL.weak(topk)

    monkeypatch.setattr(Layer, "__call__", forgetful)  # the ranks are forks
    for error, trace in both(
        tmp_path / "store", Rank, PLAN.buckets, "flashmla_sparse", {"few tokens": STEPS["few tokens"]}
    ):
        assert "out of bounds" in error, trace


@pytest.mark.parametrize(
    ("impl", "left_out", "refusal"),
    [
        # What a server on two H200 said: more slots than keys. So this device sees what a GPU sees.
        ("flashmla_sparse", "context_parallel:prepare", "num_tokens: expected 21 but got 32"),
        ("flashmla_kv", "rows:cached_lengths", "cache_seqlens: expected {rows} but got 16"),
    ],
)
def test_without_the_cuts_kernels_refuse(tmp_path: Path, impl: str, left_out: str, refusal: str) -> None:
    steps = {"a cached prefix": STEPS["a cached prefix"]}
    for rank, (error, trace) in enumerate(
        both(tmp_path / "store", Rank, PLAN.buckets, impl, steps, without=[left_out])
    ):
        rows = rows_of(rank, steps["a cached prefix"])
        assert error == f"Size mismatch for {refusal.format(rows=rows)}", trace
