"""Starts and stops server processes for tests, benchmarks and the demo: SGLang servers, and the router beside
them.

    with Server(checkpoint, ["--page-size", "64"]) as server:
        httpx.post(server.url + "/generate", json={...})

Each server leads a process group of its own; stopping ends the whole group and waits until nothing of it is
left.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx

# Called while a server starts: seconds since the start, and the newest log line worth reading.
Progress = Callable[[float, str], None]

_POLL_S = 0.1
_TERM_S = 10.0  # from SIGTERM to SIGKILL
_TAIL_LINES = 20
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_WIDTH = 240  # SGLang prints its whole configuration as one line
# Lines that explain nothing to somebody who waits for a server, or whose server died.
_NOISE = re.compile(
    r"^[\^~\s|+\-]*$|warnings\.warn\(|(Future|User|Deprecation|Runtime)Warning|resource_tracker"
    r"|it/s\]|s/it\]|\"GET /|freeze_gc|Ignore import error|Cannot detect CUDA|import pynvml|NVML"
)
# Waits for the end of its standard input, whose other end dies with us, then ends the group $1.
_GUARD = """
read -r _
kill -TERM "$1"
left=$2
while [ $left -gt 0 ] && kill -0 "-$1"; do sleep 0.1; left=$((left - 1)); done
kill -KILL "-$1"
"""
_handed_out: set[int] = set()


class ServerError(RuntimeError):
    """A server did not start. The message has its last log lines; `log` is the whole log, `returncode` None
    if still running.
    """

    def __init__(self, message: str, log: Path, returncode: int | None) -> None:
        self.log = log
        self.returncode = returncode
        self.tail = tail(log)
        lines = "\n".join(f"  {line}" for line in self.tail) or "  (no output)"
        super().__init__(f"{message}\n{lines}\n  the whole log: {log}")


def free_port(host: str = "127.0.0.1", span: int = 10_000) -> int:
    """A TCP port nobody listens on now; this process never hands out the same one twice.

    It lies below those that the kernel gives to connections, of which it may give away any before a server, half a minute
    after its start, binds its own. Any free one where there are not `span` such ports.
    """
    first = _first_of_the_kernel()
    quiet = random.Random().sample(range(first - span, first), span // 10) if first > 2 * span else []
    for wanted in itertools.chain(quiet, itertools.repeat(0)):
        with socket.socket() as probe:
            try:
                probe.bind((host, wanted))
            except OSError as error:
                if wanted and error.errno in (errno.EADDRINUSE, errno.EACCES):
                    continue
                raise
            port = int(probe.getsockname()[1])
        # SGLang derives further ports by adding up to a few thousand.
        if port not in _handed_out and port < 60000:
            _handed_out.add(port)
            return port
    raise AssertionError  # there is always another one


def _first_of_the_kernel() -> int:
    """The first of the ports that the kernel hands out by itself; 0 where it does not say."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def readable(line: str) -> str:
    """A log line without colour codes, cut to a readable width; "" when it is noise."""
    plain = _ANSI.sub("", line).rstrip()[:_WIDTH]
    return "" if _NOISE.search(plain) else plain


def tail(log: Path, lines: int = _TAIL_LINES) -> list[str]:
    """The last `lines` readable lines of a log; empty when there is no log."""
    try:
        data = log.read_bytes()[-(1 << 18) :]
    except FileNotFoundError:
        return []
    kept = [line for line in map(readable, data.decode(errors="replace").splitlines()) if line]
    return kept[-lines:]


