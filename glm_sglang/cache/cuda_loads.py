"""Loads on a GPU: pinned host pages into the pool's pages, some layers of all of them at a time.

The copy engine brings the pages into a staging slot, which a kernel scatters. The copies need no page numbers and run
ahead of the forward before, as far as the slots reach; the scatter waits. The launch of the load's forward waits until
all are queued, so the host's time for it counts. Host pages that lie next to each other are one strided copy a run,
which moves as much as the bus does. Scattered ones take a call each, and a call takes the host longer than the bus a
layer of a page; so the more runs, the more layers go together (`cuda_plan.Course`). docs/decisions.md has what else was
measured for these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from glm_kernels.page_copy import CopyTable, Rows

from glm_sglang.cache import cuda_plan
from glm_sglang.cache.copier import HostPage
from glm_sglang.cache.cuda_ring import Ring
from glm_sglang.cache.cuda_runtime import Event, Runtime, Strided
from glm_sglang.cache.device_pages import DevicePages

# Measured beside an H200 at 78 layers: 8 to 10 µs a strided copy, 100 µs a block without its copies, 50 GB/s over PCIe 5.
# A byte weighs a quarter more than that: where requests queue, the forward before hides what the host takes.
MEASURED = cuda_plan.Costs(call=9e-6, block=1e-4, byte=2.5e-11)
# Steps grow to a 16th of the layers: what the forward waits for, at most, where copy and layers take equally long.
_LEAST_STEPS = 16


@dataclass(frozen=True, slots=True)
class _Block:
    """Pages of a load that fit one slot: their runs in host memory, their numbers on the device."""

    runs: list[cuda_plan.Run]
    numbers: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Load:
    """Pages in the order of their addresses."""

    runs: list[cuda_plan.Run]
    numbers: torch.Tensor
    cut: dict[int, list[_Block]] = field(default_factory=dict)

    def blocks(self, size: int) -> list[_Block]:
        """Cut into blocks of `size` pages."""
        if size not in self.cut:
            self.cut[size] = [
                _Block(cuda_plan.clip(self.runs, start, start + size), self.numbers[start : start + size])
                for start in range(0, self.numbers.shape[0], size)
            ]
        return self.cut[size]


class CudaLoads:
    """Started by one thread. Owns a ring of staging, two streams, and its tables, until it is dropped.

    stream: what writes the pool's pages, in order; a load has landed with its last operation there.
    marked: an event behind the steps that the load under way has queued so far.
    """

    marked: Event

    def __init__(
        self,
        device: DevicePages,
        runtime: Runtime,
        ring: Ring,
        *,
        costs: cuda_plan.Costs = MEASURED,
        region_of: Callable[[int], int] = cuda_plan.one_region,
    ) -> None:
        self._runtime = runtime
        self._ring = ring
        self._region_of = region_of
        self._layers = device.layers
        self._page_bytes, self._page_tokens = device.layout.page_bytes, device.layout.page_tokens
        self._costs = costs
        layout = [[(part.start, part.rows.shape[1]) for part in layer] for layer in device.layers]
        most = max(1, len(layout) // _LEAST_STEPS)
        self._courses = [
            cuda_plan.Course.of(cuda_plan.groups(layout, first, most))
            for first in cuda_plan.group_sizes(len(layout))
        ]
        # Of the layers that a step brings: several courses have steps in common.
        self._staged = {
            group.layers: self._table(group) for course in self._courses for group in course.groups
        }
        # Kernels are urgent: they are short, and a copy of a millisecond waits for each of them.
        self.stream = runtime.stream(urgent=True)
        self.copies = runtime.stream(urgent=False)

    def queue(
        self,
        after: Sequence[Event],
        slots: Sequence[torch.Tensor],
        source: Sequence[HostPage],
        landed: Callable[[int], None],
    ) -> int:
        """Queues a load; nothing is read of `slots`, or written, before the events `after` have come about. How many runs
        the host pages are.

        ValueError where the slots are not as many as the pages'.
        """
        tokens = sum(one.shape[0] for one in slots)
        if tokens != len(source) * self._page_tokens:
            raise ValueError(f"{tokens} slots for {len(source)} host pages of {self._page_tokens} tokens")
        addresses, order = by_address(source, range(len(source)))
        runs = cuda_plan.runs(addresses, self._page_bytes, self._region_of)
        for event in after:
            self.stream.wait_event(event)
        with self._runtime.on(self.stream):
            numbers = self._runtime.page_numbers(slots, self._page_tokens, order)
            load = _Load(runs, numbers)
            course = cuda_plan.best(self._courses, len(source), len(runs), self._ring.slot_bytes, self._costs)
            for group in course.groups:
                self._queue(load, group)
                self.marked = self._runtime.event()
                self.marked.record(self.stream)
                for layer in group.layers:
                    landed(layer)
        return len(runs)

    def _queue(self, load: _Load, group: cuda_plan.Group) -> None:
        for block in load.blocks(max(1, self._ring.slot_bytes // group.width)):
            slot = self._ring.take(self.copies)
            staged = slot.pages(block.numbers.shape[0], group.width)
            copies = _strided(block.runs, group, staged.data_ptr())
            self._runtime.copy(copies, to_host=False, stream=self.copies)
            slot.filled.record(self.copies)
            self.stream.wait_event(slot.filled)
            self._runtime.scatter(self._staged[group.layers], block.numbers, staged)
            slot.free.record(self.stream)

    def _table(self, group: cuda_plan.Group) -> CopyTable:
        return self._runtime.table(
            [
                Rows(part.rows, start)
                for layer, starts in zip(group.layers, group.starts, strict=True)
                for part, start in zip(self._layers[layer], starts, strict=True)
            ]
        )


def _strided(runs: Sequence[cuda_plan.Run], group: cuda_plan.Group, base: int) -> list[Strided]:
    return [
        Strided(
            base + run.first * group.width + span.at,
            group.width,
            run.address + span.start,
            run.pitch,
            span.size,
            run.count,
        )
        for run in runs
        for span in group.spans
    ]


def by_address(host: Sequence[HostPage], pages: Sequence[int]) -> tuple[list[int], list[int]]:
    """(addresses ascending, `pages` in that order): pages next to each other become one copy."""
    pairs = sorted((page.address, number) for page, number in zip(host, pages, strict=True))
    return [address for address, _ in pairs], [number for _, number in pairs]
