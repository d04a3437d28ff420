"""LMCache's prefetch over its tiers when a tier fails: is the scheduler answered, with what, and what is
left.

Oracles: LMCache's reference counts and allocator; the prefix that the tiers really hold; one answer a lookup.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
from lmcache_faults import Pool, run, turns

TOKENS = 256  # in a chunk


class Tier:
    """A storage backend that holds the first `chunks` of what it is asked for."""

    def __init__(self, pool: Pool, chunks: int, fails: str = "") -> None:
        self.pool, self.chunks, self.fails = pool, chunks, fails
        self.kept: list[Any] = []
        self.pins = 0

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool) -> int:
        if self.fails == "contains":
            raise RuntimeError("tier is down")
        found = min(self.chunks, len(keys))
        self.pins += found if pin else 0
        return found

    def unpin(self, key: Any) -> None:
        self.pins -= 1

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[Any], spec: Any) -> list[Any]:
        await asyncio.sleep(0)
        if self.fails == "load":
            raise RuntimeError("tier went down")
        self.kept = [self.pool.take() for _ in keys]
        return self.kept


def prefetch(fails: tuple[str, str]) -> tuple[list[int], int, list[int], dict[str, int]]:
    """Two tiers with 2 chunks each of a 4-chunk prompt: answers in tokens, chunks left after cleanup, pins,
    events.
    """
    from lmcache.v1.cache_engine import LMCacheEngine
    from lmcache.v1.event_manager import EventManager, EventStatus, EventType
    from lmcache.v1.storage_backend.storage_manager import AsyncSingleSerializer, StorageManager

    pool = Pool()
    answers: list[int] = []

    async def main() -> None:
        manager = object.__new__(StorageManager)
        tiers = [Tier(pool, 2, fails[0]), Tier(pool, 2, fails[1])]
        manager.__dict__.update(
            storage_backends=OrderedDict(zip(("first", "second"), tiers, strict=True)),
            event_manager=EventManager(),
            async_lookup_server=SimpleNamespace(
                send_response_to_scheduler=lambda lookup_id, tokens: answers.append(tokens)
            ),
            async_serializer=AsyncSingleSerializer(asyncio.get_running_loop()),
            _freeze=False,
            _freeze_lock=threading.RLock(),
            _bypassed_backends=set(),
            _bypass_lock=threading.RLock(),
        )
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        lengths = [TOKENS * n for n in range(5)]
        call = manager.async_lookup_and_prefetch("lookup", list("abcd"), lengths, pin=True)
        await asyncio.gather(call, return_exceptions=True)
        await turns()
        # The request is aborted: what a scheduler's cleanup message makes a rank do.
        LMCacheEngine.cleanup_memory_objs(SimpleNamespace(event_manager=manager.event_manager), "lookup")
        results.extend(tier.pins for tier in tiers)
        for status in EventStatus:
            events[status.name] = manager.event_manager.get_events_count_by_status(EventType.LOADING, status)

    results: list[int] = []
    events: dict[str, int] = {}
    asyncio.run(main())
    return answers, pool.used // Pool.CHUNK, results, events


NO_EVENTS = {"ONGOING": 0, "DONE": 0, "NOT_FOUND": 0}


@pytest.mark.parametrize("repaired", [False, True])
def test_with_all_tiers_up_the_whole_prefix_is_answered(repaired: bool) -> None:
    answers, left, _, events = run(prefetch, ("", ""), repaired=repaired)
    assert (answers, left, events) == ([4 * TOKENS], 0, NO_EVENTS)


def test_a_tier_that_can_not_be_asked_is_a_miss() -> None:
    answers, *_ = run(prefetch, ("contains", ""), repaired=False)
    assert answers == []
    answers, left, _, events = run(prefetch, ("contains", ""), repaired=True)
    assert (answers, left, events) == ([2 * TOKENS], 0, NO_EVENTS)
    answers, *_ = run(prefetch, ("", "contains"), repaired=False)
    assert answers == []
    answers, left, _, events = run(prefetch, ("", "contains"), repaired=True)
    assert (answers, left, events) == ([2 * TOKENS], 0, NO_EVENTS)


def test_a_tier_that_fails_while_it_loads_ends_the_prefix() -> None:
    answers, left, _, events = run(prefetch, ("", "load"), repaired=False)
    assert answers == []
    assert left == 2  # the first tier's chunks, held by a future that nobody can read
    answers, left, pins, events = run(prefetch, ("", "load"), repaired=True)
    assert (answers, left, events) == ([2 * TOKENS], 0, NO_EVENTS)
    assert pins[1] == 0


def test_a_first_tier_that_fails_while_it_loads_makes_the_lookup_a_miss() -> None:
    answers, *_ = run(prefetch, ("load", ""), repaired=False)
    assert answers == []
    answers, left, pins, events = run(prefetch, ("load", ""), repaired=True)
    assert (answers, left, events) == ([0], 0, NO_EVENTS)
    assert pins[0] == 0


def lookup_with_lengths_that_do_not_fit() -> tuple[list[int], str]:
    from lmcache.v1.storage_backend.storage_manager import StorageManager

    answers: list[int] = []
    manager = object.__new__(StorageManager)
    manager.async_lookup_server = SimpleNamespace(
        send_response_to_scheduler=lambda lookup_id, tokens: answers.append(tokens)
    )
    try:
        asyncio.run(manager.async_lookup_and_prefetch("lookup", list("abc"), [0, 256], keys_per_chunk=2))
    except ValueError as error:
        return answers, type(error).__name__
    return answers, ""


def test_a_malformed_lookup_is_answered_too() -> None:
    assert run(lookup_with_lengths_that_do_not_fit, repaired=False) == ([], "ValueError")
    assert run(lookup_with_lengths_that_do_not_fit, repaired=True) == ([0], "ValueError")


def retrieve_and_unpin(used: int) -> tuple[list[int], list[int], int]:
    """Three chunks of the CPU pool are looked up and pinned, `used` retrieved; then vLLM unpins the request.

    Returns reference and pin counts (the pool holds one reference on each), and chunks that are still
    allocated.
    """
    import torch
    from lmcache.v1.cache_engine import LMCacheEngine
    from lmcache.v1.event_manager import EventManager, EventStatus, EventType

    pool = Pool()
    chunks = [pool.take() for _ in range(3)]
    for chunk in chunks:
        chunk.pin()  # LocalCPUBackend.batched_async_contains(pin=True)
        chunk.ref_count_up()  # LocalCPUBackend.batched_get_non_blocking
    keys = [_engine_key(number) for number in range(3)]

    async def loaded() -> list[list[tuple[Any, Any]]]:
        return [list(zip(keys, chunks, strict=True))]

    async def main() -> None:
        manager = EventManager()
        task = asyncio.create_task(loaded())
        await task
        manager.add_event(EventType.LOADING, "request", task)
        manager.update_event_status(EventType.LOADING, "request", EventStatus.DONE)
        spans = [(TOKENS * n, TOKENS * (n + 1), key) for n, key in enumerate(keys[:used])]
        engine = SimpleNamespace(
            event_manager=manager,
            token_database=SimpleNamespace(process_tokens=lambda **_: spans),
            lookup_pins={},
            async_loading=True,
        )
        engine.cleanup_memory_objs = lambda lookup_id: LMCacheEngine.cleanup_memory_objs(engine, lookup_id)
        mask = torch.zeros(3 * TOKENS, dtype=torch.bool)
        found, _ = LMCacheEngine._async_process_tokens_internal(engine, None, None, mask, req_id="request")
        assert int(mask.sum()) == used * TOKENS
        for _, chunk, _, _ in found:  # LMCacheEngine.retrieve, once they are on the GPU
            if chunk.is_pinned:
                chunk.unpin()
            chunk.ref_count_down()
        LMCacheEngine.lookup_unpin(engine, "request")  # LMCacheConnectorV1Impl.wait_for_save

    asyncio.run(main())
    return (
        [chunk.get_ref_count() for chunk in chunks],
        [chunk.meta.pin_count for chunk in chunks],
        pool.used // Pool.CHUNK,
    )


def _engine_key(number: int) -> Any:
    import torch
    from lmcache.utils import CacheEngineKey

    return CacheEngineKey("glm", 1, 0, number, torch.bfloat16)


@pytest.mark.parametrize("used", [3, 1, 0])
def test_a_retrieved_chunk_is_released_once_and_stays_in_the_pool(used: int) -> None:
    counts, _, left = run(retrieve_and_unpin, used, repaired=False)
    assert (counts, left) == ([0, 0, 0], 0)  # free, and still in the pool's hot cache
    assert run(retrieve_and_unpin, used, repaired=True) == ([1, 1, 1], [0, 0, 0], 3)
