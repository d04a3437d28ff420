"""The CPU pool against a model of it: every slot is accounted for after any sequence of calls, and a held page
keeps its bytes, whatever is evicted, dropped or overwritten around it.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from glm_connectors.tiers.layout import PageLayout
from glm_connectors.tiers.pool import OWNERS, CpuPool
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ranks import bytes_of, keys

LAYOUT = PageLayout(64, (("kv", 100), ("index", 28)))
SLOTS = 8
MANY = 40  # of which five more than needed are chosen among
HUGE = 2 << 20
ALL = keys(MANY * 3 // 2)


def pool_of(slots: int = SLOTS) -> CpuPool:
    return CpuPool(LAYOUT, slots * 512)


def filled() -> tuple[CpuPool, list[Any]]:
    """A pool of MANY slots, and in it the pages of one prompt, `keys(MANY)`; nobody holds them."""
    pool = pool_of(MANY)
    pages = pool.take(MANY, "save")
    assert pages is not None
    pool.insert(pages, keys(MANY), "save")
    return pool, pages


def recount(pool: CpuPool) -> None:
    """The counts are those of the pages; all that may be taken is offered, and nothing that is held may."""
    pages = pool._pages
    resident = [page for page in pages if page.resident]
    assert pool._free == sum(page.spare and not page.resident for page in pages)
    assert pool._old == sum(page.spare for page in resident)
    assert pool._idle == sum(not page.holds for page in resident)
    assert not any(page.spare for page in pages if page.holds)
    assert {page.number for page in pages if page.spare} <= {
        slot for slot, one in enumerate(pool._places._offered) if one
    }


class Pool(RuleBasedStateMachine):
    """`used`: when each resident page was last used. `in_use`: when it was last held while others were evicted, which is
    use where the pool has come by. `holds`: (page, key or None, owner) of each hold."""

    slots = SLOTS

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(self.slots)
        self.now = 0
        self.aged = 0  # when pages were last looked for that may go
        self.used: dict[bytes, int] = {}
        self.in_use: dict[bytes, int] = {}
        self.holds: list[tuple[Any, bytes | None, Any]] = []
        self.slot: dict[bytes, int] = {}  # of resident pages

    @initialize()
    def start(self) -> None:
        assert (self.pool.free, self.pool.slots) == (self.slots, self.slots)

    def teardown(self) -> None:
        for page, _, owner in self.holds:
            self.pool.release([page], owner)
        self.pool.clear()
        assert self.pool.free == self.slots
        assert self.pool.close()

    def held_slots(self) -> Counter[int]:
        return Counter(page.memory.meta.address for page, _, _ in self.holds)

    def chain(self, data: Any, least: int = 0, most: int = 6) -> list[bytes]:
        some = st.sampled_from(ALL[: self.slots * 3 // 2])
        return list(data.draw(st.lists(some, min_size=least, max_size=most, unique=True)))

    def use(self, key: bytes) -> None:
        self.now += 1
        self.used[key] = self.now

    @rule(data=st.data(), owner=st.sampled_from(["save", "get"]), lane=st.sampled_from([None, "a", "b"]))
    def take(self, data: Any, owner: Any, lane: Any) -> None:
        """All or nothing; of those that nobody holds, oldest first but for a choice among an eighth of the pool."""
        count = data.draw(st.integers(1, self.slots + 1) | st.integers(1, 4))
        held = self.held_slots()
        evictable = [key for key in self.used if not held[self.slot[key]]]
        free = self.pool.free
        pages = self.pool.take(count, owner, lane)
        self.aged = self.now
        if count > free + len(evictable):
            assert pages is None
            assert self.pool.free == free
            assert all(self.pool.prefix([key]) for key in self.used)
            return
        assert pages is not None
        taken = {page.memory.meta.address for page in pages}
        assert len(taken) == count
        assert not taken & set(held)
        evicted = [key for key in self.used if not self.pool.prefix([key])]
        assert {self.slot[key] for key in evicted} == taken & {self.slot[key] for key in self.used}
        for key in evicted:
            before = [other for other in evictable if self.last(other) < self.used[key]]
            assert len(before) < count + self.slots // 8
        for key in evicted:
            del self.used[key]
        self.now += 1
        self.in_use |= {key: self.now for key in self.used if held[self.slot[key]]}
        self.holds += [(page, None, owner) for page in pages]

    def last(self, key: bytes) -> int:
        return max(self.used[key], self.in_use.get(key, 0))

    def empty_holds(self) -> list[int]:
        return [
            number for number, (_, key, owner) in enumerate(self.holds) if key is None and owner == "save"
        ]

    def fill_some(self, data: Any) -> tuple[list[int], list[Any], list[bytes]]:
        """Writes some held, empty pages: their numbers in `holds`, they, and their keys."""
        numbers = data.draw(st.lists(st.sampled_from(self.empty_holds()), min_size=1, unique=True))
        chain = self.chain(data, len(numbers), len(numbers))
        pages = [self.holds[number][0] for number in numbers]
        for page, key in zip(pages, chain, strict=True):
            page.view[:] = bytes_of(key, 128)
        return numbers, pages, chain

    @precondition(lambda self: self.empty_holds())
    @rule(data=st.data())
    def insert(self, data: Any) -> None:
        numbers, pages, chain = self.fill_some(data)
        new = self.pool.insert(pages, chain, "save")
        assert new == [key not in self.used for key in chain]
        for page, key, inserted in reversed(list(zip(pages, chain, new, strict=True))):
            if inserted:
                self.use(key)
                self.slot[key] = page.memory.meta.address
        for number in sorted(numbers, reverse=True):
            del self.holds[number]

    @precondition(lambda self: self.empty_holds())
    @rule(data=st.data())
    def insert_held(self, data: Any) -> None:
        numbers, pages, chain = self.fill_some(data)
        there = self.pool.insert_held(pages, chain, "save")
        for page, key, held in zip(reversed(pages), reversed(chain), there, strict=True):
            if key not in self.used:
                self.slot[key] = page.memory.meta.address
            self.use(key)
            assert held.memory.meta.address == self.slot[key]
        for number in sorted(numbers, reverse=True):
            del self.holds[number]
        self.holds += [(page, key, "save") for page, key in zip(there, reversed(chain), strict=True)]

    @rule(data=st.data(), owner=st.sampled_from(["load", "put"]))
    def hold(self, data: Any, owner: Any) -> None:
        chain = self.chain(data, 1)
        pages = self.pool.hold(chain, owner)
        expected = next((n for n, key in enumerate(chain) if key not in self.used), len(chain))
        assert (len(pages), self.pool.prefix(chain)) == (expected, expected)
        for key in reversed(chain[:expected]):
            self.use(key)
        self.holds += [(page, key, owner) for page, key in zip(pages, chain, strict=False)]

    @rule(data=st.data(), owner=st.sampled_from(["wait", "put"]))
    def hold_any(self, data: Any, owner: Any) -> None:
        chain = self.chain(data)
        pages, absent = self.pool.hold_any(chain, owner)
        assert absent == [key for key in chain if key not in self.used]
        there = [key for key in reversed(chain) if key in self.used]
        assert [page.memory.meta.address for page in pages] == [self.slot[key] for key in there]
        for key in there:
            self.use(key)
        self.holds += [(page, key, owner) for page, key in zip(pages, there, strict=True)]

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        page, _, owner = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.pool.release([page], owner)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def hold_again(self, data: Any) -> None:
        page, key, _ = data.draw(st.sampled_from(self.holds))
        if key is not None:
            self.pool.also([page], "put")
            self.holds.append((page, key, "put"))

    @rule(data=st.data())
    def drop(self, data: Any) -> None:
        chain = self.chain(data)
        assert self.pool.drop(chain) == sum(key in self.used for key in chain)
        self.used = {key: when for key, when in self.used.items() if key not in chain}

    @rule(data=st.data())
    def look(self, data: Any) -> None:
        chain = self.chain(data)
        assert self.pool.missing(chain) == [key for key in chain if key not in self.used]
        for key in reversed([key for key in chain if key in self.used]):
            self.use(key)

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        used = {self.slot[key] for key in self.used} | set(self.held_slots())
        assert self.pool.resident == len(self.used)
        assert self.pool.free == self.slots - len(used)
        for owner in OWNERS:
            assert self.pool.held(owner) == sum(one == owner for _, _, one in self.holds)

    @invariant()
    def the_counts_are_those_of_a_recount(self) -> None:
        """And what was just used is nobody's to take."""
        recount(self.pool)
        pages = self.pool._pages
        assert {page.number: page.holds for page in pages if page.holds} == self.held_slots()
        assert {page.number: page.key for page in pages if page.resident} == {
            self.slot[key]: key for key in self.used
        }
        assert not any(pages[self.slot[key]].spare for key in self.used if self.used[key] > self.aged)

    @invariant()
    def held_pages_keep_their_bytes(self) -> None:
        for page, key, _ in self.holds:
            if key is not None:
                assert bytes(page.view) == bytes_of(key, 128)


