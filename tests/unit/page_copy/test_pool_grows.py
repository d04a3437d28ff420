"""The CPU pool over memory that is still being pinned: it works with what is there, and closes with what is not."""

from __future__ import annotations

import pytest
from glm_connectors.tiers import Namespace, PageLayout, TierConfig, TieredStore
from glm_connectors.tiers import pool as pool_module
from glm_connectors.tiers.pool import CpuPool
from glm_connectors.valkey_store import EmbeddedServer

from glm_sglang.cache.cuda_pinned import PinnedMemory
from tests.unit.page_copy.test_cuda_pinned import HandPinner

SLOTS = 20


def test_a_pool_of_which_not_all_can_be_pinned_takes_its_shares_of_what_there_is() -> None:
    memory = PinnedMemory(HandPinner(allowed=3, fail_at=1), piece_bytes=12288)
    pool = CpuPool(PageLayout(64, (("kv", 1400),)), SLOTS * 1536, memory)
    memory._made[0]._thread.join(10)
    assert (pool.slots, pool.free) == (8, 8)
    assert pool.close()


def test_the_stores_shares_follow() -> None:
    """Half of the pool for requests that wait, half for puts: of 8 slots, not of 20."""
    pinner = HandPinner(allowed=1, fail_at=1)
    space = Namespace("m", "r", "bf16", PageLayout(64, (("kv", 1400),)))
    with EmbeddedServer() as server:
        memory = PinnedMemory(pinner, piece_bytes=12288)
        store = TieredStore(
            TierConfig(url=server.url, pool_bytes=SLOTS * 1536), space, writer=True, memory=memory
        )
        saver = store._remote.saver  # type: ignore[union-attr]
        assert (store.pool_pages, store.prefetch_pages, saver._limits.share_pages()) == (20, 10, 10)
        pinner.may.release(2)
        memory._made[0]._thread.join(10)
        assert (store.pool_pages, store.prefetch_pages, saver._limits.share_pages()) == (8, 4, 4)
        assert store.metrics["cache_pool_bytes", "total"] == 8 * 1536
        store.close()


def keys(first: int, count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(first, first + count)]


def test_a_pool_is_usable_before_it_is_pinned_and_leaves_nothing_behind() -> None:
    pinner = HandPinner(allowed=1)
    memory = PinnedMemory(pinner, piece_bytes=12288)
    pool = CpuPool(PageLayout(64, (("kv", 1400),)), SLOTS * 1536, memory)
    assert memory.registered_bytes() == 12288
    assert (pool.slots, pool.slot_bytes, pool.free) == (SLOTS, 1536, 8)
    pages = pool.take(8, "save")
    assert pages is not None
    for number, page in enumerate(pages):
        page.tensor.fill_(number)
        assert page.address == page.tensor.data_ptr()
    pool.insert(pages, keys(0, 8), "save")
    assert pool.take(9, "save") is None  # more than there is yet
    fresh = pool.take(3, "save")  # evicts, although most of the pool is still to come
    assert fresh is not None
    assert pool.evicted == 3
    pool.release(fresh, "save")
    pinner.may.release(2)
    held = pool.hold(keys(0, 5), "load")
    assert [int(page.tensor[-1]) for page in held] == [0, 1, 2, 3, 4]
    pool.release(held, "load")
    assert pool.close()
    assert pinner.pinned == {}


def test_a_pool_that_grows_evicts_nothing_as_long_as_more_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many slots it takes over at once."""
    monkeypatch.setattr(pool_module, "_RECEIVED", 1)
    pinner = HandPinner(allowed=1)
    memory = PinnedMemory(pinner, piece_bytes=12288)
    pool = CpuPool(PageLayout(64, (("kv", 1400),)), SLOTS * 1536, memory)
    taken: list[int] = []
    for count in (8, 2, 2, 2, 2, 2):  # all that there is, and then as many as it takes over
        pages = pool.take(count, "save")
        assert pages is not None
        pool.insert(pages, keys(len(taken), count), "save")
        taken += [page.address for page in pages]
        if count == 8:
            pinner.may.release(2)
            memory._made[0]._thread.join(10)
        assert (pool.free, pool.evicted) == (SLOTS - len(taken), 0)
    assert len(set(taken)) == SLOTS - 2
    assert len(pool.take(SLOTS, "save") or []) == SLOTS
    assert pool.evicted == SLOTS - 2
