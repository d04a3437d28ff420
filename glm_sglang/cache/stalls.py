"""How long the cache keeps the scheduler's thread, a scheduling step at a time."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
Observe = Callable[[float], None]


class Kind(IntEnum):
    """What a call is to its step, the least first."""

    POLL = 0  # nothing was to be done, or nothing for us
    HOLD = 1  # about requests that wait for their pages
    WORK = 2


class StallClock:
    """Adds up the time that one scheduler step spends in our calls. Scheduler thread only.

    `observe` gets the total of each step with `WORK`, `held` of each of the others with `HOLD`: a scheduler without a
    batch makes thousands of steps a second, and those that only ask whether requests may run would make any percentile
    of the former look good. Of idle ones, which only polled, there is `longest`, as of all.

    What the launch of a forward waits for its loads is part of it: on a GPU until their copies are queued (until they
    are done where the forward does not wait for them itself), on a CPU until they are done. So is an insertion into
    SGLang's tree as a whole, as the hashing in it cannot be told apart.

    beside: observers of the same calls and steps by a second clock. tell: gets the parts of a step that took longer than
    `longer` seconds, by the name of the function that was measured, the longest first.
    """

    def __init__(
        self,
        observe: Observe,
        *,
        held: Observe,
        clock: Clock = time.perf_counter,
        beside: tuple[Observe, Observe, Clock] | None = None,
        tell: Callable[[float, dict[str, float]], None] | None = None,
        longer: float = 0.0,
    ) -> None:
        self._observers = {Kind.WORK: observe, Kind.HOLD: held}
        self._clock = clock
        self._beside = {Kind.WORK: beside[0], Kind.HOLD: beside[1]} if beside is not None else {}
        self._clock_beside = beside[2] if beside is not None else None
        self._total = self._total_beside = 0.0
        self._kind = Kind.POLL
        self._depth = 0
        self._tell, self._longer = tell, longer
        self._parts: dict[str, float] = {}
        self.longest = 0.0

    @contextmanager
    def measure(self, kind: Kind = Kind.WORK) -> Iterator[None]:
        """Around one call. Calls within calls count once; a step is of the kind of the most that was done in it."""
        self._depth += 1
        outermost = self._depth == 1
        beside = self._clock_beside() if outermost and self._clock_beside is not None else 0.0
        began = self._clock() if outermost else 0.0
        try:
            yield
        finally:
            self._depth -= 1
            if outermost:
                took = self._clock() - began
                self._total += took
                if self._tell is not None:
                    name = sys._getframe(
                        2
                    ).f_code.co_name  # of who has the `with`: behind this and contextlib's
                    self._parts[name] = self._parts.get(name, 0.0) + took
                if self._clock_beside is not None:
                    self._total_beside += self._clock_beside() - beside
            self._kind = max(self._kind, kind)

    def step(self) -> None:
        """A new step begins."""
        self.longest = max(self.longest, self._total)
        if self._tell is not None:
            if self._total > self._longer:
                self._tell(self._total, dict(sorted(self._parts.items(), key=lambda part: -part[1])))
            self._parts = {}
        if self._kind is not Kind.POLL:
            self._observers[self._kind](self._total)
            if self._beside:
                self._beside[self._kind](self._total_beside)
        self._total, self._total_beside, self._kind = 0.0, 0.0, Kind.POLL


def running_clock() -> Clock | None:
    """Seconds of the calling thread, but for those in which it is ready to run and other threads have the cores. None
    where the kernel does not tell. For that thread only, and some microseconds a call: an instrument.

    Waiting for a lock, for Python's among them, for a disk or a network is counted; a machine that is too busy is not.
    """
    try:
        file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)  # ends with us
        counted = int(os.pread(file, 64, 0).split()[2])  # times that it got a core: this is one
    except (OSError, ValueError, IndexError):
        return None
    if not counted:
        os.close(file)
        return None
    return lambda: time.perf_counter() - int(os.pread(file, 64, 0).split()[1]) * 1e-9


def log_longer(milliseconds: str) -> tuple[Callable[[float, dict[str, float]], None] | None, float]:
    """`tell` and `longer` of a clock, from what GLM_SGLANG_CACHE_STALL_LOG_MS says. ValueError for what is no number."""
    try:
        limit = float(milliseconds)
    except ValueError:
        limit = -1.0
    if not 0.0 <= limit < float("inf"):
        raise ValueError(
            f"GLM_SGLANG_CACHE_STALL_LOG_MS is {milliseconds!r}; expected milliseconds, 0 for no log"
        )
    if not limit:
        return None, 0.0

    def tell(total: float, parts: dict[str, float]) -> None:
        named = ", ".join(f"{name} {took * 1e3:.2f}" for name, took in parts.items() if took > 5e-5)
        logger.info("cache: a scheduling step was kept for %.2f ms: %s", total * 1e3, named)

    return tell, limit * 1e-3
