"""Moves pages between the device pool and pages of the CPU pool, with torch's own copies.

The one place that knows streams and events. A copier is used by one save thread and one load thread at a time;
what is faster on a GPU replaces this class and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from glm_sglang.cache import cuda_plan
from glm_sglang.cache.device_pages import DevicePages
from glm_sglang.cache.slots import page_numbers


class HostPage(Protocol):
    """A page of the CPU pool that its holder has reserved or pinned."""

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 [bytes of a page], in pinned memory where there is CUDA."""

    @property
    def address(self) -> int:
        """Where its first byte is: `tensor.data_ptr()`, without making the tensor."""


Saved = Callable[[Sequence[int], Sequence[HostPage]], None]


class PageCopier(Protocol):
    """How pages are copied.

    saved: an audit's, called with the arguments of `start_save` by whoever waits for it, once the bytes are there.
    layers: of the pool; `landed` is called so often.
    """

    saved: Saved | None
    layers: int
    page_bytes: int

    def written(self, forward_stream: Any) -> Callable[[], None]:
        """Called on the scheduler thread, never waits. The result waits until the pages that are written by now
        may be read; for another thread.
        """

    def free(self, forward_stream: Any) -> Callable[[], None]:
        """Called on the scheduler thread, never waits. The result is for the load thread: the load that it starts next
        reads slots that are computed by now, and writes pages that nobody reads any more. Whether the thread waits
        for that, or the device, is the copier's business.
        """

    @property
    def depth(self) -> int:
        """How many saves may usefully be under way at once, 1 or more."""

    def start_save(self, pages: Sequence[int], into: Sequence[HostPage]) -> Callable[[], None]:
        """Device pages, by number, into host pages. The result returns when the bytes are there."""

    def start_load(
        self, slots: Sequence[torch.Tensor], source: Sequence[HostPage], landed: Callable[[int], None]
    ) -> Callable[[], int]:
        """Host pages into the device pages whose slots these are: int64 [tokens] of each request, page by page. Calls
        `landed(layer)` for each layer, in order, once whoever reads it may be told (`layer_waits`). The result, for any
        thread, returns when the host pages are no longer read and the device pages no longer written: how many runs of
        neighbours the host pages were. Where this raises, nothing is read or written any more already.
        """

    # For an audit:

    def own_memory(self, pages: int) -> torch.Tensor:
        """uint8 [pages, bytes of a page], of a kind that pages can be copied to."""

    def save_again(self, pages: Sequence[int], into: Sequence[HostPage]) -> None:
        """Within `saved`: what the same device pages hold now, after what the save was to come behind has been done by
        the host's clock, which does not trust the order on the device. Returns when the bytes are there.
        """

    def read_back(self, slots: Sequence[torch.Tensor], into: Sequence[HostPage]) -> Callable[[], None]:
        """Within `landed` of a load's last layer: what the load has made of the pages whose slots these are, before
        anybody else may write them. The result, for any thread, returns when the bytes are there.
        """


