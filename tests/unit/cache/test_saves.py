"""The save queue: one result for each save, in order, whatever happens to it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from glm_sglang.cache.audit import Audit
from glm_sglang.cache.saves import FEWER, RESERVE, SaveQueue
from tests.unit.cache.memory_store import MemoryStore

PAGE = 64


class Copier:
    """Writes a page's number into it. `gate` holds copies back, `fail` names pages that cannot be copied."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.fail: set[int] = set()
        self.depth = 1
        self.under_way = self.most = 0

    def written(self, forward_stream: Any) -> Callable[[], None]:
        return lambda: None

    def start_save(self, pages: Sequence[int], into: Sequence[Any]) -> Callable[[], None]:
        self.under_way += 1
        self.most = max(self.most, self.under_way)

        def wait() -> None:
            assert self.gate.wait(10)
            self.under_way -= 1
            for number, page in zip(pages, into, strict=True):
                if number in self.fail:
                    raise RuntimeError(f"page {number} cannot be read")
                page.tensor.fill_(number)

        return wait

    def load(self, pages: Sequence[int], source: Sequence[Any], landed: Callable[[int], None]) -> None:
        raise AssertionError("a save loads nothing")


class Setup:
    def __init__(self, slots: int = 1024, limit: int = 1024, pool_pages: int | None = None) -> None:
        self.store, self.copier, self.ends = MemoryStore(4, slots=slots), Copier(), Counter[str]()
        self.queue = SaveQueue(
            self.store,
            self.copier,
            PAGE,
            limit_pages=lambda: limit,
            count=self.count,
            audit=Audit(),
            pool_pages=None if pool_pages is None else lambda: pool_pages,
        )

    def count(self, end: str, pages: int) -> None:
        self.ends[end] += pages

    def put(self, *numbers: int) -> None:
        slots = torch.cat([torch.arange(n * PAGE, (n + 1) * PAGE) for n in numbers] or [torch.arange(0)])
        self.queue.put([key(n).hex() for n in numbers], slots, lambda: None)

    def results(self, count: int) -> list[bool]:
        self.queue._work.join()
        assert self.queue.completed() == count
        return [self.queue.pop() for _ in range(count)]


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_saved_pages_are_resident_and_handed_on(setup: Setup) -> None:
    setup.put(1, 2, 3)
    assert setup.results(1) == [True]
    assert setup.store.remote == {key(n): bytes([n] * 4) for n in (1, 2, 3)}
    assert setup.ends == {"saved": 3, "resident": 0}
    assert setup.store.reserved == 0


def test_what_came_from_the_pool_is_not_copied_again(setup: Setup) -> None:
    setup.put(1, 2)
    setup.put(1, 2, 3)
    assert setup.results(2) == [True, True]
    assert setup.ends == {"saved": 3, "resident": 2}


def test_results_come_in_the_order_of_asking(setup: Setup) -> None:
    """A save that fails at once waits for its turn: ranks take results in step."""
    tight = Setup(limit=2)
    tight.copier.gate.clear()
    tight.put(1, 2)
    tight.put(3)  # does not fit
    assert tight.queue.completed() == 0
    with pytest.raises(IndexError, match="no save has completed"):
        tight.queue.pop()
    tight.copier.gate.set()
    assert tight.results(2) == [True, False]
    assert tight.ends["queue_full"] == 1
    tight.put(3)
    assert tight.results(1) == [True]


def test_a_node_larger_than_the_queue_is_saved_from_its_beginning_each_time_more_of_it() -> None:
    """A chunk of 65,536 tokens has 1,024 pages, a quarter of a small pool fewer."""
    small = Setup(limit=40)
    node = range(1, 101)
    for saved in (40, 80, 100):
        small.put(*node)
        assert small.results(1) == [saved == 100]
        assert small.store.resident([key(n) for n in node]) == saved
    assert small.ends == {"saved": 100, "resident": 0 + 40 + 80, "queue_full": 60 + 20}
    small.put(*node)
    assert small.results(1) == [True]
    assert (small.queue.queued_pages, small.store.reserved) == (0, 0)


def test_a_node_larger_than_the_pool_keeps_its_beginning_there() -> None:
    """All of it would push out itself from its beginning on, and everybody else."""
    small = Setup(limit=100, pool_pages=60)
    for _ in range(3):
        small.put(*range(1, 101))
        assert small.results(1) == [False]
        assert small.store.resident([key(n) for n in range(1, 101)]) == 30
    assert small.ends == {"saved": 30, "resident": 0 + 30 + 30, "queue_full": 3 * 70}
    small.put(*range(101, 161))  # as large as the pool
    assert small.results(1) == [True]


