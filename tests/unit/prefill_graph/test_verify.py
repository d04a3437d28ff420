"""--glm-verify-graphs: every graph beside the eager model, also where ranks sync their counts; and never of nothing."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm_sglang.prefill_graph import counts, dense, options, verify, verify_steps, whole
from glm_sglang.prefill_graph.arena import Arena
from glm_sglang.prefill_graph.options import Options
from glm_sglang.prefill_graph.verify_steps import Step
from tests.unit.prefill_graph import synced

PAGE = 64
VOCABULARY = 100


class Backend:
    """An attention backend, which may have an arena."""


@dataclasses.dataclass(frozen=True)
class ShapeKey:
    """SGLang's."""

    size: int
    variant_label: str | None = None


class Verified:
    """A model runner that has captured these buckets; the steps it has run. `sync`: SGLang's padding of synced steps."""

    is_draft_worker, page_size = False, PAGE

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        buckets: list[int],
        arena: Any = None,
        sync: Any = None,
        context: int = 8192,
        pool: int = 8192,
        topk: int = 0,
    ) -> None:
        self.arena, self.attn_backend, self.eager_runner, self.sync = arena, Backend(), object(), sync
        self.replayed: list[tuple[int, int, str | None]] = []
        self.batches: list[tuple[bool, Any]] = []
        self.req_to_token_pool = SimpleNamespace(req_to_token=torch.zeros(4, context, dtype=torch.int32))
        self.tables: list[torch.Tensor] = []
        self.token_to_kv_pool = SimpleNamespace(size=pool)
        self.model_config = SimpleNamespace(
            vocab_size=VOCABULARY, context_len=context, hf_config=SimpleNamespace(index_topk=topk)
        )
        self.prefill_cuda_graph_runner = self.graphs = SimpleNamespace(
            capture_num_tokens=buckets,
            max_num_tokens=max(buckets),
            device="cpu",
            model_runner=self,
            capture_prepare=self.prepare,
        )
        if arena is not None:
            monkeypatch.setitem(whole._arenas, self.attn_backend, arena)
        monkeypatch.setattr(options, "current", lambda: Options(mode="auto", verify=True))

    def prepare(self, tokens: int) -> tuple[Any, None]:
        """As SGLang's capture_prepare: requests of the context length, and what a step's sync would fill in left out."""
        context = self.model_config.context_len
        lengths = [min(context, tokens - start) for start in range(0, tokens, context)]
        batch = synced.step(tokens)
        for name in ("seq_lens", "seq_lens_cpu", "orig_seq_lens", "extend_seq_lens"):
            setattr(batch, name, torch.tensor(lengths))
        batch.batch_size = len(lengths)
        batch.req_pool_indices = torch.arange(len(lengths))
        batch.extend_prefix_lens = torch.zeros(len(lengths), dtype=torch.int64)
        batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = lengths, [0] * len(lengths)
        batch.global_num_tokens_for_logprob_cpu = None
        batch.can_run_dp_prefill_cuda_graph = batch.is_extend_in_batch = False
        batch.num_token_non_padded = torch.tensor(tokens, dtype=torch.int32)
        if self.sync is None:
            batch.global_num_tokens_cpu = batch.global_num_tokens_gpu = None
        return batch, None

    def _forward_raw(self, batch: Any, _: None) -> Any:
        """As SGLang's: padding, the bucket, and by `dense` which of its graphs."""
        graph = self.prefill_cuda_graph_runner is self.graphs
        tokens = len(batch.input_ids)
        if self.sync is not None:
            batch.prepare_mlp_sync_batch(self.sync)
            graph = graph and batch.can_run_dp_prefill_cuda_graph  # UPSTREAM: can_run_graph
        self.batches.append((graph, batch))
        self.tables.append(self.req_to_token_pool.req_to_token.clone())
        label = None
        if graph:
            bucket = next(size for size in self.graphs.capture_num_tokens if size >= len(batch.input_ids))
            if self.arena is not None:
                self.arena.dense_step = dense.fits(self.arena, batch, bucket)
                runner = SimpleNamespace(_model_runner=self)
                label = dense.replay(lambda graphs, key: key, runner, ShapeKey(bucket)).variant_label
            self.replayed.append((bucket, tokens, label))
        counts.eager("disabled")
        logits = self.logits(batch, graph, label)
        return SimpleNamespace(can_run_graph=graph, logits_output=SimpleNamespace(next_token_logits=logits))

    def logits(self, batch: Any, graph: bool, label: str | None) -> torch.Tensor:
        return torch.arange(float(VOCABULARY)).repeat(batch.batch_size, 1)


