"""Where a rank is to be found by its siblings."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass

from glm_connectors.tiers.share import Share
from glm_connectors.tiers.siblings import memory


@dataclass(frozen=True, slots=True)
class Address:
    """Of rank `index` of its share.

    machine  the same for processes that reach each other's sockets and memory.
    name     of its socket, an abstract one: nothing of it stays behind, however the process ends.
    """

    index: int
    machine: str
    pid: int
    name: str


class Place:
    """A rank's socket, which listens from now on: whoever has its address is answered once `Siblings` has begun."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"glm-sglang-{os.getpid()}-{secrets.token_hex(8)}"
        self.listener.bind("\0" + name)
        self.listener.listen(share.of)
        self.listener.setblocking(False)
        memory.let_siblings_read()
        self.address = Address(share.index, _machine(), os.getpid(), name)

    def close(self) -> None:
        """Where it comes to nothing."""
        self.listener.close()


def _machine() -> str:
    """The boot, and the name spaces of processes and of abstract sockets."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        parts = [file.read().strip()]
    parts += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
    return " ".join(parts)
