"""Every way in which a store can fail, against a real Valkey behind a proxy: each is a miss, never wrong bytes.
Stalls of gets are in tests/unit/cache/test_stall_table.py.

Oracles: a page's bytes follow from its key, and the pool's count of slots.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from glm_connectors.tiers.envelope import HEADER_BYTES, Envelope
from glm_connectors.tiers.layout import Namespace, PageLayout
from glm_connectors.valkey_store import EmbeddedServer, StoreDownError, StoreFailedError, ValkeyStore, parse
from glm_connectors.valkey_store.breaker import CLOSED, OPEN
from ranks import NAMESPACE, Rank, bytes_of, keys, until
from valkey_proxy import Fault, Proxy

LARGE = Namespace("glm", "r", "fp8", PageLayout(64, (("kv", 300_000),)))  # a get a page
Make = Callable[..., Rank]


def url_of(proxy: Proxy) -> str:
    return f"valkey://127.0.0.1:{proxy.port}"


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.1, 1.0, float("inf")])
def test_a_stalled_put_is_stored_whole_or_not_at_all(
    seconds: float, server: EmbeddedServer, client: Any, proxy: Proxy, rank: Make
) -> None:
    """In the middle of its bytes, every third time: tried again; nothing is lost below three failures."""
    chain = keys(6)
    writer = rank(url_of(proxy), namespace=LARGE, put_workers=1, pages=15)  # too few to share round trips
    proxy.fault = Fault("stall", "request", seconds, every=3, match=b"$3\r\nSET")
    assert writer.save(chain) == 6
    assert proxy.fault.hits
    assert writer.hits(chain) == 6
    reader = rank(server.url, namespace=LARGE, writer=False)
    assert reader.fetch(chain) == "complete"
    assert reader.hits(chain) == 6
    assert client.dbsize() == 6
    until(writer.idle)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault("reset", "reply"), ("connection", "timeout")),
        (Fault("fin", "reply"), ("connection", "timeout")),
        (Fault("answer", "request", text=b"-LOADING The dataset\r\n", match=b"GET"), ("loading",)),
        (Fault("answer", "request", text=b"-MOVED 3999 127.0.0.1:1\r\n", match=b"GET"), ("moved",)),
        (Fault("answer", "request", text=b"-NOAUTH Authentication required.\r\n", match=b"GET"), ("auth",)),
        (Fault("answer", "request", text=b"-ERR something else\r\n", match=b"GET"), ("refused",)),
        (Fault("refuse", "connect"), ("connection", "timeout")),
    ],
    ids=["reset", "fin", "loading", "moved", "noauth", "error", "refused"],
)  # fmt: skip
def test_a_failing_get_is_a_miss_and_opens_the_breaker_within_five(
    fault: Fault, kind: tuple[str, ...], server: EmbeddedServer, proxy: Proxy, rank: Make
) -> None:
    chain = keys(1)
    rank(server.url, namespace=LARGE).save(chain)
    reader = rank(url_of(proxy), namespace=LARGE, writer=False, get_workers=1)
    fault.hits = fault._seen = 0
    proxy.fault = fault
    ends = []
    while not ends or ends[-1] != "down":
        ends.append(reader.fetch(chain))
        assert reader.hits(chain) == 0
        assert len(ends) <= 6
    assert ends == ["failed"] * 5 + ["down"]
    assert sum(reader.metrics["cache_store_failures", "get", one] for one in kind) == 5
    assert reader.metrics["cache_breaker_state", "get"] == OPEN
    assert reader.metrics["cache_breaker_state", "put"] == CLOSED
    proxy.fault = None
    until(lambda: reader.fetch(chain) in ("complete", "resident"))
    assert reader.hits(chain) == 1
    assert reader.metrics["cache_breaker_state", "get"] == CLOSED
    until(reader.idle)


@pytest.mark.parametrize(
    "bit", [0, 8 * 8, 8 * 16, 8 * 40, 8 * 66, 8 * 72, 8 * 100, 8 * 128, 8 * 200_000 + 3, 8 * 300_127 + 7]
)
def test_a_flipped_bit_is_found_wherever_it_is(
    bit: int, server: EmbeddedServer, client: Any, proxy: Proxy, rank: Make
) -> None:
    """In each field of the envelope, in its zeros, in the page: a miss, counted; the value is deleted."""
    chain = keys(1)
    rank(server.url, namespace=LARGE).save(chain)
    reader = rank(url_of(proxy), namespace=LARGE, writer=False, request_timeout=5.0)
    proxy.fault = Fault("flip", "reply", bit=bit)
    assert reader.fetch(chain) == "miss"
    assert proxy.fault.hits == 1
    assert reader.hits(chain) == 0
    found = reader.metrics.snapshot()["cache_bad_values"]
    assert sum(found.values()) == 1
    assert client.dbsize() == 0
    until(reader.idle)


def wrong_values(envelope: Envelope, chain: list[bytes]) -> dict[str, bytes]:
    size = NAMESPACE.layout.page_bytes

    def sealed(key: bytes, by: Envelope = envelope) -> bytearray:
        value = bytearray(HEADER_BYTES) + bytes_of(key)
        by.seal(memoryview(value), key)
        return value

    other = Envelope(Namespace("glm", "revision 2", "fp8", NAMESPACE.layout, "full 0,1,2", ""))
    version = sealed(chain[0])
    version[8] = 2
    magic = sealed(chain[0])
    magic[:8] = b"NO PAGE\n"
    announced = sealed(chain[0])
    announced[64:72] = (size + 1).to_bytes(8, "little")
    return {
        "key": bytes(sealed(chain[1])),  # another page's value under this key
        "fingerprint": bytes(sealed(chain[0], other)),
        "version": bytes(version),
        "magic": bytes(magic),
        "length": bytes(announced),
        "length shorter": bytes(sealed(chain[0])[:-1]),
        "length empty": b"",
        "length longer": bytes(sealed(chain[0])) + b"x",
        "checksum": bytes(sealed(chain[0])[:-1]) + b"x",
    }


@pytest.mark.parametrize("name", sorted(wrong_values(Envelope(NAMESPACE), keys(2))))
def test_a_value_that_is_not_the_page_is_a_miss_is_deleted_is_counted(
    name: str, server: EmbeddedServer, client: Any, rank: Make
) -> None:
    """Alone, and in the middle of pages that share its get: those before it are served."""
    chain = keys(4)
    envelope = Envelope(NAMESPACE)
    writer = rank(server.url)
    writer.save(chain)
    value = wrong_values(envelope, [chain[2], chain[3]])[name]
    client.set(envelope.name(chain[2]), value)
    reader = rank(server.url, writer=False)
    assert reader.fetch(chain) == "miss"
    assert reader.hits(chain) == 2
    assert reader.metrics["cache_bad_values", name.split()[0]] == 1
    assert sum(reader.metrics.snapshot()["cache_bad_values"].values()) == 1
    assert client.exists(envelope.name(chain[2])) == 0
    assert client.dbsize() == 3
    until(reader.idle)


def test_something_else_than_a_string_is_a_miss_and_deleted(
    server: EmbeddedServer, client: Any, rank: Make
) -> None:
    chain = keys(1)
    client.lpush(Envelope(NAMESPACE).name(chain[0]), "a list")
    reader = rank(server.url, writer=False)
    assert reader.fetch(chain) == "miss"
    assert client.dbsize() == 0
    assert reader.metrics["cache_breaker_state", "get"] == CLOSED


def test_evicted_between_two_lookups_is_a_miss(server: EmbeddedServer, client: Any, rank: Make) -> None:
    chain = keys(8)
    rank(server.url).save(chain)
    client.delete(Envelope(NAMESPACE).name(chain[5]))
    reader = rank(server.url, writer=False)
    assert reader.fetch(chain) == "miss"
    assert reader.hits(chain) == 5


def test_out_of_memory_drops_puts_and_leaves_gets_alone(
    server: EmbeddedServer, client: Any, rank: Make
) -> None:
    """A full node that evicts nothing: each put is tried three times; five failures open the puts' breaker."""
    chain = keys(4)
    writer = rank(server.url, put_workers=1, namespace=LARGE, save_patience=0.2, pages=15)
    assert writer.save(chain) == 4
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", "1mb")
    try:
        assert writer.save(keys(4, "more")) == 0
        assert writer.metrics["cache_store_failures", "put", "oom"] >= 5
        dropped = writer.metrics.snapshot()["cache_dropped_saves"]
        assert sum(dropped.values()) == 4
        reader = rank(server.url, writer=False, namespace=LARGE)
        assert reader.fetch(chain) == "complete"
        assert reader.hits(chain) == 4
        assert writer.metrics["cache_breaker_state", "get"] == CLOSED
    finally:
        client.config_set("maxmemory", "1gb")
        client.config_set("maxmemory-policy", "allkeys-lru")
    until(lambda: writer.save(keys(1, f"after {writer.metrics['cache_saved_pages']}")) == 1)
    until(writer.idle)


