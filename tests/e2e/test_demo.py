"""`make demo` as a newcomer runs it, and as they interrupt it."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil
import pytest

from glm_sglang.serving import group_members, guard

ROOT = Path(__file__).resolve().parents[2]
PAGE = 64
DEMO = [sys.executable, "-m", "launch.demo"]
#: SIGTERM to a server, then SIGKILL: 10 s; and a busy machine.
SOON_S = 60


def start(output: Path, **env: str) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
    """The demo with DEMO_KEEP=1 in a process group of its own, and what stops it when this process is killed."""
    with output.open("wb") as out:
        process = subprocess.Popen(
            DEMO,
            cwd=ROOT,
            env={**os.environ, "DEMO_KEEP": "1", "COLUMNS": "200", **env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process, guard(process.pid)


def servers_of(pid: int) -> int:
    """How many of the demo's servers (prefill, decode, router) run below `pid`."""
    found = set()
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if process.pid == os.getsid(process.pid) and {"glm_sglang.launch_server", "glm_sglang.router"} & {
                *command
            }:
                found.add(process.pid)
    return len(found)


def assert_they_end(groups: list[int]) -> None:
    """Everybody in these process groups is gone soon."""
    assert len(groups) >= 4  # the demo, prefill, decode, router
    deadline = time.monotonic() + SOON_S
    while left := [pid for group in groups for pid in group_members(group)]:
        assert time.monotonic() < deadline, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
        time.sleep(0.1)


def until(there: Callable[[], bool]) -> None:
    """Returns when it is so; the longest is the making of the demo's model."""
    deadline = time.monotonic() + 120
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.1)


# The next two come before the fixture: they end a demo while it starts.
def test_a_closed_terminal_leaves_no_process() -> None:
    master, slave = pty.openpty()
    # The leader of a session that opens a terminal gets it as its own.
    argv = ["/bin/sh", "-c", '"$@" <> "$0" >&0 2>&0; exit', os.ttyname(slave), *DEMO]
    shell = subprocess.Popen(argv, cwd=ROOT, start_new_session=True)

    def started() -> bool:
        while select.select([master], [], [], 0)[0]:  # somebody looks at the terminal
            os.read(master, 1 << 16)
        assert shell.poll() is None
        return servers_of(shell.pid) == 3

    try:
        until(started)
        groups = groups_of(shell.pid)
        os.close(slave)
        os.close(master)
        shell.wait(timeout=SOON_S)
        assert_they_end(groups)
    finally:
        shell.kill()
        shell.wait()