class LargerPool(Pool):
    slots = MANY


SETTINGS = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestPool = Pool.TestCase
TestPool.settings = SETTINGS
TestLargerPool = LargerPool.TestCase
TestLargerPool.settings = SETTINGS


def test_the_beginning_of_a_prompt_is_evicted_last() -> None:
    pool = pool_of(4)
    chain = keys(4)
    pages = pool.take(4, "save")
    assert pages is not None
    pool.insert(pages, chain, "save")
    taken = []
    for left in (3, 2, 1, 0):
        taken += pool.take(1, "save") or []
        assert pool.prefix(chain) == left
        pool.missing(chain)  # asked for again: the order stays
    pool.release(taken, "save")
    assert pool.free == 4
    assert pool.close()


def test_a_page_that_is_evicted_by_name_while_held_stays_until_released() -> None:
    """sglang 12073: its slot must not be filled by others before its save has finished."""
    pool = pool_of(2)
    chain = keys(2)
    pages = pool.take(1, "save")
    assert pages is not None
    pages[0].view[:] = bytes_of(chain[0], 128)
    pool.also(pages, "put")
    pool.insert(pages, chain[:1], "save")
    assert pool.drop(chain[:1]) == 1
    assert pool.take(2, "save") is None
    other = pool.take(1, "save")
    assert other is not None
    other[0].view[:] = bytes(128)
    assert bytes(pages[0].view) == bytes_of(chain[0], 128)
    pool.release(pages, "put")
    pool.release(other, "save")
    assert pool.free == 2
    assert pool.close()


