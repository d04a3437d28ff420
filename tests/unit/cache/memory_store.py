"""A store of pages in one process's memory, with the contract of TieredStore and switches for what can go wrong."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class Page:
    tensor: torch.Tensor
    key: bytes = b""
    pins: int = 0


@dataclass(eq=False)
class Ticket:
    store: MemoryStore
    keys: list[bytes]
    done: bool = False
    lost: bool = False

    def arrive(self, upto: int | None = None) -> None:
        """Pages come from the remote tier, up to the first miss or the first `upto`."""
        for key in self.keys[:upto]:
            if not self.store.bring(key):
                break
        self.done = True


@dataclass(eq=False)
class MemoryStore:
    """remote: what other processes see too. manual: prefetches wait for `arrive` on their tickets."""

    page_bytes: int
    slots: int = 1024
    remote: dict[bytes, bytes] = field(default_factory=dict)
    writer: bool = True
    manual: bool = False
    tickets: dict[str, Ticket] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    urged: dict[str, int] = field(default_factory=dict)
    reserved: int = 0
    refuse_after: int | None = None  # reservations that still succeed
    prefills: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool: OrderedDict[bytes, Page] = OrderedDict()
        self.lock = threading.RLock()

    @property
    def pinned(self) -> int:
        with self.lock:
            return sum(page.pins for page in self.pool.values())

    def bring(self, key: bytes) -> bool:
        with self.lock:
            if key in self.pool:
                return True
            if key not in self.remote:
                return False
            pages = self.reserve(1)
            if pages is None:
                return False
            pages[0].tensor.copy_(torch.frombuffer(bytearray(self.remote[key]), dtype=torch.uint8))
            self.commit(pages, [key])
            return True

    def resident(self, keys: Sequence[bytes]) -> int:
        with self.lock:
            return next((i for i, key in enumerate(keys) if key not in self.pool), len(keys))

    def prefetch(self, rid: str, keys: Sequence[bytes]) -> Ticket:
        ticket = self.tickets[rid] = Ticket(self, list(keys))
        if not self.manual:
            ticket.arrive()
        return ticket

    def urge(self, rid: str, turn: int) -> None:
        self.urged[rid] = turn

    def cancel(self, rid: str) -> None:
        self.cancelled.append(rid)

    def pin(self, keys: Sequence[bytes]) -> list[Page]:
        with self.lock:
            pages = [self.pool[key] for key in keys[: self.resident(keys)]]
            for page in pages:
                page.pins += 1
                self.pool.move_to_end(page.key)
            return pages

    def release(self, pages: Sequence[Page]) -> None:
        with self.lock:
            for page in pages:
                assert page.pins > 0, "released twice"
                page.pins -= 1

    def reserve(self, count: int, *, last: bool = True, lane: object = None) -> list[Page] | None:
        with self.lock:
            if self.refuse_after is not None:
                if self.refuse_after == 0:
                    return None
                self.refuse_after -= 1
            free = self.slots - len(self.pool) - self.reserved
            victims = [key for key, page in self.pool.items() if not page.pins][: max(0, count - free)]
            if free + len(victims) < count:
                return None
            for key in victims:
                self.pool.pop(key).tensor.fill_(0xEE)
            self.reserved += count
            return [Page(torch.full((self.page_bytes,), 0xDD, dtype=torch.uint8)) for _ in range(count)]

    def commit(self, pages: Sequence[Page], keys: Sequence[bytes]) -> None:
        with self.lock:
            for page, key in zip(pages, keys, strict=True):
                self.reserved -= 1
                if key not in self.pool:
                    page.key = key
                    self.pool[key] = page
                if self.writer:
                    self.remote.setdefault(key, page.tensor.numpy().tobytes())

    def abandon(self, pages: Sequence[Page]) -> None:
        with self.lock:
            self.reserved -= len(pages)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        self.prefills.append((tokens, seconds))

    def clear(self) -> None:
        with self.lock:
            self.pool = OrderedDict((key, page) for key, page in self.pool.items() if page.pins)

    def close(self) -> None:
        pass
