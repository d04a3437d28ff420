"""A store that will never serve is told before anything is loaded; what a scheduler finds out is one message as well."""

from __future__ import annotations

import socket
from pathlib import Path

from glm_connectors.valkey_store import EmbeddedServer

from tests.contract.launching import environment, run

LAUNCHER = "glm_sglang.launch_server"
_NO_PLUGINS = """
import sys

class Never:
    def find_spec(self, name, path=None, target=None):
        if name == "sglang.srt.plugins":
            sys.exit("SGLang was imported")

sys.meta_path.insert(0, Never())
"""


def port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_a_wrong_password_ends_the_launcher_before_sglang_is_there(tiny: Path, tmp_path: Path) -> None:
    """Its plugins are what is imported first; here they cannot be."""
    (tmp_path / "sitecustomize.py").write_text(_NO_PLUGINS)
    with EmbeddedServer() as server:
        url = server.url.replace("//", "//joe:hunter2@")
        argv = ("--model-path", str(tiny), "--port", port(), "--glm-cache-url", url)
        ended = run(LAUNCHER, *argv, env=environment(tmp_path), timeout_s=60)
    assert ended.code == 2, ended.err
    (message,) = ended.messages
    assert message.startswith(f"glm-sglang: --glm-cache-url: 127.0.0.1:{server.port} refuses the credentials")
    assert ended.err.endswith(message + "\n")
    assert "hunter2" not in ended.err + ended.out
    assert ended.left == []


def test_a_store_that_is_down_ends_nothing_and_a_pool_too_small_does(tiny: Path) -> None:
    """The one is a warning, and the start goes on as far as the scheduler, which finds out the other."""
    argv = ("--model-path", str(tiny), "--port", port(), "--glm-cache-url", "valkey://127.0.0.1:1")
    ended = run(LAUNCHER, *argv, "--glm-cache-pool-gb", "0.000001", env=environment())
    assert ended.code == 1, ended.err[-3000:]
    warning, message = ended.messages
    assert "127.0.0.1:1 of --glm-cache-url does not answer" in warning
    assert "it needs 2 at least: raise --glm-cache-pool-gb" in message
    assert "Traceback" not in ended.err
    assert "Received sigquit" not in ended.err
    assert ended.left == []
