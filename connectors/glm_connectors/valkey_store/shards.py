"""Which of several independent nodes holds a key: rendezvous hashing, so a node that is added or leaves moves
only its own share.
"""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from glm_connectors.valkey_store.url import Node


class Shards:
    """Places keys on nodes: the same in every process, whatever the order in which the URL names the nodes."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._seeds = [xxh3_64_intdigest(str(node).encode()) for node in nodes]

    def place(self, key: bytes) -> int:
        """Index of the node that holds `key` (a page hash: any bytes)."""
        if len(self._seeds) == 1:
            return 0
        weights = [xxh3_64_intdigest(key, seed) for seed in self._seeds]
        return weights.index(max(weights))
