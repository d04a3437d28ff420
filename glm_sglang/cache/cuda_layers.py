"""Layers of a load that have been queued on the device: the forward's stream waits for them, its thread does not.

UPSTREAM: LayerWiseLoadCounter. A pool calls `wait_until(layer)` when a layer is read. There the thread waits until the
layer's copies are queued (the load thread queues a whole load within milliseconds), and its current stream waits
until they have been done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter

from glm_sglang.cache.cuda_copies import CudaPageCopier
from glm_sglang.cache.cuda_plan import one_region
from glm_sglang.cache.cuda_runtime import CudaRuntime, Event
from glm_sglang.cache.device_pages import DevicePages


class QueuedLayers(Protocol):
    """`cuda_copies.CudaPageCopier`."""

    def queued_layer(self) -> Event: ...
    def reader_waits(self, event: Event) -> None: ...
    def settle(self, event: Event) -> None: ...


@dataclass(slots=True)
class _Batch:
    """A load: an event for each layer that is queued, and whether no more will be."""

    queued: dict[int, Event] = field(default_factory=dict)
    failed: bool = False
    change: threading.Condition = field(default_factory=threading.Condition)


class StreamLayerCounter(LayerWiseLoadCounter):  # type: ignore[misc]
    """`complete` and `fail` are called on the load thread, the rest on the thread of scheduler and forward.

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
        batch, event = self._batches[index], self._copier.queued_layer()
        with batch.change:
            batch.queued[layer] = event
            batch.change.notify_all()

    def fail(self, index: int, error: BaseException) -> None:
        """Layers that are not queued by now never will be."""
        batch = self._batches.get(index)
        if batch is not None:
            with batch.change:
                batch.failed = True
                batch.change.notify_all()

    def wait_until(self, threshold: int) -> None:
        """The current stream waits for the layer; the thread waits until it is queued, or has failed."""
        batch = self._batches.get(self.consumer_index)
        if batch is None:
            return
        if threshold not in batch.queued:
            with batch.change:
                batch.change.wait_for(lambda: threshold in batch.queued or batch.failed)
        event = batch.queued.get(threshold)
        if event is not None:  # none: the load has failed, which finish reports
            self._copier.reader_waits(event)

    def finish(self, index: int) -> bool:
        """Whether all has landed; returns when the batch writes no more. After the batch's forward, so normally
        without waiting.
        """
        batch = self._batches.get(index)
        if batch is None:
            return True
        with batch.change:
            batch.change.wait_for(lambda: len(batch.queued) == self.num_layers or batch.failed)
        del self._batches[index]
        if batch.queued:
            # Layers are queued in order, on one stream.
            self._copier.settle(batch.queued[max(batch.queued)])
        return bool(len(batch.queued) == self.num_layers)

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
