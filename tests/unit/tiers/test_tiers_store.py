"""Stores on a real Valkey: what one rank saves another one finds, and nothing but that."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from glm_connectors.tiers import Namespace, PageLayout, TierConfig, TieredStore, saves
from glm_connectors.tiers.envelope import Envelope
from glm_connectors.valkey_store import EmbeddedServer
from ranks import LAYOUT, NAMESPACE, Rank, bytes_of, keys, until
from valkey_proxy import Fault, Proxy

Make = Callable[..., Rank]


def url_of(proxy: Proxy) -> str:
    return f"valkey://127.0.0.1:{proxy.port}"


@pytest.mark.parametrize("page", [1000, 64 << 10, 1 << 20, 3_500_000])
def test_what_one_rank_saves_another_one_loads(page: int, server: EmbeddedServer, rank: Make) -> None:
    """Pages that share a round trip, and pages that don't; sealed in place: the value is header and page."""
    space = Namespace("glm", "r", "fp8", PageLayout(64, (("kv", page - 100), ("index", 100))))
    chain = keys(9)
    writer = rank(server.url, namespace=space, pages=20, request_timeout=10.0)
    assert writer.save(chain) == 9
    assert writer.metrics["cache_saved_bytes"] == 9 * (128 + page)
    reader = rank(
        server.url, namespace=space, pages=20, writer=False, prefetch_share=1.0, request_timeout=10.0
    )
    assert reader.hits(chain) == 0
    assert reader.fetch([*chain, *keys(3, "more")]) == "miss"
    assert reader.store.resident(chain) == 9
    assert reader.hits(chain) == 9
    assert reader.metrics["cache_loaded_bytes"] == 9 * (128 + page)
    assert reader.metrics["cache_hit_pages", "valkey"] == 9
    assert reader.metrics["cache_miss_pages", "valkey"] == 3
    assert reader.fetch(chain) == "resident"
    assert reader.metrics["cache_hit_pages", "cpu"] == 9


def test_only_the_writer_saves(server: EmbeddedServer, client: Any, rank: Make) -> None:
    """MLA: every rank holds the same bytes, one of them writes; the others find them."""
    reader = rank(server.url, writer=False)
    reader.commit(keys(4))
    assert reader.hits(keys(4)) == 4
    assert reader.metrics["cache_save_queue_pages"] == 0
    assert client.dbsize() == 0
    rank(server.url).save(keys(4, "other"))
    assert reader.fetch(keys(4, "other")) == "complete"


@pytest.mark.parametrize(
    "other",
    [
        replace(NAMESPACE, weights_revision="revision 2"),
        replace(NAMESPACE, indexer="none"),
        replace(NAMESPACE, layout=PageLayout(64, (("kv", 7001), ("index", 999)))),
    ],
    ids=["weights", "indexer", "layout"],
)
def test_another_name_space_is_a_miss(other: Namespace, server: EmbeddedServer, rank: Make) -> None:
    rank(server.url).save(keys(4))
    reader = rank(server.url, writer=False, namespace=other)
    assert reader.fetch(keys(4)) == "miss"
    assert reader.hits(keys(4)) == 0
    assert sum(reader.metrics.snapshot()["cache_bad_values"].values()) == 0  # their keys differ already


def test_values_have_a_ttl(server: EmbeddedServer, client: Any, rank: Make) -> None:
    rank(server.url, ttl=500).save(keys(3))
    assert [400 < client.ttl(name) <= 500 for name in client.scan_iter()] == [True] * 3
    client.flushall()
    rank(server.url, ttl=0).save(keys(3))
    assert [client.ttl(name) for name in client.scan_iter()] == [-1] * 3


def test_a_key_that_is_resident_keeps_its_page(server: EmbeddedServer, rank: Make) -> None:
    """Committed twice, and fetched while it is committed: one page, one put."""
    one = rank(server.url)
    assert one.save(keys(3)) == 3
    assert one.save(keys(5)) == 2
    assert one.pool.resident == 5
    assert one.hits(keys(5)) == 5


def test_a_hole_ends_the_prefix_and_is_filled(server: EmbeddedServer, client: Any, rank: Make) -> None:
    """Pages behind a hole are under their own keys: never served for their predecessors."""
    chain = keys(6)
    rank(server.url).save(chain)
    client.delete(Envelope(NAMESPACE).name(chain[2]))
    reader = rank(server.url, writer=False)
    assert reader.fetch(chain) == "miss"
    assert reader.hits(chain) == 2
    reader.commit([chain[2]])
    reader.fetch(chain)
    assert reader.hits(chain) == 6


