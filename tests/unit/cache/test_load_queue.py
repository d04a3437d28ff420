"""What a load's forward waits for: the queueing of its layers, nothing else. Stand-ins for device, pool and audit."""

from __future__ import annotations

import threading
from typing import Any

import torch

from glm_sglang.cache.loads import Load, LoadQueue
from tests.unit.cache.tree import PAGE

LAYERS = 3


class Parts:
    """Store, copier, counter, recorder and audit; the audit takes until `hashed` is set."""

    def __init__(self) -> None:
        self.hashed, self.queued = threading.Event(), threading.Event()
        self.done: list[str] = []
        self.added: dict[str, int] = {}

    def watch(self, copier: Any) -> None:
        """Only what is in the pool."""

    def record(self, kind: str, keys: Any, pages: Any) -> None:
        assert self.hashed.wait(30)
        self.done.append("audited")

    def release(self, pages: Any) -> None:
        self.done.append("released")

    def start_load(self, numbers: Any, pages: Any, landed: Any) -> Any:
        for layer in range(LAYERS):
            landed(layer)

        def wait() -> int:
            self.done.append("landed")
            return 7  # runs

        return wait

    def update_producer(self) -> int:
        return 0

    def complete(self, index: int, layer: int) -> None:
        if layer == LAYERS - 1:
            self.queued.set()

    def add(self, name: str, *, amount: int = 1) -> None:
        self.added[name] = amount


def test_no_layer_waits_for_the_audit_and_the_pins_do() -> None:
    parts: Any = Parts()
    loads = LoadQueue(parts, parts, parts, recorder=parts, audit=parts)
    loads.start([Load([b"a"], torch.arange(PAGE, 2 * PAGE), [object()])], lambda: None)  # type: ignore[list-item]
    try:
        assert parts.queued.wait(30)  # while the audit has yet to end
        assert parts.done == []
    finally:
        parts.hashed.set()
        loads.quiesce()
        loads.close()
    assert parts.done == ["audited", "landed", "released"]
    assert parts.added == {"cache_load_pages": 1, "cache_load_runs": 7}