def test_a_test_run_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    """A process that has started the demo as the tests do gets no chance to stop it."""
    program = (
        "import pathlib, sys, time; from tests.e2e.test_demo import start; "
        "start(pathlib.Path(sys.argv[1])); time.sleep(600)"
    )
    run = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "output")], cwd=ROOT)
    try:
        until(lambda: run.poll() is None and servers_of(run.pid) == 3)
        groups = [group for group in groups_of(run.pid) if group != os.getpgid(run.pid)]
    finally:
        run.kill()
        run.wait()
    assert_they_end(groups)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The demo, serving, and its output."""
    output = tmp_path_factory.mktemp("demo") / "output"
    (ROOT / "demo-report.json").unlink(missing_ok=True)
    process, watcher = start(output)
    try:
        deadline = time.monotonic() + 400
        while b"curl " not in output.read_bytes():
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.2)
        yield process, output
    finally:
        process.terminate()
        try:
            process.wait(timeout=SOON_S)
        finally:
            process.kill()
            process.wait()
            watcher.kill()
            watcher.communicate()


@pytest.fixture(scope="module")
def report(demo: tuple[subprocess.Popen[bytes], Path]) -> dict[str, Any]:
    """What that demo has written."""
    return dict(orjson.loads((ROOT / "demo-report.json").read_bytes()))


def test_the_table_and_the_report_say_the_same(
    demo: tuple[subprocess.Popen[bytes], Path], report: dict[str, Any]
) -> None:
    first, second = report["turns"]
    assert first["prompt_tokens"] > 2000
    assert first["cached_tokens"] == 0
    # Turn 2 repeats turn 1's prompt; whole pages of it are cached on the prefill node.
    assert second["cached_tokens"] == first["prompt_tokens"] // PAGE * PAGE
    assert (second["pool_tokens"], second["valkey_tokens"]) == (0, 0)  # the device has them still
    assert report["peak_memory_gib"] < 8
    text = demo[1].read_text()
    for turn in report["turns"]:
        assert str(turn["prompt_tokens"]) in text
        assert str(turn["cached_tokens"]) in text


def test_the_printed_curl_line_answers(demo: tuple[subprocess.Popen[bytes], Path]) -> None:
    line = next(line for line in demo[1].read_text().splitlines() if line.startswith("curl "))
    done = subprocess.run(["bash", "-c", f"{line} --silent"], capture_output=True, timeout=120, check=True)
    assert orjson.loads(done.stdout)["choices"][0]["message"]["content"]


def test_ctrl_c_leaves_no_process(demo: tuple[subprocess.Popen[bytes], Path]) -> None:
    process, output = demo
    groups = groups_of(process.pid)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)  # whoever is impatient does not interrupt the stopping
    assert process.wait(timeout=90) == 130, output.read_text()
    assert len(groups) >= 4  # the demo, prefill, decode, router
    assert [member for group in groups for member in group_members(group)] == []
    line = next(line for line in output.read_text().splitlines() if line.startswith("curl "))
    with pytest.raises(httpx.ConnectError):
        httpx.get(line.split()[1], trust_env=False)


@pytest.mark.parametrize("what", ["valkey", pytest.param("prefill", marks=pytest.mark.slow)])
def test_a_restart_between_the_turns_keeps_the_hits(
    what: str, demo: tuple[subprocess.Popen[bytes], Path], report: dict[str, Any], tmp_path: Path
) -> None:
    """As many cached tokens and the same answers as without a restart; whence they came, the report says."""
    demo[0].terminate()  # where the test before this one has not run
    demo[0].wait(timeout=90)
    output = tmp_path / "output"
    process, watcher = start(output, DEMO_RESTART=what, DEMO_KEEP="")
    try:
        assert process.wait(timeout=400) == 0, output.read_text()
    finally:
        process.terminate()
        process.wait()
        watcher.kill()
        watcher.communicate()
    assert f"{what} was restarted" in output.read_text()
    turns = orjson.loads((ROOT / "demo-report.json").read_bytes())["turns"]
    for kept, usual in zip(turns, report["turns"], strict=True):
        for name in ("prompt_tokens", "cached_tokens", "answer"):
            assert kept[name] == usual[name], name
    second = turns[1]
    if what == "valkey":
        # The prompt between the turns leaves the device room for 2 of its 48 pages.
        assert second["pool_tokens"] >= second["cached_tokens"] - 2 * PAGE > 0
        assert second["valkey_tokens"] == 0
    else:
        assert second["pool_tokens"] == second["valkey_tokens"] == second["cached_tokens"] > 0


def groups_of(pid: int) -> list[int]:
    """Process groups of `pid` and of everything below it."""
    children: dict[int, list[tuple[int, int]]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            child, parent, group = _stat(entry)
        except (OSError, ValueError):
            continue
        children.setdefault(parent, []).append((child, group))
    found, queue = {os.getpgid(pid)}, [pid]
    while queue:
        for child, group in children.get(queue.pop(), []):
            found.add(group)
            queue.append(child)
    return sorted(found)


def _stat(entry: Path) -> tuple[int, int, int]:
    fields = entry.read_text().rpartition(")")[2].split()
    return int(entry.parent.name), int(fields[1]), int(fields[2])
