"""Pages between SGLang's pool on a GPU and the pinned CPU pool, on side streams that the forward never waits for.

Save: on a side stream that waits for the forward's event, one kernel gathers a block of pages of all layers into a
staging slot; on another, strided copies take the slot to host memory. Load: `cuda_loads`, layer by layer; the forward's
stream waits for a layer's event.

Who waits for what: streams for events of each other; the thread of saves, and the one that ends loads, for events, by
asking now and then; the scheduler's and the forward's thread, and the one that starts loads, for nothing (`cuda_layers`
says why they need not). A load's page numbers never come to the host: SGLang computes the slots on a stream that lies
behind the forward before, and so does what writes the pages. What is queued on the device is bounded by what the callers
have started: the copier's `depth` blocks of a save, the loads of the batches in flight, of which SGLang has two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from glm_kernels.page_copy import Rows

from glm_sglang.cache import cuda_plan
from glm_sglang.cache.copier import HostPage, Saved
from glm_sglang.cache.cuda_loads import MEASURED, CudaLoads, by_address
from glm_sglang.cache.cuda_ring import Ring
from glm_sglang.cache.cuda_runtime import Event, Runtime, Stream, Strided
from glm_sglang.cache.device_pages import DevicePages
from glm_sglang.errors import UsageError

_SLOTS = 3  # of a direction: one is gathered into, one is copied, one is slack
_SLOT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Way:
    """From the pool to the host: staging, and the streams that fill and empty it."""

    ring: Ring
    gather: Stream
    to_host: Stream


class CudaPageCopier:
    """`copier.PageCopier` for a GPU; saves are started by one thread and loads by one, and may be waited for by others.

    Owns 2 · 3 slots of staging (64 MiB each, or one page where that is more), four streams, and its tables, until
    it is dropped. `landed` of a load is called when a layer's copies are *queued*, in order: `queued_layer` marks the
    place, and whoever reads the layer must have its stream wait for that (`cuda_layers.StreamLayerCounter`).

    An audit (`saved`, `save_again`, `read_back`) takes as much staging again as saves do.
    """

    saved: Saved | None = None

    def __init__(
        self,
        device: DevicePages,
        runtime: Runtime,
        *,
        slots: int = _SLOTS,
        slot_bytes: int = _SLOT_BYTES,
        region_of: Callable[[int], int] = cuda_plan.one_region,
        costs: cuda_plan.Costs = MEASURED,
    ) -> None:
        """region_of: the part of host memory an address is in, where it was pinned in parts. costs: `CudaLoads`'s.

        Raises UsageError where the GPU has no room for staging: SGLang has sized its KV pool by then.
        """
        self._runtime = runtime
        self._region_of = region_of
        self.layers = len(device.layers)
        self.page_bytes, self._page_tokens = device.layout.page_bytes, device.layout.page_tokens
        self._pitch = cuda_plan.aligned(self.page_bytes)
        slot_bytes = max(slot_bytes, self._pitch)
        self.block = slot_bytes // self._pitch
        self.depth = slots
        parts = [part for layer in device.layers for part in layer]
        self._whole = runtime.table([Rows(part.rows, part.start) for part in parts])
        try:
            saving, loading = (Ring(runtime, slots, slot_bytes) for _ in range(2))
        except torch.OutOfMemoryError as error:
            raise UsageError(
                f"the cache stages pages in {2 * slots * slot_bytes >> 20} MiB ({2 * slots * slot_bytes} bytes) of GPU "
                "memory beside weights and KV pool, and so much is not free; lower --mem-fraction-static"
            ) from error
        self._saves = self._way(saving)
        self._back: _Way | None = None  # an audit's
        self._own_ring = partial(Ring, runtime, slots, slot_bytes)
        self.loads = CudaLoads(device, runtime, loading, region_of=region_of, costs=costs)
        self._after = threading.local()
        self._pinned = device.device.type == "cuda"

    def warm(self) -> None:
        """Compiles the kernels: copies page 0, the pool's padding, onto itself. Before anything else is under way."""
        gather = self._saves.gather
        with self._runtime.on(gather):
            staged = self._saves.ring.take(gather).pages(1, self._pitch)
            self._runtime.gather(self._whole, self._runtime.numbers([0]), staged)
            slots = self._runtime.numbers(range(self._page_tokens))
            numbers = self._runtime.page_numbers([slots], self._page_tokens, [0])
            self._runtime.scatter(self._whole, numbers, staged)
        self._drain(gather)

    def _way(self, ring: Ring) -> _Way:
        # The gather is urgent: it is short, and a copy of a millisecond waits for it.
        return _Way(ring, self._runtime.stream(urgent=True), self._runtime.stream(urgent=False))

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
            self._after.events = self._after.written = after
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

    def _events(self) -> Sequence[Event]:
        """What this thread's next copies come behind."""
        events: Sequence[Event] = getattr(self._after, "events", ())
        self._after.events = ()
        return events

    # Save

    def save(self, pages: Sequence[int], into: Sequence[HostPage]) -> None:
        """Device pages, by number, into host pages. Returns when the bytes are there."""
        self.start_save(pages, into)()

    def start_save(self, pages: Sequence[int], into: Sequence[HostPage]) -> Callable[[], None]:
        """Queues the copies; the result waits until the bytes are there. Until then both sides belong to the copy.

        Where queueing fails it raises only when nothing is under way any more.
        """
        done = self._queue_save(pages, into, self._region_of)

        def wait() -> None:
            self._runtime.poll(done.query)
            if self.saved is not None:
                self.saved(pages, into)

        return wait

    def _queue_save(
        self, pages: Sequence[int], into: Sequence[HostPage], region_of: Callable[[int], int]
    ) -> Event:
        """The copies, and an event behind them."""
        if len(into) != len(pages):
            raise ValueError(f"{len(pages)} device pages for {len(into)} host pages")
        way = self._saves
        try:
            for event in self._events():
                way.gather.wait_event(event)
            with self._runtime.on(way.gather):
                for start in range(0, len(pages), self.block):
                    end = start + self.block
                    addresses, numbers = by_address(into[start:end], pages[start:end])
                    self._save_block(way, self._runtime.numbers(numbers), addresses, region_of)
        except BaseException:
            self._drain(way.gather, way.to_host)
            raise
        return self._mark(way.to_host)

    def _save_block(
        self,
        way: _Way,
        numbers: torch.Tensor,
        addresses: Sequence[int],
        region_of: Callable[[int], int],
    ) -> None:
        slot = way.ring.take(way.gather)
        staged = slot.pages(len(addresses), self._pitch)
        self._runtime.gather(self._whole, numbers, staged)
        slot.filled.record(way.gather)
        way.to_host.wait_event(slot.filled)
        base = staged.data_ptr()
        pieces = [
            Strided(
                base + run.first * self._pitch,
                self._pitch,
                run.address,
                run.pitch,
                self.page_bytes,
                run.count,
            )
            for run in cuda_plan.runs(addresses, self.page_bytes, region_of)
        ]
        self._runtime.copy(pieces, to_host=True, stream=way.to_host)
        slot.free.record(way.to_host)

    # Load

    def load(
        self, slots: Sequence[torch.Tensor], source: Sequence[HostPage], landed: Callable[[int], None]
    ) -> None:
        """Host pages into device pages. Returns when the bytes are there; `landed(layer)` is called much sooner."""
        self.start_load(slots, source, landed)()

    def start_load(
        self, slots: Sequence[torch.Tensor], source: Sequence[HostPage], landed: Callable[[int], None]
    ) -> Callable[[], int]:
        """Queues the copies; the result waits until they are done, and has how many runs the host pages were. Until
        then both sides belong to the copy.

        Loads may be started before the one before is done: they go through the same streams, in order. Where queueing
        fails it raises only when nothing is under way any more.
        """
        try:
            runs = self.loads.queue(self._events(), slots, source, landed)
        except BaseException:
            self._drain(self.loads.copies, self.loads.stream)
            raise
        done = self.loads.marked  # behind every copy: each is scattered

        def wait() -> int:
            self._runtime.begin_thread()
            self._runtime.poll(done.query)
            return runs

        return wait

    # For an audit: `copier.PageCopier`

    def own_memory(self, pages: int) -> torch.Tensor:
        """Pinned as a whole, where the pool is on a GPU."""
        return torch.empty(pages, self.page_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def save_again(self, pages: Sequence[int], into: Sequence[HostPage]) -> None:
        """On the save thread, which waits for the forward that `written` has marked."""
        for event in self._after.written:
            self._runtime.poll(event.query)
        self._runtime.poll(self._queue_save(pages, into, cuda_plan.one_region).query)

    def read_back(self, slots: Sequence[torch.Tensor], into: Sequence[HostPage]) -> Callable[[], None]:
        """On the load thread. The layer is marked anew, behind the gathers, so that whoever writes the slots once the
        load's forward is over comes behind them on the device. Page numbers are computed from the slots again.
        """
        back = self._back = self._back or self._way(self._own_ring())
        back.gather.wait_event(self.loads.marked)
        addresses, order = by_address(into, range(len(into)))
        with self._runtime.on(back.gather):
            numbers = self._runtime.page_numbers(slots, self._page_tokens, order)
            for start in range(0, len(into), self.block):
                end = start + self.block
                self._save_block(back, numbers[start:end], addresses[start:end], cuda_plan.one_region)
        self.loads.stream.wait_event(self._mark(back.gather))
        self.loads.marked = self._mark(self.loads.stream)
        done = self._mark(back.to_host)
        return lambda: self._runtime.poll(done.query)

    # Layers, for whoever reads them

    def queued_layer(self) -> Event:
        """An event behind what the load under way has queued so far: one for the layers of a step. Load thread."""
        return self.loads.marked

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
