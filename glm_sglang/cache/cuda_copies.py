"""Pages between SGLang's pool on a GPU and the pinned CPU pool, on side streams that the forward never waits for.

Save: on a side stream that waits for the forward's event, one kernel gathers a block of pages of all layers into a
staging slot; on another, strided copies take the slot to host memory. Load: strided copies bring some layers of many
pages into a slot, a kernel scatters them, and so on layer by layer; the forward's stream waits for a layer's event.

Who waits for what: streams for events of each other; the thread of saves, and the one that ends loads, for events, by
asking now and then; the scheduler's and the forward's thread, and the one that starts loads, for nothing (`cuda_layers`
says why they need not). A load's page numbers never come to the host: SGLang computes the slots on a stream that lies
behind the forward before, and so does the scatter. Copies into staging need no numbers and run before that, as far as
the slots reach. What is queued on the device is bounded by what the callers have started: the copier's `depth` blocks of
a save, the loads of the batches in flight, of which SGLang has two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from glm_kernels.page_copy import CopyTable, Rows

from glm_sglang.cache import cuda_plan
from glm_sglang.cache.copier import HostPage
from glm_sglang.cache.cuda_runtime import Event, Runtime, Stream, Strided
from glm_sglang.cache.device_pages import DevicePages

_SLOTS = 3  # of a direction: one is gathered into, one is copied, one is slack
_SLOT_BYTES = 64 << 20
_STEP_BYTES = 8 << 20  # of a load's step: 0.15 ms over PCIe 5, against some 10 µs of launches
# Of one strided copy, at least, where a load has so many bytes: a call takes the host about 8 µs (measured beside an
# H200), in which PCIe 5 moves 430 KB.
_CALL_BYTES = 512 << 10


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


@dataclass(frozen=True, slots=True)
class _Block:
    """Pages of a load that fit one slot: their runs in host memory, their numbers on the device."""

    runs: list[cuda_plan.Run]
    numbers: torch.Tensor


class CudaPageCopier:
    """`copier.PageCopier` for a GPU; saves are started by one thread and loads by one, and may be waited for by others.

    Owns 2 · 3 slots of staging (64 MiB each, or one page where that is more), four streams, and its tables, until
    it is dropped. `landed` of a load is called when a layer's copies are *queued*, in order: `queued_layer` marks the
    place, and whoever reads the layer must have its stream wait for that (`cuda_layers.StreamLayerCounter`).
    """

    def __init__(
        self,
        device: DevicePages,
        runtime: Runtime,
        *,
        slots: int = _SLOTS,
        slot_bytes: int = _SLOT_BYTES,
        step_bytes: int = _STEP_BYTES,
        call_bytes: int = _CALL_BYTES,
        region_of: Callable[[int], int] = cuda_plan.one_region,
    ) -> None:
        """region_of: the part of host memory an address is in, where it was pinned in parts."""
        self._runtime = runtime
        self._region_of = region_of
        self._layers = device.layers
        self._page_bytes, self._page_tokens = device.layout.page_bytes, device.layout.page_tokens
        self._step_bytes, self._call_bytes = step_bytes, call_bytes
        self._pitch = cuda_plan.aligned(self._page_bytes)
        slot_bytes = max(slot_bytes, self._pitch)
        self.block = slot_bytes // self._pitch
        self.depth = slots
        parts = [part for layer in device.layers for part in layer]
        self._whole = runtime.table([Rows(part.rows, part.start) for part in parts])
        layout = [[(part.start, part.rows.shape[1]) for part in layer] for layer in device.layers]
        self._grouped = {
            together: [(group, self._table(group)) for group in cuda_plan.groups(layout, together)]
            for together in cuda_plan.group_sizes(len(device.layers))
        }
        self._saving, self._loading = (Ring(runtime, slots, slot_bytes) for _ in range(2))
        # Kernels are urgent: they are short, and a copy of a millisecond waits for each of them.
        self._gather, self._scatter = (runtime.stream(urgent=True) for _ in range(2))
        self._to_host, self._to_device = (runtime.stream(urgent=False) for _ in range(2))
        self._after = threading.local()

    def warm(self) -> None:
        """Compiles the kernels: copies page 0, the pool's padding, onto itself. Before anything else is under way."""
        staged = self._saving.take(self._gather).pages(1, self._pitch)
        numbers = self._runtime.numbers([0], self._gather)
        self._runtime.gather(self._whole, numbers, staged, self._gather)
        slots = self._runtime.numbers(range(self._page_tokens), self._gather)
        numbers = self._runtime.page_numbers([slots], self._page_tokens, [0], self._gather)
        self._runtime.scatter(self._whole, numbers, staged, self._gather)
        self._drain(self._gather)

    # Order with the forward

    def written(self, forward_stream: Any) -> Callable[[], None]:
        """UPSTREAM: UnifiedCacheLinker.record_offload_ready. Two events, recorded at once on the scheduler's thread.

        The result is called on the save thread: it waits until the slots are computed, whose numbers a save sorts by
        address, and orders that thread's next save behind the forward on the device. UPSTREAM: with overlap the slots
        lie behind the forward before, for the schedule stream waits for that (`_apply_war_barrier`).
        """
        after = self._now(forward_stream)

        def ready() -> None:
            self._runtime.begin_thread()
            self._after.events = after
            self._runtime.poll(after[0].query)

        return ready

    def free(self, forward_stream: Any) -> Callable[[], None]:
        """The same events for a load: the device waits for both, before it reads the slots. The thread doesn't."""
        after = self._now(forward_stream)

        def ready() -> None:
            self._runtime.begin_thread()
            self._after.events = after

        return ready

    def _now(self, forward_stream: Any) -> list[Event]:
        """What the current stream has been given by now (it computes slots), and the forward's."""
        streams = [self._runtime.current(), *([] if forward_stream is None else [forward_stream])]
        return [self._mark(stream) for stream in streams]

    def _wait_for_forward(self, stream: Stream) -> None:
        for event in getattr(self._after, "events", ()):
            stream.wait_event(event)
        self._after.events = ()

    # Save

    def save(self, pages: Sequence[int], into: Sequence[HostPage]) -> None:
        """Device pages, by number, into host pages. Returns when the bytes are there."""
        self.start_save(pages, into)()

    def start_save(self, pages: Sequence[int], into: Sequence[HostPage]) -> Callable[[], None]:
        """Queues the copies; the result waits until the bytes are there. Until then both sides belong to the copy.

        Where queueing fails it raises only when nothing is under way any more.
        """
        if len(into) != len(pages):
            raise ValueError(f"{len(pages)} device pages for {len(into)} host pages")
        try:
            self._wait_for_forward(self._gather)
            for start in range(0, len(pages), self.block):
                end = start + self.block
                self._save_block(pages[start:end], into[start:end])
        except BaseException:
            self._drain(self._gather, self._to_host)
            raise
        done = self._mark(self._to_host)
        return lambda: self._runtime.poll(done.query)

    def _save_block(self, pages: Sequence[int], into: Sequence[HostPage]) -> None:
        addresses, numbers = _by_address(into, pages)
        slot = self._saving.take(self._gather)
        staged = slot.pages(len(numbers), self._pitch)
        self._runtime.gather(self._whole, self._runtime.numbers(numbers, self._gather), staged, self._gather)
        slot.filled.record(self._gather)
        self._to_host.wait_event(slot.filled)
        base = staged.data_ptr()
        pieces = [
            Strided(
                base + run.first * self._pitch,
                self._pitch,
                run.address,
                run.pitch,
                self._page_bytes,
                run.count,
            )
            for run in cuda_plan.runs(addresses, self._page_bytes, self._region_of)
        ]
        self._runtime.copy(pieces, to_host=True, stream=self._to_host)
        slot.free.record(self._to_host)

    # Load

    def load(
        self, slots: Sequence[torch.Tensor], source: Sequence[HostPage], landed: Callable[[int], None]
    ) -> None:
        """Host pages into device pages. Returns when the bytes are there; `landed(layer)` is called much sooner."""
        self.start_load(slots, source, landed)()

    def start_load(
        self, slots: Sequence[torch.Tensor], source: Sequence[HostPage], landed: Callable[[int], None]
    ) -> Callable[[], None]:
        """Queues the copies; the result waits until they are done. Until then both sides belong to the copy.

        Loads may be started before the one before is done: they go through the same streams, in order. Where queueing
        fails it raises only when nothing is under way any more.
        """
        tokens = sum(one.shape[0] for one in slots)
        if tokens != len(source) * self._page_tokens:
            raise ValueError(f"{tokens} slots for {len(source)} host pages of {self._page_tokens} tokens")
        try:
            addresses, order = _by_address(source, range(len(source)))
            self._wait_for_forward(self._scatter)  # it computes the slots, and may read the pages
            on_device = self._runtime.page_numbers(slots, self._page_tokens, order, self._scatter)
            found = cuda_plan.runs(addresses, self._page_bytes, self._region_of)
            blocks: dict[int, list[_Block]] = {}
            for group, table in self._groups(len(source), len(found)):
                size = max(1, self._loading.slot_bytes // group.width)
                if size not in blocks:
                    blocks[size] = [
                        _Block(cuda_plan.clip(found, start, start + size), on_device[start : start + size])
                        for start in range(0, len(source), size)
                    ]
                for block in blocks[size]:
                    self._load_block(group, table, block)
                for layer in group.layers:
                    landed(layer)
        except BaseException:
            self._drain(self._to_device, self._scatter)
            raise
        done = self._mark(self._scatter)  # behind every copy: each is scattered

        def wait() -> None:
            self._runtime.begin_thread()
            self._runtime.poll(done.query)

        return wait

    def _load_block(self, group: cuda_plan.Group, table: CopyTable, block: _Block) -> None:
        slot = self._loading.take(self._to_device)
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
        self._runtime.copy(pieces, to_host=False, stream=self._to_device)
        slot.filled.record(self._to_device)
        self._scatter.wait_event(slot.filled)
        self._runtime.scatter(table, block.numbers, staged, self._scatter)
        slot.free.record(self._scatter)

    def _groups(self, pages: int, run_count: int) -> list[tuple[cuda_plan.Group, CopyTable]]:
        together = cuda_plan.layers_together(
            len(self._layers),
            self._page_bytes // len(self._layers),
            pages,
            run_count,
            step=self._step_bytes,
            call=self._call_bytes,
        )
        return self._grouped[together]

    def _table(self, group: cuda_plan.Group) -> CopyTable:
        return self._runtime.table(
            [
                Rows(part.rows, start)
                for layer, starts in zip(group.layers, group.starts, strict=True)
                for part, start in zip(self._layers[layer], starts, strict=True)
            ]
        )

    # Layers, for whoever reads them

    def queued_layer(self) -> Event:
        """An event behind everything that the load under way has queued so far. Load thread."""
        return self._mark(self._scatter)

    def reader_waits(self, event: Event) -> None:
        """The calling thread's current stream waits for the event; the thread doesn't."""
        self._runtime.current().wait_event(event)

    def settle(self, event: Event) -> None:
        """Returns when the event has come about."""
        self._runtime.poll(event.query)

    def _mark(self, stream: Stream) -> Event:
        event = self._runtime.event()
        event.record(stream)
        return event

    def _drain(self, *streams: Stream) -> None:
        for event in [self._mark(stream) for stream in streams]:
            self._runtime.poll(event.query)


def _by_address(host: Sequence[HostPage], pages: Sequence[int]) -> tuple[list[int], list[int]]:
    """(addresses ascending, `pages` in that order): pages next to each other become one copy."""
    pairs = sorted((page.address, number) for page, number in zip(host, pages, strict=True))
    return [address for address, _ in pairs], [number for _, number in pairs]
