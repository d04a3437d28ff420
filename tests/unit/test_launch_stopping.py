"""Signals to a launcher: one line, an exit code that names the signal, nobody left; and none where it already serves."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from glm_sglang import stopping

# A launcher with a child as SGLang starts them, and that child's own, which knows nothing of signals.
_PROGRAM = textwrap.dedent("""
    import multiprocessing, os, signal, subprocess, sys, time, types
    from glm_sglang import failure, stopping

    def child(queue):
        stopping.leave_to_launcher()
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        queue.put(None)
        time.sleep(300)

    def server(status):
        # What SGLang has once HTTP starts.
        manager = types.SimpleNamespace(server_status=types.SimpleNamespace(name=status))
        state = types.SimpleNamespace(tokenizer_manager=manager)
        sys.modules["sglang.srt.entrypoints.http_server"] = types.SimpleNamespace(get_global_state=lambda: state)

    if __name__ == "__main__":
        BEFORE
        listener = failure.Listener()
        stopping.end_at_signals(listener)
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        context.Process(target=child, args=(queue,)).start()
        queue.get()
        AFTER
        print(listener.folder, flush=True)
        THEN
        time.sleep(300)
""")


def launch(
    tmp_path: Path, before: str = "", after: str = "", then: str = ""
) -> tuple[subprocess.Popen[str], Path]:
    """The program, ready for signals, in a session of its own; and its run folder."""
    program = _PROGRAM.replace("BEFORE", before or "pass").replace("AFTER", after or "pass")
    script = tmp_path / "program.py"
    script.write_text(program.replace("THEN", then or "pass"))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def assert_gone(process: subprocess.Popen[str], folder: Path, code: int, said: str) -> None:
    # Every process holds stdout and stderr: that `communicate` returns means that all of them are gone.
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, said)
    assert not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("whom", ["launcher", "group"])
def test_before_it_serves_a_signal_ends_everybody(tmp_path: Path, number: signal.Signals, whom: str) -> None:
    """A terminal sends to the whole group, a supervisor to the launcher."""
    process, folder = launch(tmp_path)
    (os.kill if whom == "launcher" else os.killpg)(process.pid, number)
    said = f"glm-sglang: {number.name}: stopped before the server was ready\n"
    assert_gone(process, folder, 128 + number, said)


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("stopping.end_before_it_serves(None, signal.SIGINT, None)", signal.SIGINT),
        ("stopping.end_before_it_drains(None)", signal.SIGTERM),
    ],
)
def test_a_warm_up_is_ended_and_a_server_is_left_to_sglang(
    tmp_path: Path, call: str, number: signal.Signals
) -> None:
    """First on a server that is up, where the call must do nothing; then during the warm-up."""
    process, folder = launch(tmp_path, after=f"server('Up'); {call}", then=f"server('Starting'); {call}")
    assert folder.name.startswith("glm-sglang-run-")
    said = f"glm-sglang: {number.name}: stopped before the server was ready\n"
    assert_gone(process, folder, 128 + number, said)


def test_after_serving_the_launcher_unwinds(tmp_path: Path) -> None:
    """uvicorn raises the signal again when it has closed down: no line, no traceback, and `finally` runs."""
    unwind = "stopping.ignore_signals(), failure.kill_children(tracker=False), listener.close()"
    then = f"try: signal.raise_signal(signal.SIGINT)\n    finally: {unwind}"
    process, folder = launch(tmp_path, after="server('Up')", then=then)
    assert_gone(process, folder, 128 + signal.SIGINT, "")


def test_what_was_ignored_stays_ignored(tmp_path: Path) -> None:
    process, folder = launch(tmp_path, before="signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    os.kill(process.pid, signal.SIGHUP)
    os.kill(process.pid, signal.SIGTERM)
    said = "glm-sglang: SIGTERM: stopped before the server was ready\n"
    assert_gone(process, folder, 128 + signal.SIGTERM, said)


def test_a_signal_in_the_midst_of_importing_the_http_server(tmp_path: Path) -> None:
    half = "sys.modules['sglang.srt.entrypoints.http_server'] = types.ModuleType('http_server')"
    process, folder = launch(tmp_path, after=half)
    os.kill(process.pid, signal.SIGINT)
    said = "glm-sglang: SIGINT: stopped before the server was ready\n"
    assert_gone(process, folder, 128 + signal.SIGINT, said)


def test_a_signal_in_the_midst_of_a_line_to_stderr(tmp_path: Path) -> None:
    """SGLang's log goes there all the time: stderr's buffer is taken then, and refuses the handler's own line."""
    interrupted = (
        "import io; raw = type('Raw', (io.RawIOBase,), {'writable': lambda self: True, "
        "'write': lambda self, data: signal.raise_signal(signal.SIGTERM)}); "
        "sys.stderr = io.TextIOWrapper(io.BufferedWriter(raw()), write_through=True); "
        "print('log', file=sys.stderr, flush=True)"
    )
    process, folder = launch(tmp_path, then=interrupted)
    said = "glm-sglang: SIGTERM: stopped before the server was ready\n"
    assert_gone(process, folder, 128 + signal.SIGTERM, said)


@pytest.mark.parametrize("how", ["all are answered", "unhealthy", "forced"])
async def test_sglang_ends_once_nothing_is_left_to_wait_for(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before the signal, not while a request is left; unhealthy or with SGL_FORCE_SHUTDOWN at once."""
    monkeypatch.setattr(stopping, "_LOOK_S", 0.0)
    ended: list[object] = []

    async def original(manager: object) -> None:
        ended.append(manager)

    async def looks() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    manager = SimpleNamespace(
        gracefully_exit=False, rid_to_state={"r": 0}, server_status=SimpleNamespace(name="Up")
    )
    task = asyncio.create_task(stopping.drain_at_once(original, manager))
    await looks()
    manager.gracefully_exit = True
    await looks()
    assert ended == []
    if how == "all are answered":
        manager.rid_to_state.clear()
    elif how == "unhealthy":
        manager.server_status.name = "UnHealthy"
    else:
        monkeypatch.setenv("SGL_FORCE_SHUTDOWN", "1")
    await task
    assert ended == [manager]
