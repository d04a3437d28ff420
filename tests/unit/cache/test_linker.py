"""The linker under SGLang's own radix tree: what is restored, what is never, and what is left behind."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from glm_sglang.cache import page_keys
from glm_sglang.cache.copier import TorchPageCopier
from glm_sglang.cache.stalls import StallClock
from tests.unit.cache.memory_store import MemoryStore
from tests.unit.cache.tree import PAGE, Tree, expected_page

MakeTree = Callable[..., Tree]


def prompt(pages: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, 150_000, (pages * PAGE,), generator=generator).tolist()
    return ids


class Gated(TorchPageCopier):
    """Copies when it is let; can be told to fail."""

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self.may_save, self.may_load = threading.Event(), threading.Event()
        self.may_save.set()
        self.may_load.set()
        self.failing = False

    def save(self, pages: Sequence[int], into: Sequence[Any]) -> None:
        assert self.may_save.wait(10)
        super().save(pages, into)

    def load(self, pages: Sequence[int], source: Sequence[Any], landed: Callable[[int], None]) -> None:
        assert self.may_load.wait(10)
        if self.failing:
            super().load(pages[:1], source[:1], lambda layer: None)
            raise RuntimeError("the device is gone")
        super().load(pages, source, landed)


def restored(tree: Tree, tokens: list[int], slots: torch.Tensor, first: int = 0) -> bool:
    """Whether the slots hold what the prompt's pages must hold."""
    return all(
        torch.equal(tree.read(int(slots[n * PAGE]) // PAGE), expected_page(tokens, first + n, tree.pages))
        for n in range(slots.numel() // PAGE)
    )


def saved(tree: Tree, tokens: list[int]) -> None:
    tree.prefill(tokens)
    tree.drain()
    tree.flush_device()


def test_a_prompt_comes_back_after_the_device_has_lost_it(make_tree: MakeTree) -> None:
    tree = make_tree()
    tokens = prompt(4)
    saved(tree, tokens)
    req = tree.request([*tokens, 7])
    assert tree.match(req) == (0, 4 * PAGE)
    slots = tree.load(req)
    assert tree.cache.linker.start_layer_wise_loading() == 0
    assert tree.cache.linker.finish_loads() == []
    assert slots.numel() == 4 * PAGE
    assert restored(tree, tokens, slots)
    tree.linker._loads.quiesce()
    assert tree.store.pinned == 0


def test_what_the_launch_of_a_forward_waits_for_its_load_is_a_stall(make_tree: MakeTree) -> None:
    """7 s by a clock that moves while the forward's thread waits, and at no other time."""
    tree = make_tree(copier=Gated)
    tokens = prompt(2)
    saved(tree, tokens)
    now = [0.0]
    steps: list[float] = []
    tree.linker.stalls = StallClock(steps.append, held=steps.append, clock=lambda: now[0])
    tree.copier.may_load.clear()
    req = tree.request([*tokens, 7])
    tree.match(req)
    tree.load(req)
    counter = tree.linker.layer_done_counter
    counter.set_consumer(tree.cache.linker.start_layer_wise_loading())
    measured = counter.waiting

    @contextmanager
    def waiting() -> Iterator[None]:
        with measured():
            now[0] += 7.0
            tree.copier.may_load.set()
            yield

    counter.waiting = waiting
    counter.wait_until(0)
    tree.linker._loads.quiesce()
    for layer in range(len(tree.pages.layers)):
        counter.wait_until(layer)
    assert tree.cache.linker.finish_loads() == []
    tree.step()
    assert steps == [7.0]
    waited: Any = tree.recorder.table.snapshot()["cache_load_wait_seconds"][()]
    assert sum(waited.counts) == 1


def test_another_process_gets_it_from_the_remote_tier(make_tree: MakeTree) -> None:
    first = make_tree()
    tokens = prompt(5)
    saved(first, tokens)
    other = make_tree(MemoryStore(first.store.page_bytes, remote=first.store.remote))
    req = other.request([*tokens, 7])
    assert other.match(req) == (0, 0)  # nothing in its pool: no hit is reported, nothing is waited for
    other.linker.request_arrives(other.cache, req)
    other.linker.arrivals._work.put(None)
    other.linker.arrivals._thread.join()
    assert other.match(req) == (0, 5 * PAGE)
    slots = other.load(req)
    other.cache.linker.start_layer_wise_loading()
    assert other.cache.linker.finish_loads() == []
    assert restored(other, tokens, slots)


def test_a_tail_continues_what_the_device_still_has(make_tree: MakeTree) -> None:
    tree = make_tree()
    tokens = prompt(6)
    saved(tree, tokens)
    tree.prefill(tokens[: 2 * PAGE])
    req = tree.request([*tokens, 7])
    assert tree.match(req) == (2 * PAGE, 4 * PAGE)
    slots = tree.load(req)
    tree.cache.linker.start_layer_wise_loading()
    assert tree.cache.linker.finish_loads() == []
    assert restored(tree, tokens, slots, first=2)


def test_a_block_that_is_lost_ends_the_hit_before_it(make_tree: MakeTree) -> None:
    """vllm 49250: block k cannot be loaded. The hit is the pages before it; the rest is computed, never guessed."""
    tree = make_tree()
    tokens = prompt(6)
    saved(tree, tokens)
    del tree.store.pool[list(tree.store.remote)[3]]
    assert tree.match(tree.request([*tokens, 7])) == (0, 3 * PAGE)


def test_prompts_of_other_name_spaces_share_nothing(make_tree: MakeTree) -> None:
    tree = make_tree()
    tokens = prompt(2)
    saved(tree, tokens)
    for other in ({"extra_key": "adapter"}, {"cache_salt": "tenant"}, {"extra_key": ""}):
        assert tree.match(tree.request([*tokens, 7], **other)) == (0, 0)
    assert tree.match(tree.request([*tokens, 7])) == (0, 2 * PAGE)


def test_a_page_under_way_is_not_reused(make_tree: MakeTree) -> None:
    """sglang 12073: the device is short of pages while a save is under way. Its pages stay; bytes match their keys."""
    tree = make_tree(pages=8, copier=Gated)
    tree.copier.may_save.clear()
    tokens = prompt(4)
    tree.prefill(tokens)
    tree.flush_device()
    assert tree.allocator.available_size() == 4 * PAGE
    slots = tree.alloc(4)
    assert slots is not None
    tree.compute(prompt(4, seed=2), slots)
    assert tree.alloc(1) is None  # nothing can be evicted while the copy has not ended
    tree.copier.may_save.set()
    tree.drain()
    tree.flush_device()
    assert tree.allocator.available_size() == 4 * PAGE
    for number, data in enumerate(tree.store.remote.values()):
        assert data == expected_page(tokens, number, tree.pages).numpy().tobytes()


def test_a_failed_load_aborts_and_leaves_nothing(make_tree: MakeTree) -> None:
    """What has been written in part is seen by nobody: the request is named, its slots are its own."""
    tree = make_tree(copier=Gated)
    tokens = prompt(4)
    saved(tree, tokens)
    tree.copier.failing = True
    req = tree.request([*tokens, 7])
    tree.match(req)
    slots = tree.load(req)
    index = tree.cache.linker.start_layer_wise_loading()
    tree.linker.layer_done_counter.set_consumer(index)
    tree.linker.layer_done_counter.wait_until(0)  # a forward that waits is not kept
    assert tree.cache.linker.finish_loads() == [req.rid]
    tree.allocator.free(slots)
    assert tree.allocator.available_size() == 16 * PAGE
    assert tree.store.pinned == 0
    assert tree.recorder.table["cache_failed_loads"] == 1


@pytest.mark.parametrize("when", ["matched", "queued", "matched and a step later"])
def test_an_abort_leaves_no_pin(make_tree: MakeTree, when: str) -> None:
    """sglang 30053, 36926: whenever the request goes, nothing of the pool stays held."""
    tree = make_tree()
    tokens = prompt(4)
    saved(tree, tokens)
    req = tree.request([*tokens, 7])
    tree.linker.request_arrives(tree.cache, req)
    tree.match(req)
    assert tree.store.pinned == 4
    if when == "queued":
        tree.load(req)
    if when == "matched and a step later":
        tree.step()
        assert tree.store.pinned == 0
    tree.cache.linker.release_request(req.rid)
    assert tree.store.pinned == 0
    assert len(tree.linker.arrivals) == 0
    assert tree.cache.linker.start_layer_wise_loading() == -1


def test_ten_thousand_aborts(make_tree: MakeTree) -> None:
    """sglang 30053: 10k aborts: credits and pins 0."""
    tree = make_tree()
    tokens = prompt(2)
    saved(tree, tokens)
    for number in range(10_000):
        req = tree.request([*tokens, number])
        tree.linker.arrivals.begin(req.rid, req.origin_input_ids, None, None, 0)
        if number % 3 == 0:
            tree.match(req)
        tree.cache.linker.release_request(req.rid)
    assert tree.store.pinned == 0
    assert len(tree.linker.arrivals) == 0
    assert tree.linker._queued == {}


def test_ranks_may_agree_on_less_than_a_lookup_has_found(make_tree: MakeTree) -> None:
    """The pins beyond what is loaded go back."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    tree = make_tree()
    tokens = prompt(4)
    saved(tree, tokens)
    keys = [key.hex() for key in tree.store.remote]
    assert tree.linker.lookup("r", [PoolTransfer(PoolName.KV, keys=keys)]) == [1, 2, 3, 4]
    slots = tree.alloc(3)
    assert tree.linker.load("r", [PoolTransfer(PoolName.KV, keys=keys[:3], device_indices=slots)])
    assert tree.store.pinned == 3
    index = tree.linker.start_layer_wise_loading()
    assert tree.linker.finish_layer_wise_loading(index)
    assert restored(tree, tokens, slots)
    tree.linker._loads.quiesce()
    assert tree.store.pinned == 0


def test_a_load_without_a_lookup_is_refused(make_tree: MakeTree) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    tree = make_tree()
    saved(tree, prompt(2))
    keys = [key.hex() for key in tree.store.remote]
    transfer = PoolTransfer(PoolName.KV, keys=keys, device_indices=torch.arange(PAGE, 3 * PAGE))
    assert not tree.linker.load("r", [transfer])


@pytest.mark.parametrize("of", [slice(0, 4), slice(1, 3)], ids=["more pages", "another tail"])
def test_a_load_of_another_lookup_is_refused_and_its_pins_go(make_tree: MakeTree, of: slice) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    tree = make_tree()
    saved(tree, prompt(4))
    keys = [key.hex() for key in tree.store.remote]
    tree.linker.lookup("r", [PoolTransfer(PoolName.KV, keys=keys[:3])])
    slots = torch.arange(PAGE, PAGE + PAGE * len(keys[of]))
    assert not tree.linker.load("r", [PoolTransfer(PoolName.KV, keys=keys[of], device_indices=slots)])
    assert tree.store.pinned == 0


def test_the_pool_without_room_costs_hits_and_nothing_else(make_tree: MakeTree) -> None:
    tree = make_tree()
    tree.store.refuse_after = 0
    saved(tree, prompt(4))
    assert tree.match(tree.request([*prompt(4), 7])) == (0, 0)
    assert tree.allocator.available_size() == 16 * PAGE
    tree.store.refuse_after = None
    saved(tree, prompt(4))
    assert tree.match(tree.request([*prompt(4), 7])) == (0, 4 * PAGE)


def test_a_flush_empties_the_pool_and_keeps_the_remote_tier(make_tree: MakeTree) -> None:
    tree = make_tree()
    saved(tree, prompt(4))
    tree.cache.reset()
    assert len(tree.store.pool) == 0
    assert len(tree.store.remote) == 4
    assert tree.match(tree.request([*prompt(4), 7])) == (0, 0)


def observed(tree: Tree) -> tuple[int, int]:
    """Steps with work, and others that held requests back."""
    found: Any = tree.recorder.table.snapshot()
    work, held = (found[f"scheduler_{name}_seconds"][()].counts for name in ("stall", "hold"))
    return sum(work), sum(held)


def test_what_a_step_spends_here_is_measured(make_tree: MakeTree) -> None:
    tree = make_tree()
    for _ in range(100):
        tree.step()
    assert observed(tree) == (0, 0)  # idle
    saved(tree, prompt(4))
    tree.step()
    work = observed(tree)[0]
    assert work == 2  # the steps with the save and with its result
    tree.match(tree.request([*prompt(4), 7]))
    for _ in range(10):
        tree.step()
    assert observed(tree) == (work + 2, 0)  # those of the lookup and of the end of its pins
    assert tree.linker.stalls.longest > 0


@pytest.fixture
def slow(make_tree: MakeTree) -> tuple[Tree, Callable[[str, Any], None], list[float], list[float]]:
    """A tree whose stalls are measured by a clock that moves in calls made slow, and at no other time."""
    tree = make_tree(wait_s=None)
    tree.store.manual = True
    now = [0.0]
    work: list[float] = []
    held: list[float] = []
    tree.linker.stalls = StallClock(work.append, held=held.append, clock=lambda: now[0])

    def slow_down(name: str, owner: Any) -> None:
        call = getattr(owner, name)

        def slowly(*args: Any, **more: Any) -> Any:
            now[0] += 1.0
            return call(*args, **more)

        setattr(owner, name, slowly)

    return tree, slow_down, work, held


def test_a_step_that_only_holds_requests_back_is_measured(slow: Any) -> None:
    """Five polls of a second for each of two requests, while nothing comes from a store; then nobody waits."""
    tree, slow_down, work, held = slow
    requests = [tree.request([*prompt(4, seed), 7]) for seed in range(2)]
    rids = {req.rid for req in requests}
    for req in requests:
        tree.linker.request_arrives(tree.cache, req)
    tree.step()
    assert (work.pop(), held) == (0.0, [])
    slow_down("ready", tree.linker.arrivals)
    for _ in range(5):
        assert tree.linker.held_back(sorted(rids), tree.cache) == rids
        tree.step()
    assert (work, held) == ([], [2.0] * 5)
    assert tree.linker.stalls.longest == 2.0
    tree.linker.arrivals.clear()
    for _ in range(100):
        assert tree.linker.held_back(sorted(rids), tree.cache) == set()
        tree.step()
    assert (work, held) == ([], [2.0] * 5)


def test_a_slow_poll_of_an_idle_step_is_the_longest(slow: Any) -> None:
    tree, slow_down, work, held = slow
    slow_down("completed", tree.linker._saves)
    for _ in range(3):
        tree.step()
    assert (work, held, tree.linker.stalls.longest) == ([], [], 1.0)


def test_who_reaches_its_deadline_runs_in_the_first_step_from_then_on(make_tree: MakeTree) -> None:
    """Steps of uneven length; each request could first run in another one, and has 2 s from there."""
    tree = make_tree(wait_s=2.0)
    tree.store.manual = True
    now = [0.0]
    tree.linker.arrivals._clock = lambda: now[0]
    waiting: list[str] = []
    due: dict[str, float] = {}
    released: dict[str, float] = {}
    steps = [0.0, 0.25, 1.0, 1.5, 2.0, 2.125, 2.5, 3.125, 3.75, 4.0, 9.0]
    for number, now[0] in enumerate(steps):
        tree.step()
        if number < 4:
            req = tree.request([*prompt(4, number), 7])
            tree.linker.request_arrives(tree.cache, req)
            waiting.append(req.rid)
            due[req.rid] = min(step for step in steps if step >= now[0] + 2.0)
        held = tree.linker.held_back(waiting, tree.cache)
        released |= {rid: now[0] for rid in waiting if rid not in held}
        waiting = [rid for rid in waiting if rid in held]
    assert released == due
    assert list(due.values()) == [2.0, 2.5, 3.125, 3.75]
    assert tree.recorder.table["cache_expired_waits"] == 4


@pytest.mark.parametrize("end", ["admitted", "request_gone", "present"])
def test_the_end_of_a_request_here_is_measured(slow: Any, end: str) -> None:
    """It takes the tiers' locks and wakes their loop. Of one that nobody knows there is nothing to measure."""
    tree, slow_down, work, held = slow
    req = tree.request([*prompt(4), 7])
    tree.linker.request_arrives(tree.cache, req)
    tree.step()
    work.clear()
    slow_down("cancel", tree.store)
    call: Any = {
        "admitted": lambda rid: tree.linker.admitted([rid]),
        "request_gone": tree.linker.request_gone,
        "present": lambda rid: tree.linker.present([]),
    }[end]
    call(req.rid)
    tree.step()
    assert (work, held) == (([], [1.0]) if end == "present" else ([1.0], []))
    for number in range(100):
        if end != "present":
            call(f"unknown {number}")
        tree.step()
    assert len(work) + len(held) == 1


def test_a_request_that_comes_is_measured(slow: Any) -> None:
    tree, slow_down, work, _ = slow
    slow_down("match_prefix", tree.cache)
    tree.linker.request_arrives(tree.cache, tree.request([*prompt(4), 7]))
    tree.step()
    assert work == [1.0]


@pytest.mark.alone
def test_a_save_that_goes_on_and_on_delays_no_step(node: MakeTree) -> None:
    """LMCache 4095: what a step pays for saves while one is under way, however long it takes (here, longer).

    Over real tiers and Valkey. Half of the steps: the requirement is 1 ms, and this machine runs other things too.
    """
    tree = node(pages=64, copier=Gated)
    tree.copier.may_save.clear()
    paid: list[float] = []
    observe = tree.recorder.observe

    def recorded(name: str, value: float) -> None:
        if name == "scheduler_stall_seconds":
            paid.append(value)
        observe(name, value)

    tree.recorder.observe = recorded  # type: ignore[method-assign]
    for number in range(30):
        tree.prefill(prompt(2, seed=4095 + number))
        tree.step()
    assert len(paid) == 30
    assert tree.linker._saves.completed() == 0  # all the time
    assert sorted(paid)[15] < 0.001
    tree.copier.may_save.set()
    tree.drain()
    assert tree.recorder.table["cache_offload_pages", "saved"] == 60


def test_after_a_weight_update_nothing_is_reused(make_tree: MakeTree) -> None:
    """What is stored was made by other weights, and what is made now would be stored under their name."""
    tree = make_tree()
    saved(tree, prompt(4))
    tree.linker.weights_change()
    assert tree.match(tree.request([*prompt(4), 7])) == (0, 0)
    saved(tree, prompt(3, seed=2))
    assert len(tree.store.remote) == 4
    assert tree.recorder.table["cache_offload_pages", "weights_changed"] == 3
    assert tree.recorder.table["cache_off"] == 1
    assert tree.allocator.available_size() == 16 * PAGE


def test_after_a_weight_update_nobody_waits_for_pages_or_holds_them(make_tree: MakeTree) -> None:
    tree = make_tree(wait_s=None)
    tree.store.manual = True
    req = tree.request([*prompt(4), 7])
    tree.linker.request_arrives(tree.cache, req)
    assert tree.linker.held_back([req.rid], tree.cache) == {req.rid}
    tree.linker.weights_change()
    assert tree.linker.held_back([req.rid], tree.cache) == set()
    assert tree.store.cancelled[0] == req.rid


def test_a_request_that_vanishes_is_forgotten_within_a_second(
    make_tree: MakeTree, caplog: pytest.LogCaptureFixture
) -> None:
    """UPSTREAM: a prompt too long for the KV pool is turned away without a word to the tree, and so is, on a PD prefill
    server, whoever's handshake fails: an everyday thing."""
    tree = make_tree()
    requests = [tree.request([*prompt(4, seed), 7]) for seed in range(2)]
    assert not tree.linker.looks_around(0.0)  # there is nobody
    for req in requests:
        tree.linker.request_arrives(tree.cache, req)
    assert tree.linker.looks_around(5.0)
    assert not tree.linker.looks_around(5.9)
    assert tree.linker.looks_around(6.0)
    tree.linker.present([requests[1].rid, "another"])
    assert tree.store.cancelled == [requests[0].rid]
    assert len(tree.linker.arrivals) == 1
    tree.linker.present([])
    assert not tree.linker.looks_around(9.0)
    assert caplog.records == []


def test_a_queue_that_is_put_in_order_looks_at_the_device_only(make_tree: MakeTree) -> None:
    """calc_priority matches every waiting request in every step: no lookup, no pin, and no hit that is stale later."""
    from glm_sglang.cache import gate

    tree = make_tree()
    saved(tree, prompt(4))
    tree.prefill(prompt(4)[: 2 * PAGE])
    req = tree.request([*prompt(4), 7])
    assert gate.order_queue(lambda policy: tree.match(req), "policy") == (2 * PAGE, 0)
    assert tree.store.pinned == 0
    assert tree.match(req) == (2 * PAGE, 2 * PAGE)


@pytest.fixture(params=["rust", "python"])
def hashed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Pages hashed by our functions, by the thread; over either of the tree's cores, of which Rust's has its own. Before
    the tree."""
    if request.param == "rust" and importlib.util.find_spec(page_keys._TREE) is None:
        pytest.skip("SGLang comes without its radix tree in Rust")
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", request.param)
    pages: Counter[str] = Counter()
    chain_names = page_keys.chain_names

    def counted(*args: Any, **more: Any) -> list[str]:
        names = chain_names(*args, **more)
        pages[threading.current_thread().name] += len(names)
        return names

    monkeypatch.setattr(page_keys, "chain_names", counted)
    return pages


def known(tree: Tree, req: Any) -> None:
    """Arrives, and waits until its pages are hashed."""
    tree.linker.request_arrives(tree.cache, req)
    patience = time.monotonic() + 60
    while tree.linker.arrivals.names(req.rid) is None:
        assert time.monotonic() < patience
        time.sleep(0.001)


def test_a_prompt_is_hashed_once_for_all_lookups_and_by_the_tree_as_it_comes_in(
    make_tree: MakeTree, hashed: dict[str, int]
) -> None:
    """Five pages that are computed, then the same from the pool: looked up three times each, then inserted. On this
    thread, the scheduler's, the tree hashes them, within what is measured: in Rust, or by `get_native_hash`."""
    tree = make_tree()
    rust = "Rust" in type(tree.cache.tree_core).__name__
    here = threading.current_thread().name
    tokens = prompt(5)
    for turn, offered in ((1, 0), (2, 5 * PAGE)):
        req = tree.request([*tokens, 7])
        known(tree, req)
        for _ in range(3):
            assert tree.match(req) == (0, offered)
        assert (hashed["glm-cache-arrivals"], hashed.get(here, 0)) == (
            5 * turn,
            0 if rust else 5 * (turn - 1),
        )
        if offered:
            slots = tree.load(req)
            tree.cache.linker.start_layer_wise_loading()
            assert tree.cache.linker.finish_loads() == []
            tree.insert(tokens, slots)
        else:
            tree.prefill(tokens)
        tree.drain()
        tree.flush_device()
        tree.linker.admitted([req.rid])
    assert (hashed["glm-cache-arrivals"], hashed.get(here, 0)) == (10, 0 if rust else 10)


def test_what_is_hashed_on_the_schedulers_thread_is_measured(hashed: dict[str, int], slow: Any) -> None:
    """By the tree at an insert, and for a request that is looked up before its hashes are there."""
    tree, slow_down, work, _ = slow
    rust = "Rust" in type(tree.cache.tree_core).__name__
    slow_down("begin_insert", tree.cache.tree_core)
    slow_down("chain_names", page_keys)
    tree.prefill(prompt(4))
    tree.step()
    assert work == [1.0 if rust else 2.0]
    tree.drain()
    tree.flush_device()
    tree.step()
    work.clear()
    assert tree.match(tree.request([*prompt(4), 7])) == (0, 4 * PAGE)
    tree.step()
    assert work == [1.0]


def test_keys_made_at_arrival_are_the_trees(make_tree: MakeTree) -> None:
    """With and without them a lookup finds the same, behind any hit on the device."""
    tree = make_tree()
    tokens = prompt(5)
    saved(tree, tokens)
    for device in (0, 2):
        if device:
            tree.prefill(tokens[: device * PAGE])
        req = tree.request([*tokens, 7])
        unhashed = tree.match(req)
        tree.linker.request_arrives(tree.cache, req)
        while tree.linker.arrivals.names(req.rid) is None:
            pass
        assert tree.match(req) == unhashed == (device * PAGE, (5 - device) * PAGE)
        tree.cache.linker.release_request(req.rid)
