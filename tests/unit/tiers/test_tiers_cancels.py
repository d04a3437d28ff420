"""Cancelled gets through a proxy that delays: every reply carries its key (redis-py 2665, valkey-glide 5442).

Over the tiers' own sockets, and over glide, which is the data path of TLS. A reply that went to another key's caller
would be found by the envelope and counted, so the count of bad values is the oracle beside the bytes; the pool's count
of slots shows what was lost.
"""

from __future__ import annotations

import gc
import os
import random
import ssl
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from glm_connectors.lmcache_repairs import COUNTERS
from glm_connectors.tiers import TierConfig
from glm_connectors.valkey_store import EmbeddedServer
from glm_connectors.valkey_store.breaker import OPEN
from ranks import Rank, keys, until
from tls_files import issuer
from valkey_proxy import Proxy

Make = Callable[..., Rank]
#: One each of a store's threads, and that of its question at the start.
CONNECTIONS = TierConfig().get_workers + TierConfig().put_workers + 1
PROMPTS = [keys(3, f"{number}") for number in range(200)]


def slow(server: EmbeddedServer, longest: float, tls: ssl.SSLContext | None = None) -> Proxy:
    rng = random.Random(1)
    return Proxy(server.port, tls, delay=lambda: longest * rng.random())


def resident_memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def drive(reader: Rank, operations: int, cancels: float, moment: float, rng: random.Random) -> Counter[str]:
    """Prefetches of random prompts, of which a share is cancelled within `moment` seconds: how they ended."""
    ends: Counter[str] = Counter()
    tickets: deque[Any] = deque()
    for number in range(operations):
        chain = rng.choice(PROMPTS)
        ticket = reader.store.prefetch(f"r{number}", chain)
        tickets.append(ticket)
        if rng.random() < cancels:
            ticket.wait(moment * rng.random())
            reader.store.cancel(f"r{number}")
        else:
            assert ticket.wait(30)
            if ticket.end in ("complete", "resident"):
                assert (
                    reader.hits(chain) <= 3
                )  # each checked byte for byte; it may have found no room to hold them
            reader.store.cancel(f"r{number}")
        while len(tickets) > 50 or (tickets and number == operations - 1):
            assert tickets[0].wait(30)
            ends[tickets.popleft().end] += 1
    return ends


def small(rank: Make, url: str) -> Rank:
    """A reader with room for a few prompts, all of which may be held for requests."""
    return rank(url, writer=False, pages=24, prefetch_share=1.0, request_timeout=10.0, connect_timeout=5.0)


def url_of(between: Proxy) -> str:
    return f"valkey://127.0.0.1:{between.port}"


def late_replies(reader: Rank) -> None:
    """Gets that end in time and such that do not, some cancelled, until both kinds have been there."""
    rng = random.Random(0)
    ends: Counter[str] = Counter()
    for rounds in range(100):  # however fast the machine is
        ends += drive(reader, 15, 0.3, 0.05, rng)
        until(lambda: reader.store._remote.valkey.state("get") != OPEN)
        timeouts = reader.metrics["cache_store_failures", "get", "timeout"]
        if rounds >= 9 and timeouts and ends["complete"]:
            break
    assert timeouts
    assert ends["complete"]
    assert set(reader.metrics.snapshot()["cache_bad_values"].values()) == {0}
    until(reader.idle)


