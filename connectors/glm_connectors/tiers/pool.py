"""The CPU pool: slots of one size in (pinned) memory, which of them hold which page, and who keeps them there.

Memory, slots and reference counts are LMCache's: `PinMemoryAllocator` in its paged mode and its `MemoryObj`.
A slot has one reference of ours while it is resident or held, and those of whoever else has its `MemoryObj` (nobody, in
this product). It is evicted only when nobody holds it and ours is the only reference, and is free
again when the last one goes, so a page that is evicted or overwritten by name while someone still reads it stays
as it is until then. Holds are counted here: a reference of LMCache's for each takes four times as long, and the
scheduler takes thousands at once. LMCache's `pin()` is not used: its PinMonitor ends a pin after a timeout,
whoever still copies.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from glm_connectors.tiers.envelope import HEADER_BYTES
from glm_connectors.tiers.layout import PageLayout

logger = logging.getLogger(__name__)

# wait: by a request that waits to run (`prefetch`).
Owner = Literal["load", "save", "put", "get", "wait"]
OWNERS: tuple[Owner, ...] = ("load", "save", "put", "get", "wait")
_ALIGN = 512  # of a slot's bytes; the page starts 128 bytes into it


class Page:
    """A held slot: valid until it is released, committed or abandoned. Made by the pool.

    One object for all holders. `holds` and `resident` are the pool's, under its lock.
    """

    __slots__ = ("_layout", "holds", "memory", "resident", "slot")

    def __init__(self, memory: Any, slot: memoryview, layout: PageLayout) -> None:
        self.memory, self.slot, self._layout = memory, slot, layout
        self.holds = 1
        self.resident = False

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
        torch, allocator_class, binary = _lmcache()
        allocator_class = memory or allocator_class
        self._layout = layout
        used = HEADER_BYTES + layout.page_bytes
        self.slot_bytes = -(-used // _ALIGN) * _ALIGN
        self._made = made = pool_bytes // self.slot_bytes
        if made < 2:
            raise ValueError(
                f"the CPU pool of {pool_bytes} bytes holds {made} pages of {self.slot_bytes} bytes; "
                f"it needs 2 at least"
            )
        shapes, dtypes = [torch.Size([self.slot_bytes])], [torch.uint8]
        self._allocator = allocator_class(
            made * self.slot_bytes, use_paging=True, shapes=shapes, dtypes=dtypes, fmt=binary
        )
        if memory is None:
            _prefer_huge_pages(self._allocator.buffer)
        self._arguments = (shapes, dtypes)
        self._free = self._allocator.allocator.free_blocks
        whole = memoryview(self._allocator.buffer.numpy())
        self._views = [
            whole[start : start + used] for start in range(0, made * self.slot_bytes, self.slot_bytes)
        ]
        self._lock = threading.Lock()
        self._resident: OrderedDict[bytes, Page] = OrderedDict()  # least recently used first
        self._held: dict[Owner, int] = dict.fromkeys(OWNERS, 0)
        self.evicted = 0

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
        found: list[bytes] = []
        with self._lock:
            for key in keys:
                (found if key in self._resident else absent).append(key)
            for key in reversed(found):  # the end of a prompt is of no use without its beginning
                self._resident.move_to_end(key)
        return absent

    @property
    def slots(self) -> int:
        """How many pages it holds: what shares of it are taken of."""
        usable = getattr(self._allocator, "usable_bytes", None)
        return self._made if usable is None else int(usable) // self.slot_bytes

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    @property
    def resident(self) -> int:
        """Pages in the index."""
        return len(self._resident)

    def held(self, owner: Owner) -> int:
        """Holds of one owner, in slots (two holders of one page count twice)."""
        return self._held[owner]

    # Holding

    def take(self, count: int, owner: Owner) -> list[Page] | None:
        """`count` slots for new pages, evicting the least recently used; None, and nothing evicted, where
        that many can't be had."""
        if count < 1:
            return []
        with self._lock:
            victims = self._victims(count - len(self._free))
            if victims is None:
                return None
            slots = []
            if fresh := count - len(victims):
                allocated = self._allocator.batched_allocate(*self._arguments, fresh)
                assert allocated is not None
                slots = allocated
            # A victim's slot is taken as it is, with our reference: to free it and allocate it again costs three times as
            # much as all the rest.
            taken = [self._resident.pop(key) for key in victims]
            for page in taken:
                page.resident = False
            slots = [*slots, *(page.memory for page in taken)]
            self.evicted += len(victims)
            self._held[owner] += count
        return [Page(memory, self._views[memory.meta.address], self._layout) for memory in slots]

    def _victims(self, count: int) -> list[bytes] | None:
        """Keys of the `count` least recently used pages that nobody holds.

        Held ones before them are in use and become the most recently used: so a stalled store, whose puts
        hold many, is not walked past again and again.
        """
        victims: list[bytes] = []
        if count <= 0:
            return victims
        held: list[bytes] = []
        for key, page in self._resident.items():
            if page.holds or page.memory.meta.ref_count > 1:
                held.append(key)
                continue
            victims.append(key)
            if len(victims) == count:
                break
        for key in held:
            self._resident.move_to_end(key)
        return victims if len(victims) == count else None

    def hold(self, keys: Sequence[bytes], owner: Owner) -> list[Page]:
        """Holds the resident prefix of `keys`, which becomes the most recently used."""
        found: list[Page] = []
        with self._lock:
            for page in map(self._resident.get, keys):
                if page is None:
                    break
                page.holds += 1
                found.append(page)
            for key in reversed(keys[: len(found)]):
                self._resident.move_to_end(key)
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
                    page.holds += 1
                    found.append(page)
                    self._resident.move_to_end(key)
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
                if not page.holds and not page.resident:
                    unused.append(page.memory)
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
                    page.resident = inserted[number] = True
                elif not page.holds:
                    unused.append(page.memory)
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
                    page.resident = True
                    there.append(page)
                    continue
                self._resident.move_to_end(key)
                before.holds += 1
                there.append(before)
                page.holds -= 1
                if not page.holds:
                    unused.append(page.memory)
            self._free_all(unused)
        return there

    def drop(self, keys: Iterable[bytes]) -> int:
        """Makes pages non-resident; slots of those that are held are free when the last holder lets go."""
        dropped = 0
        with self._lock:
            for key in keys:
                if key in self._resident:
                    self._forget(key)
                    dropped += 1
        return dropped

    def _forget(self, key: bytes) -> None:
        page = self._resident.pop(key)
        page.resident = False
        if not page.holds:
            page.memory.ref_count_down()

    def _free_all(self, unused: Sequence[Any]) -> None:
        """Our reference on these slots ends; together, for LMCache's way for each takes longer than all that we do with
        one. Where somebody else has a reference, it is the one that frees the slot.

        UPSTREAM: TensorMemoryObj.ref_count_down takes a lock and frees at 0 where nothing is pinned; a count of 1 is
        ours, so nobody else can change it, and this pool pins nothing.
        """
        freed = []
        for memory in unused:
            if memory.meta.ref_count == 1:
                memory.meta.ref_count = 0
                freed.append(memory)
            else:
                memory.ref_count_down()
        if freed:
            self._allocator.batched_free(freed)

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
            if len(self._free) != self._made:
                return self._keep(
                    f"{self._made - len(self._free)} slots are still held ("
                    + ", ".join(f"{owner} {count}" for owner, count in self._held.items() if count)
                    + ")"
                )
            try:
                for view in self._views:
                    view.release()
            except BufferError as error:
                return self._keep(str(error))
            for memory in self._free:
                memory.invalidate()  # or LMCache takes each for a leak when it is collected
            self._free.clear()
            self._allocator.close()
        return True

    def _keep(self, why: str) -> bool:
        logger.error("the pool's memory stays allocated: %s", why)
        _KEPT.append(self._allocator)
        return False


