"""Saves: device pages to pool pages on a thread, in the order of asking, never in the scheduler's way."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from glm_sglang.cache.audit import Audit
from glm_sglang.cache.copier import HostPage, PageCopier
from glm_sglang.cache.slots import page_numbers
from glm_sglang.cache.store import PageStore

logger = logging.getLogger(__name__)
# Pages reserved and committed at once, a chunk of 2,048 tokens: each block costs the threads behind it some turns of the
# interpreter. Where so many do not fit, fewer are tried; what fitted so far is kept, the rest dropped.
RESERVE, FEWER = 32, 16

Count = Callable[[str, int], None]


def _nothing() -> None:
    return None


@dataclass(slots=True)
class _Save:
    names: Sequence[str]
    indices: Any  # [tokens] int64 on the device: the page's slots, page by page
    written: Callable[[], None]
    most: int = 0  # pages to be copied, behind those that are resident
    succeeded: bool | None = None


@dataclass(slots=True)
class _Block:
    """Pages that are being copied into slots that are reserved for them."""

    keys: Sequence[bytes]
    pages: Sequence[HostPage]
    wait: Callable[[], None] = _nothing


class SaveQueue:
    """A bounded queue and one thread.

    The tree locks the node until its save is taken from here by `pop`, so its pages are not reused while they
    are read. Every save gets exactly one result, and results come in the order of asking: ranks count and take
    them in step. A node may have more pages than the queue has room for: of those that are not resident the first are
    saved, and the result is False. The tree then offers the node again when a prompt next goes through it, on all ranks
    alike, and what is resident by then needs no room: so each time more of it is saved.
    """

    def __init__(
        self,
        store: PageStore,
        copier: PageCopier,
        page_tokens: int,
        *,
        limit_pages: Callable[[], int],
        count: Count,
        audit: Audit,
        pool_pages: Callable[[], int] | None = None,
    ) -> None:
        """pool_pages: what the pool holds, of which a node that is larger gets half."""
        self._store = store
        self._copier = copier
        self._page_tokens = page_tokens
        self._limit = limit_pages
        self._count = count
        self._audit = audit
        self._pool_pages = pool_pages
        # The scheduler's thread takes no lock, whose holder may be waiting for the interpreter. It alone changes `_order`
        # and `_pages_put`; the save thread sets `_pages_ended` and, after that, a save's result.
        self._order: deque[_Save] = deque()
        self._pages_put = self._pages_ended = 0
        self._work: queue.Queue[_Save | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="glm-cache-save", daemon=True)
        self._thread.start()

    @property
    def queued_pages(self) -> int:
        """Pages whose copy has not ended."""
        return self._pages_put - self._pages_ended

    def put(self, names: Sequence[str], indices: Any, written: Callable[[], None]) -> None:
        """Scheduler thread. names: the pages' keys in hexadecimal. Where the queue has no room for a single one, the save
        has failed at once.
        """
        room = max(0, self._limit() - self.queued_pages)
        most = min(len(names), room)
        if names and not room:
            self.refuse(len(names), "queue_full")
            return
        save = _Save(names, indices, written, most)
        self._order.append(save)
        self._pages_put += most
        self._work.put(save)

    def refuse(self, pages: int, end: str) -> None:
        """A save that has failed before it began; its result comes in its turn."""
        self._order.append(_Save([], None, _nothing, succeeded=False))
        self._count(end, pages)

    def completed(self) -> int:
        """How many results can be taken: those before the oldest save that is still under way."""
        done = 0
        for save in self._order:
            if save.succeeded is None:
                break
            done += 1
        return done

    def pop(self) -> bool:
        """The oldest result. IndexError where there is none."""
        if not self._order or self._order[0].succeeded is None:
            raise IndexError("no save has completed")
        return bool(self._order.popleft().succeeded)

    def quiesce(self) -> None:
        """Waits until every copy has ended, and forgets the results. Copies only: no network."""
        self._work.join()
        self._order.clear()

    def close(self) -> None:
        """Ends the thread after what is queued."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (save := self._work.get()) is not None:
            try:
                succeeded = self._save(save)
            except Exception:
                logger.exception("a save failed; its pages are computed again when they are needed")
                succeeded = False
            self._pages_ended += save.most
            save.succeeded = succeeded  # last: whoever sees it finds room for the next
            self._work.task_done()
        self._work.task_done()

    def _save(self, save: _Save) -> bool:
        keys = [bytes.fromhex(name) for name in save.names]
        try:
            save.written()
            numbers = page_numbers(save.indices, self._page_tokens)
        except BaseException:
            self._count("failed", len(keys))
            raise
        # What was loaded from the pool comes back here, and what was saved of a larger node.
        first = self._store.resident(keys)
        end = min(len(keys), first + save.most)
        if self._pool_pages is not None and len(keys) > (pool := self._pool_pages()):
            end = max(
                first, min(end, pool // 2)
            )  # its end would push out its own beginning, and everybody else
        lane = object() if end - first > RESERVE else None
        self._count("resident", first)
        if end < len(keys):
            self._count("queue_full", len(keys) - end)
        under_way: deque[_Block] = deque()
        ended = first
        try:
            start, step = first, RESERVE
            while start < end:
                part = keys[start : min(start + step, end)]
                last = len(part) <= FEWER
                pages = self._store.reserve(len(part), last=last, lane=lane)
                if pages is None:
                    if last:
                        break
                    step = FEWER
                    continue
                block = _Block(part, pages)
                under_way.append(block)
                block.wait = self._copier.start_save(numbers[start : start + len(part)], pages)
                start += len(part)
                while len(under_way) >= self._copier.depth:
                    ended += self._finish(under_way)
            while under_way:
                ended += self._finish(under_way)
        except BaseException:
            self._count("failed", end - ended)
            self._abandon(under_way)
            raise
        if ended < end:
            self._count("pool_full", end - ended)
        return ended == len(keys)

    def _finish(self, under_way: deque[_Block]) -> int:
        """Waits for the oldest block and hands it to the store; how many pages."""
        block = under_way.popleft()
        try:
            block.wait()
            self._audit.record("save", block.keys, block.pages)
        except BaseException:
            self._store.abandon(block.pages)
            raise
        self._store.commit(block.pages, block.keys)
        self._count("saved", len(block.keys))
        return len(block.keys)

    def _abandon(self, under_way: deque[_Block]) -> None:
        """No slot goes back while a copy may still write to it."""
        for block in under_way:
            try:
                block.wait()
            except Exception as error:
                logger.warning("another copy of the same save failed: %s", error)
            self._store.abandon(block.pages)