def test_a_long_prompt_takes_its_share_of_the_pool_at_most(server: EmbeddedServer, rank: Make) -> None:
    chain = keys(30)
    rank(server.url).save(chain)
    reader = rank(server.url, writer=False, pages=20, prefetch_share=0.5)
    assert reader.fetch(chain) == "share"
    assert reader.hits(chain) == 10
    assert reader.metrics["cache_prefetches", "share"] == 1
    assert reader.metrics["cache_hit_pages", "valkey"] == 10
    assert reader.metrics["cache_miss_pages", "valkey"] == 0  # the other 20 were not asked for
    assert reader.metrics["cache_miss_pages", "cpu"] == 30
    assert reader.fetch(chain[:10]) == "resident"
    assert (
        reader.fetch(chain) == "share"
    )  # that much is there: what is behind it would be more than its share
    assert reader.hits(chain) == 10


def test_a_full_pool_ends_a_prefetch_and_nothing_else(server: EmbeddedServer, rank: Make) -> None:
    """LMCache 3855: the allocator returns nothing in mid-batch. The prefix is kept; nobody waits for memory."""
    chain = keys(10)
    rank(server.url).save(chain)
    reader = rank(server.url, writer=False, pages=6, get_workers=1, prefetch_share=1.0)
    reader.commit(keys(6, "busy"))
    pinned = reader.store.pin(keys(6, "busy"))
    assert reader.store.reserve(1) is None
    assert reader.metrics["cache_refused_reservations"] == 1
    assert reader.fetch(chain) == "full"
    assert reader.hits(keys(6, "busy")) == 6
    reader.store.release(pinned[3:])
    assert reader.store.reserve(7) is None  # more than there are: nothing is evicted for it
    assert reader.hits(keys(6, "busy")) == 6
    reader.fetch(chain[:3])
    assert reader.hits(chain[:3]) == 3
    reader.store.release(pinned[:3])


def test_a_prompt_larger_than_what_can_be_had_keeps_its_beginning(server: EmbeddedServer, rank: Make) -> None:
    """LMCache 3855: the pool gives out in the middle of a prompt. What came stays: a later page takes no earlier one's
    slot, or the prompt would have no prefix at all.
    """
    chain = keys(6)
    rank(server.url).save(chain)
    reader = rank(server.url, writer=False, pages=6, get_workers=1, prefetch_share=1.0)
    reader.commit(keys(6, "busy"))
    pinned = reader.store.pin(keys(6, "busy"))
    reader.store.release(pinned[3:])
    assert reader.fetch(chain) == "full"
    assert reader.hits(chain) == 3
    reader.store.release(pinned[:3])
    until(reader.idle)
    assert reader.fetch(chain) == "complete"
    assert reader.hits(chain) == 6


def test_requests_for_the_same_pages_share_their_gets(
    server: EmbeddedServer, client: Any, rank: Make
) -> None:
    chain = keys(40)
    rank(server.url).save(chain)
    reader = rank(server.url, writer=False)
    client.config_resetstat()
    tickets = [reader.store.prefetch(f"r{number}", chain) for number in range(20)]
    assert all(ticket.wait(30) for ticket in tickets)
    assert {ticket.end for ticket in tickets} <= {"complete", "resident"}
    assert reader.hits(chain) == 40
    for ticket in tickets:
        reader.store.cancel(ticket.rid)
    until(reader.idle)
    assert reader.metrics["cache_loaded_bytes"] <= 2 * 40 * (128 + LAYOUT.page_bytes)


def test_a_cancelled_request_takes_no_others_gets_away(
    server: EmbeddedServer, proxy: Proxy, rank: Make
) -> None:
    chain = keys(40)
    rank(server.url).save(chain)
    reader = rank(url_of(proxy), writer=False, get_workers=1, request_timeout=5.0)
    proxy.fault = Fault("stall", "reply", 0.1)
    one, two = reader.store.prefetch("one", chain), reader.store.prefetch("two", chain)
    reader.store.cancel("one")
    reader.store.cancel("unknown")
    assert one.done
    assert one.end == "cancelled"
    assert two.wait(30)
    assert two.end == "complete"
    assert reader.hits(chain) == 40


def test_a_get_cancelled_before_its_first_step_is_nobodys_partner(server: EmbeddedServer, rank: Make) -> None:
    """The loop is held so that the cancel runs between a gets' task and its first step."""
    chain = keys(8)
    rank(server.url).save(chain)
    reader = rank(server.url, writer=False)
    prefetcher, loop = reader.store._remote.prefetcher, reader.store._remote._loop
    held, go = threading.Event(), threading.Event()
    loop.call_soon_threadsafe(lambda: (held.set(), go.wait(30)))
    assert held.wait(30)
    first = reader.store.prefetch("first", chain)
    loop.call_soon_threadsafe(lambda: loop.call_soon(prefetcher._leave_all, {first}))
    second = reader.store.prefetch("second", chain)
    go.set()
    assert first.wait(30)
    assert second.wait(30)
    for rid in ("first", "second"):
        reader.store.cancel(rid)
    assert reader.fetch(chain) in ("complete", "resident")
    assert reader.hits(chain) == 8
    until(lambda: prefetcher._under_way == {})


