"""What runs in a segment and what at a break, on SGLang's own breakable graph with a device of Python lists."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm_sglang.prefill_graph import break_counts, options, whole
from glm_sglang.prefill_graph.arena import Arena
from glm_sglang.prefill_graph.options import Options
from tests.unit.prefill_graph import fake_graph

TOPK, HEADS, DIM = 8, 2, 4


class Mode:
    def __init__(self, extend: bool = True) -> None:
        self.extend = extend

    def is_extend_without_speculative(self) -> bool:
        return self.extend

    def is_context_parallel_extend(self) -> bool:
        return False


class Backend:
    """An attention backend: `order` gets what it is asked."""

    def __init__(self, order: list[Any]) -> None:
        self.order = order
        self.forward_metadata: Any = None

    def get_indexer_metadata(self, layer_id: int, batch: Any) -> Any:
        return self

    def topk_transform(self, scores: torch.Tensor, topk: int) -> torch.Tensor:
        self.order.append("select all")
        return torch.full((len(scores), topk), 64, dtype=torch.int32)

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save: bool, **kwargs: Any) -> str:
        self.order.append(("attend", tuple(k.shape), save, sorted(kwargs)))
        return "attended"


class Indexer:
    """An indexer: its projections are kernels, its selection says which rows it got."""

    def __init__(self, pool: fake_graph.Pool, order: list[Any]) -> None:
        self.pool, self.order = pool, order

    def _fused_q_prepare_and_store(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.pool.run(lambda: self.order.append("project"))
        rows = x.shape[0]
        return torch.zeros(rows, HEADS, DIM).to(torch.float8_e4m3fn), torch.zeros(rows, HEADS, 1)

    def _fused_k_weights(self, x: torch.Tensor) -> Any:
        return x, x

    def _fused_k_prepare_and_store(
        self, keys: torch.Tensor, positions: Any, batch: Any, layer: int, *_: Any
    ) -> None:
        self.pool.run(lambda: self.order.append(("store", layer)))

    def _get_topk_ragged(
        self, dual: bool, batch: Any, layer: int, query: Any, gate: Any, metadata: Any, out: Any
    ) -> None:
        self.order.append(("select", layer, len(query), len(gate), len(out)))


class Counter:
    def __init__(self, order: list[Any]) -> None:
        self.order = order

    def wait_until(self, layer: int) -> None:
        self.order.append(("wait", layer))


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runner that captures, its arena, and SGLang's contexts as they are while it does."""
    from sglang.srt.layers.attention.dsa import dsa_indexer
    from sglang.srt.model_executor import forward_context
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import context
    from sglang.srt.model_executor.runner_utils import prefill_graph
    from sglang.srt.state_capturer import indexer_topk

    module, pool = fake_graph.install(monkeypatch)
    order: list[Any] = []
    backend = Backend(order)
    arena = Arena.create(
        16, index_topk=TOPK, index_heads=HEADS, head_dim=DIM, group_ends=(2, 2, 2), device="cpu"
    )
    kv_pool = SimpleNamespace(layer_transfer_counter=Counter(order), start_layer=0)
    monkeypatch.setitem(whole._arenas, backend, arena)
    monkeypatch.setattr(options, "current", lambda: Options(mode="auto"))
    monkeypatch.setattr(forward_context, "get_attn_backend", lambda: backend)
    monkeypatch.setattr(forward_context, "get_token_to_kv_pool", lambda: kv_pool)
    monkeypatch.setattr(context, "is_in_breakable_cuda_graph", lambda: True)
    monkeypatch.setattr(prefill_graph, "is_in_prefill_graph_scope", lambda: True)
    monkeypatch.setattr(dsa_indexer, "_broadcast_indexer_topk_from_rank0", lambda topk: topk)
    monkeypatch.setattr(indexer_topk, "maybe_capture_indexer_topk", lambda layer, topk: topk)
    monkeypatch.setattr(whole, "_read_end", lambda declared, batch: "read end")
    whole._selection_break.cache_clear()
    yield SimpleNamespace(module=module, pool=pool, order=order, backend=backend, arena=arena)
    whole._selection_break.cache_clear()


