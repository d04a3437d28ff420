"""How long the cache keeps the scheduler's thread, a scheduling step at a time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Clock = Callable[[], float]


class StallClock:
    """Adds up the time that one scheduler step spends in our calls. Scheduler thread only.

    `observe` gets the total of each step in which something was done besides polling: idle polls would make
    any percentile look good. What the launch of a forward waits for its loads is part of it: on a GPU until their copies
    are queued (until they are done where the forward does not wait for them itself), on a CPU until they are done.

    beside: a second observer and its clock, for the same calls and steps.
    """

    def __init__(
        self,
        observe: Callable[[float], None],
        clock: Clock = time.perf_counter,
        *,
        beside: tuple[Callable[[float], None], Clock] | None = None,
    ) -> None:
        self._observe = observe
        self._clock = clock
        self._beside = beside
        self._total = self._total_beside = 0.0
        self._worked = False
        self._depth = 0
        self.longest = 0.0

    @contextmanager
    def measure(self, *, poll: bool = False) -> Iterator[None]:
        """Around one call. Calls within calls count once."""
        self._depth += 1
        outermost = self._depth == 1
        beside = self._beside[1]() if outermost and self._beside is not None else 0.0
        began = self._clock() if outermost else 0.0
        try:
            yield
        finally:
            self._depth -= 1
            if outermost:
                self._total += self._clock() - began
                if self._beside is not None:
                    self._total_beside += self._beside[1]() - beside
            self._worked |= not poll

    def step(self) -> None:
        """A new step begins."""
        if self._worked:
            self._observe(self._total)
            self.longest = max(self.longest, self._total)
            if self._beside is not None:
                self._beside[0](self._total_beside)
        self._total, self._total_beside, self._worked = 0.0, 0.0, False


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
