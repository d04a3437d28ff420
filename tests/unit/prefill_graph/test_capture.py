"""Capture bucket by bucket: what a failure costs, what ranks agree on, what is said; and graphs against eager."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm_sglang.prefill_graph import agreement, capture, dense, options, verify, whole
from glm_sglang.prefill_graph.options import Options

BUCKETS = st.lists(st.integers(1, 9), max_size=6, unique=True)


@given(st.lists(BUCKETS, min_size=1, max_size=8))
def test_ranks_agree_on_what_all_of_them_hold(held: list[list[int]]) -> None:
    gathered: list[Sequence[int]] = list(held)
    kept = {agreement.agree(mine, lambda _: gathered) for mine in held}
    assert len(kept) == 1, "every rank keeps the same"
    (common,) = kept
    assert list(common) == sorted(common)
    for bucket in range(1, 10):
        assert (bucket in common) == all(bucket in mine for mine in held)


@given(BUCKETS)
def test_alone_a_rank_keeps_what_it_captured(held: list[int]) -> None:
    gather = agreement.gather_over(SimpleNamespace(world_size=1))
    assert agreement.agree(held, gather) == tuple(sorted(held))


class Key(NamedTuple):
    """SGLang's ShapeKey."""

    size: int


class Backend:
    """An attention backend, which may have an arena."""


class Runner:
    """As much of a PrefillCudaGraphRunner as capture touches; `broken` buckets raise."""

    prefill_backend_name = "breakable"

    def __init__(self, broken: Sequence[int] = ()) -> None:
        self.broken = set(broken)
        self.backend = SimpleNamespace(_graphs={})
        self.capture_num_tokens = [64, 128, 256]
        self.max_num_tokens = 256
        config = SimpleNamespace(hf_config=SimpleNamespace(num_hidden_layers=4))
        self.attn_backend = Backend()
        self.model_runner = SimpleNamespace(model_config=config, attn_backend=self.attn_backend)

    def original(self, runner: Any, size: int, **kwargs: Any) -> None:
        if size in self.broken:
            raise MemoryError("out of\n memory")
        self.backend._graphs[Key(size)] = SimpleNamespace(_break_fns=[None] * 3)

    def capture(self) -> None:
        for size in reversed(self.capture_num_tokens):
            capture.one_bucket(self.original, self, size)
        capture.all_buckets(None, self)


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> Any:
    def choose(chosen: Any, world: int = 1) -> None:
        monkeypatch.setattr(options, "current", lambda: Options(mode=chosen))
        monkeypatch.setattr(agreement, "ranks", lambda: SimpleNamespace(world_size=world))

    return choose


