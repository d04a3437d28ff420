"""The article's two signals of a cache that dies, read during a run of `stalled_valkey`: stores of nothing ("store only 0
total chunks"), and executor queues that grow; and the workers that are left to empty them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

#: What stored nothing: a save for which the pool had no room, and the same of LMCache's own store.
ZERO_STORES = ("cache_refused_reservations_total", "lmcache_store_zero_chunks_total")
QUEUE = "lmcache_queue_depth"


class Longest(threading.Thread):
    """The largest of what `read` returns, asked every `every` seconds until `end`; what it raises, `end` raises."""

    def __init__(self, read: Callable[[], int], every: float) -> None:
        super().__init__(daemon=True)
        self._read, self._every = read, every
        self._ended = threading.Event()
        self._error: Exception | None = None
        self.most = 0

    def run(self) -> None:
        while not self._ended.wait(self._every):
            try:
                self.most = max(self.most, self._read())
            except Exception as error:
                self._error = error
                return

    def end(self) -> int:
        """Returns the largest."""
        self._ended.set()
        self.join()
        if self._error is not None:
            raise self._error
        return self.most


def gauge(samples: Sequence[Counter[str]], name: str) -> int:
    """A gauge now, summed over its children and the servers. RuntimeError where no server has it."""
    found = [value for sample in samples for key, value in sample.items() if key.partition("{")[0] == name]
    if not found:
        raise RuntimeError(f"no server has {name}")
    return round(sum(found))


def worst(runs: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Of several runs: stores of nothing in all, the longest queues, and the most workers that any of them lacks."""
    return {
        "zero_stores": sum(run["zero_stores"] for run in runs),
        "queue_most": max(run["queue_most"] for run in runs),
        "queue_at_end": max(run["queue_at_end"] for run in runs),
        "workers_lost": max(run["expected_workers"] - run["live_workers"] for run in runs),
    }
