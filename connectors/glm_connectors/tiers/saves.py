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
# Seconds that a worker waits for the next pages of its node before its job ends: a job takes the event loop a millisecond
# of the interpreter, and a prefill's chunks follow each other within that time.
_LINGER = 1.0


@dataclass(frozen=True)
class SaveLimits:
    """pages, share_pages: queued at most (count, and the share of the pool as it then is). patience: seconds for a store
    that is down. group: pages of one round trip. workers: round trips at a time, a node."""

    pages: int
    share_pages: Callable[[], int]
    patience: float
    group: int
    workers: int


@dataclass(eq=False, slots=True)
class _Save:
    page: Page
    key: bytes
    since: float
    attempts: int = 0


class _Node:
    """What is queued for one node. `waiting`: a worker waits for it; under the saver's lock."""

    def __init__(self, lock: threading.Lock) -> None:
        self.queue: deque[_Save] = deque()
        self.more = threading.Condition(lock)
        self.waiting = False
        self.pumps: set[asyncio.Task[None]] = set()  # changed on the event loop only


class Saver:
    """The save queue of one store. Its executor's jobs put what is queued, group by group, on its threads; pumps on the
    store's event loop start them, and wait where a node is left alone."""

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
        self._nodes = [_Node(self._lock) for _ in valkey.nodes]
        self._outstanding = 0
        self._idle = threading.Event()
        self._idle.set()
        self._closed = False

    # Any thread

    @property
    def outstanding(self) -> int:
        """Pages that wait for their put or are being put."""
        return self._outstanding

    def enqueue(self, pages: Sequence[Page], keys: Sequence[bytes]) -> None:
        """Queues the puts of pages that the caller holds, as many as fit, in order; never blocks."""
        unserved = []
        with self._lock:
            room = min(self._limits.pages, self._limits.share_pages()) - self._outstanding
            fit = 0 if self._closed else max(0, min(room, len(pages)))
            if fit:
                self._outstanding += fit
                self._idle.clear()
                self._pool.also(pages[:fit], "put")
                now, place = self._clock(), self._valkey.shards.place
                touched = set()
                for page, key in zip(pages[:fit], keys, strict=False):
                    node = place(key)
                    self._nodes[node].queue.append(_Save(page, key, now))
                    touched.add(node)
                for node in touched:
                    if self._nodes[node].waiting:
                        self._nodes[node].more.notify()
                    else:
                        unserved.append(node)
        if fit < len(pages):
            self._table.add(
                "cache_dropped_saves", "closing" if self._closed else "full", amount=len(pages) - fit
            )
        if unserved:
            self._loop.call_soon_threadsafe(self._wake, unserved)

    def drop_all(self, reason: str) -> None:
        """Gives up what is queued; what is being put goes on."""
        for node in self._nodes:
            with self._lock:
                dropped = list(node.queue)
                node.queue.clear()
            self._done(dropped, reason)

    def close(self, drain: float) -> None:
        """Takes no more, waits at most `drain` seconds for what is queued, then gives it up."""
        with self._lock:
            self._closed = True
            for node in self._nodes:
                node.more.notify_all()
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

    def _wake(self, numbers: Sequence[int]) -> None:
        """As many pumps as there are round trips to make, up to a worker each."""
        for number in numbers:
            node = self._nodes[number]
            free = self._limits.workers - len(node.pumps)
            for _ in range(min(free, -(-len(node.queue) // self._limits.group))):
                task = self._loop.create_task(self._pump(number))
                node.pumps.add(task)
                task.add_done_callback(partial(self._ended, number))

    def _ended(self, number: int, pump: asyncio.Task[None]) -> None:
        node = self._nodes[number]
        node.pumps.discard(pump)
        if not pump.cancelled() and (error := pump.exception()) and not self._closed:
            logger.error("a save pump failed; another starts in %g s", _RECHECK, exc_info=error)
            self._loop.call_later(_RECHECK, self._wake, [number])
        elif node.queue and not self._closed:  # since it looked
            self._wake([number])

    async def _pump(self, number: int) -> None:
        """Jobs until nothing is queued."""
        node = self._nodes[number]
        while node.queue:
            if self._valkey.breakers[number, "put"].due() is not None:
                self._expire(node)
                await asyncio.sleep(_RECHECK)
            elif not await self._executor.submit_job(self._put_queued, number):
                await asyncio.sleep(_RECHECK)  # half-open, and someone else has the trial

    def _expire(self, node: _Node) -> None:
        """Gives up what has waited longer than its patience: it keeps pages from being evicted."""
        late = self._clock() - self._limits.patience
        expired = []
        with self._lock:
            while node.queue and node.queue[0].since <= late:
                expired.append(node.queue.popleft())
        self._done(expired, "down")

    # A worker's thread

    def _put_queued(self, number: int) -> bool:
        """A job: puts what is queued for a node, and what comes while it does or soon after. False where it may not now.

        It owns the pages in hand until their put has ended, whoever cancels the job meanwhile.
        """
        while saves := self._next(number):
            asked, more = self._put_all(number, saves)
            if not more:
                return asked
        return True

    def _next(self, number: int) -> list[_Save]:
        """A round trip's saves; empty once there are none and somebody else waits for more, or waiting was in vain."""
        node = self._nodes[number]
        with self._lock:
            if not node.queue and not node.waiting and not self._closed:
                node.waiting = True
                node.more.wait_for(lambda: node.queue or self._closed, _LINGER)
                node.waiting = False
            saves = [node.queue.popleft() for _ in range(min(len(node.queue), self._limits.group))]
            left = bool(node.queue)
        if left and len(node.pumps) < self._limits.workers:
            self._loop.call_soon_threadsafe(self._wake, [number])
        return saves

    def _put_all(self, number: int, saves: list[_Save]) -> tuple[bool, bool]:
        """One round trip. What the store did not take is queued again while that makes sense. Whether the node was asked
        at all, and whether it took everything."""
        again: list[_Save] = []
        lost: dict[str, list[_Save]] = {}
        taken = saves
        asked = True
        try:
            self._put(number, saves)
        except StoreDownError:
            asked, taken, again = False, [], saves
        except StoreFailedError as error:
            marks = error.taken or [False] * len(saves)
            taken = [save for save, mark in zip(saves, marks, strict=True) if mark]
            for save, mark in zip(saves, marks, strict=True):
                if not mark:
                    end = self._end_of(save, error)
                    (again if end is None else lost.setdefault(end, [])).append(save)
        except Exception as error:
            if not self._closed:
                logger.warning("a put failed: %s", error)
            taken, lost = [], {"closing" if self._closed else "failed": saves}
        with self._lock:
            self._nodes[number].queue.extendleft(reversed(again))
        self._done(taken)
        for reason, those in lost.items():
            self._done(those, reason)
        return asked, len(taken) == len(saves)

    def _end_of(self, save: _Save, error: StoreFailedError) -> str | None:
        """Why a failed put is given up; None where it is tried again."""
        if self._closed:
            return "closing"
        if error.passing:
            return "down" if self._clock() - save.since > self._limits.patience else None
        save.attempts += 1
        return "failed" if save.attempts >= _ATTEMPTS else None

    def _put(self, number: int, saves: list[_Save]) -> None:
        pages, keys = [save.page for save in saves], [save.key for save in saves]
        self._envelope.seal_all(pages, keys)
        name = self._envelope.name
        self._valkey.put(number, [name(key) for key in keys], [page.slot for page in pages])
