"""Layers of a load that have been queued on the device: the forward's stream waits for them, its thread does not.

UPSTREAM: LayerWiseLoadCounter. A pool calls `wait_until(layer)` when a layer is read. There the thread waits until the
layer's copies are queued (the load thread queues a whole load within milliseconds), and through `on_layer_ready`,
upstream's own extension point, its current stream waits until they have been done.
"""

from __future__ import annotations

from collections.abc import Callable
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


class StreamLayerCounter(LayerWiseLoadCounter):  # type: ignore[misc]
    """`complete` is called on the load thread, the rest on the thread of scheduler and forward."""

    def __init__(self, num_layers: int, copier: QueuedLayers) -> None:
        super().__init__(num_layers, on_layer_ready=self._reader_waits)
        self._copier = copier
        self._queued: dict[int, dict[int, Event]] = {}

    def update_producer(self) -> int:
        index: int = super().update_producer()
        self._queued[index] = {}
        return index

    def complete(self, index: int, layer: int) -> None:
        """The layer's copies are queued."""
        self._queued[index][layer] = self._copier.queued_layer()
        super().complete(index, layer)

    def _reader_waits(self, index: int, layer: int) -> None:
        event = self._queued[index].get(layer)
        if event is not None:  # none: the load has failed, which finish reports
            self._copier.reader_waits(event)

    def finish(self, index: int) -> bool:
        """Whether all has landed; returns when the batch writes no more. After the batch's forward, so normally
        without waiting.
        """
        landed: bool = super().finish(index)
        queued = self._queued.pop(index, {})
        if queued:
            self._copier.settle(queued[max(queued)])  # layers are queued in order, on one stream
        return landed

    def reset(self) -> None:
        super().reset()
        self._queued.clear()


def make(
    pages: DevicePages, region_of: Callable[[int], int] = one_region
) -> tuple[CudaPageCopier, StreamLayerCounter]:
    """What copies the pages of a pool on a GPU, and the counter of its loads. UsageError without
    cuda-bindings."""
    copier = CudaPageCopier(pages, CudaRuntime(pages.device), region_of=region_of)
    copier.warm()
    return copier, StreamLayerCounter(len(pages.layers), copier)