def test_many_aborts_leave_no_credit_behind(server: EmbeddedServer, rank: Make) -> None:
    """sglang 30053: 10k aborts in the bootstrap queue; credits and pins 0, the next request is served."""
    chain = keys(8)
    rank(server.url).save(chain)
    reader = rank(server.url, writer=False)
    for number in range(10_000):
        reader.store.prefetch(f"r{number}", keys(4, f"{number % 50}"))
        reader.store.cancel(f"r{number}")
    prefetcher = reader.store._remote.prefetcher
    until(lambda: not prefetcher._tasks)
    assert (prefetcher.running, prefetcher._waiting, prefetcher._under_way) == (0, 0, {})
    until(reader.idle)
    assert reader.fetch(chain) == "complete"
    ends = reader.metrics.snapshot()["cache_prefetches"]
    assert sum(ends.values()) == 10_001


def test_pages_evicted_before_their_put_has_run_are_stored_as_themselves(
    server: EmbeddedServer, client: Any, proxy: Proxy, rank: Make
) -> None:
    """sglang 12073: the pool turns over many times while puts are slow; every value matches its key."""
    writer = rank(url_of(proxy), pages=12, put_share=0.5, put_workers=1, request_timeout=10.0)
    proxy.fault = Fault("stall", "request", 0.02, match=b"$3\r\nSET")
    for number in range(25):
        writer.commit(keys(6, f"{number}"))
        if number % 5 == 2:
            writer.store.clear()
    until(lambda: writer.metrics["cache_save_queue_pages"] == 0)
    saved = 0
    envelope = Envelope(NAMESPACE)
    for number in range(25):
        for key in keys(6, f"{number}"):
            value = client.get(envelope.name(key))
            if value is not None:
                saved += 1
                assert value[128:] == bytes_of(key)
                assert envelope.check(memoryview(value), key, len(value)) is None
    assert saved == writer.metrics["cache_saved_pages"] > 0
    dropped = sum(writer.metrics.snapshot()["cache_dropped_saves"].values())
    assert saved + dropped == 150
    until(writer.idle)


class Jobs:
    """An executor's jobs, counted."""

    def __init__(self, saver: Any) -> None:
        self._submit, self.count = saver._executor.submit_job, 0
        saver._executor.submit_job = self.submit

    async def submit(self, *args: Any) -> Any:
        self.count += 1
        return await self._submit(*args)


