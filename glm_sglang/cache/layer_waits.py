"""SGLang's counter of a load's layers, with what the scheduler's thread waits for it measured.

UPSTREAM: LayerWiseLoadCounter. A forward is launched on the scheduler's thread, and asks for each layer before it reads
it: whatever it waits there, the scheduler waits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter


class MeasuredLayerCounter(LayerWiseLoadCounter):  # type: ignore[misc]
    """waiting: entered around every wait of the forward's thread, and only then; the linker sets it."""

    waiting: Callable[[], AbstractContextManager[object]] = staticmethod(nullcontext)


class HostLayerCounter(MeasuredLayerCounter):
    """For copies that are complete when they are counted: the thread waits for the layer's bytes."""

    def wait_until(self, threshold: int) -> None:
        """Returns when the layer has landed, or the load has failed, which `finish` reports."""
        futures = self.futures.get(self.consumer_index)
        if futures is None:
            return
        if futures[threshold].done():
            super().wait_until(threshold)
            return
        with self.waiting():
            super().wait_until(threshold)
