"""Starting and stopping server processes, with small HTTP servers in SGLang's place."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import httpx
import pytest

from glm_sglang import serving
from glm_sglang.serving import (
    Process,
    Server,
    ServerError,
    free_port,
    group_members,
    readable,
    stop_together,
    tail,
)

# Answers /health with 503 to the first `deaf` requests. A child that ignores SIGTERM shares its process
# group.
SERVER = """
import http.server, subprocess, sys
port, deaf, child = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if child:
    subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE).stdout.readline()
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        self.send_response(503 if Handler.asked <= deaf else 200)
        self.end_headers()
    def log_message(self, *args):
        print("loading layer", Handler.asked, flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
DEAF_CHILD = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


def process(tmp_path: Path, *, deaf: int = 0, child: bool = False, **options: object) -> Process:
    port = free_port()
    argv = [sys.executable, "-c", SERVER, str(port), str(deaf), DEAF_CHILD if child else ""]
    settings: dict[str, object] = {"host": "127.0.0.1", "port": port, "log": tmp_path / "log", **options}
    return Process("toy", argv, **settings)  # type: ignore[arg-type]


def wait_until(condition: object, seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


def test_serves_inside_the_block_and_not_after(tmp_path: Path) -> None:
    with process(tmp_path) as server:
        assert httpx.get(server.url + "/health", trust_env=False).status_code == 200
        group = server.pid
        assert group_members(group)
    assert group_members(group) == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url, trust_env=False)


def test_ready_means_status_200_not_an_open_port(tmp_path: Path) -> None:
    seen: list[str] = []
    with process(tmp_path, deaf=3, progress=lambda _, line: seen.append(line)) as server:
        assert server.alive
    # The fourth request was the first to be answered with 200; each is logged before the next is sent.
    assert "loading layer 4" in (tmp_path / "log").read_text()
    assert seen
    assert all(line.startswith("loading layer") for line in seen)
    assert len(seen) == len(set(seen))


def test_children_that_ignore_sigterm_end_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm_sglang.serving._TERM_S", 0.3)
    with process(tmp_path, child=True) as server:
        group = server.pid
        assert len(group_members(group)) == 2
    assert group_members(group) == []


def test_an_error_in_the_block_stops_the_server_and_keeps_the_log(tmp_path: Path) -> None:
    server = process(tmp_path, log=None)
    groups = []

    def fail() -> None:
        with server:
            groups.append(server.pid)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert group_members(groups[0]) == []
    assert server.log.exists()
    server.log.unlink()


def test_a_temporary_log_goes_when_all_was_well(tmp_path: Path) -> None:
    with process(tmp_path, log=None) as server:
        assert server.log.exists()
    assert not server.log.exists()


def test_a_server_that_dies_says_why(tmp_path: Path) -> None:
    code = "import sys; print('warnings.warn(x)'); print('--hidden is 3; it must be 512'); sys.exit(7)"
    server = Process(
        "toy", [sys.executable, "-c", code], host="127.0.0.1", port=free_port(), log=tmp_path / "log"
    )
    with pytest.raises(ServerError, match="--hidden is 3; it must be 512") as caught, server:
        pass
    assert caught.value.returncode == 7
    assert caught.value.tail == ["--hidden is 3; it must be 512"]
    assert str(tmp_path / "log") in str(caught.value)


def test_a_server_that_never_answers_is_stopped(tmp_path: Path) -> None:
    server = process(tmp_path, deaf=10**9, ready_timeout_s=1.0)
    server.start()
    group = server.pid
    with pytest.raises(ServerError, match="did not answer /health within 1 s"):
        server.wait_ready()
    assert not server.alive
    assert group_members(group) == []


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = Process("toy", ["/nonexistent"], host="127.0.0.1", port=port, log=tmp_path / "log")
        with pytest.raises(ServerError, match=f"--port is {port}; it must be free on 127.0.0.1"):
            server.start()
    assert not server.alive


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_stays_when_the_parent_dies(tmp_path: Path, ending: signal.Signals) -> None:
    port = free_port()
    parent = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from glm_sglang.serving import Process
        argv = [sys.executable, "-c", {SERVER!r}, "{port}", "0", ""]
        log = Path({str(tmp_path / "log")!r})
        with Process("toy", argv, host="127.0.0.1", port={port}, log=log) as server:
            print(server.pid, flush=True)
            time.sleep(600)
    """)
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        group = int(running.stdout.readline())
        assert group_members(group)
        running.send_signal(ending)
        running.wait(30)
        assert wait_until(lambda: not group_members(group))


def test_several_are_told_before_any_is_waited_for(tmp_path: Path) -> None:
    said: list[str] = []

    class Told(Process):
        def begin_to_stop(self) -> None:
            said.append(f"told {self.name}")
            super().begin_to_stop()

        def stop(self) -> None:
            said.append(f"stop {self.name}")
            super().stop()

    servers = []
    for name in "ab":
        port = free_port()
        argv = [sys.executable, "-c", SERVER, str(port), "0", ""]
        servers.append(Told(name, argv, host="127.0.0.1", port=port, log=tmp_path / name))
        servers[-1].start()
    groups = [server.pid for server in servers]
    stop_together(servers)
    assert said[:3] == ["told a", "told b", "stop a"]
    assert [group_members(group) for group in groups] == [[], []]
    servers[0].start()  # and again: what it was told before is forgotten
    servers[0].wait_ready()
    stop_together(servers)


def test_free_ports_are_free_and_differ() -> None:
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_a_free_port_is_none_that_the_kernel_gives_to_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    said = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert serving._first_of_the_kernel() == said
    monkeypatch.setattr(serving, "_first_of_the_kernel", lambda: 30_000)
    assert all(20_000 <= free_port() < 30_000 for _ in range(50))


def test_where_the_kernel_leaves_no_ports_any_free_one_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_first_of_the_kernel", lambda: 1024)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port()))


def test_server_runs_our_launcher_with_loopback_and_the_flags(tmp_path: Path) -> None:
    server = Server(tmp_path, ["--page-size", "64"], port=31234, log=tmp_path / "log")
    assert server.argv == [
        *(sys.executable, "-m", "glm_sglang.launch_server"),
        *("--model-path", str(tmp_path), "--host", "127.0.0.1", "--port", "31234", "--page-size", "64"),
    ]
    assert server.url == "http://127.0.0.1:31234"
    stock = Server(tmp_path, module="sglang.launch_server", log=tmp_path / "log")
    assert stock.argv[2] == "sglang.launch_server"


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("\x1b[32m[2026-01-01 00:00:00] Load weight end.\x1b[0m", "[2026-01-01 00:00:00] Load weight end."),
        ("Loading safetensors:  50%|#####     | 1/2 [00:01<00:01,  1.05it/s]", ""),
        ("  warnings.warn(", ""),
        ("    ^^^^^^^^^^", ""),
        ('INFO: 127.0.0.1:1 - "GET /health HTTP/1.1" 503 Service Unavailable', ""),
        ("RuntimeError: out of memory", "RuntimeError: out of memory"),
    ],
)
def test_noise_is_left_out(line: str, kept: str) -> None:
    assert readable(line) == kept


def test_tail_is_short_and_a_missing_log_is_empty(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == []
    log.write_text("".join(f"line {i}\n\n" for i in range(100)))
    assert tail(log, 3) == ["line 97", "line 98", "line 99"]


def test_zombies_are_no_members() -> None:
    with subprocess.Popen(["/bin/true"], start_new_session=True) as child:
        # Not waited for yet: once it has ended it is a zombie, and waitid leaves it one.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert group_members(child.pid) == []
