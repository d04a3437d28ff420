"""What a deployment chooses about the tiers, with the defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TierConfig:
    """Sizes and bounds of a `TieredStore`. Bytes, seconds, shares of the pool. ValueError where one is absurd.

    url: `embedded://`, `valkey://…`, `valkeys://…`, `valkey-cluster://…` or `none` (`valkey_store.parse`).
    pool_bytes: size of the CPU pool of this rank. put_share: share of the pool that queued puts may keep
    from being evicted, at most. prefetch_share: of the pool, that requests which wait to run may hold, all together.
    save_queue: puts that may be queued. save_patience: how long a put may wait for a store that is down.
    request_timeout: a get or put whose bytes stand still for this long has failed, and so has one that takes
    five times as long (`valkey_store.sockets.LONGEST`); over TLS and in clusters, one without its whole answer by
    then. connect_timeout: for connecting, and again for signing in. drain: how long `close` waits for queued puts.
    ttl: of values in Valkey, 0 for none.
    """

    url: str = "none"
    pool_bytes: int = 1 << 30
    put_share: float = 0.5
    prefetch_share: float = 0.5
    save_queue: int = 4096
    save_patience: float = 60.0
    get_workers: int = 4
    put_workers: int = 4
    request_timeout: float = 2.0
    connect_timeout: float = 2.0
    drain: float = 5.0
    ttl: int = 86_400

    def __post_init__(self) -> None:
        for name in ("put_share", "prefetch_share"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name}: expected above 0 and at most 1, found {getattr(self, name)}")
        for name in ("pool_bytes", "save_queue", "get_workers", "put_workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, found {getattr(self, name)}")
        for name in ("request_timeout", "connect_timeout"):
            if getattr(self, name) < 0.001:
                raise ValueError(f"{name}: expected 0.001 s or more, found {getattr(self, name)}")
        for name in ("save_patience", "drain", "ttl"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected 0 or more, found {getattr(self, name)}")
