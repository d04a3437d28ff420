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
HUGE = 2 << 20
ALL = keys(12)
CHAINS = st.lists(st.sampled_from(ALL), max_size=6, unique=True)


def pool_of(slots: int = SLOTS) -> CpuPool:
    return CpuPool(LAYOUT, slots * 512)


class Pool(RuleBasedStateMachine):
    """`resident`: keys from least to most recently used. `holds`: (page, key or None, owner) of each hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of()
        self.resident: list[bytes] = []
        self.holds: list[tuple[Any, bytes | None, Any]] = []
        self.slot: dict[bytes, int] = {}  # of resident pages

    @initialize()
    def start(self) -> None:
        assert (self.pool.free, self.pool.slots) == (SLOTS, SLOTS)

    def teardown(self) -> None:
        for page, _, owner in self.holds:
            self.pool.release([page], owner)
        self.pool.clear()
        assert self.pool.free == SLOTS
        assert self.pool.close()

    def held_slots(self) -> Counter[int]:
        return Counter(page.memory.meta.address for page, _, _ in self.holds)

    @rule(count=st.integers(1, SLOTS + 1), owner=st.sampled_from(["save", "get"]))
    def take(self, count: int, owner: Any) -> None:
        held = self.held_slots()
        evictable = [key for key in self.resident if not held[self.slot[key]]]
        free = self.pool.free
        pages = self.pool.take(count, owner)
        self.pass_held(evictable, count - free, held)
        if count > free + len(evictable):
            assert pages is None
            assert self.pool.free == free
            return
        assert pages is not None
        assert len({page.memory.meta.address for page in pages}) == count
        for key in evictable[: max(0, count - free)]:  # the least recently used, and no more than needed
            self.resident.remove(key)
        assert not {page.memory.meta.address for page in pages} & set(held)
        self.holds += [(page, None, owner) for page in pages]

    def pass_held(self, evictable: list[bytes], wanted: int, held: Counter[int]) -> None:
        """Held pages before the last victim (all of them, where there are too few) are used now."""
        if wanted <= 0:
            return
        end = self.resident.index(evictable[wanted - 1]) if wanted <= len(evictable) else len(self.resident)
        passed = [key for key in self.resident[:end] if held[self.slot[key]]]
        self.resident = [key for key in self.resident if key not in passed] + passed

    def empty_holds(self) -> list[int]:
        return [
            number for number, (_, key, owner) in enumerate(self.holds) if key is None and owner == "save"
        ]

    def fill_some(self, data: Any) -> tuple[list[int], list[Any], list[bytes]]:
        """Writes some held, empty pages: their numbers in `holds`, they, and their keys."""
        numbers = data.draw(st.lists(st.sampled_from(self.empty_holds()), min_size=1, unique=True))
        chain = data.draw(
            st.lists(st.sampled_from(ALL), min_size=len(numbers), max_size=len(numbers), unique=True)
        )
        pages = [self.holds[number][0] for number in numbers]
        for page, key in zip(pages, chain, strict=True):
            page.view[:] = bytes_of(key, 128)
        return numbers, pages, chain

    @precondition(lambda self: self.empty_holds())
    @rule(data=st.data())
    def insert(self, data: Any) -> None:
        numbers, pages, chain = self.fill_some(data)
        new = self.pool.insert(pages, chain, "save")
        assert new == [key not in self.resident for key in chain]
        for page, key, inserted in reversed(list(zip(pages, chain, new, strict=True))):
            if inserted:
                self.resident.append(key)
                self.slot[key] = page.memory.meta.address
        for number in sorted(numbers, reverse=True):
            del self.holds[number]

    @precondition(lambda self: self.empty_holds())
    @rule(data=st.data())
    def insert_held(self, data: Any) -> None:
        numbers, pages, chain = self.fill_some(data)
        there = self.pool.insert_held(pages, chain, "save")
        for page, key, held in zip(reversed(pages), reversed(chain), there, strict=True):
            if key in self.resident:
                self.resident.remove(key)
            else:
                self.slot[key] = page.memory.meta.address
            self.resident.append(key)
            assert held.memory.meta.address == self.slot[key]
        for number in sorted(numbers, reverse=True):
            del self.holds[number]
        self.holds += [(page, key, "save") for page, key in zip(there, reversed(chain), strict=True)]

    @rule(
        chain=st.lists(st.sampled_from(ALL), min_size=1, max_size=6, unique=True),
        owner=st.sampled_from(["load", "put"]),
    )
    def hold(self, chain: list[bytes], owner: Any) -> None:
        pages = self.pool.hold(chain, owner)
        expected = next((n for n, key in enumerate(chain) if key not in self.resident), len(chain))
        assert (len(pages), self.pool.prefix(chain)) == (expected, expected)
        for key in reversed(chain[:expected]):
            self.resident.remove(key)
            self.resident.append(key)
        self.holds += [(page, key, owner) for page, key in zip(pages, chain, strict=False)]

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

    @rule(chain=CHAINS)
    def drop(self, chain: list[bytes]) -> None:
        assert self.pool.drop(chain) == sum(key in self.resident for key in chain)
        self.resident = [key for key in self.resident if key not in chain]

    @rule(chain=CHAINS)
    def look(self, chain: list[bytes]) -> None:
        assert self.pool.missing(chain) == [key for key in chain if key not in self.resident]
        for key in reversed([key for key in chain if key in self.resident]):
            self.resident.remove(key)
            self.resident.append(key)

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        used = {self.slot[key] for key in self.resident} | set(self.held_slots())
        assert self.pool.resident == len(self.resident)
        assert self.pool.free == SLOTS - len(used)
        for owner in OWNERS:
            assert self.pool.held(owner) == sum(one == owner for _, _, one in self.holds)

    @invariant()
    def held_pages_keep_their_bytes(self) -> None:
        for page, key, _ in self.holds:
            if key is not None:
                assert bytes(page.view) == bytes_of(key, 128)


TestPool = Pool.TestCase
TestPool.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


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
    """LMCache's calls for one slot cost more than all else that the pool does with it."""
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
    assert calls == {"batched_allocate": 1}  # of the first eight; the others took the places of those before
    pages = pool.take(SLOTS, "get")
    assert pages is not None
    pool.release(pages, "get")
    assert calls == {"batched_allocate": 1, "batched_free": 1}
    assert pool.free == SLOTS
    assert pool.close()
