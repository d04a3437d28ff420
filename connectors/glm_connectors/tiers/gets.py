"""Gets: pages into new slots of the pool, from Valkey or out of a sibling's memory, checked and made resident.

`Getter`'s methods run on a worker's thread. A get that has begun stores its page even when its request is gone by then:
the bytes are there, and the next turn may want them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

from glm_connectors.tiers.envelope import HEADER_BYTES, Envelope
from glm_connectors.tiers.metrics import MetricTable
from glm_connectors.tiers.pool import CpuPool, Page
from glm_connectors.tiers.rates import LoadMeter
from glm_connectors.tiers.siblings import copy_from
from glm_connectors.tiers.ticket import Ticket
from glm_connectors.valkey_store.glide import ABSENT
from glm_connectors.valkey_store.store import StoreDownError, StoreFailedError, ValkeyStore

logger = logging.getLogger(__name__)

HIT = "hit"


class Fetch:
    """One get, of one or several pages of one node or sibling, and the tickets that want it.

    Its pages are held until none of them is under way any more: or a prompt's end, for which there is no room, would take
    its beginning's slots.
    """

    def __init__(self, keys: list[bytes], lane: int | None, stands_for: float = 1.0) -> None:
        """lane: of the prompt, whose pages come next to each other; None where they come with one get.
        stands_for: how many pages come meanwhile for each of it, itself and those of siblings."""
        self.keys, self.lane, self.stands_for = keys, lane, stands_for
        self.tickets: set[Ticket] = set()
        self.task: asyncio.Task[dict[bytes, str]] | None = None
        self.held: list[Page] = []
        self.left = False  # nobody wants it any more; whoever still has a page of it lets it go


class Getter:
    """lock: the one under which `Fetch.left` and `Fetch.held` change."""

    def __init__(
        self,
        pool: CpuPool,
        valkey: ValkeyStore,
        envelope: Envelope,
        load: LoadMeter,
        table: MetricTable,
        lock: threading.Lock,
    ) -> None:
        self._pool, self._valkey, self._envelope = pool, valkey, envelope
        self._load, self._table, self._lock = load, table, lock

    def from_valkey(self, node: int, fetch: Fetch, keys: Sequence[bytes]) -> list[str]:
        """An outcome for each of `keys`, which are the fetch's or some of them."""
        return self._into_slots(fetch, keys, lambda pages: self._get(node, fetch, keys, pages))

    def from_sibling(self, pid: int, fetch: Fetch, keys: Sequence[bytes], places: Sequence[int]) -> list[str]:
        """The same out of another process's memory, where they lie at `places`, header first. "unusable": what was
        there is not the page. OSError, as of `copy_from`, where it can't be read."""
        return self._into_slots(fetch, keys, lambda pages: self._copy(pid, fetch, keys, pages, places))

    def _into_slots(
        self, fetch: Fetch, keys: Sequence[bytes], bring: Callable[[list[Page]], list[str]]
    ) -> list[str]:
        """bring: fills the slots and keeps those that are hits."""
        with self._lock:
            left = fetch.left
            pages = None if left else self._pool.take(len(keys), "get", fetch.lane)
        if pages is None:
            return ["cancelled" if left else "full"] * len(keys)
        outcomes: list[str] = []
        try:
            outcomes = bring(pages)
            return outcomes
        finally:
            kept = [outcome == HIT for outcome in outcomes] or [False] * len(pages)
            self._pool.release([page for page, keep in zip(pages, kept, strict=True) if not keep], "get")

    def _get(self, node: int, fetch: Fetch, keys: Sequence[bytes], pages: list[Page]) -> list[str]:
        names = [self._envelope.name(key) for key in keys]
        started = self._load.start()
        arrived: int | None = 0
        try:
            lengths = self._valkey.get(node, names, [page.slot for page in pages])
            arrived = round(fetch.stands_for * sum(length for length in lengths if length > 0)) or None
        except StoreDownError:
            arrived = None
            return ["down"] * len(keys)
        except StoreFailedError:
            return ["failed"] * len(keys)
        finally:
            self._load.stop(started, arrived)
        there = [number for number, length in enumerate(lengths) if length != ABSENT]
        faults = self._envelope.check_all(
            [pages[n] for n in there], [keys[n] for n in there], [lengths[n] for n in there]
        )
        bad: list[str] = []
        good: list[int] = []
        for number, fault in zip(there, faults, strict=True):
            if fault is None:
                good.append(number)
                continue
            self._table.add("cache_bad_values", fault)
            logger.warning("%s: not the page (%s), deleted", names[number], fault)
            bad.append(names[number])
        if bad:
            self._valkey.delete(node, bad)
        self._table.add("cache_loaded_bytes", amount=len(good) * self._envelope.value_bytes)
        return self._keep(fetch, keys, pages, good, "miss")

    def _copy(
        self, pid: int, fetch: Fetch, keys: Sequence[bytes], pages: list[Page], places: Sequence[int]
    ) -> list[str]:
        size = self._envelope.value_bytes
        copy_from(pid, places, [page.address - HEADER_BYTES for page in pages], size)
        faults = self._envelope.check_all(pages, keys, [size] * len(keys))
        good = [number for number, fault in enumerate(faults) if fault is None]
        self._table.add("cache_sibling_pages", "copied", amount=len(good))
        return self._keep(fetch, keys, pages, good, "unusable")

    def _keep(
        self, fetch: Fetch, keys: Sequence[bytes], pages: list[Page], good: Sequence[int], otherwise: str
    ) -> list[str]:
        """Makes the good ones resident; the fetch holds what is then there as long as somebody wants it."""
        if good:
            held = self._pool.insert_held([pages[n] for n in good], [keys[n] for n in good], "get")
            with self._lock:
                if not fetch.left:
                    fetch.held, held = fetch.held + held, []
            self._pool.release(held, "get")
        outcomes = [otherwise] * len(keys)
        for number in good:
            outcomes[number] = HIT
        return outcomes
