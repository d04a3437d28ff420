"""Staging memory on the GPU: slots that are filled and emptied in turn, in an order that events on the device keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm_sglang.cache.cuda_runtime import Event, Runtime, Stream


@dataclass(slots=True)
class Slot:
    """A piece of staging memory, owned by its ring. `free` is recorded when nothing reads it any more."""

    memory: torch.Tensor
    filled: Event
    free: Event
    used: bool = False

    def pages(self, count: int, width: int) -> torch.Tensor:
        """The slot as uint8 [count, width]."""
        return self.memory[: count * width].view(count, width)


class Ring:
    """Slots in turn. The stream that fills a slot first waits, on the device, until it was emptied."""

    def __init__(self, runtime: Runtime, count: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._slots = [
            Slot(runtime.staging(slot_bytes), runtime.event(), runtime.event()) for _ in range(count)
        ]
        self._next = 0

    def take(self, filler: Stream) -> Slot:
        """The next slot, in the order of `filler` free to be filled."""
        slot = self._slots[self._next % len(self._slots)]
        self._next += 1
        if slot.used:
            filler.wait_event(slot.free)
        slot.used = True
        return slot
