"""The CPU pool: slots of one size in (pinned) memory, which of them hold which page, and who keeps them there.

Memory, slots and reference counts are LMCache's: `PinMemoryAllocator` in its paged mode and its `MemoryObj`.
A slot has one reference of ours, also while it is free, and those of whoever else has its `MemoryObj` (nobody, in
this product). It is evicted only when nobody holds it and ours is the only reference, and is free
again when the last hold and the last other reference go, so a page that is evicted or overwritten by name while someone
still reads it stays as it is until then. Holds are counted here: a reference of LMCache's for each takes four times as
long, and the scheduler takes thousands at once. LMCache's `pin()` is not used: its PinMonitor ends a pin after a timeout,
whoever still copies.

A load is one copy for each run of neighbouring slots, so slots are chosen (`places`): who takes several gets neighbours.
To have a choice in a full pool an eighth of it, the least recently used pages, is spare: which of them is evicted
first is where it lies, not when it was used. They stay what they are until then, and one that is used is spare no more.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice
from typing import Any, Literal

from glm_connectors.tiers.envelope import HEADER_BYTES
from glm_connectors.tiers.layout import PageLayout
from glm_connectors.tiers.places import Places
from glm_connectors.tiers.pool_memory import keep, lmcache, prefer_huge_pages

# wait: by a request that waits to run (`prefetch`). sibling: lent to another rank, which copies it (`siblings`).
Owner = Literal["load", "save", "put", "get", "wait", "sibling"]
OWNERS: tuple[Owner, ...] = ("load", "save", "put", "get", "wait", "sibling")
_ALIGN = 512  # of a slot's bytes; the page starts 128 bytes into it
# Of the pool: among so many slots more than are needed, free or of the least recently used pages, it is chosen which.
_CHOICE = 1 / 8
_RECEIVED = 512  # slots at once: each takes a microsecond


class Page:
    """A held slot: valid until it is released, committed or abandoned. Made by the pool.

    One object a slot, for all holders, now and later. What has no docstring is the pool's, under its lock.
    """

    __slots__ = ("_layout", "holds", "key", "memory", "number", "resident", "slot", "spare")

    def __init__(self, memory: Any, slot: memoryview, layout: PageLayout) -> None:
        self.memory, self.slot, self._layout = memory, slot, layout
        self.number: int = memory.meta.address  # of the slot
        self.holds = 0
        self.resident = False
        self.key = b""  # once it is resident
        # May be taken: it holds nothing, or a resident page that was not used since it was one of the oldest.
        self.spare = True

    @property
    def view(self) -> memoryview:
        """The page's bytes in the pool, `layout.page_bytes` of them, format "B", writable."""
        return self.slot[HEADER_BYTES:]

    @property
    def tensor(self) -> Any:
        """The same memory as a torch uint8 tensor [page_bytes]; pinned where there is CUDA."""
        return self.memory.raw_data[HEADER_BYTES : HEADER_BYTES + self._layout.page_bytes]

    @property
    def address(self) -> int:
        """Where the page's first byte is. For loads of thousands of pages: a tensor of each would take milliseconds."""
        return int(self.memory.raw_data.data_ptr()) + HEADER_BYTES

    def part(self, name: str) -> Any:
        """One part as a torch uint8 tensor [bytes of the part]; its start is a multiple of 16 bytes only
        where the parts before it have such sizes. KeyError for an unknown part."""
        return self.tensor[self._layout.span(name)]