def test_ten_thousand_cancels(server: EmbeddedServer, rank: Make) -> None:
    between = slow(server, 0.001)
    try:
        writer = rank(server.url, pages=700)
        for chain in PROMPTS:
            assert writer.save(chain) == 3
        reader = small(rank, url_of(between))
        rng = random.Random(0)
        skipped = COUNTERS["skipped_jobs"] + COUNTERS["cancelled_jobs"]
        drive(reader, 1000, 0.9, 0.002, rng)  # connections, caches: what the first ones cost is no leak
        gc.collect()
        before = resident_memory()
        ends = drive(reader, 11_200, 0.9, 0.0005, rng)
        assert ends.total() == 11_200
        assert set(ends) <= {"cancelled", "complete", "resident", "full"}
        assert ends["cancelled"] > 5000
        assert COUNTERS["skipped_jobs"] + COUNTERS["cancelled_jobs"] - skipped > 1000
        assert set(reader.metrics.snapshot()["cache_bad_values"].values()) == {0}
        until(reader.idle)
        gc.collect()
        assert resident_memory() - before < 0.01 * before + (4 << 20)
        assert reader.metrics["lmcache_live_workers"] == reader.metrics["lmcache_expected_workers"]
        assert between.connections <= CONNECTIONS
    finally:
        between.close()


@pytest.mark.slow
def test_a_hundred_thousand_operations_a_third_cancelled(server: EmbeddedServer, rank: Make) -> None:
    """TARGETS.md's number: no reply for another key, no pin, no connection more, and memory within 1 %.

    No thread needs a second connection in all that time. When it needs its first is chance: not all of them may have had
    work in the first 3,000 operations.
    """
    between = slow(server, 0.001)
    try:
        writer = rank(server.url, pages=700)
        for chain in PROMPTS:
            assert writer.save(chain) == 3
        reader = small(rank, url_of(between))
        rng = random.Random(2)
        drive(reader, 3000, 0.3, 0.001, rng)
        gc.collect()
        before = resident_memory()
        ends = drive(reader, 100_000, 0.3, 0.001, rng)
        assert ends.total() == 100_000
        assert ends["cancelled"] > 10_000
        assert set(reader.metrics.snapshot()["cache_bad_values"].values()) == {0}
        until(reader.idle)
        gc.collect()
        assert resident_memory() < 1.01 * before
        assert between.connections <= CONNECTIONS
        assert reader.metrics["lmcache_live_workers"] == reader.metrics["lmcache_expected_workers"]
    finally:
        between.close()


def test_replies_that_come_after_their_timeout_go_nowhere(server: EmbeddedServer, rank: Make) -> None:
    between = slow(server, 0.06)
    try:
        writer = rank(server.url, pages=700)
        for chain in PROMPTS:
            writer.save(chain)
        late_replies(rank(url_of(between), writer=False, pages=40, request_timeout=0.03))
    finally:
        between.close()


@pytest.fixture
def tls(tmp_path: Path) -> tuple[ssl.SSLContext, str]:
    """What the proxy needs to end TLS, and what a URL says of it."""
    ca, certificate, key = issuer(tmp_path, "ours")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, f"ca={ca}"


def test_cancels_over_glide(server: EmbeddedServer, rank: Make, tls: tuple[ssl.SSLContext, str]) -> None:
    """valkey-glide 5442: a call whose caller has left, and the next one on its connection."""
    between = slow(server, 0.001, tls[0])
    try:
        writer = rank(server.url, pages=700)
        for chain in PROMPTS:
            assert writer.save(chain) == 3
        reader = small(rank, f"valkeys://127.0.0.1:{between.port}?{tls[1]}")
        ends = drive(reader, 3000, 0.9, 0.0005, random.Random(0))
        assert ends.total() == 3000
        assert ends["cancelled"] > 1000
        assert ends["complete"] > 100
        assert set(reader.metrics.snapshot()["cache_bad_values"].values()) == {0}
        until(reader.idle)
    finally:
        between.close()


def test_replies_that_come_after_their_timeout_over_glide(
    server: EmbeddedServer, rank: Make, tls: tuple[ssl.SSLContext, str]
) -> None:
    """valkey-glide 5442."""
    between = slow(server, 0.06, tls[0])
    try:
        writer = rank(server.url, pages=700)
        for chain in PROMPTS:
            writer.save(chain)
        url = f"valkeys://127.0.0.1:{between.port}?{tls[1]}"
        late_replies(rank(url, writer=False, pages=40, request_timeout=0.03, connect_timeout=5.0))
    finally:
        between.close()
