"""What the repairs count: plain numbers, no metrics library, so that any host can export them.

`COUNTERS` is one object a process. A host (SGLang's scheduler, a vLLM worker) calls `snapshot()` whenever it
is scraped; every name is present from the start, so a child that stays 0 is a fact and not a hole.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

HELP: Mapping[str, str] = {
    "cancelled_jobs": "jobs whose caller left while they ran or before it took their result",
    "skipped_jobs": "queued jobs that never ran because their caller had left",
    "failed_jobs": "jobs that raised, whoever was told",
    "nested_jobs": "jobs that submitted to their own executor and were run in place",
    "stuck_jobs": "running jobs without a caller that were cancelled at the stuck limit",
    "refused_jobs": "jobs that a closing executor turned away",
    "abandoned_jobs": "jobs that outlast a shutdown's bounds; their buffers stay referenced",
    "orphans_disposed": "buffers that nobody would take, returned to the allocator",
    "orphan_bytes": "bytes of those buffers",
    "loop_waits_refused": "allocations that would have waited for memory on an event loop's thread",
    "lost_tiers": "tiers whose part of a prefetch failed and was counted as a miss",
    "store_zero_chunks": "stores that saved nothing because no chunk could be allocated",
    "lookups_expired": "lookups answered with a miss at their deadline",
    "lookups_without_rank": "lookups answered with a miss at once because a rank is down",
    "late_replies": "replies that came after their lookup had expired or been cancelled",
    "foreign_replies": "replies that name another rank than the one they came from, or none",
    "unsent_replies": "replies that a rank could not send because the scheduler does not read",
    "rank_probes": "probes sent to ranks that are down",
    "untested_symbols": "changed symbols that GLM_SGLANG_ALLOW_UNTESTED let pass",
    "live_workers": "executor workers that are running",
    "expected_workers": "executor workers that should be running",
    "queue_depth": "jobs that wait in executors and still have a caller",
    "running_jobs": "jobs that executors are running",
    "dead_ranks": "lookup ranks that are down at the moment",
}


class CounterSource(Protocol):
    """What an exporter needs of us."""

    def snapshot(self) -> Mapping[str, int]:
        """Every number by the names in `HELP`; counters only grow, the last five are gauges."""


class GaugeSource(Protocol):
    """An object with numbers of its own, for as long as it lives (an executor, a lookup client)."""

    def gauges(self) -> Mapping[str, int]:
        """Gauges by name; sources are added up."""


GAUGES = ("live_workers", "expected_workers", "queue_depth", "running_jobs", "dead_ranks")


@dataclass(eq=False)
class Counters:
    """Numbers of one process.

    Written from event loops, lookup threads and log filters alike, hence the lock.
    """

    _values: dict[str, int] = field(default_factory=lambda: {name: 0 for name in HELP if name not in GAUGES})
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sources: weakref.WeakSet[GaugeSource] = field(default_factory=weakref.WeakSet)

    def add(self, name: str, amount: int = 1) -> None:
        """Adds to a counter. KeyError for a name that `HELP` lacks: a typo must not create a metric."""
        with self._lock:
            self._values[name] += amount

    def watch(self, source: GaugeSource) -> None:
        """Counts `source`'s gauges in from now on; a weak reference, nothing to undo."""
        with self._lock:
            self._sources.add(source)

    def __getitem__(self, name: str) -> int:
        return self.snapshot()[name]

    def snapshot(self) -> dict[str, int]:
        """Counters and the sum of all gauges, in the order of `HELP`."""
        with self._lock:
            values = dict(self._values)
            sources = list(self._sources)
        totals = dict.fromkeys(GAUGES, 0)
        for source in sources:
            for name, amount in source.gauges().items():
                totals[name] += amount
        return {name: values[name] if name in values else totals[name] for name in HELP}


COUNTERS = Counters()