def test_a_page_that_is_one_too_many_is_free_when_its_last_holder_lets_go() -> None:
    """Its key was resident: the page that is there stays, is held by whoever asked for that, and was used."""
    pool = pool_of(5)
    chain = keys(2)
    pages = pool.take(4, "save")
    assert pages is not None
    pool.insert(pages[:2], chain, "save")
    pool.missing(chain[:1])
    pool.also(pages[2:], "put")
    assert pool.insert(pages[2:3], chain[1:], "save") == [False]
    assert pool.insert_held(pages[3:], chain[1:], "save") == [pages[1]]
    recount(pool)
    assert pool.free == 1
    pool.release(pages[2:], "put")
    pool.release(pages[1:2], "save")
    recount(pool)
    assert pool.free == 3
    assert pool.take(4, "get") is not None
    assert [pool.prefix([key]) for key in chain] == [0, 1]


def test_a_pool_that_is_closed_while_a_page_is_held_keeps_its_memory() -> None:
    pool = pool_of(2)
    pages = pool.take(1, "load")
    assert pages is not None
    assert not pool.close()
    pages[0].view[:] = bytes(128)  # still ours
    pool.release(pages, "load")


def test_the_parts_of_a_page_are_views_of_its_memory() -> None:
    pool = pool_of(2)
    pages = pool.take(1, "save")
    assert pages is not None
    pages[0].part("kv").fill_(1)
    pages[0].part("index").fill_(2)
    assert bytes(pages[0].view) == b"\1" * 100 + b"\2" * 28
    assert pages[0].tensor.tolist() == [1] * 100 + [2] * 28
    pool.release(pages, "save")
    assert pool.close()


def test_a_pool_too_small_for_two_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="holds 1 pages of 512 bytes"):
        CpuPool(LAYOUT, 1023)


