"""Drives one round at one endpoint: closed loop (so many sessions at once), open loop (arrivals by a seeded Poisson
process), or a trace's own arrivals.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.ab.client import Sample
from benchmarks.workloads import Load, Session, Turn

#: A request with the body that was made for it before the clock started.
Prepared = tuple[Turn, bytes]


class Asker(Protocol):
    """What a round needs of a client."""

    def encode(self, turn: Turn) -> bytes:
        """The request's body."""
        ...

    async def ask(self, turn: Turn, body: bytes | None = None) -> Sample:
        """Sends one request."""
        ...


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a sweep: `concurrency` sessions at once, or `rate` sessions a second; neither: the trace's
    arrivals.
    """

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}"
        return "the trace's arrivals" if self.rate is None else f"{self.rate:g} sessions/s"

    def describe(self) -> dict[str, Any]:
        """As sglang.bench_serving names it."""
        if self.concurrency is not None:
            return {"request_rate": math.inf, "max_concurrency": self.concurrency}
        return {"request_rate": "trace" if self.rate is None else self.rate, "max_concurrency": None}


@dataclass(slots=True)
class Round:
    """Samples by session and turn (a session that failed ends early), and seconds from first send to last
    byte. `planned`: turns of all sessions, asked or not; None: as many as there are samples.
    """

    samples: list[list[Sample]]
    seconds: float
    planned: int | None = None


Done = Callable[[Sample], None]


async def run_round(
    client: Asker, load: Load, point: Point, seed: object, done: Done = lambda _: None
) -> Round:
    """Sends everything and returns when the last answer ended."""
    for turn in load.prelude:
        filled = await client.ask(turn)
        if filled.error:
            raise RuntimeError(
                f"the round's prelude failed, so its cache is not what it says: {filled.error}"
            )
    prepared = [[(turn, client.encode(turn)) for turn in session.turns] for session in load.sessions]
    samples: list[list[Sample]] = [[] for _ in prepared]

    async def one(index: int, turns: Sequence[Prepared]) -> None:
        for turn, body in turns:
            if samples[index] and samples[index][-1].error:
                return
            sample = await client.ask(turn, body)
            samples[index].append(sample)
            done(sample)

    began = time.perf_counter()
    for phase in _phases(prepared, load.apart):
        jobs = [lambda i=i, turns=turns: one(i, turns) for i, turns in enumerate(phase)]
        if point.concurrency is not None:
            await _closed(jobs, point.concurrency)
        else:
            await _open(jobs, arrivals(load.sessions, point.rate, seed))
    return Round(samples, time.perf_counter() - began, sum(map(len, prepared)))


def _phases(prepared: Sequence[Sequence[Prepared]], apart: bool) -> list[list[Sequence[Prepared]]]:
    if not apart:
        return [list(prepared)]
    longest = max(map(len, prepared), default=0)
    return [[turns[i : i + 1] for turns in prepared] for i in range(longest)]


async def _closed(jobs: Sequence[Callable[[], Awaitable[None]]], concurrency: int) -> None:
    waiting = deque(jobs)

    async def worker() -> None:
        while waiting:
            await waiting.popleft()()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(jobs))):
            group.create_task(worker())


async def _open(jobs: Sequence[Callable[[], Awaitable[None]]], at: Sequence[float]) -> None:
    began = time.perf_counter()

    async def later(job: Callable[[], Awaitable[None]], seconds: float) -> None:
        await asyncio.sleep(max(0.0, began + seconds - time.perf_counter()))
        await job()

    async with asyncio.TaskGroup() as group:
        for job, seconds in zip(jobs, at, strict=True):
            group.create_task(later(job, seconds))


def arrivals(sessions: Sequence[Session], rate: float | None, seed: object) -> list[float]:
    """Seconds from the start at which each session begins. Raises ValueError when neither a rate nor the
    sessions say.
    """
    if rate is None:
        found = [session.at_s for session in sessions if session.at_s is not None]
        if len(found) != len(sessions):
            raise ValueError("--workload has no arrival times of its own; give --concurrency or --rate")
        return found
    rng = random.Random(f"arrivals:{seed}")
    at, clock = [], 0.0
    for _ in sessions:
        at.append(clock)
        clock += rng.expovariate(rate)
    return at
