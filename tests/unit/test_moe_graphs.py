"""Counts of replayed graphs: what each capture counted, once a replay."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.runner.shape_key import ShapeKey
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn
from test_moe_layer import SCALING, TOP_K, OneRank, layer, tokens

from glm_sglang.moe import entry, state
from glm_sglang.moe.hooks import HOOKS

LAYERS, CAPACITY, EXPERTS = 3, 16, 6
BACKENDS = (
    "full_cuda_graph_backend.FullCudaGraphBackend",
    "breakable_cuda_graph_backend.BreakableCudaGraphBackend",
)


class Backend:
    """Captures as SGLang's do: two warm-ups and the run that counts; a replay runs no Python but a break's.

    Two graphs a size, as where short prompts have one of their own.
    """

    def __init__(self, *, breaks: bool = False) -> None:
        self.breaks = breaks
        self.forwards: dict[int, Callable[[], Any]] = {}

    def capture_one(self, shape_key: ShapeKey, forward_fn: Callable[[], Any]) -> None:
        for _ in range(2 * 3):
            forward_fn()
        self.forwards[shape_key.size] = forward_fn

    def replay(self, shape_key: ShapeKey) -> str:
        if self.breaks:
            self.forwards[shape_key.size]()
        return f"output {shape_key.size}"


def hooked(backend: str) -> type[Backend]:
    """The backend with this room's declared hooks, as SGLang's registry puts them in."""
    wrapped = type("Backend", (Backend,), {})
    for name in ("capture_one", "replay"):
        target = f"sglang.srt.model_executor.runner_backend.{backend}.{name}"
        (hook,) = (hook for hook in HOOKS if hook.target == target)
        function = resolve_name(hook.function)
        setattr(wrapped, name, _wrap_fn(getattr(Backend, name), function, HookType(hook.kind)))
    return wrapped


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> state.Running:
    routed = layer(OneRank(), CAPACITY)
    found = state.Running("megamoe", "", LAYERS, routed.counters, routed)
    monkeypatch.setattr(state, "_running", found)
    monkeypatch.setattr(entry, "_tokens", lambda batch: batch)
    return found


def model(running: state.Running, rows: int) -> Callable[[], None]:
    """A forward of LAYERS layers with so many rows on this rank."""
    batch = tokens(1, rows, EXPERTS, TOP_K)

    def forward() -> None:
        for _ in range(LAYERS):
            assert running.routed is not None
            running.routed(
                None, batch.x.float(), batch.ids, batch.weights, top_k=TOP_K, scaling=SCALING, clamp=None
            )

    return forward


def step(running: state.Running, count: int, run: Callable[[], Any]) -> Any:
    """A pass of `count` tokens through ModelRunner.forward."""
    runner = torch.nn.Module()
    runner.is_draft_worker = False
    return entry.forward(lambda runner, batch: run(), runner, count)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_replay_counts_what_its_bucket_captured(running: state.Running, backend: str) -> None:
    """Buckets of 16 and 40 rows are 1 and 3 calls a layer; 40 rows hold 33 tokens and padding."""
    graphs = hooked(backend)()
    for size in (40, 16):
        graphs.capture_one(ShapeKey(size), model(running, size))
    assert running.counters.report() == {}  # captures compute nothing for anybody
    assert step(running, 33, lambda: graphs.replay(ShapeKey(40))) == "output 40"
    step(running, 16, lambda: graphs.replay(ShapeKey(16)))
    step(running, 16, lambda: graphs.replay(ShapeKey(16, variant_label="dense")))
    step(running, 5, model(running, 5))
    assert running.counters.report() == {
        "megamoe-graph": {
            "calls": 3 * LAYERS,
            "tokens": (33 + 16 + 16) * LAYERS,
            "chunks": (3 + 1 + 1) * LAYERS,
            "rows": (40 + 16 + 16) * LAYERS,
        },
        "megamoe": {"calls": LAYERS, "tokens": 5 * LAYERS, "chunks": LAYERS, "rows": 5 * LAYERS},
    }


def test_layers_that_run_in_a_break_report_themselves(running: state.Running) -> None:
    graphs = hooked(BACKENDS[1])(breaks=True)
    graphs.capture_one(ShapeKey(40), model(running, 40))
    step(running, 40, lambda: graphs.replay(ShapeKey(40)))
    assert running.counters.report() == {
        "megamoe": {"calls": LAYERS, "tokens": 40 * LAYERS, "chunks": 3 * LAYERS, "rows": 40 * LAYERS}
    }


def test_sglangs_own_path_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_running", None)
    graphs, seen = hooked(BACKENDS[0])(), list[int]()
    graphs.capture_one(ShapeKey(16), lambda: seen.append(1))
    assert graphs.replay(ShapeKey(16)) == "output 16"
    assert len(seen) == 6
