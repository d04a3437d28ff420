"""Loads: pinned pool pages into the device slots of requests, layer by layer, on a thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from glm_sglang.cache.audit import Audit
from glm_sglang.cache.copier import HostPage, PageCopier
from glm_sglang.cache.recorder import Recorder
from glm_sglang.cache.saves import page_numbers
from glm_sglang.cache.store import PageStore

logger = logging.getLogger(__name__)


class LayerCounter(Protocol):
    """UPSTREAM: unified_cache_linker.LayerWiseLoadCounter."""

    def update_producer(self) -> int: ...
    def complete(self, index: int, layer: int) -> None: ...
    def fail(self, index: int, error: BaseException) -> None: ...


@dataclass(slots=True)
class Load:
    """One request's load. The pages are pinned; whoever ends the load releases them."""

    keys: Sequence[bytes]
    indices: Any  # [tokens] int64: slots of the request's own, page by page
    pages: Sequence[HostPage]


class LoadQueue:
    """Batches of loads, one after the other.

    A load cannot miss: its pages are pinned in the pool. What can still fail is the copy; then the counter says so and
    SGLang aborts the batch's requests, whose slots nobody else has seen.
    """

    def __init__(
        self,
        store: PageStore,
        copier: PageCopier,
        counter: LayerCounter,
        page_tokens: int,
        *,
        recorder: Recorder,
        audit: Audit,
    ) -> None:
        self._store = store
        self._copier = copier
        self._counter = counter
        self._page_tokens = page_tokens
        self._recorder = recorder
        self._audit = audit
        self._work: queue.Queue[tuple[int, list[Load], Callable[[], None]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="glm-cache-load", daemon=True)
        self._thread.start()

    def start(self, loads: list[Load], free: Callable[[], None]) -> int:
        """Starts one batch; its index at the counter. `free` waits until the slots may be written."""
        index = self._counter.update_producer()
        self._work.put((index, loads, free))
        return index

    def quiesce(self) -> None:
        """Waits until nothing is copied any more."""
        self._work.join()

    def close(self) -> None:
        """Ends the thread after what is queued."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (batch := self._work.get()) is not None:
            index, loads, free = batch
            try:
                self._load(index, loads, free)
            except BaseException as error:
                logger.exception("a load failed; its requests are aborted")
                self._recorder.add("cache_failed_loads", amount=len(loads))
                self._counter.fail(index, error)
            finally:
                for load in loads:
                    self._store.release(load.pages)
                self._work.task_done()
        self._work.task_done()

    def _load(self, index: int, loads: list[Load], free: Callable[[], None]) -> None:
        free()
        numbers: list[int] = []
        pages: list[HostPage] = []
        for load in loads:
            numbers.extend(page_numbers(load.indices, self._page_tokens))
            pages.extend(load.pages)
            self._audit.record("load", load.keys, load.pages)
        self._copier.load(numbers, pages, lambda layer: self._counter.complete(index, layer))
        self._recorder.add("cache_load_pages", amount=len(pages))
