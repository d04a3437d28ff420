"""A store that stalls, against what a request's first token may wait for it: its deadline and 5 ms.

Stalls of 0, 10, 100 and 1,000 ms and endless ones, of 1 % and of 20 % of the operations, while connecting, in the middle
of a request and in the middle of a reply: a real Valkey behind a proxy, the arrivals' own thread, the tiers.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from glm_connectors.tiers import Namespace, PageLayout
from glm_connectors.valkey_store import EmbeddedServer
from glm_connectors.valkey_store.breaker import CLOSED

from glm_sglang.cache.arrivals import Arrivals
from glm_sglang.cache.recorder import Recorder
from tests.unit.cache.digests import chain
from tests.unit.tiers.ranks import PATIENCE, Rank, until
from tests.unit.tiers.valkey_proxy import Fault, Proxy

PAGE = 64
DEADLINE = 0.05
ADDED = 0.005
REQUESTS, AT_ONCE = 20, 4
TIMEOUT = 0.3  # of a get: shorter stalls are waited for, longer ones are failures
STALLS = (0.0, 0.01, 0.1, 1.0, float("inf"))
SPACE = Namespace("glm", "stalls", "fp8", PageLayout(PAGE, (("kv", 100_000),)))


TRIES = 3


def prompts(cell: int, again: int) -> list[array[int]]:
    """Two whole pages and a token each, which no other try of a cell has."""
    first = (cell * TRIES + again) * REQUESTS
    return [array("q", range(1000 * n, 1000 * n + 129)) for n in range(first, first + REQUESTS)]


class Node:
    """Arrivals over a store whose Valkey is behind a proxy."""

    def __init__(self, valkey: EmbeddedServer) -> None:
        self.writer = Rank(valkey.url, namespace=SPACE, pages=2500)
        self.proxy = Proxy(valkey.port)
        url = f"valkey://127.0.0.1:{self.proxy.port}"
        bounds = {"request_timeout": TIMEOUT, "connect_timeout": TIMEOUT}
        self.reader = Rank(url, namespace=SPACE, pages=200, writer=False, **bounds)
        self.arrivals = Arrivals(self.reader.store, PAGE, DEADLINE, recorder=Recorder())

    def close(self) -> None:
        self.proxy.fault = None
        self.arrivals.close()
        self.reader.close()
        self.writer.close()
        self.proxy.close()

    def ask(self, tokens: list[array[int]]) -> tuple[list[float], int]:
        """All at once: (of each that reached its deadline, the seconds that our code kept it then; pages that were in the
        pool at the end).

        Whatever else the machine does: who is asked about after its deadline may run, and before it only whose pages
        have come, or never will.
        """
        rids = [f"r{number}" for number in range(len(tokens))]
        for rid, ids in zip(rids, tokens, strict=True):
            self.arrivals.begin(rid, ids, None, None, 0)
        known = dict(self.arrivals._known)
        deadlines: dict[str, tuple[float, float]] = {}  # no earlier, and no later
        reached: list[float] = []
        waiting = set(rids)
        while waiting:
            for rid in sorted(waiting):
                began = time.monotonic()
                may_run = self.arrivals.ready(rid)
                ended = time.monotonic()
                earliest, latest = deadlines.setdefault(rid, (began + DEADLINE, ended + DEADLINE))
                assert may_run or began < latest, f"held back {began - latest:.3f} s after its deadline"
                if not may_run:
                    continue
                ticket = known[rid].ticket
                assert ended >= earliest or (ticket is not None and ticket.done)
                self.arrivals.release(rid)
                waiting.remove(rid)
                if began >= latest:
                    reached.append(time.monotonic() - began)
            time.sleep(0.0002)  # a scheduler has other things to do as well
        for arrival in known.values():  # what happens to a prefetch after its request was admitted
            until(lambda arrival=arrival: arrival.ticket is not None)  # type: ignore[misc]
            assert arrival.ticket.wait(PATIENCE)  # type: ignore[union-attr]
        for rid in rids:
            self.arrivals.forget(rid)
        return reached, sum(self.reader.hits(chain(ids, PAGE)) for ids in tokens)

    def healthy(self) -> None:
        self.proxy.fault = None
        valkey: Any = self.reader.store._remote
        until(lambda: self.reader.fetch([b"x" * 32]) == "miss")
        until(lambda: valkey.valkey.state("get") == CLOSED)


@pytest.fixture
def stalling(valkey: EmbeddedServer) -> Iterator[Node]:
    node = Node(valkey)
    yield node
    node.close()


@pytest.mark.alone
@pytest.mark.parametrize("where", ["connect", "request", "reply"])
def test_a_stall_costs_the_deadline_at_most(
    where: Literal["connect", "request", "reply"], stalling: Node
) -> None:
    """Who reaches it runs at the next look, which takes 5 ms at most, and who does not has its pages (`Node.ask`).

    A machine that runs other things too may stop for seconds, and a cell is tried again: a look that waits for the store
    does so each time, as the first operation is always one of those that stall, somebody reaches a deadline that is
    shorter, and pages that are lost are lost each time. Pages that came are the right ones, a stall below the client's
    timeout loses none, and after a cell the store serves.
    """
    cells = [(seconds, every) for seconds in STALLS for every in (100, 5)]
    stalling.healthy()
    for cell, (seconds, every) in enumerate(cells):
        for again in range(TRIES):
            reached, hits = one_try(stalling, Fault("stall", where, seconds, every), prompts(cell, again))
            stalling.healthy()
            came = where == "connect" or as_many_as_should(hits, seconds, every)
            if came and in_time(reached, seconds):
                break
        assert came, (seconds, every, hits)
        assert in_time(reached, seconds), (seconds, every, reached)
    until(stalling.reader.idle)
    assert set(stalling.reader.metrics.snapshot()["cache_bad_values"].values()) == {0}


def as_many_as_should(hits: int, stall: float, every: int) -> bool:
    """Pages of both of each request's."""
    if stall < TIMEOUT:
        return hits == 2 * REQUESTS
    return hits < 2 * REQUESTS and (every == 5 or hits >= REQUESTS)


def in_time(reached: list[float], stall: float) -> bool:
    return all(added <= ADDED for added in reached) and bool(reached or stall <= DEADLINE)


def one_try(stalling: Node, fault: Fault, asked: list[array[int]]) -> tuple[list[float], int]:
    """All requests under a fault; as `Node.ask`."""
    for ids in asked:  # straight to Valkey
        stalling.writer.commit(chain(ids, PAGE))
    until(lambda: stalling.writer.metrics["cache_save_queue_pages"] == 0)
    fault.match = b"GET" if fault.where == "request" else b""
    stalling.proxy.fault = fault
    if fault.where == "connect":  # every connection has to be made again
        stalling.proxy.vanish()
        stalling.proxy.listen()
    reached: list[float] = []
    hits = 0
    for start in range(0, REQUESTS, AT_ONCE):
        more, found = stalling.ask(asked[start : start + AT_ONCE])
        reached += more
        hits += found
    assert fault.hits, (fault.seconds, fault.every)
    return reached, hits
