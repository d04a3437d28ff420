"""How long a socket may say nothing: while it is dialled, and in a call.

In a call a part of the timeout at most passes in the kernel at a time, under SO_SNDTIMEO and SO_RCVTIMEO; the call has
failed once no byte has come and none was taken away for as long as the timeout.
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct
import termios
import time

# Seconds of a wait for bytes at most, then a look at whether values are what was expected: what a get loses to the first
# hole that it meets. Set once: to set it while bytes come has the kernel do its work on them with the interpreter in our
# hands.
_GLANCE = 0.005
_WAITS = 4  # that a timeout consists of, at least


class Silence:
    """Of one connected socket, whose waits it limits. Of one thread; `ends_after` comes first."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._timeout = 0.0
        self._since = time.monotonic()  # when a byte moved last
        self._unsent = -1  # bytes not yet acknowledged at the last wait since; -1 unknown

    def ends_after(self, timeout: float) -> None:
        """Seconds of silence; a part of them is how long a call of the kernel may take."""
        self._timeout = timeout
        for option, seconds in (
            (socket.SO_SNDTIMEO, timeout / _WAITS),
            (socket.SO_RCVTIMEO, min(timeout / _WAITS, _GLANCE)),
        ):
            whole, part = divmod(max(1, int(1e6 * seconds)), 1_000_000)
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", whole, part))

    def broken(self) -> None:
        """A call begins, a byte came, or the kernel took one."""
        self._since, self._unsent = time.monotonic(), -1

    def waited(self) -> None:
        """A wait ended without either. TimeoutError where there was neither for as long as the timeout.

        The kernel takes megabytes at once and a slow link has them for seconds: while the other side acknowledges some
        of them, this is no silence.
        """
        unsent = array.array("i", [0])
        fcntl.ioctl(self._socket, termios.TIOCOUTQ, unsent)
        now = time.monotonic()
        if unsent[0] < self._unsent:
            self._since = now
        self._unsent = unsent[0]
        if now - self._since >= self._timeout:
            raise TimeoutError("timed out")


def dial(host: str, port: int, timeout: float) -> socket.socket:
    """Tries the host's addresses in turn. Each has its share of what is left of `timeout`: one that never answers
    leaves the next ones theirs. The last one's OSError where none answers."""
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    deadline = time.monotonic() + timeout
    for left, (family, kind, protocol, _, address) in zip(
        range(len(addresses), 0, -1), addresses, strict=True
    ):
        one = socket.socket(family, kind, protocol)
        try:
            one.settimeout(max(0.001, (deadline - time.monotonic()) / left))
            one.connect(address)
        except OSError:
            one.close()
            if left == 1:
                raise
        except BaseException:
            one.close()
            raise
        else:
            return one
    raise OSError(f"{host} has no address")
