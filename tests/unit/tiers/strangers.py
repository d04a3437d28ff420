"""Whatever listens where a Valkey should."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stranger(answer: bytes | Callable[[socket.socket], None] | None, *, echo: bool = False) -> Iterator[int]:
    """A port at which something answers each connection's first words, with the same if it is an echo; None: silence. Or
    does what it will with the connection."""
    held = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                if callable(answer):
                    answer(connection)
                    continue
                asked = connection.recv(4096)
                held.append(connection)
                if answer is not None:
                    connection.sendall(asked if echo else answer)
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    for connection in held:
        connection.close()
