"""Whole messages between the scheduler and a rank on one machine, over a Unix socket. Sending never blocks.

In the place of upstream's ZeroMQ sockets: there each message goes through a thread of its own at both ends, and
what a lookup over eight ranks costs is waking threads (`python -m benchmarks.lookup_latency` measures both). Here a
request wakes the rank's thread and a reply the scheduler's, nothing else.
"""

from __future__ import annotations

import hashlib
import os
import select
import socket
import struct
import threading
from contextlib import suppress

_LENGTH = struct.Struct("<I")
_PIECE = 1 << 16  # bytes of one read
_LONGEST = 1 << 26  # bytes of a message; longer ones are no messages
# As plain integers: `|` of the socket module's flags takes a microsecond.
_PUSH = int(socket.MSG_DONTWAIT) | int(socket.MSG_NOSIGNAL)
_NOW = int(socket.MSG_DONTWAIT)
ROOM = 8 << 20  # bytes that may wait for an end that does not read


def address(path: str) -> str:
    """The socket of a rank, beside the one that unrepaired LMCache has at `path`.

    No longer than the shortest name that LMCache gives its own: it fits a socket's address where that one does.
    """
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return os.path.join(os.path.dirname(path), f"glm_lookup_{digest}")


def framed(message: bytes) -> bytes:
    """A message as `Link.send` takes it: encoded once for all ranks."""
    return _LENGTH.pack(len(message)) + message


class Link:
    """One end of a connection. Any thread sends, at any time; one thread at a time receives, and closes.

    Sending and receiving raise ConnectionError once the other end is gone or this one closed.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()  # of what goes out, and of the end
        self._unsent = bytearray()
        self._begun = b""  # a message that has come in part
        self._buffer = bytearray(_PIECE)
        self._patience = 0  # milliseconds, as the socket has it; 0: for ever

    @classmethod
    def to(cls, path: str) -> Link:
        """Connects to a rank's `Inlet`. OSError where it is not there."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.connect(path)
            connection.setblocking(True)
        except BaseException:
            connection.close()
            raise
        return cls(connection)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def pressing(self) -> bool:
        """Whether something waits for the other end to read: `flush` when the socket is writable again."""
        return bool(self._unsent)

    def send(self, frame: bytes) -> bool:
        """Sends `frame`, or keeps what does not go now. False where there is no room: nothing of it is sent."""
        with self._lock:
            sent = 0 if self._unsent else self._push(frame)
            if sent == len(frame):
                return True
            if not sent and len(self._unsent) + len(frame) > ROOM:
                return False
            self._unsent += memoryview(frame)[sent:]
        return True

    def flush(self) -> None:
        """Sends of what waits as much as goes."""
        with self._lock:
            del self._unsent[: self._push(self._unsent)]

    def _push(self, data: bytes | bytearray) -> int:
        if self._socket.fileno() < 0:
            raise ConnectionResetError("closed")
        try:
            return self._socket.send(data, _PUSH)
        except BlockingIOError:
            return 0

    def receive(self, milliseconds: int) -> list[bytes]:
        """Messages that have come; waits at most so long for any, not at all with 0."""
        flags = 0
        if not milliseconds:
            flags = _NOW
        elif milliseconds != self._patience:
            self._patience = milliseconds
            seconds, rest = divmod(milliseconds, 1000)
            limit = struct.pack("@ll", seconds, 1000 * rest)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        try:
            count = self._socket.recv_into(self._buffer, 0, flags)
        except BlockingIOError:
            return []
        if not count:
            raise ConnectionResetError("the other end is gone")
        data = self._begun + self._buffer[:count]
        messages, start = [], 0
        while len(data) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, start)
            if length > _LONGEST:
                raise ConnectionResetError(f"a message of {length} bytes is none")
            end = start + _LENGTH.size + length
            if end > len(data):
                break
            messages.append(data[start + _LENGTH.size : end])
            start = end
        self._begun = data[start:]
        return messages

    def cut(self) -> None:
        """Ends the connection under whoever receives on it; `close` is for when nobody does."""
        with self._lock, suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self._socket.close()


class Kick:
    """Something to poll beside connections: readable from `send`, by any thread, until `take`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a number that was closed may be another file's at once
        self._number = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._number

    def send(self) -> None:
        with self._lock:
            if self._number >= 0:
                os.eventfd_write(self._number, 1)

    def take(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._number)

    def close(self) -> None:
        """Idempotent; a `send` after it does nothing."""
        with self._lock:
            if self._number >= 0:
                os.close(self._number)
                self._number = -1


class Inlet:
    """Where a rank is asked: accepts connections and waits on all of them. `wake` and `close` apart, of one thread."""

    def __init__(self, path: str) -> None:
        """OSError where the socket can't be made. A file that a rank before left there is taken over."""
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with suppress(FileNotFoundError):
                os.unlink(path)
            self._listener.bind(path)
            self._listener.listen()
            self._listener.setblocking(False)
        except BaseException:
            self._listener.close()
            raise
        self._identity = os.stat(path).st_ino
        self._kick = Kick()
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)
        self._poll.register(self._kick, select.POLLIN)
        self._links: dict[int, Link] = {}

    def wake(self) -> None:
        """Ends a `wait` that is under way, or the next one. Any thread."""
        self._kick.send()

    def wait(self) -> list[tuple[Link, bytes]]:
        """Waits for something to come; the messages among it, and what sent them."""
        came: list[tuple[Link, bytes]] = []
        for link in self._links.values():
            if link.pressing:
                self._poll.modify(link, select.POLLIN | select.POLLOUT)
        for number, events in self._poll.poll():
            if number == self._kick.fileno():
                self._kick.take()
            elif number == self._listener.fileno():
                self._accept()
            else:
                came += self._read(number, events)
        return came

    def _accept(self) -> None:
        with suppress(BlockingIOError, ConnectionError):
            connection, _ = self._listener.accept()
            connection.setblocking(True)
            link = Link(connection)
            self._links[link.fileno()] = link
            self._poll.register(link, select.POLLIN)

    def _read(self, number: int, events: int) -> list[tuple[Link, bytes]]:
        link = self._links[number]
        try:
            if events & select.POLLOUT:
                link.flush()
                if not link.pressing:
                    self._poll.modify(link, select.POLLIN)
            if events & ~select.POLLOUT:
                return [(link, message) for message in link.receive(0)]
        except ConnectionError:
            self._poll.unregister(number)
            del self._links[number]
            link.close()
        return []

    def close(self) -> None:
        """Closes everything. The file goes with it, unless another rank has taken it over."""
        with suppress(OSError):
            if os.stat(self._path).st_ino == self._identity:
                os.unlink(self._path)
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._listener.close()
        self._kick.close()
