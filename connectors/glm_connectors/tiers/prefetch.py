"""Prefetch: a request's missing pages come from Valkey into the pool while the request waits for its turn.

A request's pages, those that the pool had and those that came, are held until `cancel`: it runs, and its load has pinned
them, or it is gone. What all of them hold together is `room`'s; who finds no room there waits, also with nothing to be
fetched: what nobody holds yet may be gone by the time it runs. What there is to fetch is seen once it has its room.

Everything but `Prefetcher.start`/`urge`/`cancel` runs on the store's event loop; gets run on the
repaired executor's threads. A get that has begun stores its page even when its request is gone by then: the
bytes are there, and the next turn may want them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from glm_connectors.tiers.envelope import Envelope
from glm_connectors.tiers.metrics import MetricTable
from glm_connectors.tiers.pool import CpuPool, Page
from glm_connectors.tiers.rates import Worth
from glm_connectors.tiers.room import Room
from glm_connectors.tiers.ticket import Ticket
from glm_connectors.valkey_store.glide import ABSENT
from glm_connectors.valkey_store.store import StoreDownError, StoreFailedError, ValkeyStore

logger = logging.getLogger(__name__)

_HIT = "hit"


class _Fetch:
    """One get, of one or several pages of one node, and the tickets that want it.

    Its pages are held until none of them is under way any more: or a prompt's end, for which there is no room, would take
    its beginning's slots.
    """

    def __init__(self, keys: list[bytes], lane: int | None) -> None:
        """lane: of the prompt, whose pages come next to each other; None where they come with one get."""
        self.keys, self.lane = keys, lane
        self.tickets: set[Ticket] = set()
        self.task: asyncio.Task[dict[bytes, str]] | None = None
        self.held: list[Page] = []
        self.left = False  # nobody wants it any more; whoever still has a page of it lets it go


class Prefetcher:
    """Prefetches of one store. group: pages of one get. window: gets under way for one ticket, at most. slots: how
    many of the pool's waiting requests may hold, all together."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        executor: Any,
        pool: CpuPool,
        valkey: ValkeyStore,
        envelope: Envelope,
        worth: Worth,
        table: MetricTable,
        *,
        group: int,
        window: int,
        slots: Callable[[], int],
    ) -> None:
        self._loop, self._executor, self._pool, self._valkey = loop, executor, pool, valkey
        self._envelope, self._worth, self._table = envelope, worth, table
        self._group = group if valkey.batches_reads else 1
        self._window = window
        self._lock = threading.Lock()
        self._tickets: dict[str, set[Ticket]] = {}  # until they are cancelled
        self._room: Room[Ticket] = Room(slots)  # the event loop's
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way: dict[bytes, _Fetch] = {}
        self._waiting = 0  # pages that are being fetched for all tickets; an estimate
        self._closed = False

    # Any thread

    def start(self, ticket: Ticket) -> None:
        """Begins. Where the store is down or recomputing is faster it claims only the pages before the first that is
        missing, and ends at once where there is none."""
        if ticket.missing and (refusal := self._refusal(len(ticket.missing))):
            ticket.short = refusal
            ticket.claim = ticket.claim[: self._pool.prefix(ticket.claim)]
            self._count(ticket, len(ticket.missing))
        if not ticket.claim:
            self._finish(ticket, ticket.short or "resident")
            return
        with self._lock:
            closed = self._closed
            if not closed:
                self._tickets.setdefault(ticket.rid, set()).add(ticket)
        if closed:
            self._finish(ticket, "cancelled")
            return
        self._loop.call_soon_threadsafe(self._arrive, ticket)

    def knows(self, rid: str) -> bool:
        """Whether a prefetch for `rid` has been started and not cancelled."""
        return rid in self._tickets

    def urge(self, rid: str, turn: int) -> None:
        """The request of `rid` could run now; smaller turns first (`room`)."""
        with self._lock:
            tickets = list(self._tickets.get(rid, ()))
            for ticket in tickets:
                ticket.turn = turn
        # Who has its room needs no other. To wake the event loop lets go of the interpreter, which it then has first.
        if not all(ticket._within for ticket in tickets):
            self._loop.call_soon_threadsafe(self._admit)

    def cancel(self, rid: str) -> None:
        """The request of `rid` runs, or is gone: nothing of it is held or fetched any more."""
        self._cancel([rid])

    def cancel_all(self) -> None:
        """Every request is gone: nobody is let in into the room of another."""
        with self._lock:
            rids = list(self._tickets)
        self._cancel(rids)

    def _cancel(self, rids: Sequence[str]) -> None:
        tickets: set[Ticket] = set()
        with self._lock:
            for rid in rids:
                tickets |= self._tickets.pop(rid, set())
            for ticket in tickets:
                ticket._cancelled = True
                self._expect_no_more(ticket)
        for ticket in tickets:
            self._finish(ticket, "cancelled")
        if tickets:
            self._loop.call_soon_threadsafe(self._leave, tickets)

    def close(self) -> None:
        """Cancels everything, and whatever comes later."""
        with self._lock:
            self._closed = True
        self.cancel_all()

    @property
    def running(self) -> int:
        """Requests whose pages are under way or held."""
        return len(self._tickets)

    def _expect_no_more(self, ticket: Ticket) -> None:
        """Under the lock."""
        self._waiting -= ticket._expected
        ticket._expected = 0

    def _refusal(self, pages: int) -> str:
        """Why so many pages are not to be fetched now, or ""."""
        if not self._valkey.usable("get"):
            return "down"
        return "" if self._worth.fetch(pages, self._waiting) else "slow"

    def _finish(self, ticket: Ticket, end: str) -> None:
        with self._lock:
            if not ticket.finish(end):
                return
        self._table.add("cache_prefetches", end)
        if end != "resident":
            self._table.observe("cache_prefetch_seconds", value=ticket.seconds)
        self._count(ticket, len(ticket.missing) - ticket.loaded)

    def _count(self, ticket: Ticket, missed: int) -> None:
        """Each page that was absent at its arrival is a hit, whoever's get brought it, or a miss: once."""
        absent, ticket._absent = ticket._absent, 0
        missed = min(absent, missed)
        if absent > missed:
            self._table.add("cache_hit_pages", "valkey", amount=absent - missed)
        if missed:
            self._table.add("cache_miss_pages", "valkey", amount=missed)

    # The event loop

    def _arrive(self, ticket: Ticket) -> None:
        if not ticket._cancelled:
            self._room.enter(ticket)
            self._admit()

    def _admit(self) -> None:
        """Lets in whose turn it is, as long as there is room."""
        while (admitted := self._room.next()) is not None:
            ticket, lost = admitted
            for other in lost:
                if not other._cancelled:  # or it has run, or is gone
                    self._table.add("cache_lost_pages", amount=len(other._held))
                other.lost = True
                self._let_go(other)
            self._begin(ticket)

    def _begin(self, ticket: Ticket) -> None:
        """It has its room. The pool is not what it was when the request arrived."""
        ticket._within = True
        if ticket._cancelled:
            self._room.leave(ticket)
            return
        ticket._held, ticket.missing = self._pool.hold_any(ticket.claim, "wait")
        end = self._refusal(len(ticket.missing)) if ticket.missing else ticket.short or "resident"
        if end:
            self._hold_prefix(ticket)
            self._finish(ticket, end)
            return
        with self._lock:
            if not ticket._cancelled:
                ticket._expected = len(ticket.missing)
                self._waiting += ticket._expected
        task = self._loop.create_task(self._run(ticket))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, ticket: Ticket) -> None:
        end = "failed"
        try:
            end = await self._fetch_in_order(ticket)
            if end == "complete":
                end = ticket.short or end
        except Exception:
            logger.exception("prefetch of %s failed", ticket.rid)
        finally:
            with self._lock:
                self._expect_no_more(ticket)
            self._hold_prefix(ticket)
            self._leave_all({ticket})  # what came is held by now
            self._finish(ticket, end)
            self._admit()

    def _hold_prefix(self, ticket: Ticket) -> None:
        """Of its claim a request holds what it can use: the pages before the first that is not there."""
        before = ticket._held
        ticket._held = [] if ticket._cancelled else self._pool.hold(ticket.claim, "wait")
        self._pool.release(before, "wait")
        self._room.shrink(ticket, len(ticket._held))

    def _let_go(self, ticket: Ticket) -> None:
        self._pool.release(ticket._held, "wait")
        ticket._held = []

    def _leave(self, tickets: set[Ticket]) -> None:
        """They are cancelled."""
        for ticket in tickets:
            self._room.leave(ticket)
            self._let_go(ticket)
        self._leave_all(tickets)
        self._admit()

    async def _fetch_in_order(self, ticket: Ticket) -> str:
        """Keeps `window` gets going and stops behind the first page that does not come."""
        under_way: deque[tuple[Sequence[bytes], list[asyncio.Task[dict[bytes, str]]]]] = deque()
        position, step = 0, self._group * len(self._valkey.nodes)
        while not ticket._cancelled:
            while len(under_way) < self._window and position < len(ticket.missing):
                keys = ticket.missing[position : position + step]
                under_way.append((keys, self._fetch(ticket, keys)))
                position += step
            if not under_way:
                return "complete"
            keys, tasks = under_way.popleft()
            await asyncio.wait(tasks)
            outcomes: dict[bytes, str] = {}
            for task in tasks:
                if not task.cancelled():
                    outcomes |= task.result()
            for key in keys:
                outcome = outcomes.get(key, "cancelled")
                if outcome != _HIT:
                    return outcome
                ticket.loaded += 1
        return "cancelled"

    def _fetch(self, ticket: Ticket, keys: Sequence[bytes]) -> list[asyncio.Task[dict[bytes, str]]]:
        """The gets that bring `keys`: those that are under way for others, and new ones for the rest."""
        fetches: set[_Fetch] = set()
        new: dict[int, list[bytes]] = {}
        for key in keys:
            shared = self._under_way.get(key)
            if shared is None:
                new.setdefault(self._valkey.shards.place(key), []).append(key)
            else:
                fetches.add(shared)
        lane = ticket.number if len(ticket.missing) > self._group else None
        for node, theirs in new.items():
            for start in range(0, len(theirs), self._group):
                fetch = _Fetch(theirs[start : start + self._group], lane)
                self._under_way |= dict.fromkeys(fetch.keys, fetch)
                fetch.task = self._loop.create_task(self._submit(node, fetch))
                fetch.task.add_done_callback(partial(self._landed, fetch))
                fetches.add(fetch)
        for fetch in fetches:
            fetch.tickets.add(ticket)
        ticket._fetches |= fetches
        return [fetch.task for fetch in fetches if fetch.task is not None]

    async def _submit(self, node: int, fetch: _Fetch) -> dict[bytes, str]:
        try:
            outcomes = await self._executor.submit_job(self._get, node, fetch)
            return dict(zip(fetch.keys, outcomes, strict=True))
        except Exception as error:
            logger.warning("a get failed: %s", error)
            return dict.fromkeys(fetch.keys, "failed")

    def _landed(self, fetch: _Fetch, _task: object = None) -> None:
        """Nobody joins it any more. Not the coroutine's to do: one cancelled before its first step runs no line
        of it."""
        for key in fetch.keys:
            if self._under_way.get(key) is fetch:
                del self._under_way[key]

    def _leave_all(self, tickets: set[Ticket]) -> None:
        """What nobody else wants ends: a get that is queued never starts, pages that came are no longer held."""
        ended: list[_Fetch] = []
        for ticket in tickets:
            for fetch in ticket._fetches:
                fetch.tickets.discard(ticket)
                if not fetch.tickets:
                    ended.append(fetch)
            ticket._fetches.clear()
        held: list[Page] = []
        with self._lock:  # all of them before the first page is let go, whose slot another would take
            for fetch in ended:
                fetch.left = True
                held += fetch.held
                fetch.held = []
        for fetch in ended:
            if fetch.task is not None:
                fetch.task.cancel()
            self._landed(fetch)  # whoever wants these pages from now on starts anew
        self._pool.release(held, "get")

    # A worker's thread

    def _get(self, node: int, fetch: _Fetch) -> list[str]:
        """Gets pages into new slots, checks them, makes them resident. An outcome for each key."""
        keys = fetch.keys
        with self._lock:
            left = fetch.left
            pages = None if left else self._pool.take(len(keys), "get", fetch.lane)
        if pages is None:
            return ["cancelled" if left else "full"] * len(keys)
        kept = [False] * len(keys)
        try:
            names = [self._envelope.name(key) for key in keys]
            started = self._worth.load.start()
            arrived: int | None = 0
            try:
                lengths = self._valkey.get(node, names, [page.slot for page in pages])
                arrived = sum(length for length in lengths if length > 0) or None
            except StoreDownError:
                arrived = None
                return ["down"] * len(keys)
            except StoreFailedError:
                return ["failed"] * len(keys)
            finally:
                self._worth.load.stop(started, arrived)
            there = [number for number, length in enumerate(lengths) if length != ABSENT]
            if not there:
                return ["miss"] * len(keys)
            faults = self._envelope.check_all(
                [pages[n] for n in there], [keys[n] for n in there], [lengths[n] for n in there]
            )
            bad: list[str] = []
            for number, fault in zip(there, faults, strict=True):
                kept[number] = fault is None
                if fault is not None:
                    self._table.add("cache_bad_values", fault)
                    logger.warning("%s: not the page (%s), deleted", names[number], fault)
                    bad.append(names[number])
            if bad:
                self._valkey.delete(node, bad)
            good = [number for number, keep in enumerate(kept) if keep]
            self._table.add("cache_loaded_bytes", amount=len(good) * self._envelope.value_bytes)
            self._keep(fetch, [pages[n] for n in good], [keys[n] for n in good])
            return [_HIT if keep else "miss" for keep in kept]
        finally:
            self._pool.release([page for page, keep in zip(pages, kept, strict=True) if not keep], "get")

    def _keep(self, fetch: _Fetch, pages: list[Page], keys: list[bytes]) -> None:
        """Makes pages resident, and holds those that are then there for the fetch as long as somebody wants it."""
        held = self._pool.insert_held(pages, keys, "get")
        with self._lock:
            if not fetch.left:
                fetch.held, held = held, []
        self._pool.release(held, "get")
