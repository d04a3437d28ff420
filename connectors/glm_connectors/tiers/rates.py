"""Measured rates: what a load from Valkey would take, against recomputing the same pages."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable

_WINDOW = 256  # gets among which the median is taken
_AGE = 5.0  # seconds after which a get says nothing any more of what the next one will take
_HALF_LIFE = 2.0  # busy seconds after which an observation counts half
_ENOUGH = 0.02  # busy seconds that make a rate worth using
_LEAST = 1e-3  # a second; most gets failed, which is slow, and not unknown


class Rate:
    """Amount per busy second, older observations fading. Thread-safe. 0.0 while unknown."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._amount = self._seconds = 0.0

    def note(self, amount: float, seconds: float) -> None:
        """Adds `amount` done in `seconds` busy seconds."""
        with self._lock:
            fade = 0.5 ** (seconds / _HALF_LIFE)
            self._amount = self._amount * fade + amount
            self._seconds = self._seconds * fade + seconds

    @property
    def value(self) -> float:
        with self._lock:
            return self._amount / self._seconds if self._seconds >= _ENOUGH else 0.0


class MedianRate:
    """Amount per busy second of the median observation. Thread-safe. 0.0 while nothing recent is known.

    A store that stops for a second makes a few gets slow, one a worker, and all of its time is theirs: on an average
    they outweigh a thousand others, and a store that is fast again would go on looking slower than recomputing until
    the average had forgotten, for which there would have to be gets. Only where most gets are slow is the store, and
    only for as long as that is news: what is skipped is not measured, so an old "slow" would keep itself true.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: deque[tuple[float, float, float]] = deque(maxlen=_WINDOW)  # when, rate, seconds

    def note(self, amount: float, seconds: float) -> None:
        """Adds `amount` done in `seconds` busy seconds."""
        with self._lock:
            self._seen.append((self._clock(), amount / max(seconds, 1e-9), seconds))

    @property
    def value(self) -> float:
        """Of the last seconds."""
        return self._median(self._clock() - _AGE)

    @property
    def last_known(self) -> float:
        """Of the newest observations, however old."""
        return self._median(float("-inf"))

    def _median(self, since: float) -> float:
        with self._lock:
            seen = [(rate, seconds) for then, rate, seconds in self._seen if then >= since]
        if sum([seconds for _, seconds in seen]) < _ENOUGH:
            return 0.0
        return max(_LEAST, statistics.median([rate for rate, _ in seen]))


class LoadMeter:
    """The rate of all gets together: the bytes of each, by its seconds shared among those that ran beside it.

    A get that failed counts with its seconds and no bytes; one that found nothing says nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.rate = MedianRate(clock)
        self._clock = clock
        self._lock = threading.Lock()
        self._running = 0

    def start(self) -> tuple[float, int]:
        """A get begins; what `stop` wants to have."""
        with self._lock:
            self._running += 1
            return self._clock(), self._running

    def stop(self, started: tuple[float, int], arrived: int | None) -> None:
        """A get ends with so many bytes; None where it found nothing."""
        began, beside = started
        with self._lock:
            beside = max(beside, self._running)
            self._running -= 1
        if arrived is not None:
            self.rate.note(arrived, (self._clock() - began) / beside)


class Worth:
    """Whether to fetch pages or to recompute them."""

    def __init__(
        self, page_bytes: int, page_tokens: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.load = LoadMeter(clock)
        self.prefill = Rate()
        self._page_bytes, self._page_tokens = page_bytes, page_tokens

    def fetch(self, pages: int, waiting: int) -> bool:
        """Whether fetching `pages`, behind `waiting` pages that are under way, is estimated to be no slower
        than recomputing them. True while either rate is unknown, as that of loads is a few seconds after the last."""
        bytes_a_second, tokens_a_second = self.load.rate.value, self.prefill.value
        if not bytes_a_second or not tokens_a_second:
            return True
        load = (pages + waiting) * self._page_bytes / bytes_a_second
        return load <= pages * self._page_tokens / tokens_a_second
