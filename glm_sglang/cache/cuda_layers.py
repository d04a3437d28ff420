"""Layers of a load that have been queued on the device: the forward's stream waits for them, its thread does not.

UPSTREAM: LayerWiseLoadCounter. A pool calls `wait_until(layer)` when a layer is read. There the thread waits until the
layer's copies are queued, whatever the device is at (`cuda_loads` bounds how long that takes), and its current stream
waits until they have been done.

Order. `finish` is called on the scheduler's thread as soon as the batch is launched, and must not wait for the device: it
returns while copies are under way. That is safe because the batch's forward is behind the whole load on the device:
layers are queued in order on one stream, and the forward's stream waits for the last one (`_Batch.joined`). So of those
who touch the batch's slots, or what the load reads, afterwards
  the batch's result     is copied behind the forward; SGLang sends pages to decode and frees slots once it has come.
  an early send          (a cached prefix, before any forward) waits for no stream with NIXL: `gate.early_send` leaves it
                         out until the result of a batch that loads has come.
  later forwards         run on the same stream; so a slot that is freed or evicted, by an abort too, is written later.
  later saves            wait for an event of that stream, recorded when they are asked for (`CudaPageCopier.written`).
  later loads            go through the same two streams, in order.
  pool pages, staging    are released by the load's own events: `LoadQueue` keeps the pins until its last copy is done,
                         a slot of the ring is filled again behind `Slot.free`. Neither asks for `finish`.
  flush and shutdown     wait for `LoadQueue`, not for `finish`.
Where the forward has not waited for the last layer, or the load has failed, none of that holds: `finish` waits until
nothing is written any more. A copy that fails once it is queued is an error of the whole CUDA context: the forward's
result never comes, and no later call succeeds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from glm_sglang.cache.cuda_copies import CudaPageCopier
from glm_sglang.cache.cuda_plan import one_region
from glm_sglang.cache.cuda_runtime import CudaRuntime, Event
from glm_sglang.cache.device_pages import DevicePages
from glm_sglang.cache.layer_waits import MeasuredLayerCounter


class QueuedLayers(Protocol):
    """`cuda_copies.CudaPageCopier`."""

    def queued_layer(self) -> Event: ...
    def reader_waits(self, event: Event) -> None: ...
    def settle(self, event: Event) -> None: ...


@dataclass(slots=True)
class _Batch:
    """A load: an event for each layer that is queued, and whether no more will be.

    joined   the forward's stream waits for the last layer, so whatever follows it there follows the load.
    awaited  somebody waits for a change, and is told of it. It is set before that one looks, and read after the change
             has been made, so one of the two sees the other's; nobody takes a lock for a layer that nobody waits for.
    """

    queued: dict[int, Event] = field(default_factory=dict)
    failed: bool = False
    joined: bool = False
    awaited: bool = False
    change: threading.Condition = field(default_factory=threading.Condition)

    def changed(self) -> None:
        """Something has been queued, or nothing more will be."""
        if self.awaited:
            with self.change:
                self.change.notify_all()

    def wait_for(self, true: Callable[[], bool]) -> None:
        """Returns once it is, or the load has failed."""
        with self.change:
            self.awaited = True
            self.change.wait_for(lambda: true() or self.failed)


class StreamLayerCounter(MeasuredLayerCounter):
    """`complete` and `fail` are called on the load's threads, the rest on the thread of scheduler and forward.

    One lock a batch, where upstream's has a future a layer: 78 of them are made in the scheduler's time.
    """

    def __init__(self, num_layers: int, copier: QueuedLayers) -> None:
        super().__init__(num_layers)
        self._copier = copier
        self._batches: dict[int, _Batch] = {}

    def update_producer(self) -> int:
        self.producer_index += 1
        self._batches[self.producer_index] = _Batch()
        return int(self.producer_index)

    def complete(self, index: int, layer: int) -> None:
        """The layer's copies are queued."""
        batch = self._batches[index]
        batch.queued[layer] = self._copier.queued_layer()
        batch.changed()

    def fail(self, index: int, error: BaseException) -> None:
        """Layers that are not queued by now never will be."""
        batch = self._batches.get(index)
        if batch is not None:
            batch.failed = True
            batch.changed()

    def wait_until(self, threshold: int) -> None:
        """The current stream waits for the layer; the thread waits until it is queued, or has failed."""
        batch = self._batches.get(self.consumer_index)
        if batch is None:
            return
        if threshold not in batch.queued:
            with self.waiting():
                batch.wait_for(lambda: threshold in batch.queued)
        event = batch.queued.get(threshold)
        if event is not None:  # none: the load has failed, which finish reports
            self._copier.reader_waits(event)
            batch.joined |= threshold == self.num_layers - 1

    def finish(self, index: int) -> bool:
        """Whether all layers were queued. The batch's forward has been launched.

        Waits for the load thread while it queues, and for the device only where the forward does not.
        """
        batch = self._batches.get(index)
        if batch is None:
            return True
        batch.wait_for(lambda: len(batch.queued) == self.num_layers)
        del self._batches[index]
        whole = len(batch.queued) == self.num_layers and not batch.failed
        if batch.queued and not (whole and batch.joined):
            # Layers are queued in order, on one stream.
            self._copier.settle(batch.queued[max(batch.queued)])
        return whole

    def reset(self) -> None:
        super().reset()
        self._batches.clear()


def make(
    pages: DevicePages, region_of: Callable[[int], int] = one_region
) -> tuple[CudaPageCopier, StreamLayerCounter]:
    """What copies the pages of a pool on a GPU, and the counter of its loads. UsageError without
    cuda-bindings."""
    copier = CudaPageCopier(pages, CudaRuntime(pages.device), region_of=region_of)
    copier.warm()
    return copier, StreamLayerCounter(len(pages.layers), copier)