def test_a_bucket_that_fails_is_named_and_the_others_serve(
    mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    mode("auto")
    runner = Runner(broken=[256])
    with caplog.at_level(logging.INFO):
        runner.capture()
    assert runner.capture_num_tokens == [64, 128]
    assert runner.max_num_tokens == 128
    assert "bucket of 256 tokens cannot be captured" in caplog.text
    assert "MemoryError: out of memory" in caplog.text
    assert "2 buckets from 64 to 128 tokens" in caplog.text
    assert "3 breaks in 4 layers (0.75 a layer)" in caplog.text


def test_where_every_bucket_fails_nothing_replays(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    mode("auto")
    runner = Runner(broken=[64, 128, 256])
    with caplog.at_level(logging.INFO):
        runner.capture()
    assert runner.capture_num_tokens == []
    assert runner.max_num_tokens == 0
    assert "no bucket was captured" in caplog.text


def test_strict_ends_the_start_and_names_bucket_and_flag(mode: Any) -> None:
    mode("strict")
    with pytest.raises(RuntimeError, match=r"128 tokens cannot be captured.*--glm-prefill-graph is strict"):
        Runner(broken=[128]).capture()


def test_beside_other_ranks_a_failure_ends_the_start(mode: Any) -> None:
    mode("auto", world=8)
    with pytest.raises(RuntimeError, match=r"128 tokens.*--glm-prefill-graph-buckets"):
        Runner(broken=[128]).capture()


def test_off_leaves_upstreams_failure_as_it_is(mode: Any) -> None:
    mode("off")
    with pytest.raises(MemoryError):
        Runner(broken=[128]).capture()


def test_a_bucket_that_another_rank_lacks_is_left_out(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mode("auto")
    monkeypatch.setattr(agreement, "gather_over", lambda group: lambda mine: [mine, [64, 256]])
    runner: Any = Runner()
    runner.capture()
    assert runner.capture_num_tokens == [64, 256]
    assert list(runner.glm_report.failed) == [128]


def test_a_dense_graph_that_another_rank_lacks_is_replayed_by_nobody(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode("auto", world=2)
    others = iter([[64, 128, 256], [64]])  # buckets, and of those the ones with a dense graph
    monkeypatch.setattr(agreement, "gather_over", lambda group: lambda mine: [mine, next(others)])
    runner = Runner()
    arena = SimpleNamespace(dense_buckets={64, 128})
    monkeypatch.setitem(whole._arenas, runner.attn_backend, arena)
    runner.capture()
    assert runner.capture_num_tokens == [64, 128, 256]
    assert arena.dense_buckets == {64}


def test_ranks_agree_on_dense_graphs_also_where_one_has_no_arena(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective: each rank has to take part in it as often as the others."""
    mode("auto", world=2)
    said: list[list[int]] = []

    def gather(mine: Sequence[int]) -> list[Sequence[int]]:
        said.append(list(mine))
        return [mine]

    monkeypatch.setattr(agreement, "gather_over", lambda group: gather)
    Runner().capture()
    assert said == [[64, 128, 256], []]


class Verified:
    """A model runner that has captured 64 (with a dense graph), 128 and 4,096 tokens; the steps it has run."""

    is_draft_worker, page_size = False, 64

    def __init__(self, arena: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arena, self.attn_backend, self.eager_runner = arena, Backend(), object()
        self.replayed: list[tuple[int, int, str | None]] = []
        self.req_to_token_pool = SimpleNamespace(req_to_token=torch.zeros(2, 8192, dtype=torch.int32))
        self.model_config = SimpleNamespace(vocab_size=100)
        self.prefill_cuda_graph_runner = self.graphs = SimpleNamespace(
            capture_num_tokens=[64, 128, 4096],
            enable_cp_bcg_capture=False,
            device="cpu",
            model_runner=self,
            capture_prepare=self.prepare,
        )
        monkeypatch.setitem(whole._arenas, self.attn_backend, arena)

    def prepare(self, tokens: int) -> tuple[Any, None]:
        names = ("seq_lens", "extend_seq_lens", "extend_prefix_lens", "extend_start_loc", "req_pool_indices")
        fields: dict[str, Any] = {name: torch.tensor([tokens]) for name in names}
        for name in ("input_ids", "positions", "out_cache_loc"):
            fields[name] = torch.zeros(tokens, dtype=torch.int64)
        more = {"batch_size": 1, "extend_seq_lens_cpu": [tokens], "extend_prefix_lens_cpu": [0]}
        return SimpleNamespace(**fields, **more), None

    def _forward_raw(self, batch: Any, _: None) -> Any:
        """As SGLang's: the bucket, and by `dense` which of its graphs."""
        graph = self.prefill_cuda_graph_runner is self.graphs
        if graph:
            tokens = len(batch.input_ids)
            bucket = next(size for size in self.graphs.capture_num_tokens if size >= tokens)
            self.arena.dense_step = dense.fits(self.arena, batch, bucket)
            runner = SimpleNamespace(_model_runner=self)
            key = dense.replay(lambda graphs, key: key, runner, ShapeKey(bucket))
            self.replayed.append((bucket, tokens, key.variant_label))
        logits = torch.arange(100.0)[None]
        return SimpleNamespace(can_run_graph=graph, logits_output=SimpleNamespace(next_token_logits=logits))


@dataclasses.dataclass(frozen=True)
class ShapeKey:
    """SGLang's."""

    size: int
    variant_label: str | None = None


def test_every_graph_is_verified_the_sparse_one_of_short_buckets_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from glm_sglang.prefill_graph.arena import Arena

    monkeypatch.setattr(options, "current", lambda: Options(mode="auto", verify=True))
    arena = Arena.create(
        4096, index_topk=64, index_heads=1, head_dim=4, group_ends=(0,), device="cpu", dense_limit=64
    )
    arena.dense_buckets = {64}
    model_runner = Verified(arena, monkeypatch)
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


def test_kl_is_that_of_the_definition() -> None:
    graph, eager = torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([[0.0, 0.0]])
    # Eager (1/2, 1/2) against graph (1/4, 3/4): 1/2 ln 2 + 1/2 ln (2/3).
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    found = verify.compare(64, 63, graph, eager)
    assert found.kl == pytest.approx(expected, rel=1e-5)
    assert not found.passes


@pytest.mark.parametrize(("gap", "same"), [(0.01, True), (0.2, False)])
def test_a_tie_may_change_places(gap: float, same: bool) -> None:
    eager = torch.tensor([[5.0, 5.0 - gap, 0.0]])
    graph = torch.tensor([[5.0 - gap, 5.0, 0.0]])
    assert verify.compare(64, 64, graph, eager).same_token is same


def test_equal_logits_pass_and_nan_never_does() -> None:
    logits = torch.randn(1, 100)
    assert verify.compare(64, 64, logits, logits.clone()).passes
    assert not verify.compare(64, 64, torch.full((1, 100), math.nan), logits).passes
