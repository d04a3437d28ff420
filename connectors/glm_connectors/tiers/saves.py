"""Saves: committed pages wait in a bounded queue for their put, off every path that a request waits on.

A queued page is held against eviction, so the queue may hold no more than its share of the pool. What does
not fit is dropped and counted; so is what has waited too long for a store that is down, or was refused.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from glm_connectors.tiers.envelope import Envelope
from glm_connectors.tiers.metrics import MetricTable
from glm_connectors.tiers.pool import CpuPool, Page
from glm_connectors.valkey_store.store import StoreDownError, StoreFailedError, ValkeyStore

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_RECHECK = 0.05  # seconds between two looks at a node that is left alone


@dataclass(frozen=True)
class SaveLimits:
    """pages, share_pages: queued at most (count, and the share of the pool as it then is). patience: seconds for a store
    that is down. group: pages of one round trip. workers: round trips at a time, a node."""

    pages: int
    share_pages: Callable[[], int]
    patience: float
    group: int
    workers: int


@dataclass(eq=False)
class _Save:
    page: Page
    key: bytes
    since: float
    attempts: int = 0


class Saver:
    """The save queue of one store. Pumps run on the store's event loop, puts on its executor's threads."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        executor: Any,
        pool: CpuPool,
        valkey: ValkeyStore,
        envelope: Envelope,
        table: MetricTable,
        limits: SaveLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop, self._executor, self._pool, self._valkey = loop, executor, pool, valkey
        self._envelope, self._table, self._limits, self._clock = envelope, table, limits, clock
        self._lock = threading.Lock()
        self._queues: list[deque[_Save]] = [deque() for _ in valkey.nodes]
        self._running = [0] * len(valkey.nodes)  # pumps of each node; the event loop's, as they are
        self._outstanding = 0
        self._idle = threading.Event()
        self._idle.set()
        self._closed = False
        self._pumps: set[asyncio.Task[None]] = set()

    # Any thread

    @property
    def outstanding(self) -> int:
        """Pages that wait for their put or are being put."""
        return self._outstanding

    def enqueue(self, pages: Sequence[Page], keys: Sequence[bytes]) -> None:
        """Queues the puts of pages that the caller holds, as many as fit, in order; never blocks."""
        with self._lock:
            room = min(self._limits.pages, self._limits.share_pages()) - self._outstanding
            fit = 0 if self._closed else max(0, min(room, len(pages)))
            self._outstanding += fit
            if fit:
                self._idle.clear()
                self._pool.also(pages[:fit], "put")
                now = self._clock()
                touched = set()
                for page, key in zip(pages[:fit], keys, strict=False):
                    node = self._valkey.shards.place(key)
                    self._queues[node].append(_Save(page, key, now))
                    touched.add(node)
        if fit < len(pages):
            self._table.add(
                "cache_dropped_saves", "closing" if self._closed else "full", amount=len(pages) - fit
            )
        if fit:
            self._loop.call_soon_threadsafe(self._wake, touched)

    def drop_all(self, reason: str) -> None:
        """Gives up what is queued; what is being put goes on."""
        for queue in self._queues:
            dropped = []
            while True:
                try:
                    dropped.append(queue.popleft())
                except IndexError:
                    break
            self._done(dropped, reason)

    def close(self, drain: float) -> None:
        """Takes no more, waits at most `drain` seconds for what is queued, then gives it up."""
        with self._lock:
            self._closed = True
        self._idle.wait(drain)
        self.drop_all("closing")

    def _done(self, saves: Sequence[_Save], dropped: str | None = None) -> None:
        if not saves:
            return
        self._pool.release([save.page for save in saves], "put")
        if dropped is None:
            self._table.add("cache_saved_pages", amount=len(saves))
            self._table.add("cache_saved_bytes", amount=len(saves) * self._envelope.value_bytes)
        else:
            self._table.add("cache_dropped_saves", dropped, amount=len(saves))
        with self._lock:
            self._outstanding -= len(saves)
            if not self._outstanding:
                self._idle.set()

    # The event loop

    def _wake(self, nodes: set[int]) -> None:
        """As many pumps as there are round trips to make."""
        for node in nodes:
            # Twice the workers: the next round trip is queued when a worker's thread is free, not a loop's turn later.
            free = 2 * self._limits.workers - self._running[node]
            for _ in range(min(free, -(-len(self._queues[node]) // self._limits.group))):
                self._running[node] += 1
                task = self._loop.create_task(self._pump(node))
                self._pumps.add(task)
                task.add_done_callback(partial(self._ended, node))

    def _ended(self, node: int, pump: asyncio.Task[None]) -> None:
        self._running[node] -= 1
        self._pumps.discard(pump)
        if pump.cancelled():
            return
        if error := pump.exception():
            logger.error("a save pump failed", exc_info=error)
        if self._queues[node]:  # since it looked
            self._wake({node})

    async def _pump(self, node: int) -> None:
        """Puts until nothing is queued."""
        queue = self._queues[node]
        while queue:
            if self._valkey.breakers[node, "put"].due() is not None:
                self._expire(queue)
                await asyncio.sleep(_RECHECK)
            elif saves := self._pop(queue):
                await self._put_all(node, saves)

    def _pop(self, queue: deque[_Save]) -> list[_Save]:
        saves: list[_Save] = []
        while queue and len(saves) < self._limits.group:
            try:
                saves.append(queue.popleft())
            except IndexError:  # `drop_all` was faster
                break
        return saves

    def _expire(self, queue: deque[_Save]) -> None:
        """Gives up what has waited longer than its patience: it keeps pages from being evicted."""
        late = self._clock() - self._limits.patience
        expired = []
        while queue and queue[0].since <= late:
            expired += self._pop_one(queue)
        self._done(expired, "down")

    @staticmethod
    def _pop_one(queue: deque[_Save]) -> list[_Save]:
        try:
            return [queue.popleft()]
        except IndexError:
            return []

    async def _put_all(self, node: int, saves: list[_Save]) -> None:
        """One round trip. What the store did not take is queued again while that makes sense."""
        again: list[_Save] = []
        lost: dict[str, list[_Save]] = {}
        taken = saves
        try:
            # The buffers themselves are among the arguments: the executor keeps a reference on each until the
            # client is done with the bytes, even when this coroutine is cancelled meanwhile.
            memory = [save.page.memory for save in saves]
            await self._executor.submit_job(self._put, node, saves, memory)
        except StoreDownError:
            taken, again = [], saves
            await asyncio.sleep(_RECHECK)  # half-open, and someone else has the trial
        except StoreFailedError as error:
            marks = error.taken or [False] * len(saves)
            taken = [save for save, mark in zip(saves, marks, strict=True) if mark]
            for save, mark in zip(saves, marks, strict=True):
                if not mark:
                    end = self._end_of(save, error)
                    (again if end is None else lost.setdefault(end, [])).append(save)
        except asyncio.CancelledError:
            taken, lost = [], {"closing": saves}
            raise
        except Exception as error:
            if not self._closed:
                logger.warning("a put failed: %s", error)
            taken, lost = [], {"closing" if self._closed else "failed": saves}
        finally:
            self._queues[node].extendleft(reversed(again))
            self._done(taken)
            for reason, those in lost.items():
                self._done(those, reason)

    def _end_of(self, save: _Save, error: StoreFailedError) -> str | None:
        """Why a failed put is given up; None where it is tried again."""
        if self._closed:
            return "closing"
        if error.passing:
            return "down" if self._clock() - save.since > self._limits.patience else None
        save.attempts += 1
        return "failed" if save.attempts >= _ATTEMPTS else None

    # A worker's thread

    def _put(self, node: int, saves: list[_Save], _memory: list[Any]) -> None:
        self._envelope.seal_all([save.page for save in saves], [save.key for save in saves])
        names = [self._envelope.name(save.key) for save in saves]
        self._valkey.put(node, names, [save.page.slot for save in saves])