def small_arena(dense_buckets: set[int]) -> Arena:
    arena = Arena.create(
        4096, index_topk=64, index_heads=1, head_dim=4, group_ends=(0,), device="cpu", dense_limit=64
    )
    arena.dense_buckets = dense_buckets
    return arena


def test_every_graph_is_verified_the_sparse_one_of_short_buckets_too(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = small_arena({64})
    model_runner = Verified(monkeypatch, [64, 128, 4096], arena)
    verify.after_capture(None, model_runner)
    assert model_runner.replayed == [
        (64, 63, dense.LABEL),
        (64, 63, None),
        (64, 64, dense.LABEL),
        (64, 64, None),
        (128, 127, None),
        (128, 128, None),
        (4096, 4095, None),
        (4096, 4096, None),
    ]
    assert arena.dense_limit == 64


def test_where_ranks_sync_counts_the_graph_gets_the_bucket_and_eager_its_own_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensor parallelism of two with MegaMoE: SGLang's own padding of both passes."""
    buckets = [256, 512]
    model_runner = Verified(monkeypatch, buckets, sync=synced.install(monkeypatch, buckets))
    verify.after_capture(None, model_runner)
    assert model_runner.replayed == [(256, 255, None), (256, 256, None), (512, 511, None), (512, 512, None)]
    for (graph, batch), tokens in zip(
        model_runner.batches, [255] * 2 + [256] * 2 + [511] * 2 + [512] * 2, strict=True
    ):
        rows = min(size for size in buckets if size >= tokens) if graph else tokens + tokens % synced.RANKS
        assert len(batch.input_ids) == rows
        assert batch.extend_seq_lens_cpu == [tokens]
        assert int(batch.global_num_token_non_padded) == tokens
        assert (batch.out_cache_loc[tokens:] == 0).all()
    assert [graph for graph, _ in model_runner.batches] == [True, False] * 4


def test_a_bucket_longer_than_a_context_is_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    model_runner = Verified(monkeypatch, [250], context=100)
    before = model_runner.req_to_token_pool.req_to_token.clone()
    verify.after_capture(None, model_runner)
    assert [tokens for _, tokens, _ in model_runner.replayed] == [249, 250]
    for (_, batch), table in zip(model_runner.batches, model_runner.tables, strict=True):
        slots = [table[row, :length] for row, length in enumerate(batch.extend_seq_lens_cpu)]
        assert torch.equal(torch.cat(slots), batch.out_cache_loc.int()), "requests read what they write"
        assert len(set(batch.out_cache_loc.tolist())) == len(batch.out_cache_loc)
        assert batch.positions.tolist() == [p for length in batch.extend_seq_lens_cpu for p in range(length)]
    assert torch.equal(model_runner.req_to_token_pool.req_to_token, before)


@pytest.mark.parametrize(
    ("pool", "steps"), [(8192, [511, 512, 1023, 1024]), (1000, [511, 512, 1000]), (512, [511, 512])]
)
def test_no_step_is_larger_than_the_pool(
    monkeypatch: pytest.MonkeyPatch, pool: int, steps: list[int]
) -> None:
    model_runner = Verified(monkeypatch, [512, 1024], pool=pool)
    verify.after_capture(None, model_runner)
    assert [tokens for _, tokens, _ in model_runner.replayed] == steps
    assert all(int(batch.out_cache_loc.max()) < pool + PAGE for _, batch in model_runner.batches)


class Attending(Verified):
    """Its logits tell which attention ran: two tokens lead, and dense attention has them apart by more than a tie."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, buckets: list[int], arena: Arena, **more: Any
    ) -> None:
        from sglang.srt.environ import envs
        from sglang.srt.layers.attention import dsa_backend

        super().__init__(monkeypatch, buckets, **more)
        self.arena, self.eager_attention = arena, list[str]()
        self.attn_backend = backend = object.__new__(dsa_backend.DeepseekSparseAttnBackend)
        vars(backend).update(
            supports_mha_one_shot=True,
            hisparse_coordinator=None,
            enable_auto_select_prefill_impl=False,
            token_to_kv_pool=SimpleNamespace(dtype=torch.bfloat16),
            _is_in_breakable_cuda_graph=lambda: False,
            _is_in_tc_piecewise_cuda_graph=lambda: False,
            _get_device_sm=lambda: 90,
            _is_blackwell=lambda: False,
        )
        monkeypatch.setitem(whole._arenas, backend, arena)
        monkeypatch.setattr(dsa_backend, "is_dsa_enable_prefill_cp", lambda: False)
        monkeypatch.setenv(envs.SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD.name, "64")

    def logits(self, batch: Any, graph: bool, label: str | None) -> torch.Tensor:
        if not graph:
            batch.get_max_chunk_capacity = lambda: 8192
            self.attn_backend.set_dsa_prefill_impl(batch)  # SGLang's choice
            self.eager_attention.append("dense" if self.attn_backend.use_mha else "sparse")
        attention = self.eager_attention[-1] if not graph else "dense" if label == dense.LABEL else "sparse"
        logits = torch.zeros(batch.batch_size, VOCABULARY)
        logits[:, :2] = torch.tensor([5.06, 5.0] if attention == "dense" else [5.0, 5.01])
        return logits


def test_eager_attends_as_the_graph_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a right sparse graph would be refused for what dense attention makes of a close call."""
    model_runner = Attending(monkeypatch, [64, 128], small_arena({64}))
    verify.after_capture(None, model_runner)
    assert [label for _, _, label in model_runner.replayed] == [dense.LABEL, None] * 2 + [None, None]
    assert model_runner.eager_attention == ["dense", "sparse"] * 2 + ["sparse", "sparse"]


def test_short_buckets_select_behind_a_prefix_that_eager_left_in_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model_runner = Attending(monkeypatch, [64, 96], small_arena({64}), topk=64)
    before = model_runner.req_to_token_pool.req_to_token.clone()
    verify.after_capture(None, model_runner)
    prefixed = [
        (graph, batch) for graph, batch in model_runner.batches if batch.extend_prefix_lens_cpu != [0]
    ]
    # 128 tokens are more than the 64 that a row selects; the largest bucket bounds a step.
    assert [(graph, batch.extend_prefix_lens_cpu[0], len(batch.input_ids)) for graph, batch in prefixed] == [
        (False, 96, 32),
        (True, 128, 64),
        (False, 128, 64),
    ]
    at = next(i for i, (_, batch) in enumerate(model_runner.batches) if batch is prefixed[0][1])
    first = model_runner.batches[at - 1][1]
    slots = torch.cat([first.out_cache_loc, *(prefixed[i][1].out_cache_loc for i in (0, 1))])
    assert first.extend_seq_lens_cpu == [96]
    assert torch.equal(model_runner.tables[at][0, :192], slots.int()), "they read what was written"
    for _, batch in prefixed:
        total = batch.extend_prefix_lens_cpu[0] + len(batch.input_ids)
        assert batch.positions.tolist() == list(range(batch.extend_prefix_lens_cpu[0], total))
        for lengths in (batch.seq_lens, batch.seq_lens_cpu, batch.orig_seq_lens):
            assert lengths.tolist() == [total]
        assert batch.extend_prefix_lens.tolist() == batch.extend_prefix_lens_cpu
        assert batch.seq_lens_sum == total
    assert model_runner.replayed.count((64, 64, None)) == 2
    assert torch.equal(model_runner.req_to_token_pool.req_to_token, before)


@pytest.mark.parametrize(("context", "pool"), [(191, 8192), (8192, 191)])
def test_no_prefix_where_there_is_no_room_for_it(
    monkeypatch: pytest.MonkeyPatch, context: int, pool: int
) -> None:
    model_runner = Attending(monkeypatch, [64, 96], small_arena({64}), topk=64, context=context, pool=pool)
    verify.after_capture(None, model_runner)
    assert all(batch.extend_prefix_lens_cpu == [0] for _, batch in model_runner.batches)


def test_a_selection_that_is_wrong_behind_a_prefix_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Attending):
        def logits(self, batch: Any, graph: bool, label: str | None) -> torch.Tensor:
            logits = super().logits(batch, graph, label)
            return logits.flip(-1) if graph and any(batch.extend_prefix_lens_cpu) else logits

    with pytest.raises(RuntimeError, match=r"bucket 64, sparse graph, 64 tokens behind 128: KL"):
        verify.after_capture(None, Broken(monkeypatch, [64, 96], small_arena({64}), topk=64))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=5))