def test_a_restarted_server_is_used_again(rank: Make) -> None:
    """Killed and empty at its old address: the CPU tier serves meanwhile; gets and puts work after."""
    with EmbeddedServer() as server:
        first = rank(server.url)
        chain = keys(5)
        assert first.save(chain) == 5
        server.stop()
        assert first.hits(chain) == 5
        assert first.fetch(keys(3, "other")) == "failed"
        other = rank(server.url)  # starts while the node is down: no error
        assert other.metrics["cache_breaker_state", "get"] == OPEN
        assert other.fetch(chain) == "down"
        server.start()
        until(lambda: other.fetch(chain) == "miss")
        assert other.save(keys(5, "new")) == 5
        until(lambda: first.fetch(keys(5, "new")) in ("complete", "resident"))
        assert first.hits(keys(5, "new")) == 5


def test_a_stalled_server_keeps_nobody_from_starting(rank: Make) -> None:
    with EmbeddedServer() as server:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            one = rank(server.url)
            assert one.metrics["cache_breaker_state", "get"] == OPEN
            assert one.metrics["cache_breaker_state", "put"] == OPEN
            assert one.fetch(keys(3)) == "down"
        finally:
            os.kill(server.pid, signal.SIGCONT)
        until(lambda: one.fetch(keys(3)) == "miss")
        assert one.save(keys(3)) == 3


