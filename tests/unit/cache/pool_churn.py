"""What a server's saves, gets, loads and puts do to the CPU pool, one after the other in an order that a seed gives.

The pool is the real one; what holds its pages is modelled: conversations of clients that take turns, prefetches with
their share of the pool and gets of so many pages by so many workers, a scheduler that loads batch by batch and computes
chunk by chunk, saves in blocks as `glm_sglang.cache.saves` makes them, puts that hold pages while Valkey is slow or
stands still, requests that are given up. Times are of a clock that the events move.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from glm_connectors.tiers.layout import PageLayout
from glm_connectors.tiers.pool import CpuPool, Page

from glm_sglang.cache import cuda_plan
from glm_sglang.cache.saves import FEWER, RESERVE

LAYOUT = PageLayout(64, (("kv", 128),))
SLOT = 512
_COPY_S = 0.0006  # of a block of a save
_DEPTH = 3
_WORKERS = 4  # of gets, and of puts


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Pages, but for: clients, live (conversations a client has open), flush_every (requests), period_s, stall_s
    (seconds of every period_s in which Valkey stands still).

    group: of one get or put. get_s, put_s, page_s: for moving or computing a page.
    """

    pool: int
    device: int
    group: int
    shortest: float
    longest: float
    tail: int
    clients: int = 12
    live: int = 4
    chunk: int = 128
    get_s: float = 0.0008
    put_s: float = 0.0012
    page_s: float = 0.0003
    shared: float = 0.3  # of the conversations begin like others
    given_up: float = 0.2
    flush_every: int = 0
    period_s: float = 9.0
    stall_s: float = 2.5


#: The soak's: 8 layers, 637 KB a page, prompts of 200 to 32k tokens.
SOAK = Traffic(pool=1570, device=896, group=13, shortest=3.1, longest=512, tail=32)
#: 78 layers, 3.4 MB a page, gets of two pages; a pool of 68 GB.
PRODUCT = Traffic(
    pool=20_000,
    device=4000,
    group=2,
    shortest=8,
    longest=2048,
    tail=64,
    clients=24,
    get_s=0.0014,
    put_s=0.002,
    page_s=0.002,
)


@dataclass(eq=False)
class _Request:
    keys: list[bytes]
    client: int
    claim: int  # pages
    state: str = "arrived"  # then: fetching, ready, running, over
    gone: bool = False
    held: list[Page] = field(default_factory=list)
    lane: object = None
    missing: deque[list[bytes]] = field(default_factory=deque)
    under_way: int = 0
    came: list[Page] = field(default_factory=list)
    failed: bool = False


