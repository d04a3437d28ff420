"""Ports for servers that start side by side."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from glm_sglang.serving import free_port

_given: set[int] = set()


def quiet_port(span: int = 10_000) -> int:
    """A free port below those that the kernel hands out by itself, of which it may give any away before a server, a
    minute after it was started, binds its own. Any free one where there are no such ports.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.Random().sample(range(first - span, first), span // 10) if first > 2 * span else ():
        with socket.socket() as probe:
            if port not in _given and probe.connect_ex(("127.0.0.1", port)) != 0:
                _given.add(port)
                return port
    return free_port()
