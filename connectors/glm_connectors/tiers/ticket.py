"""What a prefetch is to its request: whether it is done and how it ended, and what `prefetch` keeps of it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

from glm_connectors.tiers.pool import Page

_numbers = itertools.count()


class Ticket:
    """A prefetch, and what it holds for its request; `TieredStore.resident` and `pin` say what there is.

    claim    keys of the pages that it is to hold: its first ones.
    missing  those of them that the pool has not: to be fetched.
    short    why it claims less than all of its pages: the end that says so, or "".
    """

    def __init__(
        self, rid: str, keys: Sequence[bytes], missing: Sequence[bytes], most: int, *, counted: bool
    ) -> None:
        """missing: those of the first `most` keys that the pool has not. most: how many one request may hold.
        counted: whether an earlier one of the same request counts its hits and misses."""
        self.rid = rid
        self.claim = keys[:most]
        self.missing = missing
        self.short = "share" if len(keys) > most else ""
        self.number = next(_numbers)
        self.turn: int | None = None
        self.lost = False  # others needed the room of its pages: they may be gone
        self.end = ""  # one of metric_list.PREFETCH_ENDS, once done
        self.loaded = 0  # pages of `missing` that came
        self._absent = 0 if counted else len(missing)  # pages that are yet to be hits or misses of Valkey
        self._began = time.perf_counter()
        self._done = threading.Event()
        self._cancelled = False
        self._within = False  # it has had its room; the event loop's
        self._expected = 0  # pages that it counts among those under way; under the prefetcher's lock
        self._fetches: set[Any] = set()  # gets that it waits for; the event loop's
        self._held: list[Page] = []  # the event loop's
        self._without: set[int] = set()  # siblings that do not lend to it; the event loop's

    @property
    def done(self) -> bool:
        """It holds what it can, or has nothing to hold: no more pages will come."""
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Waits until `done`, at most `seconds`; returns `done`. Not for the scheduler thread."""
        return self._done.wait(seconds)

    def finish(self, end: str) -> bool:
        """Ends it, once; whether this did. For the store."""
        if self._done.is_set():
            return False
        self.end = end
        self._done.set()
        return True

    @property
    def seconds(self) -> float:
        """Since its request arrived."""
        return time.perf_counter() - self._began
