"""A cluster's shards: which of them has a key, and which nodes have a shard's slots now.

Glide finds the node of each key by itself. What is here tells a shard that is down from those that are not: each has its
breakers, and its queue of saves, as one of several independent nodes has.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Callable, Sequence

from glm_connectors.valkey_store import health
from glm_connectors.valkey_store.url import Node, StoreUrl

SLOTS = 16384

# The primary of each slot; None where nobody has it.
Owners = Sequence[Node | None]


def owners(
    url: StoreUrl, nodes: Sequence[Node], timeout: float, stopped: Callable[[], bool] = lambda: False
) -> Owners | None:
    """As the first of `nodes` says that answers; None where none does, or once `stopped`. timeout: seconds, of each."""
    for node in nodes:
        if stopped():
            break
        client = health.connect(url, node, timeout)
        try:
            ranges = client.execute_command("CLUSTER SLOTS")
        except Exception:
            continue
        finally:
            client.close()
        found: list[Node | None] = [None] * SLOTS
        for first, last, (host, port, *_), *_replicas in ranges:
            # Without a name it is whom we have asked.
            name = host.decode() if host not in (None, b"", b"?") else node.host
            found[first : last + 1] = [Node(name, port)] * (last + 1 - first)
        return found
    return None


class ClusterShards:
    """Places keys on the shards that a cluster had at the start, by their primaries then. A shard keeps its number when
    a replica takes it over; slots that move to another keep theirs, and share the breaker of where they were.
    """

    def __init__(self, owners: Owners, name_of: Callable[[bytes], str]) -> None:
        """name_of: a key's name in Valkey. One shard at least."""
        self.nodes = tuple(dict.fromkeys(node for node in owners if node is not None))
        numbers = {node: number for number, node in enumerate(self.nodes)}
        self._numbers = [0 if node is None else numbers[node] for node in owners]
        self._name_of = name_of

    def place(self, key: bytes) -> int:
        """Index of the shard that holds `key` (a page hash; its name has no hash tag)."""
        return self._numbers[crc_hqx(self._name_of(key).encode(), 0) % SLOTS]

    def answers(self, number: int, url: StoreUrl, timeout: float, stopped: Callable[[], bool]) -> bool:
        """Whether a node that now has slots of this shard answers. Once `stopped`, no further one is asked: False."""
        own = self.nodes[number]
        asked = sorted(dict.fromkeys((*self.nodes, *url.nodes)), key=lambda node: node == own)
        now = owners(url, asked, timeout, stopped)
        if now is None:
            return False
        those = {node for node, its in zip(now, self._numbers, strict=True) if its == number and node}
        return any(not stopped() and health.alive(url, node, timeout) is None for node in those)
