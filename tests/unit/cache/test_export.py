"""The cache's metrics as /metrics shows them: every child from the start, counters by their growth, of each rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_RANK = """
from glm_connectors.tiers import Metric, MetricTable
from glm_connectors.tiers.metric_list import METRICS
from glm_sglang.cache.export import Exporter
from glm_sglang.cache.recorder import Recorder

exporter = Exporter(rank="{rank}")
store = MetricTable(METRICS, exporter)
store.observe("cache_lookup_seconds", value=2e-5)  # before anything is declared
elsewhere = [0]
store.read_from("lmcache_cancelled_jobs", read=lambda: elsewhere[0])
recorder = Recorder(exporter, exporter.poll)
recorder.gauge("cache_waiting_requests", lambda: 3)
exporter.watch(store, recorder.table)
{then}
"""
_MOVE = """
store.add("cache_hit_pages", "valkey", amount=5)
recorder.add("cache_offload_pages", "saved", amount=2)
recorder.observe("scheduler_stall_seconds", 0.0012)
elsewhere[0] = 7
exporter.poll()
elsewhere[0] = 9
store.add("cache_hit_pages", "valkey", amount=1)
exporter.poll()
exporter.poll()
"""
_COLLECT = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def python(program: str, folder: Path | None) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
    if folder is not None:
        environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_there_from_the_start_and_then_by_rank(tmp_path: Path) -> None:
    python(_RANK.format(rank="0", then=_MOVE), tmp_path)
    python(_RANK.format(rank="1", then=""), tmp_path)
    shown = python(_COLLECT, tmp_path).splitlines()
    for line in (
        'glm_sglang:cache_hit_pages_total{rank="0",tier="valkey"} 6.0',
        'glm_sglang:cache_hit_pages_total{rank="0",tier="cpu"} 0.0',
        'glm_sglang:cache_hit_pages_total{rank="1",tier="valkey"} 0.0',
        'glm_sglang:cache_offload_pages_total{end="saved",rank="0"} 2.0',
        'glm_sglang:cache_offload_pages_total{end="pool_full",rank="1"} 0.0',
        'glm_sglang:lmcache_cancelled_jobs_total{rank="0"} 9.0',
        'glm_sglang:cache_waiting_requests{rank="1"} 3.0',
        'glm_sglang:scheduler_stall_seconds_bucket{le="0.001",rank="0"} 0.0',
        'glm_sglang:scheduler_stall_seconds_bucket{le="0.0015",rank="0"} 1.0',
        'glm_sglang:scheduler_stall_seconds_count{rank="1"} 0.0',
    ):
        assert line in shown, line


def test_without_sglangs_metrics_nothing_is_imported() -> None:
    program = _RANK.format(rank="0", then=_MOVE + "\nimport sys; print('prometheus_client' in sys.modules)")
    assert python(program, None).strip() == "False"


def test_a_name_that_two_tables_have_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    then = """
twin = MetricTable([Metric("cache_failed_loads_again", "counter", "x")], exporter)
try:
    exporter.watch(twin, MetricTable([Metric("cache_failed_loads_again", "counter", "x")], exporter))
except ValueError as error:
    print(error)
"""
    said = python(_RANK.format(rank="0", then=then), tmp_path)
    assert "cache_failed_loads_again" in said
