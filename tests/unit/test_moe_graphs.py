"""Counts of replayed graphs: what each capture counted, once a replay."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from test_moe_layer import SCALING, TOP_K, OneRank, layer, tokens

from glm_sglang.moe import entry, state
from glm_sglang.moe.hooks import HOOKS

LAYERS, CAPACITY, EXPERTS = 3, 16, 6
BACKENDS = (
    "full_cuda_graph_backend.FullCudaGraphBackend",
    "breakable_cuda_graph_backend.BreakableCudaGraphBackend",
)


class Backend:
    """Captures as SGLang's do: two warm-ups and the run that counts; a replay runs no Python but a break's."""

    def __init__(self, *, breaks: bool = False) -> None:
        self.breaks = breaks
        self.forwards: dict[int, Callable[[], Any]] = {}

    def capture_one(self, size: int, forward_fn: Callable[[], Any]) -> None:
        for _ in range(3):
            forward_fn()
        self.forwards[size] = forward_fn

    def replay(self, size: int) -> str:
        if self.breaks:
            self.forwards[size]()
        return f"output {size}"


def hooked(backend: str, name: str) -> Callable[..., Any]:
    target = f"sglang.srt.model_executor.runner_backend.{backend}.{name}"
    (hook,) = (hook for hook in HOOKS if hook.target == target)
    return partial(resolve_name(hook.function), getattr(Backend, name))


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
    graphs, capture, replay = Backend(), hooked(backend, "capture_one"), hooked(backend, "replay")
    for size in (40, 16):
        capture(graphs, size, model(running, size))
    assert running.counters.report() == {}  # captures compute nothing for anybody
    assert step(running, 33, lambda: replay(graphs, 40)) == "output 40"
    step(running, 16, lambda: replay(graphs, 16))
    step(running, 16, lambda: replay(graphs, 16))
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
    graphs, (_, backend) = Backend(breaks=True), BACKENDS
    hooked(backend, "capture_one")(graphs, 40, model(running, 40))
    step(running, 40, lambda: hooked(backend, "replay")(graphs, 40))
    assert running.counters.report() == {
        "megamoe": {"calls": LAYERS, "tokens": 40 * LAYERS, "chunks": 3 * LAYERS, "rows": 40 * LAYERS}
    }


def test_sglangs_own_path_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_running", None)
    graphs, seen = Backend(), []
    hooked(BACKENDS[0], "capture_one")(graphs, 16, lambda: seen.append(1))
    assert hooked(BACKENDS[0], "replay")(graphs, 16) == "output 16"
    assert len(seen) == 3