def test_what_is_queued_takes_room_from_what_comes_and_every_page_has_one_end() -> None:
    tight = Setup(limit=10)
    tight.copier.gate.clear()
    tight.put(*range(1, 7))
    tight.put(*range(11, 31))
    assert tight.queue.queued_pages == 10
    tight.put(40)
    tight.put()  # nothing needs no room
    tight.copier.gate.set()
    assert tight.results(4) == [True, False, False, True]
    assert tight.store.resident([key(n) for n in range(11, 31)]) == 4
    assert tight.ends == {"saved": 10, "resident": 0, "queue_full": 16 + 1}
    tight.copier.fail = {53}
    tight.put(*range(50, 70))
    assert tight.results(1) == [False]
    assert tight.ends == {"saved": 10, "resident": 0, "queue_full": 17 + 10, "failed": 10}
    assert (tight.queue.queued_pages, tight.store.reserved) == (0, 0)


def test_asking_does_not_wait_for_a_copy(setup: Setup) -> None:
    """LMCache 4095: a save under way keeps nobody. Here it never ends while others are queued behind it."""
    setup.copier.gate.clear()
    for number in range(1, 100):
        setup.put(number)
    assert setup.queue.completed() == 0
    assert setup.queue.queued_pages == 99
    setup.copier.gate.set()
    assert setup.results(99) == [True] * 99
    assert setup.queue.queued_pages == 0


def test_a_pool_without_room_in_the_middle_keeps_the_beginning() -> None:
    """LMCache 3855: the allocator returns nothing mid-batch: prefix kept, no deadlock, nothing reserved for ever."""
    setup = Setup()
    setup.store.refuse_after = 2
    setup.put(*range(1, 100))
    assert setup.results(1) == [False]
    assert setup.store.resident([key(n) for n in range(1, 100)]) == 2 * RESERVE
    assert setup.ends == {"saved": 2 * RESERVE, "resident": 0, "pool_full": 99 - 2 * RESERVE}
    setup.store.refuse_after = None
    setup.put(*range(1, 100))
    assert setup.results(1) == [True]


@pytest.mark.parametrize(("slots", "saved"), [(99, 99), (98, 96), (40, 32), (25, 16), (15, 0)])
def test_where_a_whole_block_does_not_fit_a_smaller_one_is_tried(slots: int, saved: int) -> None:
    """99 pages: 32 at a time, and 16 at a time once 32 are too many; the last of both has three."""
    assert (RESERVE, FEWER) == (32, 16)
    setup = Setup(slots=slots)
    held = setup.store.pin  # what was saved stays: as if others held it
    setup.store.commit = lambda pages, keys, commit=setup.store.commit: (commit(pages, keys), held(keys))  # type: ignore[method-assign]
    setup.put(*range(1, 100))
    assert setup.results(1) == [saved == 99]
    assert setup.store.resident([key(n) for n in range(1, 100)]) == saved
    assert setup.store.reserved == 0


def test_a_copy_that_fails_is_one_failed_save(setup: Setup) -> None:
    setup.copier.fail = {RESERVE + 4}
    setup.put(*range(1, 50))
    setup.put(60)
    assert setup.results(2) == [False, True]
    assert setup.store.reserved == 0
    assert setup.store.resident([key(n) for n in range(1, 50)]) == RESERVE
    assert setup.ends == {"saved": RESERVE + 1, "failed": 49 - RESERVE, "resident": 0}


def test_quiesce_waits_for_copies_and_forgets_results(setup: Setup) -> None:
    setup.put(1)
    setup.queue.quiesce()
    assert setup.queue.completed() == 0
    assert setup.store.resident([key(1)]) == 1
    setup.queue.close()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_blocks_under_way(setup: Setup, depth: int) -> None:
    """As many as the copier wants; when one fails, the others have ended before their slots go back."""
    setup.copier.depth = depth
    setup.put(*range(1, 100))
    assert setup.results(1) == [True]
    assert setup.copier.most == depth
    assert setup.store.resident([key(n) for n in range(1, 100)]) == 99
    setup.copier.fail = {120}
    setup.put(*range(101, 200))
    assert setup.results(1) == [False]
    assert setup.copier.under_way == 0
    assert setup.store.reserved == 0