def test_requests_have_pages_of_their_own(lengths: list[int]) -> None:
    slots = verify_steps.place(lengths, PAGE)
    pages = [
        {slot // PAGE for slot in range(first, first + length)}
        for first, length in zip(slots, lengths, strict=True)
    ]
    assert all(first % PAGE == 0 for first in slots)
    assert 0 not in set.union(*pages), "page 0 takes the padding's writes"
    assert len(set.union(*pages)) == sum(map(len, pages))


def test_its_passes_are_not_counted_as_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "_published", lambda: pytest.fail("counted"))
    verify.after_capture(None, Verified(monkeypatch, [64]))


@pytest.mark.parametrize("runner", [object(), SimpleNamespace(capture_num_tokens=[])])
def test_without_graphs_the_server_does_not_start(monkeypatch: pytest.MonkeyPatch, runner: Any) -> None:
    model_runner: Any = Verified(monkeypatch, [64])
    model_runner.prefill_cuda_graph_runner = runner
    with pytest.raises(RuntimeError, match="--glm-verify-graphs has no graphs to compare"):
        verify.after_capture(None, model_runner)
    model_runner.is_draft_worker = True
    verify.after_capture(None, model_runner)


def test_the_worst_request_counts() -> None:
    eager = torch.zeros(3, 2)
    graph = torch.tensor([[0.0, 0.0], [0.0, math.log(3.0)], [0.0, 0.0]])
    assert verify.compare(64, Step(64), graph, eager).kl == pytest.approx(
        0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-5
    )


def test_kl_is_that_of_the_definition() -> None:
    graph, eager = torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([[0.0, 0.0]])
    # Eager (1/2, 1/2) against graph (1/4, 3/4): 1/2 ln 2 + 1/2 ln (2/3).
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    found = verify.compare(64, Step(63), graph, eager)
    assert found.kl == pytest.approx(expected, rel=1e-5)
    assert not found.passes


@pytest.mark.parametrize(("gap", "same"), [(0.01, True), (0.2, False)])
def test_a_tie_may_change_places(gap: float, same: bool) -> None:
    eager = torch.tensor([[5.0, 5.0 - gap, 0.0]])
    graph = torch.tensor([[5.0 - gap, 5.0, 0.0]])
    assert verify.compare(64, Step(64), graph, eager).same_token is same


def test_equal_logits_pass_and_nan_never_does() -> None:
    logits = torch.randn(1, 100)
    assert verify.compare(64, Step(64), logits, logits.clone()).passes
    assert not verify.compare(64, Step(64), torch.full((1, 100), math.nan), logits).passes