def _prefer_huge_pages(buffer: Any) -> None:
    """Has the memory of a tensor that holds nothing yet come in pages of 2 MiB, where the kernel has them to give.

    LMCache touches its memory when it allocates it: it is given back, and comes anew, huge, when it is used. In pages
    of 4 KiB a page's checksum takes a quarter longer, and a get up to half (`python -m benchmarks.store_bandwidth`).
    Pinned memory stays as it is.
    """
    if buffer.is_pinned():
        return
    start = -(-buffer.data_ptr() // _HUGE) * _HUGE
    length = (buffer.data_ptr() + buffer.numel() - start) // _HUGE * _HUGE
    if length <= 0:
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    for advice in (mmap.MADV_DONTNEED, mmap.MADV_HUGEPAGE):
        if madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice):
            logger.info("the CPU pool stays in small pages: %s", os.strerror(ctypes.get_errno()))
            return


_HUGE = 2 << 20
_KEPT: list[Any] = []  # allocators of pools that were closed with slots in use


def _lmcache() -> tuple[Any, Any, Any]:
    """torch, LMCache's allocator class and format, with LMCache repaired, quiet and not phoning home."""
    from glm_connectors import lmcache_repairs

    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
    lmcache_repairs.install()
    import torch
    from lmcache.v1.memory_allocators.pin_memory_allocator import PinMemoryAllocator
    from lmcache.v1.memory_management import MemoryFormat

    return torch, PinMemoryAllocator, MemoryFormat.BINARY_BUFFER