def mapping_at(address: int) -> dict[str, str]:
    """What the kernel says of the mapping that holds `address`."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(" ")
        if not name.endswith(":"):
            start, end = (int(part, 16) for part in name.split("-"))
            if found:
                break
            inside = start <= address < end
        elif inside:
            found[name] = value.strip()
    return found


def in_memory(start: int, end: int) -> int:
    """Pages of 4 KiB that are in memory, of the whole pages of 2 MiB between two addresses."""
    start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
    there = (ctypes.c_ubyte * ((end - start) // 4096))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(end - start), there) == 0
    return sum(one & 1 for one in there)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel that has no huge pages to give"
)
def test_the_pool_asks_for_huge_pages_before_anything_is_in_it() -> None:
    """But for its ends. Whether the kernel has any left at the moment is another matter."""
    pool = CpuPool(PageLayout(64, (("kv", 100_000),)), 32 << 20)
    pages = pool.take(pool.slots, "save")
    assert pages is not None
    if pages[0].tensor.is_pinned():
        pytest.skip("pinned memory stays as it is")
    assert "hg" in mapping_at(pages[len(pages) // 2].address)["VmFlags:"].split()
    addresses = [page.address for page in pages]
    assert in_memory(min(addresses), max(addresses)) == 0  # LMCache has touched all of it
    for page in pages:
        page.view[:] = b"x" * 100_000
    assert all(bytes(page.view) == b"x" * 100_000 for page in pages)
    pool.release(pages, "save")
    assert pool.close()


def test_slots_are_freed_together_and_reused_without_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache's calls for one slot cost more than all else that the pool does with it: none but the first."""
    pool = pool_of()
    calls: Counter[str] = Counter()
    inner = pool._allocator.allocator
    for name in ("free", "batched_free", "batched_allocate"):
        original = getattr(inner, name)

        def count(*args: Any, _name: str = name, _original: Any = original, **more: Any) -> Any:
            calls[_name] += 1
            return _original(*args, **more)

        monkeypatch.setattr(inner, name, count)
    chain = keys(3 * SLOTS)
    for start in range(0, len(chain), SLOTS):
        pages = pool.take(SLOTS, "save")
        assert pages is not None
        assert all(pool.insert(pages, chain[start : start + SLOTS], "save"))
    assert pool.evicted == 2 * SLOTS
    pages = pool.take(SLOTS, "get")
    assert pages is not None
    pool.release(pages, "get")
    assert not calls
    assert pool.free == SLOTS
    assert pool.close()


def test_a_page_that_somebody_else_refers_to_is_not_evicted_and_its_slot_comes_back_when_they_let_go() -> (
    None
):
    """By LMCache's own count, which nothing in this product uses."""
    pool = pool_of(2)
    chain = keys(2)
    pages = pool.take(2, "save")
    assert pages is not None
    other = pages[1].memory  # of the oldest
    other.ref_count_up()
    pool.insert(pages, chain, "save")
    for _ in range(3):  # the other one, each time
        taken = pool.take(1, "get")
        assert taken is not None
        assert taken[0].memory.meta.address != other.meta.address
        pool.release(taken, "get")
    assert pool.take(2, "save") is None
    assert pool.prefix(chain[1:]) == 1
    pool.drop(chain)
    assert (pool.free, pool.resident) == (1, 0)
    other.ref_count_down()
    assert pool.free == 2
    assert len(pool.take(2, "save") or []) == 2


@pytest.mark.parametrize("referred_to", [False, True])
def test_a_page_that_was_to_go_and_is_dropped_is_free(referred_to: bool) -> None:
    """At once, or when somebody else who refers to it lets go."""
    pool, pages = filled()
    taken = pool.take(1, "get")
    assert taken is not None
    page = next(page for page in pages if page.spare)
    memory = page.memory
    if referred_to:
        memory.ref_count_up()
    assert pool.drop([page.key]) == 1
    recount(pool)
    assert pool.free == (not referred_to)
    if referred_to:
        memory.ref_count_down()
    pool.release(taken, "get")
    assert pool.free == 2
    assert len(pool.take(MANY, "get") or []) == MANY


