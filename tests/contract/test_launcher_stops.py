"""Ctrl-C and SIGTERM while a real server starts: it is gone within seconds, says so in one line, and leaves nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from glm_sglang.serving import free_port
from tests.contract.launching import environment, session_members

#: The requirement is "some seconds"; the machine may be busy with other tests.
SOON_S = 30


class Starting:
    """`python -m glm_sglang.launch_server` in a session of its own, as a terminal starts it."""

    def __init__(self, model: Path, log: Path, *flags: str) -> None:
        self.log, self.port = log, free_port()
        argv = [sys.executable, "-m", "glm_sglang.launch_server", "--model-path", str(model)]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*argv, "--port", str(self.port), *flags],
                env=environment(PYTHONUNBUFFERED="1"),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def until(self, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 240
        while not there():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.02)

    def says(self, text: str) -> bool:
        return text in self.log.read_text()

    def health(self) -> int:
        """Status of /health, 0 where nobody listens."""
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/health", trust_env=False, timeout=30).status_code
        except httpx.TransportError:
            return 0

    def hold(self) -> None:
        """Stops every process but the launcher: whatever the launcher waits for now does not come."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            child.suspend()

    def assert_ends(self, number: signal.Signals) -> None:
        code = self.process.wait(timeout=SOON_S)
        text = self.log.read_text()
        assert code == 128 + number, text[-4000:]
        # Not the last line: it may go on where a progress bar, or a line that was cut by the signal, has stopped.
        assert text.endswith(f"glm-sglang: {number.name}: stopped before the server was ready\n")
        assert "Traceback" not in text
        assert session_members(self.process.pid) == []

    def kill(self) -> None:
        for pid in session_members(self.process.pid):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def test_ctrl_c_while_it_imports(tiny: Path, tmp_path: Path) -> None:
    server = Starting(tiny, tmp_path / "log")
    try:
        server.until(lambda: server.says("MoE layers run"))  # the last line before SGLang is imported
        os.killpg(server.process.pid, signal.SIGINT)
        server.assert_ends(signal.SIGINT)
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("number", "kill"),
    [
        pytest.param(signal.SIGINT, os.killpg, id="ctrl-c"),
        pytest.param(signal.SIGTERM, os.kill, id="sigterm", marks=pytest.mark.slow),
    ],
)
def test_during_the_warm_up(
    number: signal.Signals, kill: Callable[[int, int], None], tiny: Path, tmp_path: Path
) -> None:
    """HTTP listens and weights are loaded; the warm-up's request never ends, as a long compilation seems not to."""
    server = Starting(tiny, tmp_path / "log")
    try:
        server.until(
            lambda: server.health() == 503
        )  # upstream's first request of the warm-up comes a second later
        server.hold()
        server.until(lambda: server.says("GET /model_info") or server.health() == 200)
        assert server.health() == 503
        kill(server.process.pid, number)
        server.assert_ends(number)
    finally:
        server.kill()


@pytest.mark.slow
def test_sigterm_while_weights_load(tiny: Path, tmp_path: Path) -> None:
    server = Starting(tiny, tmp_path / "log")
    try:
        server.until(lambda: server.says("Load weight begin"))
        server.hold()
        os.kill(server.process.pid, signal.SIGTERM)
        server.assert_ends(signal.SIGTERM)
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 128 + signal.SIGINT), (signal.SIGTERM, 0)], ids=["ctrl-c", "sigterm"]
)
def test_while_it_serves(number: signal.Signals, code: int, tiny: Path, tmp_path: Path) -> None:
    """SGLang closes down in its own way, SIGTERM being a wish for that; Ctrl-C says so in the exit code."""
    server = Starting(tiny, tmp_path / "log")
    try:
        server.until(lambda: server.health() == 200)
        os.killpg(server.process.pid, number) if number == signal.SIGINT else server.process.send_signal(
            number
        )
        assert server.process.wait(timeout=2 * SOON_S) == code, server.log.read_text()[-4000:]
        assert "Traceback" not in server.log.read_text()
        deadline = time.monotonic() + SOON_S  # multiprocessing's resource tracker ends after its parent
        while session_members(server.process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        server.kill()
