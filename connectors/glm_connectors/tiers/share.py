"""Which pages a rank puts into Valkey, and gets from there for its siblings, of those that several ranks hold alike (MLA
under TP and CP)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """Rank `index` of the `of` ranks that commit the same pages. ValueError for a rank that is none of them.

    A page's key says whose it is, so no rank asks another: each page is put by exactly one, and a prompt's pages are
    spread over all. What a rank can't put, because its connection is down for longer than its patience or its queue is
    full, no other puts in its place: a hole in the prompt, counted there as `cache_dropped_saves`.
    """

    index: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            raise ValueError(
                f"share {self.index} of {self.of}: expected an index from 0 on, below the number"
            )

    def owner(self, key: bytes) -> int:
        """The rank that puts the page of `key`. Keys are digests: every part of one is evenly spread."""
        return int.from_bytes(key[:8], "little") % self.of

    def holds(self, key: bytes) -> bool:
        """Whether it is this one."""
        return self.owner(key) == self.index
