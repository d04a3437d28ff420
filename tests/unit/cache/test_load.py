"""Thousands of small requests, 512 at a time, a tenth of them aborted: what the scheduler pays for the cache and
what is left behind.

SGLang's tree, the linker, the tiers and a real Valkey; the test stands for the scheduler. The device and the pool are too
small for the prompts, so pages come from both tiers all the time.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from glm_connectors.tiers.pool import OWNERS

from glm_sglang.cache import in_use
from glm_sglang.cache.slots import page_numbers
from tests.unit.cache.tree import PAGE, Tree, expected_page

AT_ONCE, A_STEP = 512, 16
BURST = 64  # requests that come between two steps at most: each takes 16 µs of the next
DEVICE = 64  # pages
LIMIT = 128  # pages whose copy may wait


class Scheduler:
    """Arrivals, admissions and aborts, step by step."""

    def __init__(self, tree: Tree, prompts: list[tuple[int, ...]]) -> None:
        self.tree, self.prompts = tree, prompts
        self.rng = random.Random(0)
        self.waiting: dict[str, tuple[Any, tuple[int, ...]]] = {}
        self.served = self.aborted = self.loaded = 0
        self.page = functools.cache(lambda tokens, number: expected_page(tokens, number, tree.pages))

    def arrive(self) -> None:
        tokens = self.rng.choice(self.prompts)
        req = self.tree.request([*tokens, 7])
        self.tree.linker.request_arrives(self.tree.cache, req)
        self.waiting[req.rid] = (req, tokens)

    def abort(self, rid: str) -> None:
        del self.waiting[rid]
        self.tree.cache.linker.release_request(rid)
        self.aborted += 1

    def step(self) -> None:
        """A tenth go: some while they wait, some when they have been looked up, some with a load that is queued."""
        tree = self.tree
        tree.step()
        for rid in [rid for rid in self.waiting if self.rng.random() < 0.001]:
            self.abort(rid)
        held = tree.linker.held_back(list(self.waiting), tree.cache)
        batch = [rid for rid in self.waiting if rid not in held][:A_STEP]
        loads: list[tuple[Any, tuple[int, ...], Any]] = []
        for rid in batch:
            req, tokens = self.waiting[rid]
            device, offered = tree.match(req)
            if self.rng.random() < 0.06:
                self.abort(rid)
                continue
            slots = tree.load(req) if offered else None
            if slots is not None and slots.numel():
                if self.rng.random() < 0.05:
                    self.abort(rid)
                    tree.allocator.free(slots)
                    continue
                loads.append((req, tokens, slots))
            tree.linker.admitted([rid])
            del self.waiting[rid]
            self.served += 1
            if not device and not offered:
                self.prefill(tokens)
        tree.cache.linker.start_layer_wise_loading()
        tree.linker._loads.quiesce()  # what a forward on a CPU waits for its bytes is not asked here
        assert tree.cache.linker.finish_loads() == []
        for _, tokens, slots in loads:
            if self.rng.random() < 0.1:  # each tenth, byte for byte
                for number, page in enumerate(page_numbers(slots, PAGE)):
                    assert tree.read(page).equal(self.page(tokens, number))
            self.loaded += slots.numel() // PAGE
            tree.allocator.free(slots)

    def prefill(self, tokens: tuple[int, ...]) -> None:
        """Where the device has no room, because saves under way hold it, the request is served and not kept."""
        slots = self.tree.alloc(len(tokens) // PAGE)
        if slots is not None:
            for number, page in enumerate(page_numbers(slots, PAGE)):
                self.tree.write(page, self.page(tokens, number))
            in_use.set_in_use(None)  # what the tree itself does is not asked here; its offload is
            try:
                self.tree.insert(tokens, slots)
            finally:
                in_use.set_in_use(self.tree.linker)


@pytest.mark.alone
@pytest.mark.parametrize("requests", [3_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_requests_and_a_tenth_aborted(node: Callable[..., Tree], requests: int) -> None:
    """No leak, bounded queues. How long a step takes is the benchmarks' (`stalled_valkey`, `cache_soak`, `page_cost`)."""
    pool_bytes = 200 * (1 << 16)
    tree = node(wait_s=0.2, pages=DEVICE, save_limit_pages=LIMIT, pool_bytes=pool_bytes)
    prompts = [tuple(range(100_000 + 100 * n, 100_000 + 100 * n + PAGE)) for n in range(600)]
    scheduler = Scheduler(tree, prompts)
    store: Any = tree.store
    prefetcher, limits = store._remote.prefetcher, store._remote.saver._limits
    most_saves = min(limits.pages, limits.share_pages())
    arrived = 0
    while scheduler.served + scheduler.aborted < requests:
        for _ in range(min(requests - arrived, AT_ONCE - len(scheduler.waiting), BURST)):
            scheduler.arrive()
            arrived += 1
        scheduler.step()
        assert tree.linker._saves.queued_pages <= LIMIT
        assert store.metrics["cache_save_queue_pages"] <= most_saves
        assert len(tree.linker.arrivals) <= AT_ONCE
        assert prefetcher.running <= AT_ONCE
    assert 0.08 * requests < scheduler.aborted < 0.14 * requests
    assert scheduler.loaded > requests / 10
    assert store.metrics["cache_hit_pages", "valkey"] > 0
    assert store.metrics["cache_evicted_pages"] > 0
    tree.drain()
    tree.flush_device()
    patience = time.monotonic() + 30
    while any(map(store._pool.held, OWNERS)) or prefetcher._tasks:
        assert time.monotonic() < patience
        time.sleep(0.01)
    assert store._pool.free + store._pool.resident == store._pool.slots
    assert tree.allocator.available_size() == DEVICE * PAGE
    assert (len(tree.linker.arrivals), tree.linker._pins, tree.linker._queued) == (0, {}, {})
