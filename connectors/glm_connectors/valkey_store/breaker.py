"""A circuit breaker: after a few failures in a row a node is left alone, and asked again in the background.

closed → (threshold failures in a row) → open → (a probe in the background succeeded) → half-open → (one real
operation succeeded) → closed. A failed probe or trial doubles the delay, up to `longest`. Pure state: time
comes from `clock`, probes from whoever calls `due`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

CLOSED, HALF_OPEN, OPEN = 0, 1, 2  # values of the state's gauge


class Breaker:
    """One node and one direction (gets or puts: a node that is out of memory still answers gets).

    threshold: failures in a row that open it. first, longest: seconds until the first probe, and at most
    between two. Thread-safe.
    """

    def __init__(
        self,
        *,
        threshold: int = 5,
        first: float = 0.25,
        longest: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threshold, self._first, self._longest, self._clock = threshold, first, longest, clock
        self._lock = threading.Lock()
        self._state = CLOSED
        self._failures = 0
        self._delay = first
        self._due = 0.0
        self._trial = False

    @property
    def state(self) -> int:
        return self._state

    def admits(self) -> bool:
        """Whether an operation may run now; its outcome must follow. Half-open, one at a time may."""
        with self._lock:
            if self._state == CLOSED:
                return True
            if self._state == OPEN or self._trial:
                return False
            self._trial = True
            return True

    def succeeded(self) -> None:
        """An operation was answered (a miss is an answer)."""
        with self._lock:
            if self._state == OPEN:
                return  # an answer from before; the probe decides
            self._state, self._failures, self._trial, self._delay = CLOSED, 0, False, self._first

    def failed(self) -> bool:
        """An operation failed. Returns whether this opened the breaker."""
        with self._lock:
            self._failures += 1
            if self._state == OPEN:
                return False
            if self._state == CLOSED and self._failures < self._threshold:
                return False
            if self._state == HALF_OPEN:
                self._delay = min(2 * self._delay, self._longest)
            self._open()
            return True

    def trip(self) -> None:
        """Opens it at once: the node was down when we started."""
        with self._lock:
            self._open()

    def _open(self) -> None:
        self._state, self._trial = OPEN, False
        self._due = self._clock() + self._delay

    def due(self) -> float | None:
        """Seconds until the next probe, at least 0; None while it is not open."""
        with self._lock:
            return max(0.0, self._due - self._clock()) if self._state == OPEN else None

    def probed(self, alive: bool) -> None:
        """Tells a background probe's outcome."""
        with self._lock:
            if self._state != OPEN:
                return
            if alive:
                self._state, self._trial = HALF_OPEN, False
            else:
                self._delay = min(2 * self._delay, self._longest)
                self._due = self._clock() + self._delay