def load(scene: Any, tokens: int, prefix: int = 0, bucket: int = 16) -> None:
    total = prefix + tokens
    lengths = torch.arange(prefix + 1, total + 1).clamp(max=TOPK).int()
    batch = SimpleNamespace(
        seq_lens_cpu=torch.tensor([total]),
        forward_mode=Mode(),
        batch_size=1,
        extend_prefix_lens_cpu=[prefix],
        extend_seq_lens_cpu=[tokens],
    )

    def metadata(*args: Any) -> None:
        scene.order.append("metadata")
        scene.backend.forward_metadata = SimpleNamespace(dsa_cache_seqlens_int32=lengths)

    runner = SimpleNamespace(
        prefill_backend_name="breakable", model_runner=SimpleNamespace(attn_backend=scene.backend)
    )
    whole.bind_replay(metadata, runner, batch, batch, SimpleNamespace(size=bucket))


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("upstream's path ran")


def index(scene: Any, rows: int = 16, original: Any = refuse, layer: int = 0, **kwargs: Any) -> Any:
    batch = SimpleNamespace(forward_mode=Mode())
    x = torch.zeros(rows, 3)
    return whole.indexer_forward(original, Indexer(scene.pool, scene.order), x, x, x, batch, layer, **kwargs)


def test_a_layer_is_projected_in_a_segment_and_selected_at_one_break(scene: Any) -> None:
    load(scene, 16, prefix=9)
    with fake_graph.captured(scene.module) as graph:
        topk = index(scene)
    assert topk.data_ptr() == scene.arena.topk.data_ptr()
    assert (len(graph._segments), len(graph._break_fns)) == (2, 1)
    load(scene, 5, prefix=9)
    scene.order.clear()
    graph.replay()
    assert scene.order == ["project", ("wait", 2), ("select", 0, 5, 5, 16)], (
        "live rows only, after their keys arrived"
    )


def test_sglangs_breaks_are_counted_where_attention_goes_into_the_segment(scene: Any) -> None:
    """Two in a layer that selects, one in one that does not; here one and none. A warm-up captures nothing."""
    load(scene, 16, prefix=9)
    with fake_graph.captured(scene.module) as graph:
        for selects in (True, False, False):
            if selects:
                index(scene)
            attend(scene, refuse, topk_indices="t")
    attend(scene, refuse, topk_indices="t")
    assert break_counts.of(graph) == (1, 4)


def test_a_dense_graph_is_cut_where_its_pieces_end_and_nothing_runs_between(scene: Any) -> None:
    scene.arena.group_ends = (0, 1, 2)
    scene.arena.capturing_dense = True
    with fake_graph.captured(scene.module) as graph:
        for layer in range(3):
            assert index(scene, layer=layer, return_indices=False) is None
    assert [len(segment.kernels) for segment in graph._segments] == [1, 2], "cut before layer 1 alone"
    scene.order.clear()
    graph.replay()
    assert scene.order == [("store", 0), ("store", 1), ("store", 2)]


def test_a_short_context_costs_a_break_nothing(scene: Any) -> None:
    load(scene, 16, prefix=9)
    with fake_graph.captured(scene.module) as graph:
        index(scene)
    scene.order.clear()
    load(scene, 4)
    assert scene.order == ["metadata", "select all"], "once a step"
    for _ in range(3):
        graph.replay()
    assert scene.order == ["metadata", "select all", *["project", ("wait", 2)] * 3]


