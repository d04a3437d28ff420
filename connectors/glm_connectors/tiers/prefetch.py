"""Prefetch: a request's missing pages come from Valkey into the pool while the request waits for its turn.

A request's pages, those that the pool had and those that came, are held until `cancel`: it runs, and its load has pinned
them, or it is gone. What all of them hold together is `room`'s; who finds no room there waits, also with nothing to be
fetched: what nobody holds yet may be gone by the time it runs. What there is to fetch is seen once it has its room.

Where siblings lend, a rank gets from Valkey its own share of a prompt and copies the rest out of their memory
(`siblings`), but for the first gets of each prompt: whether Valkey has it at all each rank finds out by itself, so that
a new prompt, of which nothing is there, costs no more than on a rank alone. What is not lent comes from Valkey; and who
has said that he gets nothing for a prompt is not asked again for it.

Everything but `Prefetcher.start`/`urge`/`cancel` runs on the store's event loop; gets run on the repaired executor's
threads (`gets`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from glm_connectors.tiers.borrowing import Borrower
from glm_connectors.tiers.envelope import Envelope
from glm_connectors.tiers.gets import HIT, Fetch, Getter
from glm_connectors.tiers.lending import Lending
from glm_connectors.tiers.metrics import MetricTable
from glm_connectors.tiers.pool import CpuPool, Page
from glm_connectors.tiers.rates import Worth
from glm_connectors.tiers.room import Room
from glm_connectors.tiers.siblings import Siblings
from glm_connectors.tiers.ticket import Ticket
from glm_connectors.valkey_store.store import ValkeyStore

logger = logging.getLogger(__name__)


class Prefetcher:
    """Prefetches of one store. group: pages of one get. asked: pages that a sibling is asked for at once. window: gets
    under way for one ticket, at most. slots: how many of the pool's waiting requests may hold, all together."""

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
        asked: int,
        window: int,
        slots: Callable[[], int],
        siblings: Siblings | None = None,
    ) -> None:
        self._loop, self._executor, self._pool, self._valkey = loop, executor, pool, valkey
        self._worth, self._table, self._siblings = worth, table, siblings
        self._group = group if valkey.batches_reads else 1
        self._window, self._asked = window, asked
        self._lock = threading.Lock()
        # Of what fetches hold: workers take slots under it. The scheduler, whose `cancel` takes the other, does not wait.
        self._holding = threading.Lock()
        self._getter = Getter(pool, valkey, envelope, worth.load, table, self._holding)
        self._borrower = (
            None if siblings is None else Borrower(siblings, executor, self._getter, table, self._from_nodes)
        )
        self._tickets: dict[str, set[Ticket]] = {}  # until they are cancelled
        self._room: Room[Ticket] = Room(slots)  # the event loop's
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way: dict[bytes, Fetch] = {}
        self._planned: Counter[bytes] = Counter()  # what siblings may count on: pages that are yet to be got
        self.lending = Lending(loop, pool, self._under_way, self._planned)
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
        planned = [] if self._siblings is None else list(ticket.missing)
        self._planned.update(planned)
        try:
            end = await self._fetch_in_order(ticket)
            if end == "complete":
                end = ticket.short or end
        except Exception:
            logger.exception("prefetch of %s failed", ticket.rid)
        finally:
            for key in planned:
                self._planned[key] -= 1
                if not self._planned[key]:
                    del self._planned[key]
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
        """Keeps `window` gets going and stops behind the first page that does not come. Whether Valkey has the prompt at
        all is seen by the first get, alone: most prompts are new, and each get takes the scheduler's thread its turns."""
        under_way: deque[tuple[Sequence[bytes], list[asyncio.Task[dict[bytes, str]]]]] = deque()
        position, step, most = 0, self._group * len(self._valkey.nodes), 1
        lenders = 0
        while not ticket._cancelled:
            while len(under_way) < most and position < len(ticket.missing):
                keys = ticket.missing[position : position + step]
                under_way.append((keys, self._fetch(ticket, keys, lenders)))
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
                if outcome != HIT:
                    return outcome
                ticket.loaded += 1
            if most == 1:
                most = self._window
                if self._siblings is not None and (lenders := self._siblings.count("usable")):
                    # Steps are as many times longer, and as many times fewer.
                    times = max(1, self._asked // self._group)
                    step *= times * (1 + lenders)
                    most = max(2, most // times)
        return "cancelled"

    def _fetch(
        self, ticket: Ticket, keys: Sequence[bytes], lenders: int
    ) -> list[asyncio.Task[dict[bytes, str]]]:
        """The gets that bring `keys`: those that are under way for others, and new ones for the rest. lenders: how many
        siblings may be asked."""
        fetches: set[Fetch] = set()
        direct: list[bytes] = []
        from_sibling: dict[int, list[bytes]] = {}
        for key in keys:
            shared = self._under_way.get(key)
            owner = self._siblings.owner(key) if lenders and self._siblings is not None else None
            if shared is not None:
                fetches.add(shared)
            elif owner is None:
                direct.append(key)
            elif owner in ticket._without:
                self._table.add("cache_sibling_pages", "absent")
                direct.append(key)
            else:
                from_sibling.setdefault(owner, []).append(key)
        lane = ticket.number if len(ticket.missing) > self._group else None
        asked = sum(len(theirs) for theirs in from_sibling.values())
        for node, group in self._groups(self._by_node(direct)):
            # Where a sibling has not lent, what it was asked for is got here as well: then it says nothing of the rate.
            fetch = Fetch(group, lane, 1.0 if ticket._without else 1 + asked / len(direct))
            fetches.add(self._start(fetch, self._from_valkey(node, fetch, group)))
        for owner, theirs in from_sibling.items():
            for start in range(0, len(theirs), self._asked):
                assert self._borrower is not None
                fetch = Fetch(theirs[start : start + self._asked], lane)
                fetches.add(self._start(fetch, self._borrower.bring(owner, fetch)))
        for fetch in fetches:
            fetch.tickets.add(ticket)
        ticket._fetches |= fetches
        return [fetch.task for fetch in fetches if fetch.task is not None]

    def _by_node(self, keys: Sequence[bytes]) -> dict[int, list[bytes]]:
        found: dict[int, list[bytes]] = {}
        for key in keys:
            found.setdefault(self._valkey.shards.place(key), []).append(key)
        return found

    def _groups(self, by_node: dict[int, list[bytes]]) -> list[tuple[int, list[bytes]]]:
        """Each a get."""
        return [
            (node, theirs[start : start + self._group])
            for node, theirs in by_node.items()
            for start in range(0, len(theirs), self._group)
        ]

    def _start(self, fetch: Fetch, work: Coroutine[Any, Any, dict[bytes, str]]) -> Fetch:
        self._under_way |= dict.fromkeys(fetch.keys, fetch)
        fetch.task = self._loop.create_task(work)
        fetch.task.add_done_callback(partial(self._landed, fetch))
        return fetch

    async def _from_valkey(self, node: int, fetch: Fetch, keys: Sequence[bytes]) -> dict[bytes, str]:
        return await self._submit(keys, self._getter.from_valkey, node, fetch, keys)

    async def _from_nodes(self, fetch: Fetch, keys: Sequence[bytes]) -> dict[bytes, str]:
        """What no sibling lent."""
        outcomes: dict[bytes, str] = {}
        parts = [self._from_valkey(node, fetch, theirs) for node, theirs in self._groups(self._by_node(keys))]
        for part in await asyncio.gather(*parts):
            outcomes |= part
        return outcomes

    async def _submit(
        self, keys: Sequence[bytes], work: Callable[..., list[str]], *args: object
    ) -> dict[bytes, str]:
        """`work` on a worker's thread: an outcome for each of `keys`."""
        try:
            outcomes = await self._executor.submit_job(work, *args)
            return dict(zip(keys, outcomes, strict=True))
        except Exception as error:
            logger.warning("a get failed: %s", error)
            return dict.fromkeys(keys, "failed")

    def _landed(self, fetch: Fetch, _task: object = None) -> None:
        """Nobody joins it any more. Not the coroutine's to do: one cancelled before its first step runs no line
        of it."""
        for key in fetch.keys:
            if self._under_way.get(key) is fetch:
                del self._under_way[key]

    def _leave_all(self, tickets: set[Ticket]) -> None:
        """What nobody else wants ends: a get that is queued never starts, pages that came are no longer held."""
        ended: list[Fetch] = []
        for ticket in tickets:
            for fetch in ticket._fetches:
                fetch.tickets.discard(ticket)
                if not fetch.tickets:
                    ended.append(fetch)
            ticket._fetches.clear()
        held: list[Page] = []
        with self._holding:  # all of them before the first page is let go, whose slot another would take
            for fetch in ended:
                fetch.left = True
                held += fetch.held
                fetch.held = []
        for fetch in ended:
            if fetch.task is not None:
                fetch.task.cancel()
            self._landed(fetch)  # whoever wants these pages from now on starts anew
        self._pool.release(held, "get")