class CpuPool:
    """Slots for pages of one layout. Every method is short and takes one lock; none waits for anything else.

    ValueError where `pool_bytes` does not hold two pages.
    """

    def __init__(self, layout: PageLayout, pool_bytes: int, memory: Callable[..., Any] | None = None) -> None:
        """memory: makes the allocator in the place of LMCache's PinMemoryAllocator, from the same arguments. Its free
        blocks may become more as time goes by; then it has a `finish()`, after which all are there, and `usable_bytes`:
        how many of its bytes there are to be before.
        """
        torch, allocator_class, binary = lmcache()
        allocator_class = memory or allocator_class
        self._layout = layout
        used = HEADER_BYTES + layout.page_bytes
        self.slot_bytes = -(-used // _ALIGN) * _ALIGN
        self._made = made = pool_bytes // self.slot_bytes
        if made < 2:
            raise ValueError(
                f"the CPU pool of {pool_bytes} bytes holds {made} pages of {self.slot_bytes} bytes; "
                f"it needs 2 at least: raise --glm-cache-pool-gb"
            )
        shapes, dtypes = [torch.Size([self.slot_bytes])], [torch.uint8]
        self._allocator = allocator_class(
            made * self.slot_bytes, use_paging=True, shapes=shapes, dtypes=dtypes, fmt=binary
        )
        if memory is None:
            prefer_huge_pages(self._allocator.buffer)
        self._arguments = (shapes, dtypes)
        self._blocks = self._allocator.allocator.free_blocks  # slots that are not with us yet, or any more
        whole = memoryview(self._allocator.buffer.numpy())
        self._views = [
            whole[start : start + used] for start in range(0, made * self.slot_bytes, self.slot_bytes)
        ]
        self._lock = threading.Lock()
        self._pages: list[Any] = [None] * made  # of the slots that the allocator has given us
        self._places = Places(made)  # slots of spare pages, and of some that are spare no more
        # Those that are not spare: least recently used first. Spare ones lie anywhere among them.
        self._resident: OrderedDict[bytes, Page] = OrderedDict()
        self._free = self._old = 0  # spare pages that hold nothing, and those that are resident
        self._idle = 0  # resident pages that nobody holds
        self._choice = int(made * _CHOICE)
        self._held: dict[Owner, int] = dict.fromkeys(OWNERS, 0)
        self.evicted = 0
        self._receive(made)

    # Looking

    def prefix(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, are resident."""
        with self._lock:
            resident = self._resident
            for count, key in enumerate(keys):
                if key not in resident:
                    return count
        return len(keys)

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of `keys` that are not resident, in order; the others become the most recently used."""
        absent: list[bytes] = []
        found: list[Page] = []
        with self._lock:
            for key in keys:
                page = self._resident.get(key)
                if page is None:
                    absent.append(key)
                else:
                    found.append(page)
            self._use_all(found)
        return absent

    @property
    def slots(self) -> int:
        """How many pages it holds: what shares of it are taken of."""
        usable = getattr(self._allocator, "usable_bytes", None)
        return self._made if usable is None else int(usable) // self.slot_bytes

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return self._free + len(self._blocks)

    @property
    def resident(self) -> int:
        """Pages in the index."""
        return len(self._resident)

    def held(self, owner: Owner) -> int:
        """Holds of one owner, in slots (two holders of one page count twice)."""
        return self._held[owner]

    # Holding

    def take(self, count: int, owner: Owner, lane: Hashable = None) -> list[Page] | None:
        """`count` slots for new pages, neighbours as far as there are, evicting what is in them; None, and nothing
        evicted, where that many can't be had. lane: names those who take for one prompt (`Places.take`).

        A page that is evicted is one of the least recently used: of those that nobody holds, fewer than `count` and an
        eighth of the pool have not been used since.
        """
        if count < 1:
            return []
        with self._lock:
            if self._blocks:
                self._receive(max(count, _RECEIVED))
            if count > self._free + self._idle or not self._age(count):
                return None
            taken = self._choose(count, lane)
            if taken is None:
                return None
            evicted = 0
            for page in taken:
                page.holds = 1
                page.spare = False
                if page.resident:
                    page.resident = False
                    del self._resident[page.key]
                    evicted += 1
            self.evicted += evicted
            self._old -= evicted
            self._idle -= evicted
            self._free -= count - evicted
            self._held[owner] += count
        return taken

    def _receive(self, most: int) -> None:
        """Slots that the allocator has free are ours from now on, one reference each: of a pool that grows, or of a page
        that somebody else had a reference to."""
        allocated = self._allocator.batched_allocate(*self._arguments, min(most, len(self._blocks)))
        assert allocated is not None
        pages = [Page(memory, self._views[memory.meta.address], self._layout) for memory in allocated]
        for page in pages:
            self._pages[page.number] = page
        self._free += len(pages)
        self._places.offer([page.number for page in pages])

    def _age(self, count: int) -> bool:
        """Has the least recently used pages that nobody holds be spare, so that there are `count` slots and some more to
        choose among; whether there are `count`.

        Held ones before them are in use and become the most recently used: so a stalled store, whose puts
        hold many, is not walked past again and again. Nor are more looked at for the choice than a few times `count`.

        Where there are not `count` yet it goes on until there are, at most past all pages that are held, under the lock:
        2.6 ms for 20,000 of them (x86-64, CPython 3.11), and `hold` had taken 2.4 ms for the same. They are not passed
        again before those behind them.
        """
        resident = self._resident
        missing = count - self._free - self._old
        choice = 0 if self._blocks else self._choice  # nothing need be evicted yet
        aged: list[int] = []
        looked_at, most = 0, 2 * count + 16
        while missing > -choice and looked_at < len(resident) and (missing > 0 or looked_at < most):
            some = list(islice(resident.items(), min(most, missing + choice)))
            looked_at += len(some)
            for key, page in some:
                resident.move_to_end(key)
                if not page.spare and not page.holds and page.memory.meta.ref_count == 1:
                    page.spare = True
                    aged.append(page.number)
            missing = count - self._free - self._old - len(aged)
        self._old += len(aged)
        self._places.offer(aged)
        return missing <= 0

    def _choose(self, count: int, lane: Hashable) -> list[Page] | None:
        """Spare pages, whose slots are no longer offered; None, and all offered still, where there are too few."""
        chosen: list[Page] = []
        while len(chosen) < count:
            piece = self._places.take(count - len(chosen), lane)
            if piece is None:
                self._places.offer([page.number for page in chosen])
                return None
            for page in self._pages[piece.start : piece.stop]:
                if not page.spare:
                    continue  # used since; it is offered again when it is old again
                if page.memory.meta.ref_count == 1:
                    chosen.append(page)
                elif page.resident:
                    self._use(page)
        return chosen

    def _use_all(self, pages: Sequence[Page]) -> None:
        """Of a prompt: its end is of no use without its beginning, which becomes the most recently used."""
        move_to_end = self._resident.move_to_end
        for page in reversed(pages):
            if page.spare:
                self._use(page)
            else:
                move_to_end(page.key)

    def _use(self, page: Page) -> None:
        """A resident page becomes the most recently used."""
        if page.spare:
            page.spare = False
            self._old -= 1
        self._resident.move_to_end(page.key)

    def hold(self, keys: Sequence[bytes], owner: Owner) -> list[Page]:
        """Holds the resident prefix of `keys`, which becomes the most recently used."""
        found: list[Page] = []
        with self._lock:
            for page in map(self._resident.get, keys):
                if page is None:
                    break
                if not page.holds:
                    self._idle -= 1
                page.holds += 1
                found.append(page)
            self._use_all(found)
            self._held[owner] += len(found)
        return found

    def hold_any(self, keys: Sequence[bytes], owner: Owner) -> tuple[list[Page], list[bytes]]:
        """Holds those of `keys` that are resident, wherever they are; they become the most recently used. Their pages,
        and the keys of the others, in order."""
        found: list[Page] = []
        absent: list[bytes] = []
        with self._lock:
            for key in reversed(keys):
                page = self._resident.get(key)
                if page is None:
                    absent.append(key)
                else:
                    if not page.holds:
                        self._idle -= 1
                    page.holds += 1
                    found.append(page)
                    self._use(page)
            self._held[owner] += len(found)
        absent.reverse()
        return found, absent

    def also(self, pages: Sequence[Page], owner: Owner) -> None:
        """A further hold, for another owner, on pages that the caller holds."""
        with self._lock:
            for page in pages:
                page.holds += 1
            self._held[owner] += len(pages)

    def release(self, pages: Sequence[Page], owner: Owner) -> None:
        """Ends a hold."""
        unused = []
        with self._lock:
            for page in pages:
                page.holds -= 1
                if not page.holds:
                    if page.resident:
                        self._idle += 1
                    else:
                        unused.append(page)
            self._held[owner] -= len(pages)
            self._free_all(unused)

    def insert(self, pages: Sequence[Page], keys: Sequence[bytes], owner: Owner) -> list[bool]:
        """Pages that `owner` has filled become resident under their keys and are no longer held.

        False for a key that was resident: the page that was there stays, the new one's slot is free again.
        """
        inserted = [False] * len(pages)
        unused = []
        with self._lock:
            for number in range(len(pages) - 1, -1, -1):  # the prompt's beginning is evicted last
                page, key = pages[number], keys[number]
                page.holds -= 1
                if key not in self._resident:
                    self._resident[key] = page
                    page.key = key
                    page.resident = inserted[number] = True
                    if not page.holds:
                        self._idle += 1
                elif not page.holds:
                    unused.append(page)
            self._held[owner] -= len(pages)
            self._free_all(unused)
        return inserted

    def insert_held(self, pages: Sequence[Page], keys: Sequence[bytes], owner: Owner) -> list[Page]:
        """Pages that `owner` has filled become resident under their keys; it goes on holding what is there then: these,
        or where a key was resident the page that was there, which becomes the most recently used."""
        there: list[Page] = []
        unused = []
        with self._lock:
            for number in range(len(pages) - 1, -1, -1):  # the prompt's beginning is evicted last
                page, key = pages[number], keys[number]
                before = self._resident.get(key)
                if before is None:
                    self._resident[key] = page
                    page.key = key
                    page.resident = True
                    there.append(page)
                    continue
                self._use(before)
                if not before.holds:
                    self._idle -= 1
                before.holds += 1
                there.append(before)
                page.holds -= 1
                if not page.holds:
                    unused.append(page)
            self._free_all(unused)
        return there

    def drop(self, keys: Iterable[bytes]) -> int:
        """Makes pages non-resident; slots of those that are held are free when the last holder lets go."""
        dropped = 0
        unused = []
        with self._lock:
            for key in keys:
                page = self._resident.pop(key, None)
                if page is None:
                    continue
                dropped += 1
                if page.spare:
                    page.spare = False
                    self._old -= 1
                page.resident = False
                if not page.holds:
                    self._idle -= 1
                    unused.append(page)
            self._free_all(unused)
        return dropped

    def _free_all(self, unused: Sequence[Page]) -> None:
        """Slots that hold nothing any more. They stay ours, with our reference, for LMCache's way for each takes longer
        than all that we do with one. Where somebody else has a reference, ours ends, and the slot comes back from
        the allocator when theirs does.
        """
        slots = []
        for page in unused:
            if page.memory.meta.ref_count == 1:  # ours: nobody else can change it
                page.spare = True
                slots.append(page.number)
            else:
                page.memory.ref_count_down()
        self._free += len(slots)
        self._places.offer(slots)

    def clear(self) -> int:
        """Drops every resident page; how many there were."""
        with self._lock:
            keys = list(self._resident)
        return self.drop(keys)

    def close(self) -> bool:
        """Gives the memory back. False, and keeps it for ever, where a slot is still held or a buffer over it
        exported: someone may be using it."""
        self.clear()
        if (finish := getattr(self._allocator, "finish", None)) is not None:
            finish()
        with self._lock:
            if self.free != self._made:
                return keep(
                    self._allocator,
                    f"{self._made - self.free} slots are still held ("
                    + ", ".join(f"{owner} {count}" for owner, count in self._held.items() if count)
                    + ")",
                )
            try:
                for view in self._views:
                    view.release()
            except BufferError as error:
                return keep(self._allocator, str(error))
            self._allocator.batched_free(
                [page.memory for page in self._pages if page is not None and page.spare]
            )
            for memory in self._blocks:
                memory.invalidate()  # or LMCache takes each for a leak when it is collected
            self._blocks.clear()
            self._pages.clear()
            self._free = 0
            self._allocator.close()
        return True
