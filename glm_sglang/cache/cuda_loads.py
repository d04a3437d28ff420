"""Loads on a GPU: pinned host pages into the pool's pages, some layers of all of them at a time.

Host pages that lie next to each other are brought by the copy engine: strided copies into a staging slot, which a kernel
scatters. The copies need no page numbers and run ahead of the forward before, as far as the slots reach; the scatter
waits. They take the host 8 µs each, and the launch of the load's forward waits until all are queued. So where pages lie
so scattered that it would wait too long, one kernel a step pulls them over the bus, and holds some SMs meanwhile.
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

_STEP_BYTES = 8 << 20  # of a load's first step: 0.15 ms over PCIe 5, against some 10 µs of launches
# Of one strided copy, at least, where a load has so many bytes: a call takes the host about 8 µs (measured beside an
# H200), in which PCIe 5 moves 430 KB.
_CALL_BYTES = 512 << 10
# Strided copies of a load, at most; else it is pulled. 3 ms of the host: no launch may wait 5 ms.
_MOST_CALLS = 384
# Steps grow to a 16th of the layers: what the forward waits for, at most, where copy and layers take equally long.
_LARGEST_STEP = 16
_VECTOR = 16  # bytes: what a pull's addresses are multiples of


@dataclass(frozen=True, slots=True)
class _Step:
    """Layers that are loaded together, by way of staging or directly."""

    group: cuda_plan.Group
    staged: CopyTable
    direct: CopyTable


@dataclass(frozen=True, slots=True)
class _Block:
    """Pages of a load that fit one slot: their runs in host memory, their numbers on the device."""

    runs: list[cuda_plan.Run]
    numbers: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Load:
    """Pages in the order of their addresses. hosts: these addresses on the device, where the pages are pulled."""

    runs: list[cuda_plan.Run]
    numbers: torch.Tensor
    hosts: torch.Tensor | None
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
    """

    def __init__(
        self,
        device: DevicePages,
        runtime: Runtime,
        ring: Ring,
        *,
        step_bytes: int = _STEP_BYTES,
        call_bytes: int = _CALL_BYTES,
        most_calls: int = _MOST_CALLS,
        region_of: Callable[[int], int] = cuda_plan.one_region,
    ) -> None:
        """most_calls: 0 pulls every load."""
        self._runtime = runtime
        self._ring = ring
        self._region_of = region_of
        self._layers = device.layers
        self._page_bytes, self._page_tokens = device.layout.page_bytes, device.layout.page_tokens
        self._step_bytes, self._call_bytes, self._most_calls = step_bytes, call_bytes, most_calls
        self._reads_host = runtime.reads_host()
        layout = [[(part.start, part.rows.shape[1]) for part in layer] for layer in device.layers]
        most = max(1, len(layout) // _LARGEST_STEP)
        self._steps = {
            first: [self._step(group) for group in cuda_plan.groups(layout, first, most)]
            for first in cuda_plan.group_sizes(len(layout))
        }
        # Kernels are urgent: they are short, and a copy of a millisecond waits for each of them.
        self.stream = runtime.stream(urgent=True)
        self.copies = runtime.stream(urgent=False)

    def warm(self) -> None:
        """Compiles the pull: of no page. The scatter is the saves' to compile."""
        nothing = self._runtime.numbers([], self.stream)
        self._runtime.pull(self._steps[1][0].direct, nothing, nothing, self.stream)

    def queue(
        self,
        after: Sequence[Event],
        slots: Sequence[torch.Tensor],
        source: Sequence[HostPage],
        landed: Callable[[int], None],
    ) -> None:
        """Queues a load; nothing is read of `slots`, or written, before the events `after` have come about.

        ValueError where the slots are not as many as the pages'.
        """
        tokens = sum(one.shape[0] for one in slots)
        if tokens != len(source) * self._page_tokens:
            raise ValueError(f"{tokens} slots for {len(source)} host pages of {self._page_tokens} tokens")
        addresses, order = by_address(source, range(len(source)))
        for event in after:
            self.stream.wait_event(event)
        numbers = self._runtime.page_numbers(slots, self._page_tokens, order, self.stream)
        runs = cuda_plan.runs(addresses, self._page_bytes, self._region_of)
        steps, hosts = self._steps_of(len(source), len(runs)), None
        if self._pulled(steps, len(runs), addresses):
            steps = self._steps_of(len(source), 1)
            hosts = self._runtime.numbers(addresses, self.stream)
        load = _Load(runs, numbers, hosts)
        for step in steps:
            self._queue(load, step)
            for layer in step.group.layers:
                landed(layer)

    def _pulled(self, steps: Sequence[_Step], run_count: int, addresses: Sequence[int]) -> bool:
        calls = run_count * sum(len(step.group.spans) for step in steps)
        if calls <= self._most_calls or not self._reads_host:
            return False
        return not steps[0].direct.aligned or not any(address % _VECTOR for address in addresses)

    def _queue(self, load: _Load, step: _Step) -> None:
        if load.hosts is not None:
            self._runtime.pull(step.direct, load.hosts, load.numbers, self.stream)
            return
        for block in load.blocks(max(1, self._ring.slot_bytes // step.group.width)):
            self._queue_block(step, block)

    def _queue_block(self, step: _Step, block: _Block) -> None:
        group = step.group
        slot = self._ring.take(self.copies)
        staged = slot.pages(block.numbers.shape[0], group.width)
        base = staged.data_ptr()
        pieces = [
            Strided(
                base + run.first * group.width + span.at,
                group.width,
                run.address + span.start,
                run.pitch,
                span.size,
                run.count,
            )
            for run in block.runs
            for span in group.spans
        ]
        self._runtime.copy(pieces, to_host=False, stream=self.copies)
        slot.filled.record(self.copies)
        self.stream.wait_event(slot.filled)
        self._runtime.scatter(step.staged, block.numbers, staged, self.stream)
        slot.free.record(self.stream)

    def _steps_of(self, pages: int, run_count: int) -> list[_Step]:
        return self._steps[
            cuda_plan.layers_together(
                len(self._layers),
                self._page_bytes // len(self._layers),
                pages,
                run_count,
                step=self._step_bytes,
                call=self._call_bytes,
            )
        ]

    def _step(self, group: cuda_plan.Group) -> _Step:
        parts = [
            (part, start)
            for layer, starts in zip(group.layers, group.starts, strict=True)
            for part, start in zip(self._layers[layer], starts, strict=True)
        ]
        return _Step(
            group,
            self._runtime.table([Rows(part.rows, start) for part, start in parts]),
            self._runtime.table([Rows(part.rows, part.start) for part, _ in parts]),
        )


def by_address(host: Sequence[HostPage], pages: Sequence[int]) -> tuple[list[int], list[int]]:
    """(addresses ascending, `pages` in that order): pages next to each other become one copy."""
    pairs = sorted((page.address, number) for page, number in zip(host, pages, strict=True))
    return [address for address, _ in pairs], [number for _, number in pairs]
