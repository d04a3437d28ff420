"""The counters that an exporter reads: all there from the start, exact under threads, gauges only of what lives."""

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping

import pytest
from glm_connectors.lmcache_repairs.counters import GAUGES, HELP, Counters


class Source:
    def gauges(self) -> Mapping[str, int]:
        return {"live_workers": 3, "queue_depth": 1}


def test_every_name_is_there_from_the_start_and_zero() -> None:
    assert Counters().snapshot() == dict.fromkeys(HELP, 0)


def test_a_name_that_is_not_described_is_refused() -> None:
    counters = Counters()
    with pytest.raises(KeyError):
        counters.add("canceled_jobs")
    with pytest.raises(KeyError):
        counters.add(GAUGES[0])
    assert counters.snapshot() == dict.fromkeys(HELP, 0)


def test_counts_from_many_threads_are_exact() -> None:
    counters = Counters()

    def work() -> None:
        for _ in range(2000):
            counters.add("orphans_disposed", 3)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters["orphans_disposed"] == 8 * 2000 * 3


def test_gauges_add_up_over_what_lives() -> None:
    counters = Counters()
    first, second = Source(), Source()
    counters.watch(first)
    counters.watch(second)
    counters.watch(second)
    assert (counters["live_workers"], counters["queue_depth"], counters["dead_ranks"]) == (6, 2, 0)
    del first
    gc.collect()
    assert counters["live_workers"] == 3
