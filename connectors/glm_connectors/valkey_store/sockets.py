"""The data path to nodes without TLS: a blocking socket for each thread and node (`connection.py`).

It moves more than `glide.py`, which copies every value twice on its way (docs/decisions.md has the figures);
clusters, and TLS, are glide's. A connection on which a call has failed or timed out is closed, never used again:
a reply that comes later has nobody to reach. One that ended while nobody used it costs no failure: what the server
has closed (a restart) is noticed before the next command, and a command that meets a reset (what a load balancer says
on a connection that it has forgotten) goes out again on a new one. Where a node says that it is no longer the one to
ask, all threads leave their connections to it: after a failover its name leads to another node.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from glm_connectors.valkey_store.clients import MISFIT, PerThread, raise_without_frames
from glm_connectors.valkey_store.connection import Connection, RefusedError
from glm_connectors.valkey_store.failures import wants_another
from glm_connectors.valkey_store.url import StoreUrl

T = TypeVar("T")

LONGEST = 5  # request timeouts that a call may take, however steadily its bytes come


class SocketClients:
    """Connections of a pool of threads to the nodes of one URL; see `clients.Clients`.

    request_timeout: seconds of silence that end a call; `LONGEST` times as many end it anyway. connect_timeout: seconds
    to connect, and as many to sign in. ttl: seconds that a value lives, 0 for ever.
    """

    def __init__(self, url: StoreUrl, request_timeout: float, connect_timeout: float, ttl: int) -> None:
        def connect(number: int) -> Connection:
            node = url.nodes[number]
            return Connection(
                node.host,
                node.port,
                url.username,
                url.password,
                url.database,
                connect_timeout,
                request_timeout,
            )

        self._longest, self._ttl = LONGEST * request_timeout, ttl
        self._connections = PerThread(connect)

    def read(self, node: int, names: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        """As `clients.Clients.read`. RefusedError, OSError."""
        try:
            return self._call(node, lambda one, deadline: one.get(names, buffers, deadline))
        except RefusedError as error:
            if len(names) == 1 and str(error).startswith("WRONGTYPE"):
                return [MISFIT]
            raise

    def write(self, node: int, names: Sequence[str], values: Sequence[memoryview]) -> list[Exception | None]:
        """As `clients.Clients.write`. OSError."""
        answers = self._call(node, lambda one, deadline: one.set(names, values, self._ttl, deadline))
        if any(answer is not None and wants_another(answer) for answer in answers):
            self._connections.leave(node)
        return [*answers]

    def delete(self, node: int, names: Sequence[str]) -> int:
        """As `clients.Clients.delete`. RefusedError, OSError."""
        return self._call(node, lambda one, deadline: one.delete(names, deadline))

    def close(self) -> None:
        """As `clients.Clients.close`."""
        self._connections.close()

    def _call(self, node: int, work: Callable[[Connection, float], T]) -> T:
        deadline = float("inf")
        while True:
            connection = self._connections.of(node)
            if not connection.idle():
                self._connections.drop(node)
                connection = self._connections.of(node)
            deadline = min(deadline, time.monotonic() + self._longest)
            try:
                return work(connection, deadline)
            except RefusedError as error:
                if wants_another(error):
                    self._connections.leave(node)
                raise_without_frames(error)
            except BaseException as error:
                self._connections.drop(node)
                # Any of our commands may run twice. Once: a new connection has not ended before.
                if not isinstance(error, ConnectionError) or not connection.ended_before():
                    raise_without_frames(error)
                traceback.clear_frames(error.__traceback__)
