"""The stall clock and the prefill rate, on clocks that the tests turn."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from glm_sglang.cache.audit import Audit, mismatches
from glm_sglang.cache.rate import PrefillRate
from glm_sglang.cache.stalls import Kind, StallClock, log_longer, running_clock


def test_a_step_is_the_sum_of_its_calls_and_idle_polls_are_none() -> None:
    now = 0.0
    steps: list[float] = []
    clock = StallClock(steps.append, held=lambda _: pytest.fail("nobody was held"), clock=lambda: now)
    for took, kind in ((0.25, Kind.WORK), (0.5, Kind.POLL), (0.125, Kind.WORK)):
        with clock.measure(kind):
            now += took
        now += 10.0  # SGLang's own work
    clock.step()
    with clock.measure(Kind.POLL):
        now += 0.5
    clock.step()  # polled only
    with clock.measure(), clock.measure():
        now += 0.0625  # a call within a call
    clock.step()
    assert steps == [0.875, 0.0625]
    assert clock.longest == 0.875


def test_a_step_that_takes_longer_is_told_by_its_parts(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    tell, longer = log_longer("5")
    clock = StallClock(
        lambda _: None, held=lambda _: None, clock=lambda: now, beside=None, tell=tell, longer=longer
    )

    def short() -> None:
        nonlocal now
        with clock.measure():
            now += 0.002

    def long() -> None:
        nonlocal now
        with clock.measure():
            now += 0.004
            short()  # within another: its part

    with caplog.at_level("INFO", "glm_sglang.cache.stalls"):
        short(), clock.step()
        assert caplog.messages == []
        short(), long(), short(), clock.step()
        short(), clock.step()
    assert caplog.messages == ["cache: a scheduling step was kept for 10.00 ms: long 6.00, short 4.00"]


def test_how_long_a_step_must_take_to_be_told() -> None:
    assert log_longer("0") == (None, 0.0)
    assert log_longer("0.5")[1] == pytest.approx(0.0005)
    for wrong in ("-1", "inf", "nan", "2 ms"):
        with pytest.raises(ValueError, match="GLM_SGLANG_CACHE_STALL_LOG_MS is"):
            log_longer(wrong)


def test_an_idle_poll_that_takes_long_is_the_longest() -> None:
    """It is in no histogram: thousands a second would say that all others are short."""
    now = 0.0
    clock = StallClock(
        lambda _: pytest.fail("no work"), held=lambda _: pytest.fail("none"), clock=lambda: now
    )
    for took in (0.001, 2.0, 0.001):
        with clock.measure(Kind.POLL):
            now += took
        clock.step()
    assert clock.longest == 2.0


def test_steps_that_only_hold_requests_back_stand_apart() -> None:
    """Five of 0.75 s; in the sixth there is work as well."""
    now = 0.0
    steps: list[float] = []
    holds: list[float] = []
    others: list[float] = []
    clock = StallClock(
        steps.append,
        held=holds.append,
        clock=lambda: now,
        beside=(others.append, others.append, lambda: 2 * now),
    )
    for number in range(6):
        with clock.measure(Kind.POLL):
            now += 0.25
        with clock.measure(Kind.HOLD):
            now += 0.5
        if number == 5:
            with clock.measure():
                now += 1.0
        clock.step()
    assert (steps, holds, clock.longest) == ([1.75], [0.75] * 5, 1.75)
    assert others == [1.5] * 5 + [3.5]


def test_a_second_clock_measures_the_same_calls() -> None:
    now, other = 0.0, 0.0
    steps: list[float] = []
    others: list[float] = []
    clock = StallClock(
        steps.append,
        held=steps.append,
        clock=lambda: now,
        beside=(others.append, others.append, lambda: other),
    )
    for _ in range(2):
        with clock.measure(), clock.measure():
            now, other = now + 0.5, other + 0.25
        now, other = now + 10.0, other + 10.0
    clock.step()
    clock.step()  # of no calls
    assert (steps, others) == ([1.0], [0.5])


def test_the_running_clock_stands_while_another_process_has_the_core() -> None:
    """The thread's own time is the oracle: what the wall has more is waiting, here for a core and nothing else."""
    found: dict[str, float] = {}

    def spin(core: int) -> None:
        os.sched_setaffinity(0, {core})  # of this thread
        running = running_clock()
        if running is None:
            return
        began = running(), time.perf_counter(), time.thread_time()
        wall = own = 0.0
        while wall - own < 0.05:
            wall, own = time.perf_counter() - began[1], time.thread_time() - began[2]
        found.update(waited=wall - own, stood=wall - (running() - began[0]))
        before = running()
        time.sleep(0.05)
        found["slept"] = running() - before

    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile os.getppid() == {os.getpid()}: pass"
    rival = subprocess.Popen([sys.executable, "-c", code])
    try:
        thread = threading.Thread(target=spin, args=(core,))
        thread.start()
        thread.join()
    finally:
        rival.kill()
        rival.wait()
    if not found:
        pytest.skip("this kernel does not tell how long a thread waits for a core")
    assert found["stood"] == pytest.approx(found["waited"], rel=0.5)
    assert found["slept"] > 0.03


def test_a_call_that_raises_is_measured_too() -> None:
    now = 0.0
    steps: list[float] = []
    clock = StallClock(steps.append, held=steps.append, clock=lambda: now)
    try:
        with clock.measure():
            now += 0.5
            raise RuntimeError
    except RuntimeError:
        pass
    with clock.measure():
        now += 0.25
    clock.step()
    assert steps == [0.75]


def test_prefill_is_timed_from_launch_to_the_next_step() -> None:
    noted: list[tuple[int, float]] = []
    rate = PrefillRate(lambda tokens, seconds: noted.append((tokens, seconds)))
    rate.step(1.0)
    rate.launched(2048, 2.0)
    rate.step(2.5)
    rate.step(9.0)  # nothing was launched: idle time is no prefill
    rate.launched(1, 10.0)  # a decode step's worth says nothing about prefill
    rate.step(10.5)
    assert noted == [(2048, 0.5)]


def test_the_audit_finds_bytes_that_nobody_saved(tmp_path: Path) -> None:
    def page(value: int) -> SimpleNamespace:
        return SimpleNamespace(tensor=torch.full((8,), value, dtype=torch.uint8))

    audit = Audit(str(tmp_path))
    audit.record("save", [b"a", b"b"], [page(1), page(2)])
    audit.record("save", [b"a"], [page(3)])  # computed twice, with another rounding
    audit.record("load", [b"a", b"b"], [page(3), page(2)])
    assert mismatches(tmp_path) == (2, [])
    audit.record("load", [b"b", b"c"], [page(9), page(2)])
    assert mismatches(tmp_path) == (4, [b"b".hex(), b"c".hex()])
    Audit().record("load", [b"b"], [page(9)])  # without a folder nothing is written
    assert mismatches(tmp_path)[0] == 4