def test_a_break_owns_nothing_of_the_graphs_pool(scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: list[Any] = []

    def note(value: Any) -> Any:
        arguments.append(value)
        return value

    monkeypatch.setattr(scene.module, "_weak_ref_if_tensor", note)
    load(scene, 16)
    with fake_graph.captured(scene.module):
        index(scene)
    assert arguments
    assert not any(isinstance(argument, torch.Tensor) for argument in arguments)


@pytest.mark.parametrize("kwargs", [{"use_cuda_graph": False}, {"return_indices": False}])
def test_what_the_arena_is_not_for_runs_upstreams_path(scene: Any, kwargs: dict[str, Any]) -> None:
    assert index(scene, original=lambda *args, **_: args[-2:], **kwargs) == (
        kwargs.get("return_indices", True),
        kwargs.get("use_cuda_graph", True),
    )


def attend(scene: Any, original: Any, **kwargs: Any) -> Any:
    layer = SimpleNamespace(tp_k_head_num=1, tp_v_head_num=1, v_head_dim=4, qk_head_dim=4)
    batch = SimpleNamespace(forward_mode=Mode(kwargs.pop("extend", True)))
    k = torch.zeros(6, 1, 4)
    return whole.attention_forward(original, layer, "q", k, k, batch, True, **kwargs)


def test_sparse_attention_runs_in_the_segment(scene: Any) -> None:
    assert attend(scene, refuse, topk_indices="t", q_rope="r") == "attended"
    assert scene.order == [("attend", (6, 1, 4), True, ["q_rope", "topk_indices"])]


@pytest.mark.parametrize("kwargs", [{}, {"topk_indices": "t", "extend": False}])
def test_other_attention_is_left_alone(scene: Any, kwargs: dict[str, Any]) -> None:
    assert attend(scene, lambda *_, **__: "upstream's", **kwargs) == "upstream's"
    assert scene.order == []


def test_without_an_arena_everything_is_upstreams(scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(whole._arenas, scene.backend, None)
    assert attend(scene, lambda *_, **__: "upstream's", topk_indices="t") == "upstream's"
    assert index(scene, original=lambda *_: "upstream's") == "upstream's"
    batch = SimpleNamespace(forward_mode=Mode())
    assert whole.can_fuse_bmm(lambda *_: True, None, batch)
    monkeypatch.setitem(whole._arenas, scene.backend, scene.arena)
    assert not whole.can_fuse_bmm(lambda *_: True, None, batch)


def test_capture_makes_kernels_read_the_arenas_lengths(scene: Any) -> None:
    from sglang.srt.layers.attention.dsa_backend import DSAMetadata

    fields: dict[str, Any] = {field.name: None for field in dataclasses.fields(DSAMetadata)}
    lengths = torch.arange(1, 9).int()
    scene.backend.forward_metadata = DSAMetadata(**(fields | {"dsa_cache_seqlens_int32": lengths}))
    batch = SimpleNamespace(extend_seq_lens_cpu=[8], seq_lens_cpu=torch.tensor([8]))
    runner = SimpleNamespace(
        prefill_backend_name="breakable", model_runner=SimpleNamespace(attn_backend=scene.backend)
    )
    whole.bind_capture(None, runner, batch, SimpleNamespace(size=8))
    bound = scene.backend.forward_metadata.dsa_cache_seqlens_int32
    assert bound.data_ptr() == scene.arena.lengths.data_ptr()
    assert bound.tolist() == list(range(1, 9))


@pytest.mark.parametrize(
    ("declared", "mode", "linker", "coarse", "expected"),
    [
        ("UNKNOWN", "EXTEND", False, False, "PRE_REPLAY"),
        ("UNKNOWN", "EXTEND", True, False, "UNKNOWN"),  # it offloads behind the scheduler's stream
        ("UNKNOWN", "EXTEND", False, True, "UNKNOWN"),
        ("UNKNOWN", "MIXED", False, False, "UNKNOWN"),
        ("POST_REPLAY", "EXTEND", False, False, "POST_REPLAY"),
    ],
)
def test_the_schedulers_tables_are_free_once_the_metadata_is_made(
    monkeypatch: pytest.MonkeyPatch,
    declared: str,
    mode: str,
    linker: bool,
    coarse: bool,
    expected: str | None,
) -> None:
    from sglang.srt import runtime_context
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    memory = SimpleNamespace(enable_unified_cache_external_linker=linker)
    monkeypatch.setattr(runtime_context, "get_memory", lambda: memory)
    monkeypatch.setenv("SGLANG_FORCE_COARSE_WAR_BARRIER", "1" if coarse else "0")
    found = whole._read_end(SharedReadEnds[declared], SimpleNamespace(forward_mode=ForwardMode[mode]))
    assert found is SharedReadEnds[expected]
