"""What `benchmarks.page_cost` divides by is what Valkey took and gave. No figure of it is a test's business."""

from __future__ import annotations

import os
import threading

import pytest
from glm_connectors.valkey_store import EmbeddedServer

from benchmarks import page_cost


@pytest.fixture
def rig(server: EmbeddedServer) -> page_cost.Rig:
    return page_cost.Rig(server.url, page_cost.Shape(1, 1, 16, 20), block=4)


def test_pages_that_count_are_those_that_moved(rig: page_cost.Rig) -> None:
    metrics = rig.store.metrics
    victim = page_cost.Victim("torch")
    try:
        for way, count in (("put", "cache_saved_pages"), ("get", "cache_loaded_bytes")):
            before = metrics[count]
            ran = victim.steps(5, 0.002, rig.prepare(way, 5))
            rig.settle(page_cost.ENDS[way])
            moved = metrics[count] - before
            if way == "get":
                moved /= rig.value_bytes
            assert 4 <= ran.pages <= 20
            assert moved == ran.pages
        missed = metrics["cache_miss_pages", "valkey"]
        ran = victim.steps(5, 0.002, rig.prepare("miss", 5))
        rig.settle("miss")
        assert metrics["cache_miss_pages", "valkey"] - missed == ran.pages
    finally:
        victim.close()
        rig.close()


def test_a_thread_that_waits_has_lost_the_time_and_one_that_computes_has_not() -> None:
    victim = page_cost.Victim("python")
    held = threading.Lock()
    try:

        def wait(step: int) -> int:
            held.acquire()
            threading.Timer(0.05, held.release).start()
            with held:
                return 1

        waited = victim.steps(2, 0.001, wait)
        assert waited.pages == 2
        assert waited.lost >= 0.1
        assert waited.blocked >= 2
    finally:
        victim.close()


def test_one_core_is_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    with pytest.raises(SystemExit, match="needs two cores"):
        page_cost.own_core()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 3, 4})
    assert page_cost.own_core() == (3, {4, 5})
