"""Ranks for tests: stores over pages whose bytes follow from their key, so that any other page's bytes show."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from glm_connectors.tiers import Namespace, PageLayout, Share, Siblings, TierConfig, TieredStore
from glm_connectors.tiers.pool import OWNERS

LAYOUT = PageLayout(64, (("kv", 7000), ("index", 1000)))
NAMESPACE = Namespace("glm", "revision 1", "fp8", LAYOUT, "full 0,1,2", "")
ALONE = Share()
PATIENCE = 30.0  # seconds before a test calls something hung


def keys(count: int, prompt: str = "p") -> list[bytes]:
    """Page keys of a prompt."""
    return [hashlib.sha256(f"{prompt}/{number}".encode()).digest() for number in range(count)]


def bytes_of(key: bytes, size: int = LAYOUT.page_bytes) -> bytes:
    """The page that belongs to `key`."""
    return hashlib.shake_128(key).digest(size)


class Rank:
    """A store, filled and read as a server would."""

    def __init__(
        self,
        url: str,
        *,
        writer: bool = True,
        share: Share = ALONE,
        siblings: Siblings | None = None,
        namespace: Namespace = NAMESPACE,
        pages: int = 200,
        **more: Any,
    ) -> None:
        slot = -(-(128 + namespace.layout.page_bytes) // 512) * 512
        bounds: dict[str, Any] = {"request_timeout": 0.3, "connect_timeout": 0.5, "drain": 5.0} | more
        self.size = namespace.layout.page_bytes
        self.store = TieredStore(
            TierConfig(url=url, pool_bytes=pages * slot, **bounds),
            namespace,
            writer=writer,
            share=share,
            siblings=siblings,
        )
        self.pool = self.store._pool
        self._rids = 0

    @property
    def metrics(self) -> Any:
        return self.store.metrics

    def commit(self, chain: Sequence[bytes]) -> None:
        """Fills and commits pages; does not wait for their puts."""
        pages = self.store.reserve(len(chain))
        assert pages is not None
        for page, key in zip(pages, chain, strict=True):
            page.view[:] = bytes_of(key, self.size)
        self.store.commit(pages, chain)

    def save(self, chain: Sequence[bytes]) -> int:
        """Commits pages and waits for the queue; how many Valkey took."""
        before = self.metrics["cache_saved_pages"]
        self.commit(chain)
        until(lambda: self.metrics["cache_save_queue_pages"] == 0)
        return int(self.metrics["cache_saved_pages"] - before)

    def fetch(self, chain: Sequence[bytes], seconds: float = PATIENCE) -> str:
        """A request that comes, waits for its pages, and goes: how its prefetch ended."""
        self._rids += 1
        ticket = self.store.prefetch(f"r{self._rids}", chain)
        assert ticket.wait(seconds)
        self.store.cancel(ticket.rid)
        return ticket.end

    def hits(self, chain: Sequence[bytes]) -> int:
        """Pages of the prefix in the pool, each checked byte for byte."""
        pages = self.store.pin(chain)
        try:
            for page, key in zip(pages, chain, strict=False):
                assert bytes(page.view) == bytes_of(key, self.size), "wrong bytes served"
        finally:
            self.store.release(pages)
        return len(pages)

    def idle(self) -> bool:
        """Whether nothing is held and every slot is either free or resident."""
        return (
            not any(self.pool.held(owner) for owner in OWNERS)
            and self.pool.free + self.pool.resident == self.pool.slots
        )

    def close(self) -> None:
        self.store.close()


def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Waits for a condition. AssertionError where it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.002)