def test_those_who_take_in_turn_get_neighbours_each() -> None:
    pool = pool_of(300)
    taken: dict[str, list[int]] = {"a": [], "b": []}
    for lane in "abab":
        taken[lane] += [page.number for page in pool.take(2, "get", lane) or []]
    for numbers in taken.values():
        assert numbers == list(range(numbers[0], numbers[0] + 4))


def test_a_page_that_is_to_go_is_counted_once() -> None:
    """It is the least recently used again once all others are in use."""
    pool, pages = filled()
    assert pool.take(1, "get") is not None
    held, _ = pool.hold_any([page.key for page in pages if page.resident and not page.spare], "load")
    assert len(held) == MANY - 6
    assert pool.take(1, "get") is not None
    recount(pool)
    assert len(pool.take(4, "get") or []) == 4
    assert pool.take(1, "get") is None
    pool.release(held, "load")


def test_a_page_that_was_to_go_stays_where_somebody_else_refers_to_it_meanwhile() -> None:
    """And a take that finds too few leaves those that it found to others."""
    pool, pages = filled()
    taken = pool.take(1, "get")
    assert taken is not None
    rest = [page for page in pages if page.resident and not page.spare]
    others = [page for page in pages if page.spare]
    assert len(others) == 5
    for page in others:
        page.memory.ref_count_up()
    held, _ = pool.hold_any([page.key for page in rest], "load")
    pool.release(taken, "get")
    assert pool.take(2, "get") is None
    recount(pool)
    assert pool.take(1, "get") == taken
    assert all(page.resident for page in others)
    for page in others:
        page.memory.ref_count_down()
    assert len(pool.take(5, "get") or []) == 5
    recount(pool)
    pool.release(held, "load")


def test_a_refusal_looks_at_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that stands still holds half of the pool, and each block of a save asks twice."""
    pool = pool_of(MANY)
    chain = keys(MANY)
    pages = pool.take(MANY, "save")
    assert pages is not None
    pool.also(pages[1:], "put")
    pool.insert(pages, chain, "save")
    monkeypatch.setattr(pool, "_age", None)  # who walks
    assert pool.take(2, "save") is None
    monkeypatch.undo()
    assert pool.take(1, "save") is not None
    assert pool.prefix(chain[1:]) == MANY - 1
    pool.release(pages[1:], "put")


@pytest.mark.parametrize("how", ["hold", "hold_any", "missing"])
def test_a_page_that_was_to_go_and_is_used_stays(how: str) -> None:
    """Five more than needed were chosen among: they are held, or were used, before it is their turn."""
    pool, pages = filled()
    chain = keys(MANY)
    assert pool.take(1, "get") is not None  # of the six oldest: the end of the prompt
    used = [page.key for page in pages if page.spare]
    assert used == chain[34:39]
    held: list[Any] = []
    if how == "missing":
        assert pool.missing(used) == []
    else:
        held = pool.hold(used, "load") if how == "hold" else pool.hold_any(used, "load")[0]
        assert len(held) == 5
    for _ in range(2):
        assert len(pool.take(4, "get") or []) == 4
    recount(pool)
    assert pool.prefix(used) == 5
    pool.release(held, "load")
    assert pool.missing(used) == []
    for _ in range(2):
        assert pool.take(4, "get") is not None  # others were not used for longer
    assert pool.prefix(used) == 5


def test_no_more_is_looked_at_for_a_choice_than_a_few_times_what_is_taken() -> None:
    """Held pages in front, as of a stalled store, are passed once and not at every take."""
    pool = pool_of(400)
    chain = keys(400)
    pages = pool.take(400, "save")
    assert pages is not None
    pool.also(pages[100:], "put")
    pool.insert(pages, chain, "save")
    oldest = list(pool._resident)
    assert pool.drop(chain[:1]) == 1
    taken = pool.take(1, "get")
    assert taken is not None
    assert pool.evicted == 0
    passed = oldest.index(next(iter(pool._resident)))
    assert 0 < passed <= 50
    pool.release(taken, "get")
    pool.release(pages[100:], "put")
    pool.clear()
    assert pool.close()
