"""Loads: pinned pool pages into the device slots of requests, layer by layer, on threads."""

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
    """Batches of loads, one after the other. One thread starts their copies, the other ends them when they are done: the
    next batch is queued on the device while the one before is still copied, where SGLang asks for it so early.

    The slots stay where they are: on a GPU nothing here waits until SGLang has computed them (`CudaPageCopier.free`).

    A load cannot miss: its pages are pinned in the pool, until its last copy is done. What can still fail is to start the
    copies; then the counter says so and SGLang aborts the batch's requests, whose slots nobody else has seen.
    """

    def __init__(
        self,
        store: PageStore,
        copier: PageCopier,
        counter: LayerCounter,
        *,
        recorder: Recorder,
        audit: Audit,
    ) -> None:
        self._store = store
        self._copier = copier
        self._counter = counter
        self._recorder = recorder
        self._audit = audit
        self._watch = audit.watch(copier)
        self._work: queue.Queue[tuple[int, list[Load], Callable[[], None]] | None] = queue.Queue()
        self._under_way: queue.Queue[tuple[int, list[Load], Callable[[], int]] | None] = queue.Queue()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._start_all, "glm-cache-load"), (self._end_all, "glm-cache-landed"))
        ]
        for thread in self._threads:
            thread.start()

    def start(self, loads: list[Load], free: Callable[[], None]) -> int:
        """Starts one batch; its index at the counter. free: `PageCopier.free`'s."""
        index = self._counter.update_producer()
        self._work.put((index, loads, free))
        return index

    def quiesce(self) -> None:
        """Waits until nothing is copied any more."""
        self._work.join()

    def close(self) -> None:
        """Ends the threads after what is queued."""
        self._work.put(None)
        for thread in self._threads:
            thread.join()

    def _start_all(self) -> None:
        while (batch := self._work.get()) is not None:
            index, loads, free = batch
            try:
                landed = self._copy(index, loads, free)
            except BaseException as error:
                self._failed(index, loads, error, "its requests are aborted")
                self._release(loads)
            else:
                self._under_way.put((index, loads, landed))
        self._work.task_done()
        self._under_way.put(None)

    def _end_all(self) -> None:
        while (batch := self._under_way.get()) is not None:
            index, loads, landed = batch
            try:
                for load in loads:  # here, where no forward waits for it: it hashes whole pages
                    self._audit.record("load", load.keys, load.pages)
                runs = landed()
                self._recorder.add("cache_load_pages", amount=sum(len(load.pages) for load in loads))
                self._recorder.add("cache_load_runs", amount=runs)
            except BaseException as error:
                self._failed(index, loads, error, "its copies were under way: the device is lost")
            finally:
                self._release(loads)

    def _failed(self, index: int, loads: list[Load], error: BaseException, then: str) -> None:
        logger.error("a load failed; %s", then, exc_info=error)
        self._recorder.add("cache_failed_loads", amount=len(loads))
        self._counter.fail(index, error)

    def _release(self, loads: list[Load]) -> None:
        for load in loads:
            self._store.release(load.pages)
        self._work.task_done()

    def _copy(self, index: int, loads: list[Load], free: Callable[[], None]) -> Callable[[], int]:
        """Starts the batch's copies; what waits for their end."""
        free()
        slots = [load.indices for load in loads]
        pages = [page for load in loads for page in load.pages]

        def landed(layer: int) -> None:
            self._counter.complete(index, layer)

        if self._watch is not None:
            keys = [key for load in loads for key in load.keys]
            return self._watch.start_load(slots, keys, pages, landed)
        return self._copier.start_load(slots, pages, landed)