class TorchPageCopier:
    """Copies through a staging tensor, a block of pages at a time; every call waits for its copies.

    Staging keeps the number of operations at layers + pages a block, where a copy for each layer of each page
    would be their product. Owned by the copier: two blocks, one for each direction.
    """

    saved: Saved | None = None

    def __init__(self, device: DevicePages, block_bytes: int = 64 << 20) -> None:
        self._device = device
        self.layers, self.page_bytes = len(device.layers), device.layout.page_bytes
        self.block = max(1, block_bytes // device.layout.page_bytes)
        self._cuda = device.device.type == "cuda"
        self._streams: dict[str, Any] = {}

    def written(self, forward_stream: Any) -> Callable[[], None]:
        """Two events: the current stream has computed which pages, the forward stream has filled them.

        UPSTREAM: UnifiedCacheLinker.record_offload_ready; the scheduler's stream runs ahead of the forward.
        Without CUDA a forward is complete when it returns.
        """
        if not self._cuda:
            return _nothing
        events = [_event(None)]
        if forward_stream is not None:
            events.append(_event(forward_stream))

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait

    free = written
    depth = 1

    def start_save(self, pages: Sequence[int], into: Sequence[HostPage]) -> Callable[[], None]:
        """The copies are complete when this returns; there is nothing left to wait for."""
        self.save(pages, into)
        if self.saved is not None:
            self.saved(pages, into)
        return _nothing

    def save(self, pages: Sequence[int], into: Sequence[HostPage]) -> None:
        """A block is gathered on the device, then copied page by page."""
        with self._stream("save"):
            for start in range(0, len(pages), self.block):
                numbers = pages[start : start + self.block]
                rows = self._rows(numbers)
                staging = torch.empty(
                    len(numbers), self._device.layout.page_bytes, dtype=torch.uint8, device=rows.device
                )
                for part in self._parts():
                    staging[:, part.span] = part.rows.index_select(0, rows)
                for row, page in zip(staging, into[start : start + self.block], strict=True):
                    page.tensor.copy_(row, non_blocking=self._cuda)
                self._synchronize("save")

    def start_load(
        self, slots: Sequence[torch.Tensor], source: Sequence[HostPage], landed: Callable[[int], None]
    ) -> Callable[[], int]:
        """The copies are complete when this returns; there is nothing left to wait for."""
        layout = self._device.layout
        self.load(
            [number for one in slots for number in page_numbers(one, layout.page_tokens)], source, landed
        )
        runs = cuda_plan.runs(sorted(page.address for page in source), layout.page_bytes)
        return lambda: len(runs)

    def load(self, pages: Sequence[int], source: Sequence[HostPage], landed: Callable[[int], None]) -> None:
        """A layer has landed when the last block's part of it has."""
        with self._stream("load"):
            for start in range(0, len(pages), self.block):
                numbers = pages[start : start + self.block]
                rows = self._rows(numbers)
                staging = torch.empty(
                    len(numbers), self._device.layout.page_bytes, dtype=torch.uint8, device=rows.device
                )
                for row, page in zip(staging, source[start : start + self.block], strict=True):
                    row.copy_(page.tensor, non_blocking=self._cuda)
                last = start + self.block >= len(pages)
                for layer, parts in enumerate(self._device.layers):
                    for part in parts:
                        part.rows.index_copy_(0, rows, staging[:, part.span])
                    if last:
                        self._synchronize("load")
                        landed(layer)
                self._synchronize("load")

    def own_memory(self, pages: int) -> torch.Tensor:
        """Pinned where there is CUDA."""
        return torch.empty(pages, self.page_bytes, dtype=torch.uint8, pin_memory=self._cuda)

    def save_again(self, pages: Sequence[int], into: Sequence[HostPage]) -> None:
        """`written` has waited already, so this is a plain save."""
        self.save(pages, into)

    def read_back(self, slots: Sequence[torch.Tensor], into: Sequence[HostPage]) -> Callable[[], None]:
        """At once: the load is complete, and its forward has not begun."""
        tokens = self._device.layout.page_tokens
        with self._stream("back"):
            numbers = [number for one in slots for number in page_numbers(one, tokens)]
            rows = self._rows(numbers)
            for part in self._parts():
                for page, row in zip(into, part.rows.index_select(0, rows), strict=True):
                    page.tensor[part.span].copy_(row, non_blocking=self._cuda)
            self._synchronize("back")
        return _nothing

    def _parts(self) -> Any:
        return (part for parts in self._device.layers for part in parts)

    def _rows(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self._device.device)

    def _stream(self, name: str) -> Any:
        """A stream of our own a direction: the default one would order our copies with the forward's kernels."""
        if not self._cuda:
            return torch.no_grad()
        if name not in self._streams:
            self._streams[name] = _cuda().Stream(self._device.device)
        return torch.cuda.stream(self._streams[name])

    def _synchronize(self, name: str) -> None:
        if self._cuda:
            self._streams[name].synchronize()


def _cuda() -> Any:
    """torch.cuda, whose streams and events have no types."""
    return torch.cuda


def _event(stream: Any) -> Any:
    event = _cuda().Event()
    event.record(*([] if stream is None else [stream]))
    return event


def _nothing() -> None:
    return None