def sizes_of_puts(writer: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the pages of each round trip that puts some."""
    puts: list[int] = []
    put = writer.store._remote.valkey.put
    monkeypatch.setattr(
        writer.store._remote.valkey,
        "put",
        lambda node, names, values: (puts.append(len(names)), put(node, names, values)),
    )
    return puts


def test_saves_that_follow_each_other_are_one_job(
    server: EmbeddedServer, rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block is one round trip: the worker that put the one before waits for it. `close` does not wait for it."""
    monkeypatch.setattr(saves, "_LINGER", 300.0)
    writer = rank(server.url)
    jobs = Jobs(writer.store._remote.saver)
    puts = sizes_of_puts(writer, monkeypatch)
    for number in range(10):
        assert writer.save(keys(10, f"block {number}")) == 10
    assert jobs.count == 1
    assert puts == [10] * 10
    until(writer.idle)


def test_a_burst_is_put_by_all_workers_in_groups(
    server: EmbeddedServer, rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 pages, of which a group is 12 in a pool of 200 (200 // 16): 9 round trips."""
    writer = rank(server.url)
    jobs = Jobs(writer.store._remote.saver)
    puts = sizes_of_puts(writer, monkeypatch)
    assert writer.save(keys(100)) == 100
    assert sum(puts) == 100
    assert len(puts) == 9
    assert max(puts) == 12
    assert jobs.count <= len(puts)


def test_the_save_queue_is_bounded_by_count(server: EmbeddedServer, proxy: Proxy, rank: Make) -> None:
    writer = rank(url_of(proxy), save_queue=7, put_workers=1, request_timeout=10.0)
    proxy.fault = Fault("stall", "request", 0.2, match=b"$3\r\nSET")
    writer.commit(keys(20))
    assert writer.metrics["cache_save_queue_pages"] <= 7
    until(lambda: writer.metrics["cache_save_queue_pages"] == 0)
    assert writer.metrics["cache_saved_pages"] == 7
    assert writer.metrics["cache_dropped_saves", "full"] == 13
    assert writer.hits(keys(20)) == 20


def test_clear_forgets_everything_but_what_is_held(server: EmbeddedServer, rank: Make) -> None:
    one = rank(server.url)
    one.save(keys(6))
    pinned = one.store.pin(keys(2))
    one.store.clear()
    assert one.hits(keys(6)) == 0
    assert bytes(pinned[1].view) == bytes_of(keys(2)[1])
    one.store.release(pinned)
    assert one.pool.free == one.pool.slots


def test_no_remote_tier() -> None:
    store = TieredStore(TierConfig(url="none", pool_bytes=1 << 20), NAMESPACE, writer=True)
    pages = store.reserve(2)
    assert pages is not None
    assert store.commit(pages, keys(2)) == 2
    assert store.prefetch("r", keys(2)).end == "resident"
    assert store.prefetch("r", keys(3)).end == "none"
    assert store.resident(keys(3)) == 2
    with pytest.raises(ValueError, match="1 pages for 2 keys"):
        store.commit(store.reserve(1) or [], keys(2))
    store.close()


def test_a_slower_store_than_recompute_is_not_asked(server: EmbeddedServer, rank: Make) -> None:
    chain = keys(12)
    rank(server.url).save(chain)
    reader = rank(server.url, writer=False)
    reader.fetch(chain[:4])
    until(lambda: reader.metrics["cache_load_bytes_per_second"] > 0 or reader.fetch(chain[:4]) == "resident")
    for _ in range(50):  # measured: most gets take ten seconds
        reader.store._worth.load.rate.note(1, 10.0)
    assert reader.fetch(chain) in ("complete", "slow")
    reader.store.note_prefill(100_000, 1.0)
    reader.store.clear()
    assert reader.fetch(chain) == "slow"
    assert reader.metrics["cache_prefetches", "slow"] == 1
    assert reader.hits(chain) == 0


def test_one_request_moves_every_counter_of_its_path(server: EmbeddedServer, rank: Make) -> None:
    """sglang 16832, 21167: metrics that are zero or absent."""
    chain = keys(4)
    rank(server.url).save(chain)
    reader = rank(server.url, writer=False)
    before = reader.metrics.snapshot()
    reader.fetch([*chain, *keys(1, "x")])
    reader.hits(chain)
    after = reader.metrics.snapshot()
    moved = {
        (name, child) for name in after for child in after[name] if after[name][child] != before[name][child]
    }
    assert moved >= {
        ("cache_hit_pages", ("valkey",)),
        ("cache_miss_pages", ("cpu",)),
        ("cache_miss_pages", ("valkey",)),
        ("cache_lookup_seconds", ()),
        ("cache_prefetch_seconds", ()),
        ("cache_prefetches", ("miss",)),
        ("cache_loaded_bytes", ()),
        ("cache_pool_bytes", ("free",)),
        ("cache_pool_bytes", ("resident",)),
    }
    assert after["lmcache_live_workers"] == after["lmcache_expected_workers"]
    assert after["cache_refused_reservations"] == {(): 0}  # a save that stores nothing


def lookups(rank: Rank) -> int:
    return sum(rank.metrics.snapshot()["cache_lookup_seconds"][()].counts)


def test_a_lookup_is_timed_and_nothing_else_is(rank: Make) -> None:
    """Of one that finds nothing too. A save asks what is there, on a thread of its own; a prefetch as well."""
    one = rank("none")
    chain = keys(4)
    one.commit(chain[:2])
    assert one.store.resident(chain) == 2
    one.store.prefetch("r", chain)
    assert lookups(one) == 0
    for asked, found in ((chain, 2), (keys(3, "other"), 0)):
        assert one.hits(asked) == found
    assert lookups(one) == 2


def test_any_thread_may_call(server: EmbeddedServer, rank: Make) -> None:
    """Eight threads save, prefetch, pin, cancel and clear at once: right bytes, and every slot back."""
    one = rank(server.url, pages=40)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(30):
                chain = keys(5, f"{(number + turn) % 6}")
                if turn % 3 == 0 and (pages := one.store.reserve(5)):
                    for page, key in zip(pages, chain, strict=True):
                        page.view[:] = bytes_of(key)
                    one.store.commit(pages, chain) if turn % 2 else one.store.abandon(pages)
                one.store.prefetch(f"{number}", chain).wait(0.02)
                one.hits(chain)
                if turn % 3 == 0:
                    one.store.urge(f"{number}", turn)
                if turn % 7 == 0:
                    one.store.cancel(f"{number}")
                if turn % 29 == 28:
                    one.store.clear()
            one.store.cancel(f"{number}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    until(one.idle)


def test_an_embedded_store_of_ones_own() -> None:
    store = TieredStore(TierConfig(url="embedded://", pool_bytes=1 << 20), NAMESPACE, writer=True)
    assert store.embedded is not None
    pages = store.reserve(1)
    assert pages is not None
    store.commit(pages, keys(1))
    until(lambda: store.metrics["cache_saved_pages"] == 1)
    store.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", store.embedded.port), 1)
