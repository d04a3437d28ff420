"""Children of a launcher on the reference platform: copies of it, which answer signals and its end as new ones would."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

LAUNCHER = """
import json, multiprocessing, os, signal, sys, time
from glm_sglang import failure, scope
from glm_sglang.reference_platform import children

IMPORTED = {}

def report(pipe):
    handlers = {s.name: str(signal.getsignal(s)) for s in (signal.SIGQUIT, signal.SIGUSR2)}
    pipe.send({"pid": os.getpid(), "copied": bool(IMPORTED), "handlers": handlers,
               "grandchildren": multiprocessing.get_start_method()})
    time.sleep(120)

if __name__ == "__main__":
    IMPORTED["by"] = "the launcher"
    listener = failure.Listener()
    scope.enter(listener.folder)
    for number in (signal.SIGQUIT, signal.SIGUSR2):
        signal.signal(number, lambda *_: os._exit(7))
    multiprocessing.set_start_method("spawn", force=True)  # as SGLang has it
    children.start_by_fork(None, None)
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.Process(target=report, args=(writer,))
    child.start()
    print(json.dumps(reader.recv()), flush=True)
    time.sleep(120)
"""


@pytest.fixture
def started(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """The launcher's process, and what its child says of itself."""
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    environ = {**os.environ, "GLM_SGLANG_START_METHOD": request.param}
    launcher = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env=environ, text=True, start_new_session=True
    )
    try:
        assert launcher.stdout is not None
        yield launcher, json.loads(launcher.stdout.readline())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()


@pytest.mark.parametrize(
    ("started", "copied"), [("auto", True), ("spawn", False)], indirect=["started"], ids=["fork", "spawn"]
)
def test_a_child_is_as_a_new_interpreter_would_be(started: Any, copied: bool) -> None:
    _, child = started
    assert child["copied"] is copied
    default = str(signal.Handlers.SIG_DFL)
    assert child["handlers"] == {"SIGQUIT": default, "SIGUSR2": default}
    # A data-parallel controller's threads must not fork.
    assert child["grandchildren"] == "spawn"


@pytest.mark.parametrize("started", ["auto"], indirect=True)
def test_a_copy_ends_with_its_launcher(started: Any) -> None:
    launcher, child = started
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 30
    while alive(child["pid"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child["pid"])


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie that nobody reaps doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
