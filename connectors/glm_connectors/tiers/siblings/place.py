"""Where a rank is to be found by its siblings."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from dataclasses import dataclass

from glm_connectors.tiers.share import Share
from glm_connectors.tiers.siblings import memory

logger = logging.getLogger(__name__)

_BOOT = "/proc/sys/kernel/random/boot_id"
_NAME_SPACES = "/proc/self/ns"


@dataclass(frozen=True, slots=True)
class Address:
    """Of rank `index` of its share.

    machine  the same for processes that reach each other's sockets and memory; "" where that is not known: nobody's.
    name     of its socket, an abstract one: nothing of it stays behind, however the process ends.
    """

    index: int
    machine: str
    pid: int
    name: str


class Place:
    """A rank's socket, which listens from now on: whoever has its address is answered once `Siblings` has begun.

    Never raises: all ranks come to the exchange of addresses, also one that can have no socket. That one is "elsewhere"
    for the others, and they for it.
    """

    def __init__(self, share: Share) -> None:
        self.share = share
        self.listener: socket.socket | None = None
        name = f"glm-sglang-{os.getpid()}-{secrets.token_hex(8)}"
        machine = ""
        try:
            found = _machine()
            memory.let_siblings_read()
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.listener.bind("\0" + name)
            self.listener.listen(share.of)
            self.listener.setblocking(False)
            machine = found
        except Exception as error:
            logger.warning("cache: no pages from or for other ranks of this machine: %s", error)
            self.close()
            self.listener = None
        self.address = Address(share.index, machine, os.getpid(), name)

    def close(self) -> None:
        """Where it comes to nothing."""
        if self.listener is not None:
            self.listener.close()


def _machine() -> str:
    """The boot, and the name spaces of processes and of abstract sockets."""
    with open(_BOOT, encoding="ascii") as file:
        parts = [file.read().strip()]
    parts += [os.readlink(f"{_NAME_SPACES}/{kind}") for kind in ("pid", "net")]
    return " ".join(parts)