class Churn:
    """Runs `traffic`; `loads` gets (pages, runs) of every batch that loaded anything."""

    def __init__(self, traffic: Traffic, seed: int, pool: CpuPool | None = None) -> None:
        self.traffic = traffic
        self.pool = pool or CpuPool(LAYOUT, traffic.pool * SLOT)
        self.loads: list[tuple[int, int]] = []
        self.operations = 0
        self.refused = 0
        self.hits = self.asked = 0
        self.now = 0.0
        self._rng = random.Random(seed)
        self._asks = [random.Random(f"{seed}.{client}") for client in range(traffic.clients)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._device: OrderedDict[bytes, None] = OrderedDict()
        self._valkey: OrderedDict[bytes, None] = OrderedDict()
        self._open: list[list[tuple[list[bytes], int]]] = [[] for _ in range(traffic.clients)]
        self._room: deque[_Request] = deque()
        self._claimed = 0
        self._ready: deque[_Request] = deque()
        self._running = False
        self._gets: deque[tuple[_Request, list[bytes]]] = deque()
        self._get_workers = self._put_workers = _WORKERS
        self._saves: deque[list[bytes]] = deque()
        self._saving = False
        self._puts: deque[tuple[Page, bytes]] = deque()
        self._outstanding = 0
        self._requests = 0

    def run(self, requests: int) -> None:
        """Until so many requests have arrived and all that came of them has ended."""
        self._left = requests
        for client in range(self.traffic.clients):
            self._after(self._rng.random() * 0.1, lambda client=client: self._ask(client))  # type: ignore[misc]
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        self._number += 1
        jitter = seconds * self._rng.uniform(0.7, 1.5)
        heapq.heappush(self._events, (self.now + jitter, self._number, event))

    def _stalled_for(self) -> float:
        """Seconds for which Valkey will not answer."""
        return max(0.0, self.traffic.stall_s - self.now % self.traffic.period_s)

    # Clients

    def _key(self, what: int, number: int) -> bytes:
        return what.to_bytes(8, "big") + number.to_bytes(8, "big")

    def _ask(self, client: int) -> None:
        if self._requests >= self._left:
            return
        self._requests += 1
        traffic, rng, open_ = self.traffic, self._asks[client], self._open[client]
        if traffic.flush_every and self._requests % traffic.flush_every == 0:
            self._device.clear()
            self.pool.clear()
        place = rng.randrange(traffic.live)
        while len(open_) < traffic.live:
            open_.append(([], 3))
        keys, turns = open_[place]
        if turns >= 3:
            count = max(1, round(traffic.shortest * (traffic.longest / traffic.shortest) ** rng.random()))
            shared = min(count, 24) if rng.random() < traffic.shared else 0
            start = 1 + rng.randrange(4)
            own = rng.getrandbits(60)
            keys = [self._key(start, n) for n in range(shared)]
            keys += [self._key(own, n) for n in range(shared, count)]
        else:
            own = rng.getrandbits(60)
            keys = keys + [self._key(own, n) for n in range(rng.randint(0, traffic.tail))]
        open_[place] = (keys, 1 if turns >= 3 else turns + 1)
        self.asked += len(keys)
        request = _Request(keys, client, min(len(keys), traffic.pool // 2))
        if rng.random() < traffic.given_up:
            self._after(rng.uniform(0, 0.3), lambda: self._give_up(request))
        self._room.append(request)
        self._admit()

    def _give_up(self, request: _Request) -> None:
        if request.state == "over":
            return
        request.gone = True
        if request.state == "arrived":
            self._room.remove(request)
        elif request.state == "ready":
            self._ready.remove(request)
            self._let_go(request)
        elif request.state == "fetching":  # its gets that are queued never start
            request.missing.clear()
            self._fetched(request)
        self._after(0.01, lambda: self._ask(request.client))

    # Prefetches

    def _admit(self) -> None:
        """Pages wanted by several count several times here."""
        while self._room:
            request = self._room[0]
            if self._claimed + request.claim > self.traffic.pool // 2:
                return
            self._room.popleft()
            self._claimed += request.claim
            request.state = "fetching"
            self.operations += 1
            request.held, absent = self.pool.hold_any(request.keys[: request.claim], "wait")
            self.hits += len(request.held)
            group = self.traffic.group
            request.lane = request if len(absent) > group else None
            if not self._stalled_for():
                request.missing.extend(absent[n : n + group] for n in range(0, len(absent), group))
            self._fetch(request)

    def _fetch(self, request: _Request) -> None:
        while request.missing and request.under_way < 2 * _WORKERS:
            request.under_way += 1
            self._gets.append((request, request.missing.popleft()))
        self._work_gets()
        if not request.under_way:
            self._fetched(request)

    def _work_gets(self) -> None:
        while self._get_workers and self._gets:
            request, keys = self._gets.popleft()
            if request.gone or request.failed:
                self._got(request, [], [])
                continue
            self.operations += 1
            pages = self.pool.take(len(keys), "get", request.lane)
            if pages is None:
                self._got(request, [], keys)
                continue
            self._get_workers -= 1
            taken = len(keys) * self.traffic.get_s + min(2.0, self._stalled_for())
            self._after(taken, lambda r=request, p=pages, k=keys: self._end_get(r, p, k))  # type: ignore[misc]

    def _end_get(self, request: _Request, pages: list[Page], keys: list[bytes]) -> None:
        self._get_workers += 1
        there = [] if self._stalled_for() else [n for n, key in enumerate(keys) if key in self._valkey]
        self.operations += 2
        kept = self.pool.insert_held([pages[n] for n in there], [keys[n] for n in there], "get")
        self.pool.release([page for n, page in enumerate(pages) if n not in there], "get")
        if request.gone:
            self.pool.release(kept, "get")
            kept = []
        self._got(request, kept, keys)

    def _got(self, request: _Request, kept: list[Page], keys: list[bytes]) -> None:
        request.under_way -= 1
        request.came += kept
        if len(kept) < len(keys):
            request.failed = True
            request.missing.clear()
        self._after(0.0, lambda: self._fetch(request))
        self._work_gets()

    def _fetched(self, request: _Request) -> None:
        if request.under_way or request.missing or request.state != "fetching":
            return
        before, came = request.held, request.came
        request.held = [] if request.gone else self.pool.hold(request.keys[: request.claim], "wait")
        request.came = []
        self.pool.release(before, "wait")
        self.pool.release(came, "get")
        self.operations += 3
        if request.gone:
            self._let_go(request)
        else:
            request.state = "ready"
            self._ready.append(request)
            self._schedule()

    def _let_go(self, request: _Request) -> None:
        self._claimed -= request.claim
        self.pool.release(request.held, "wait")
        request.held = []
        request.state = "over"
        self._after(0.0, self._admit)

    # The scheduler

    def _schedule(self) -> None:
        if self._running or not self._ready:
            return
        self._running = True
        loaded: list[Page] = []
        work: list[tuple[_Request, int]] = []
        budget = self.traffic.chunk
        while self._ready and budget > 0:
            request = self._ready.popleft()
            there = next(
                (n for n, key in enumerate(request.keys) if key not in self._device), len(request.keys)
            )
            pages = self.pool.hold(request.keys[there:], "load")
            loaded += pages
            self._let_go(request)
            self.operations += 2
            start = there + len(pages)
            self._on_device(request.keys[:start])
            budget -= max(1, len(request.keys) - start)
            work.append((request, start))
            request.state = "running"
        if loaded:
            addresses = sorted({page.address for page in loaded})
            self.loads.append((len(loaded), len(cuda_plan.runs(addresses, LAYOUT.page_bytes))))
            self._after(0.004, lambda: self.pool.release(loaded, "load"))
        self._compute(deque(work))

    def _compute(self, work: deque[tuple[_Request, int]]) -> None:
        """A chunk: of several requests, or a part of the last one."""
        budget, saves = self.traffic.chunk, []
        while work and budget > 0:
            request, start = work.popleft()
            end = min(len(request.keys), start + budget)
            budget -= max(1, end - start)
            saves.append(request.keys[start:end])
            if end < len(request.keys):
                work.appendleft((request, end))
            else:
                request.state = "over"
                if not request.gone:
                    self._after(0.02, lambda r=request: self._ask(r.client))  # type: ignore[misc]
        self._after(0.005 + self.traffic.page_s * sum(map(len, saves)), lambda: self._computed(saves, work))

    def _computed(self, saves: list[list[bytes]], work: deque[tuple[_Request, int]]) -> None:
        for keys in saves:
            self._on_device(keys)
            if keys:
                self._saves.append(keys)
        self._save()
        if work:
            self._compute(work)
        else:
            self._running = False
            self._schedule()

    def _on_device(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._device[key] = None
            self._device.move_to_end(key)
        while len(self._device) > self.traffic.device:
            self._device.popitem(last=False)

    # Saves

    def _save(self) -> None:
        if self._saving or not self._saves:
            return
        self._saving = True
        keys = self._saves.popleft()
        first = self.pool.prefix(keys)
        self._blocks(keys, first, RESERVE, object() if len(keys) - first > RESERVE else None, deque())

    def _blocks(
        self,
        keys: list[bytes],
        start: int,
        step: int,
        lane: object,
        under_way: deque[tuple[list[Page], list[bytes]]],
    ) -> None:
        while start < len(keys) and len(under_way) < _DEPTH:
            part = keys[start : start + step]
            self.operations += 1
            pages = self.pool.take(len(part), "save", lane)
            if pages is None:
                if len(part) <= FEWER:
                    self.refused += 1
                    start = len(keys)
                step = FEWER
                continue
            under_way.append((pages, part))
            start += len(part)
        if not under_way:
            self._saving = False
            self._save()
            return

        def end() -> None:
            self._commit(*under_way.popleft())
            self._blocks(keys, start, step, lane, under_way)

        self._after(_COPY_S, end)

    def _commit(self, pages: list[Page], keys: list[bytes]) -> None:
        self.operations += 2
        self.pool.also(pages, "put")
        new = self.pool.insert(pages, keys, "save")
        room = self.traffic.pool // 2 - self._outstanding
        fresh = [n for n, inserted in enumerate(new) if inserted][: max(0, room)]
        self.pool.release([page for n, page in enumerate(pages) if n not in fresh], "put")
        self._outstanding += len(fresh)
        self._puts.extend((pages[n], keys[n]) for n in fresh)
        self._work_puts()

    def _work_puts(self) -> None:
        while self._put_workers and self._puts:
            group = [self._puts.popleft() for _ in range(min(len(self._puts), self.traffic.group))]
            self._put_workers -= 1
            self._after(
                len(group) * self.traffic.put_s + self._stalled_for(),
                lambda group=group: self._end_put(group),  # type: ignore[misc]
            )

    def _end_put(self, group: list[tuple[Page, bytes]]) -> None:
        self._put_workers += 1
        self._outstanding -= len(group)
        self.operations += 1
        self.pool.release([page for page, _ in group], "put")
        for _, key in group:
            self._valkey[key] = None
            if len(self._valkey) > 6 * self.traffic.pool:
                self._valkey.popitem(last=False)
        self._work_puts()


def figures(loads: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Of batches of loads: quantiles of runs, and pages a run over all of them."""
    runs = sorted(runs for _, runs in loads)
    total = sum(pages for pages, _ in loads)
    return {
        "loads": len(loads),
        "pages": total,
        "runs_p50": runs[len(runs) // 2],
        "runs_p99": runs[len(runs) * 99 // 100],
        "runs_max": runs[-1],
        "pages_a_run": round(total / sum(runs), 2),
    }
