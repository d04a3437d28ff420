"""What the cache's flags say, read once and checked where the server starts. Imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from glm_sglang import settings
from glm_sglang.errors import UsageError

OFF = "none"
NEVER, COMPLETE = "never", "complete"


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The cache of one server.

    url        where pages are kept besides the CPU pool; `none` turns the whole cache off.
    wait_s     how long a request may be held back for its pages from Valkey, counted from when it could first run:
               0.0 never, None until they are there.
    pool_bytes size of one rank's CPU pool.
    ttl_s      how long Valkey keeps a page, 0 for as long as it has room.
    """

    url: str
    wait_s: float | None
    pool_bytes: int
    ttl_s: int

    @property
    def on(self) -> bool:
        """Whether there is a cache at all."""
        return self.url != OFF


def read(environ: Mapping[str, str] = os.environ) -> CacheOptions:
    """The options as the launcher handed them down. Raises UsageError naming the flag."""
    return CacheOptions(
        url=_url(settings.read(settings.CACHE_URL, environ)),
        wait_s=_wait(settings.read(settings.CACHE_WAIT, environ)),
        pool_bytes=_pool(settings.read(settings.CACHE_POOL_GB, environ)),
        ttl_s=_ttl(settings.read(settings.CACHE_TTL_S, environ)),
    )


def _url(text: str) -> str:
    if text == OFF:
        return text
    from glm_connectors.valkey_store import CacheUrlError, parse

    try:
        parse(text)
    except CacheUrlError as error:
        raise UsageError(str(error)) from None
    return text


def _wait(text: str) -> float | None:
    if text == NEVER:
        return 0.0
    if text == COMPLETE:
        return None
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = -1.0
    if not 0.0 <= milliseconds <= 600_000.0:
        raise UsageError(
            f"--glm-cache-wait is {text!r}; allowed: {NEVER}, {COMPLETE}, or milliseconds from 0 to 600000"
        )
    return milliseconds / 1000.0


def _pool(text: str) -> int:
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = 0.0
    if not 0.0 < gigabytes <= 65_536.0:
        raise UsageError(f"--glm-cache-pool-gb is {text!r}; expected GiB of host memory a rank, above 0")
    return int(gigabytes * (1 << 30))


def _ttl(text: str) -> int:
    try:
        seconds = int(text)
    except ValueError:
        seconds = -1
    if seconds < 0:
        raise UsageError(f"--glm-cache-ttl-s is {text!r}; expected whole seconds, 0 for none")
    return seconds
