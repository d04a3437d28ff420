"""What the data paths have in common: a connection for each thread and node, and how a failed call ends."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Generic, NoReturn, Protocol, TypeVar

ABSENT = -1  # no such key
MISFIT = -2  # something else than a value that fits the buffer


class Clients(Protocol):
    """A data path. Blocking; for worker threads. When a call has returned, or raised, nobody uses its buffers."""

    def read(self, node: int, names: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        """Gets values into buffers (writable, format "B"): bytes read, ABSENT or MISFIT, one each.

        Several names are one command: of a standalone node, not of a cluster. Raises the path's errors
        (`failures.kind_of` names them).
        """

    def write(self, node: int, names: Sequence[str], values: Sequence[memoryview]) -> list[Exception | None]:
        """Sets values, several in one round trip: the server's answer to each, None where it took it.

        Raises the path's errors where there are no answers.
        """

    def delete(self, node: int, names: Sequence[str]) -> int:
        """Deletes keys; how many there were. Raises the path's errors."""

    def close(self) -> None:
        """Closes every connection. Only when no thread is in a call any more."""


class Closes(Protocol):
    """A connection, as far as `PerThread` cares."""

    def close(self) -> object: ...


C = TypeVar("C", bound=Closes)


class PerThread(Generic[C]):
    """Connections of a pool of threads to the nodes of one URL; each is made at its first use."""

    def __init__(self, connect: Callable[[int], C]) -> None:
        self._connect = connect
        self._local = threading.local()
        self._lock = threading.Lock()
        self._all: list[C] = []
        self._left: dict[int, int] = {}  # how often a node was left
        self._closed = False

    def of(self, node: int) -> C:
        """This thread's connection to `node`. Raises what `connect` raises, and ConnectionError once closed."""
        mine, left = self._mine(), self._left.get(node, 0)
        if node in mine and mine[node][1] != left:
            self.drop(node)
        if node not in mine:
            try:
                connection = self._connect(node)
            except Exception as error:
                raise_without_frames(error)
            with self._lock:
                closed = self._closed
                if not closed:
                    self._all.append(connection)
            if closed:
                connection.close()
                raise ConnectionError("the store is closed")
            mine[node] = connection, left
        return mine[node][0]

    def drop(self, node: int) -> None:
        """Closes this thread's connection to `node`: the next call makes a new one."""
        connection, _ = self._mine().pop(node, (None, 0))
        if connection is None:
            return
        with self._lock:
            if connection in self._all:
                self._all.remove(connection)
        connection.close()

    def leave(self, node: int) -> None:
        """Every thread's next call to `node` makes a new connection. Those in a call end it first."""
        with self._lock:
            self._left[node] = self._left.get(node, 0) + 1

    def close(self) -> None:
        """Closes them all, and each that is made later."""
        with self._lock:
            connections, self._all, self._closed = self._all, [], True
        for connection in connections:
            connection.close()

    def _mine(self) -> dict[int, tuple[C, int]]:
        connections: dict[int, tuple[C, int]] = self._local.__dict__.setdefault("connections", {})
        return connections


def raise_without_frames(error: BaseException) -> NoReturn:
    """As `lmcache_repairs.clients` says: a failed call's frames hold views of the caller's memory. One that cffi has
    exported crashes CPython's collector when it is cleared as part of a cycle, and any keeps a pool's memory
    from being given back. So they are emptied here.
    """
    traceback.clear_frames(error.__traceback__)
    # Its new traceback holds this frame: were the error among its names, callers' views would stay until a collection.
    try:
        raise error.with_traceback(None) from None
    finally:
        del error
