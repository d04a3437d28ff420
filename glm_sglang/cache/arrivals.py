"""Requests from their arrival to their admission: page hashes, prefetch, and how long each may be held back."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from glm_sglang.cache.page_keys import request_names
from glm_sglang.cache.recorder import Recorder
from glm_sglang.cache.store import PageStore, Ticket

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Arrival:
    """A request that has not been admitted.

    digests  of its whole pages, once hashed, and as SGLang writes them; by the hashing thread, once.
    ticket   of its prefetch, once started: it holds the request's pages until `forget`.
    skipped  pages at the start that the device had when it arrived: not fetched.
    released it is held back no longer, or was never: the device had all of it.
    turn     when the scheduler first asked whether it may run, counted; None before.
    asked    the same by the clock: from then on it is held back. On a PD prefill server that is when its decode
             server has answered, perhaps minutes after it arrived.
    """

    rid: str
    tokens: Sequence[int]
    extra_key: str | None
    cache_salt: str | None
    skipped: int
    digests: list[bytes] | None = None
    names: list[str] | None = None
    ticket: Ticket | None = None
    turn: int | None = None
    asked: float = 0.0
    failed: bool = False
    gone: bool = False
    released: bool = False


class Arrivals:
    """Hashes and prefetches on one thread; decides, on the scheduler's, who waits on.

    wait_s: as in `CacheOptions`. Owned by the linker; `begin`, `ready`, `digests` and `forget` are called by the
    scheduler thread only.
    """

    def __init__(
        self,
        store: PageStore,
        page_tokens: int,
        wait_s: float | None,
        *,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._page_tokens = page_tokens
        self._wait_s = wait_s
        self._recorder = recorder
        self._clock = clock
        self._known: dict[str, Arrival] = {}
        self._turns = itertools.count()
        self._work: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="glm-cache-arrivals", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, rid: str) -> bool:
        return rid in self._known

    def begin(
        self,
        rid: str,
        tokens: Sequence[int],
        extra_key: str | None,
        cache_salt: str | None,
        device_pages: int,
    ) -> None:
        """A request has arrived, or come back after it was retracted. Its first `device_pages` are on the device."""
        self.forget(rid)
        usable = self._usable(tokens)
        if not usable:
            return
        arrival = Arrival(rid, tokens, extra_key, cache_salt, device_pages)
        # Nothing to wait for, but to be hashed: by the time that it runs, the device may have evicted its pages.
        arrival.released = usable <= device_pages
        self._known[rid] = arrival
        self._work.put(arrival)

    def _usable(self, tokens: Sequence[int]) -> int:
        """Pages that can be restored. The last token is always computed, so the page that it completes is not."""
        return (len(tokens) - 1) // self._page_tokens

    def digests(self, rid: str) -> list[bytes] | None:
        """The page hashes, where they are known by now."""
        arrival = self._known.get(rid)
        return arrival.digests if arrival is not None else None

    def names(self, rid: str) -> list[str] | None:
        """The page hashes in hexadecimal, where they are known by now."""
        arrival = self._known.get(rid)
        return arrival.names if arrival is not None else None

    def undecided(self, rid: str) -> bool:
        """Whether `ready` has yet to be asked: the same on every rank."""
        arrival = self._known.get(rid)
        return arrival is not None and not arrival.released

    def ready(self, rid: str) -> bool:
        """Whether this rank would admit the request now, which the scheduler could. Ranks must agree before `release`;
        they ask in the same order."""
        arrival = self._known[rid]
        if arrival.turn is None:
            arrival.turn, arrival.asked = next(self._turns), self._clock()
            if arrival.ticket is not None:  # else the thread sees it
                self._store.urge(rid, arrival.turn)
        if arrival.failed or self._wait_s == 0.0:
            return True
        if arrival.ticket is not None and arrival.ticket.lost:
            arrival.ticket = None
            self._work.put(arrival)  # anew
        if arrival.ticket is not None and arrival.ticket.done:
            return True
        return self._late(arrival)

    def _late(self, arrival: Arrival) -> bool:
        """Whether its time is up; False where it has none."""
        if self._wait_s is None or self._wait_s == 0.0:
            return False
        return self._clock() - arrival.asked >= self._wait_s

    def release(self, rid: str) -> None:
        """It is held back no longer. After `ready`."""
        arrival = self._known[rid]
        arrival.released = True
        self._recorder.observe("cache_wait_seconds", self._clock() - arrival.asked)
        pending = arrival.ticket is None or not arrival.ticket.done
        if pending and not arrival.failed and self._late(arrival):
            self._recorder.add("cache_expired_waits")

    def forget(self, rid: str) -> None:
        """It was admitted, its pages pinned for its load, or is gone: they are held for it no longer. Unknown ones are
        fine."""
        arrival = self._known.pop(rid, None)
        if arrival is None:
            return
        arrival.gone = True
        self._store.cancel(rid)

    def keep(self, rids: Iterable[str]) -> int:
        """Forgets who is not among `rids`; how many those were. For requests of whose end nobody told us."""
        lost = self._known.keys() - set(rids)
        for rid in lost:
            self.forget(rid)
        return len(lost)

    def clear(self) -> None:
        """Forgets everybody."""
        for rid in list(self._known):
            self.forget(rid)

    def close(self) -> None:
        """Ends the thread after what is queued."""
        self.clear()
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (arrival := self._work.get()) is not None:
            if arrival.gone:
                continue
            try:
                digests = arrival.digests or self._hash(arrival)
                usable = self._usable(arrival.tokens)
                if usable <= arrival.skipped:
                    continue
                if not arrival.gone:
                    arrival.ticket = self._store.prefetch(arrival.rid, digests[arrival.skipped : usable])
                if arrival.turn is not None:
                    self._store.urge(arrival.rid, arrival.turn)
                if arrival.gone:  # while its prefetch was being started
                    self._store.cancel(arrival.rid)
            except Exception:
                logger.exception("no prefetch for request %s; it is served as a miss", arrival.rid)
                self._recorder.add("cache_failed_prefetches")
                arrival.failed = True

    def _hash(self, arrival: Arrival) -> list[bytes]:
        began = self._clock()
        names = request_names(arrival.tokens, self._page_tokens, arrival.extra_key, arrival.cache_salt)
        self._recorder.observe("cache_hash_seconds", self._clock() - began)
        arrival.digests = digests = [bytes.fromhex(name) for name in names]
        arrival.names = names  # last: who finds names takes the digests for granted
        return digests