def test_puts_wait_for_a_stalled_store_and_are_not_lost(rank: Make) -> None:
    """A stall longer than every timeout: nothing is lost that fits the queue; the pool's share is the bound."""
    with EmbeddedServer() as server:
        writer = rank(server.url, pages=100, put_share=0.2, get_workers=1)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            chain = keys(30)
            writer.commit(chain)  # returns at once
            assert writer.metrics["cache_dropped_saves", "full"] == 10
            assert writer.metrics["cache_save_queue_pages"] == 20
            assert writer.metrics["cache_pinned_bytes", "put"] == 20 * writer.pool.slot_bytes
            assert writer.hits(chain) == 30
            # The rest of the pool is there for others while puts hold their share.
            for number in range(10):
                writer.store.abandon(writer.store.reserve(80) or pytest.fail(f"{number}"))
            until(lambda: writer.metrics["cache_breaker_state", "put"] == OPEN)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        until(lambda: writer.metrics["cache_save_queue_pages"] == 0)
        assert writer.metrics["cache_saved_pages"] == 20
        reader = rank(server.url, writer=False)
        assert reader.fetch(chain) == "miss"
        assert reader.hits(chain) == 20
        until(writer.idle)


def test_writes_resume_after_a_long_stall() -> None:
    """LMCache 4368: 50 s of stall by the store's clock; the next look is at most 15 s away, then all is well."""
    now = [0.0]
    with EmbeddedServer() as server:
        store = ValkeyStore(parse(server.url), request_timeout=0.1, connect_timeout=0.1, clock=lambda: now[0])
        value = memoryview(b"value")
        store.put(0, ["a"], [value])
        os.kill(server.pid, signal.SIGSTOP)
        for number in range(5):
            with pytest.raises(StoreFailedError) as failed:
                store.put(0, ["a"], [value])
            assert failed.value.kind == "timeout", number
        with pytest.raises(StoreDownError):
            store.put(0, ["a"], [value])
        breaker = store.breakers[0, "put"]
        while now[0] < 50:
            now[0] += breaker.due() or 0.0
            store.probe_due()
        os.kill(server.pid, signal.SIGCONT)
        waits = breaker.due()
        assert waits is not None
        assert waits <= 15
        now[0] += waits
        store.probe_due()
        store.put(0, ["b"], [value])
        assert breaker.state == CLOSED
        buffer = memoryview(bytearray(5))
        assert store.get(0, ["b"], [buffer]) == [5]
        assert bytes(buffer) == b"value"
        store.close()


@pytest.mark.slow
def test_saves_resume_after_fifty_seconds(rank: Make) -> None:
    """LMCache 4368 by the wall, with the tier's queue: what came in the stall is stored within 30 s of its end."""
    with EmbeddedServer() as server:
        writer = rank(server.url)
        assert writer.save(keys(5, "before")) == 5
        os.kill(server.pid, signal.SIGSTOP)
        for moment in ("early", "late"):
            time.sleep(25)
            writer.commit(keys(20, moment))
        os.kill(server.pid, signal.SIGCONT)
        until(lambda: writer.metrics["cache_saved_pages"] == 45, 30)
        assert writer.metrics["cache_store_failures", "put", "timeout"] > 0
        reader = rank(server.url, writer=False)
        for moment in ("before", "early", "late"):
            assert reader.fetch(keys(20, moment)[: 5 if moment == "before" else 20]) == "complete"
        until(writer.idle)


def test_puts_for_a_store_that_stays_down_are_given_up(rank: Make) -> None:
    """They would keep their pages from being evicted for ever."""
    with EmbeddedServer() as server:
        writer = rank(server.url, save_patience=0.3)
        server.stop()
        writer.commit(keys(20))
        until(lambda: writer.metrics["cache_save_queue_pages"] == 0)
        assert writer.metrics["cache_dropped_saves", "down"] == 20
        assert writer.idle()


@pytest.mark.parametrize("how", ["stopped", "killed", "running"])
def test_close_ends_whatever_the_store_does(how: str, rank: Make) -> None:
    """Queued puts and gets under way; a store that answers nothing. Everything is released."""
    with EmbeddedServer() as server:
        one = rank(server.url, drain=0.5)
        one.save(keys(3, "warm"))
        if how == "stopped":
            os.kill(server.pid, signal.SIGSTOP)
        elif how == "killed":
            server.stop()
        one.commit(keys(40))
        tickets = [one.store.prefetch(f"x{number}", keys(5, f"x{number}")) for number in range(20)]
        one.close()
        one.close()
        assert all(ticket.done for ticket in tickets)
        assert one.metrics["cache_pinned_bytes", "put"] == 0
        dropped = sum(one.metrics.snapshot()["cache_dropped_saves"].values())
        assert dropped + one.metrics["cache_saved_pages"] == 43
        assert one.pool.free == 0  # the memory is gone, not leaked
        after = one.store.prefetch("late", keys(1))
        assert after.done