def group_members(group: int) -> list[int]:
    """Pids of the live processes (zombies apart) of a process group."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            # "pid (name) state ppid pgrp ...": the name may hold anything, so count from its closing bracket.
            state, _, pgrp = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError, ValueError):
            continue
        if int(pgrp) == group and state not in "ZX":
            found.append(int(entry))
    return found


def guard(leader: int) -> subprocess.Popen[bytes]:
    """Stops the process group of `leader` should this process die without having done so (SIGKILL, os._exit): SIGTERM
    to the leader, SIGKILL to the group 10 s later. Whoever stops it himself kills the guard.
    """
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "guard", str(leader), str(int(_TERM_S * 10))],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


class Process:
    """One server process: `start()`, `wait_ready()`, `stop()`, or a `with` block that does all three.

    Owns the process group and, when `log` is not given, a temporary log file, which is removed after a clean
    stop and kept when something went wrong.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        host: str,
        port: int,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        ready_path: str = "/health",
        ready_timeout_s: float = 240.0,
        progress: Progress | None = None,
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self.host = host
        self.port = port
        self.env = dict(env or {})
        self._owns_log = log is None
        if log is None:
            handle, path = tempfile.mkstemp(prefix=f"glm-sglang-{name}-", suffix=".log")
            os.close(handle)
            log = Path(path)
        self.log = log
        self.ready_path = ready_path
        self.ready_timeout_s = ready_timeout_s
        self.progress = progress
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._told_at = 0.0  # when it was told to end; 0: not yet

    @property
    def url(self) -> str:
        """http://host:port, without a slash at the end."""
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """Pid of the process, which is its group's id too. Raises RuntimeError before `start()`."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts the process without waiting for it. Raises ServerError when the port is taken."""
        self._check_port()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **self.env}
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._guard = guard(self._process.pid)
        self._started_at = time.monotonic()

    def _check_port(self) -> None:
        # Somebody else's server on the port would answer our readiness question.
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                message = (
                    f"{self.name}: --port is {self.port}; it must be free on {self.host} ({error.strerror})"
                )
                raise ServerError(message, self.log, None) from None

    def wait_ready(self) -> None:
        """Returns once GET `ready_path` answers 200.

        Raises ServerError when the process ends first or `ready_timeout_s` passes; the group is stopped in
        both cases.
        """
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        shown = ""
        with httpx.Client(base_url=self.url, timeout=5.0, trust_env=False) as client:
            while True:
                waited = time.monotonic() - self._started_at
                code = self._process.poll()
                if code is not None:
                    self._fail(
                        f"{self.name} ended with status {code} after {waited:.0f} s, before it served", code
                    )
                try:
                    if client.get(self.ready_path).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                if waited > self.ready_timeout_s:
                    self._fail(
                        f"{self.name} did not answer {self.ready_path} within {self.ready_timeout_s:.0f} s",
                        None,
                    )
                if self.progress is not None and (last := tail(self.log, 1)) and last[0] != shown:
                    shown = last[0]
                    self.progress(waited, shown)
                time.sleep(_POLL_S)

    def _fail(self, message: str, code: int | None) -> None:
        self._end_group()
        raise ServerError(message, self.log, code)

    def stop(self) -> None:
        """Ends the process and everything in its group; returns when none of it is left. Harmless when not
        running.
        """
        self._end_group()
        if self._owns_log:
            self.log.unlink(missing_ok=True)

    def begin_to_stop(self) -> None:
        """Tells the process to end and does not wait, as `stop` does. Harmless when not running, and twice."""
        # The leader alone: it tells its children.
        if self._process is not None and not self._told_at and self._process.poll() is None:
            self._told_at = time.monotonic()
            self._process.send_signal(signal.SIGTERM)

    def _end_group(self) -> None:
        process = self._process
        if process is None:
            return
        group = process.pid
        self.begin_to_stop()
        # Whoever outlives the grace period is killed.
        deadline = (self._told_at or time.monotonic()) + _TERM_S
        while group_members(group) and time.monotonic() < deadline:
            process.poll()  # reaps the leader
            time.sleep(_POLL_S)
        while group_members(group):
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                break
            process.poll()
            time.sleep(_POLL_S)
        process.wait()
        self._process, self._told_at = None, 0.0
        if self._guard is not None:
            self._guard.kill()  # before its input ends: the group id is free for others now
            self._guard.communicate()
            self._guard = None

    def __enter__(self) -> Process:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self._end_group()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self._end_group()


def stop_together(processes: Sequence[Process]) -> None:
    """Tells all of them to end, in this order, then waits for each: a server takes seconds to drain."""
    for process in processes:
        process.begin_to_stop()
    for process in processes:
        process.stop()


class Server(Process):
    """An SGLang server started by `python -m glm_sglang.launch_server`; `module` names another launcher
    (stock SGLang's).
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        args: Sequence[str] = (),
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        module: str = "glm_sglang.launch_server",
        name: str = "server",
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        ready_timeout_s: float = 240.0,
        progress: Progress | None = None,
    ) -> None:
        port = free_port(host) if port is None else port
        argv = [
            sys.executable,
            "-m",
            module,
            "--model-path",
            os.fspath(model),
            "--host",
            host,
            "--port",
            str(port),
            *args,
        ]
        super().__init__(
            name,
            argv,
            host=host,
            port=port,
            env=env,
            log=log,
            ready_timeout_s=ready_timeout_s,
            progress=progress,
        )

    def __enter__(self) -> Server:
        super().__enter__()
        return self
