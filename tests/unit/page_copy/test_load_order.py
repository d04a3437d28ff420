"""The scheduler goes on as soon as a batch is launched, with its load still under way: what it does next to the same
slots and pool pages comes behind the load, on a device that runs its streams in any order and stops wherever it likes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.unit.cache.conftest import context, make_tree  # noqa: F401
from tests.unit.cache.tree import PAGE, SKIP_TOPK, Tree, expected_page
from tests.unit.page_copy.simulator import SimDevice
from tests.unit.page_copy.test_linker_on_sim import on_sim, prompt, restored  # noqa: F401

LAYERS = len(SKIP_TOPK)
PAGES = 5
everywhere = pytest.mark.parametrize(
    ("stop", "seed"), [(stop, seed) for stop in range(LAYERS) for seed in range(3)]
)


@dataclass
class Batch:
    """One prompt whose load is under way. seen: of each layer that the forward has read, whether it was whole. ended:
    once the result has come, whether the slots were whole then."""

    rid: str
    tokens: list[int]
    slots: torch.Tensor
    seen: list[bool] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)


class Overlap:
    """SGLang's overlap loop on the simulator: a stream of the scheduler's, one of the forward's. The test's thread is the
    scheduler's, and must not wait for the device."""

    def __init__(self, tree: Tree, device: SimDevice) -> None:
        self.tree, self.device = tree, device
        self.forward = tree.linker.forward_stream = device.stream(urgent=False)
        self.copier: Any = tree.linker.parts.copier
        self._gate, self._jam = device.event(), device.stream(urgent=False)
        device.stuck.add(self._jam)
        self._gate.record(self._jam)

    def stop_before(self, layer: int) -> None:
        """The load's kernels stop before this layer, of every load from now on, until `go_on`."""
        loads = self.copier.loads
        original = loads._queue

        def queue(load: Any, group: Any) -> None:
            if layer in group.layers:
                loads.stream.wait_event(self._gate)
            original(load, group)

        loads._queue = queue

    def go_on(self) -> None:
        self.device.stuck.clear()

    def saved(self, seed: int) -> list[int]:
        """A prompt that the pool has and the device has lost."""
        tokens = prompt(PAGES, seed)
        self.tree.prefill(tokens)
        self.tree.drain()
        self.tree.flush_device()
        return tokens

    def launch(self, tokens: list[int], *, waits_for: int = LAYERS, late: bool = False) -> Batch:
        """Loads the prompt, launches a forward that waits for so many layers, and asks whether the load is good. late:
        the slots are not computed before `go_on`."""
        req = self.tree.request([*tokens, 7])
        assert self.tree.match(req) == (0, PAGES * PAGE)
        batch = Batch(req.rid, tokens, self.tree.load(req))
        if late:
            known = batch.slots.clone()
            batch.slots.fill_(-1)
            self.device.current_stream.wait_event(self._gate)
            self.device.current_stream.put(lambda: batch.slots.copy_(known))
        counter = self.tree.linker.layer_done_counter
        counter.set_consumer(self.tree.cache.linker.start_layer_wise_loading())
        schedule, self.device.current_stream = self.device.current_stream, self.forward
        for layer in range(waits_for):
            counter.wait_until(layer)
            self.forward.put(functools.partial(self._read, batch, layer))
        self.forward.put(lambda: batch.ended.append(restored(self.tree, tokens, batch.slots)))
        self.device.current_stream = schedule
        self.device.may_not_poll = threading.get_ident() if waits_for == LAYERS else None
        try:
            assert self.tree.cache.linker.finish_loads() == []
        finally:
            self.device.may_not_poll = None
        return batch

    def _read(self, batch: Batch, layer: int) -> None:
        numbers = [int(slot) // PAGE for slot in batch.slots[::PAGE]]
        batch.seen.append(
            all(
                torch.equal(part.rows[number], expected_page(batch.tokens, n, self.tree.pages)[part.span])
                for part in self.tree.pages.layers[layer]
                for n, number in enumerate(numbers)
            )
        )


MakeOverlap = Callable[..., Overlap]


@pytest.fixture
def overlap(
    make_tree: Callable[..., Tree],  # noqa: F811
    on_sim: Callable[[int], SimDevice],  # noqa: F811
) -> Iterator[MakeOverlap]:
    """`overlap(seed, pages=…)`: one server, whose device goes on at the end."""
    made: list[Overlap] = []

    def make(seed: int, **more: Any) -> Overlap:
        device = on_sim(seed)
        made.append(Overlap(make_tree(**more), device))
        return made[-1]

    yield make
    for server in made:
        server.go_on()


@everywhere
def test_the_scheduler_goes_on_and_the_result_comes_behind_the_load(
    overlap: MakeOverlap,
    stop: int,
    seed: int,
) -> None:
    server = overlap(seed)
    tree, device = server.tree, server.device
    tokens = server.saved(seed)
    server.stop_before(stop)
    batch = server.launch(tokens)
    device.run_what_can()
    assert (batch.seen, batch.ended) == ([True] * stop, [])
    assert tree.store.pinned == PAGES
    server.go_on()
    device.run_all()
    assert (batch.seen, batch.ended) == ([True] * LAYERS, [True])
    tree.linker._loads.quiesce()
    assert tree.store.pinned == 0
    assert tree.recorder.table["cache_load_pages",] == PAGES


@pytest.mark.parametrize("seed", range(6))
def test_a_launch_does_not_wait_until_its_slots_are_computed(overlap: MakeOverlap, seed: int) -> None:
    server = overlap(seed)
    tree, device = server.tree, server.device
    tokens = server.saved(seed)
    waited = device.host_waits
    batch = server.launch(tokens, late=True)
    device.run_what_can()
    assert (batch.seen, batch.ended) == ([], [])
    assert device.host_waits - waited <= 1  # of the thread that ends loads, while it is under way
    server.go_on()
    device.run_all()
    assert (batch.seen, batch.ended) == ([True] * LAYERS, [True])
    tree.linker._loads.quiesce()
    assert tree.store.pinned == 0


@everywhere
def test_an_aborted_requests_slots_are_anothers_at_once(
    overlap: MakeOverlap,
    stop: int,
    seed: int,
) -> None:
    """The device has no other slots, and the pool has no other pages: what evicts there finds them pinned."""
    server = overlap(seed, pages=PAGES)
    tree, device = server.tree, server.device
    tree.store.slots = PAGES + 1
    tokens = server.saved(seed)
    server.stop_before(stop)
    batch = server.launch(tokens)
    tree.cache.linker.release_request(batch.rid)
    tree.allocator.free(batch.slots)
    other = prompt(PAGES, seed + 100)
    slots = tree.alloc(PAGES)
    assert slots is not None
    assert sorted(slots.tolist()) == sorted(batch.slots.tolist())
    server.forward.put(lambda: tree.compute(other, slots))
    tree.insert(other, slots)  # saved behind the forward
    server.go_on()
    tree.drain()
    device.run_all()
    assert (batch.seen, batch.ended) == ([True] * LAYERS, [True])
    assert restored(tree, other, slots)
    tree.linker._loads.quiesce()
    assert (tree.store.pinned, tree.store.reserved) == (0, 0)
    for key, page in tree.store.pool.items():
        known = [expected_page(of, n, tree.pages) for of in (tokens, other) for n in range(PAGES)]
        assert any(torch.equal(page.tensor, want) for want in known), key


@pytest.mark.parametrize("freed", [False, True], ids=["both-run", "the-first-is-aborted"])
@everywhere
def test_two_batches_load_at_once(
    overlap: MakeOverlap,
    stop: int,
    seed: int,
    freed: bool,
) -> None:
    """The second is launched, to its last layer, while the first has not been copied; also into the same slots."""
    server = overlap(seed, pages=PAGES if freed else 2 * PAGES)
    tree, device = server.tree, server.device
    prompts = [server.saved(2 * seed), server.saved(2 * seed + 1)]
    server.stop_before(stop)
    first = server.launch(prompts[0])
    if freed:
        tree.cache.linker.release_request(first.rid)
        tree.allocator.free(first.slots)
    second = server.launch(prompts[1])
    device.run_what_can()
    assert (first.seen, second.seen) == ([True] * stop, [])
    assert tree.store.pinned == 2 * PAGES
    server.go_on()
    device.run_all()
    assert [first.seen, second.seen] == [[True] * LAYERS] * 2
    assert [first.ended, second.ended] == [[True]] * 2
    tree.linker._loads.quiesce()
    assert tree.store.pinned == 0
    assert restored(tree, prompts[1], second.slots)


@pytest.mark.parametrize("waits_for", range(LAYERS))
def test_a_forward_that_leaves_layers_out_is_waited_for(overlap: MakeOverlap, waits_for: int) -> None:
    """Its result would come before the load has ended."""
    server = overlap(waits_for)
    tokens = server.saved(waits_for)
    server.stop_before(LAYERS - 1)
    settle = server.copier.settle

    def settles(event: Any) -> None:
        server.go_on()
        settle(event)

    server.copier.settle = settles
    batch = server.launch(tokens, waits_for=waits_for)
    assert restored(server.tree, tokens, batch.slots)
    server.device.run_all()


def test_a_flush_waits_for_loads_under_way(
    overlap: MakeOverlap,
) -> None:
    server = overlap(1)
    tree = server.tree
    tokens = server.saved(1)
    server.stop_before(2)
    server.launch(tokens)
    flush = threading.Thread(target=tree.cache.linker.reset)
    flush.start()
    assert tree.store.pinned == PAGES
    assert flush.is_alive()
    server.go_on()
    flush.join(30)
    assert not flush.is_alive()
    assert (tree.store.pinned, len(tree.store.pool)) == (0, 0)


def test_a_load_that_breaks_once_it_is_queued_is_told_and_lets_its_pages_go(
    overlap: MakeOverlap,
) -> None:
    """As an error of the whole CUDA context comes back: from whatever is asked next."""
    server = overlap(1)
    tree, device = server.tree, server.device
    tokens = server.saved(1)
    start = server.copier.start_load

    def broken(*args: Any) -> Callable[[], None]:
        start(*args)

        def wait() -> None:
            raise RuntimeError("an illegal memory access was encountered")

        return wait

    server.copier.start_load = broken
    with suppress(AssertionError):  # the requests are aborted where it was seen in time
        server.launch(tokens)
    tree.linker._loads.quiesce()
    assert tree.store.pinned == 0
    assert tree.recorder.table["cache_failed_loads",] == 1
    server.go_on()
    device.run_all()
