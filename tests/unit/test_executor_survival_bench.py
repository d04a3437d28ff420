"""What `benchmarks.executor_survival` measures of both executors, on few jobs; and which figures it puts on top.

Oracles: the number of workers that were started, LMCache's allocator, and the keys that jobs were given.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
from lmcache_faults import run

from benchmarks import executor_survival


def survey(executor: str, mode: str) -> dict[str, Any]:
    args = Namespace(jobs=2_000, cancel=0.3, seed=0, executor=executor, mode=mode)
    return executor_survival.measure(args)


@pytest.mark.parametrize("executor", executor_survival.EXECUTORS)
def test_workers_die_unrepaired_and_bytes_change_with_the_guard_alone(executor: str) -> None:
    found = run(survey, executor, "unrepaired", repaired=False)
    assert found["live_workers"] == 0 < found["leaked_bytes"]
    assert found["callers_left_waiting"] == executor_survival.CALLERS
    found = run(survey, executor, executor_survival.GUARDED, repaired=False)
    assert found["live_workers"] == found["expected_workers"] == executor_survival.WORKERS
    assert found["corrupt_puts"] > 0
    assert found["freed_by_garbage_collector"] > 0


@pytest.mark.parametrize("executor", executor_survival.EXECUTORS)
def test_nothing_is_lost_repaired(executor: str) -> None:
    found = run(survey, executor, "repaired", repaired=True)
    assert found["jobs_submitted"] == sum(found["outcomes"].values()) == 2_000
    left = [count for stage, count in found["outcomes"].items() if stage.startswith("cancelled_")]
    assert len(left) == len(executor_survival.STAGES)  # callers left at every stage
    assert found["live_workers"] == found["expected_workers"] == executor_survival.WORKERS
    for lost in ("leaked_bytes", "wrong_replies", "corrupt_puts", "callers_left_waiting"):
        assert found[lost] == 0, lost
    assert found["freed_by_garbage_collector"] == 0


def test_the_worse_executor_stands_on_top() -> None:
    good = {"live_workers": 4, "expected_workers": 4, "leaked_bytes": 0, "wrong_replies": 0}
    good |= {"corrupt_puts": 0, "callers_left_waiting": 0}
    bad = good | {"live_workers": 1, "leaked_bytes": 16384, "corrupt_puts": 2}
    for runs in ([good, bad], [bad, good]):
        assert executor_survival.worst(runs) == bad
