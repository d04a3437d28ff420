"""The comparison itself: warm-up, then rounds in which every endpoint is asked the same, in alternating order."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from benchmarks.ab import records
from benchmarks.ab.client import Client
from benchmarks.ab.endpoints import refuse_shared_caches
from benchmarks.ab.load import Point, Round, run_round
from benchmarks.ab.progress import Board
from benchmarks.ab.running import Between, Endpoint, EndpointError, hold
from benchmarks.workloads import Load, Workload
from benchmarks.workloads.text import BYTES_PER_TOKEN, Text

_T = TypeVar("_T")
_CALIBRATION_BYTES = 8192


@dataclass(frozen=True)
class Plan:
    """How often, how, and where to."""

    workload: Workload
    points: Sequence[Point]
    rounds: int
    output: Path
    warm_up: int = 2
    round_warm_up: int = 1
    between: Between = "paused"
    continuous_usage: bool = True
    seed: int = 1
    block: int = 1  # rounds that an endpoint is asked in a row


def blocks(plan: Plan) -> list[list[tuple[Point, int]]]:
    """The rounds of a plan in the order of asking; every endpoint is asked a block before the next one begins.

    Where endpoints are started each time, a block holds all points of the sweep.
    """
    starts = range(0, plan.rounds, plan.block)
    rows = [range(start, min(start + plan.block, plan.rounds)) for start in starts]
    if plan.between == "ended":
        return [[(point, number) for point in plan.points for number in row] for row in rows]
    return [[(point, number) for number in row] for point in plan.points for row in rows]


def run_async(work: Coroutine[Any, Any, _T]) -> _T:
    """On uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def calibrate(endpoint: Endpoint, files: Sequence[str]) -> float:
    """Bytes of this text that the endpoint counts as a token. Raises EndpointError when it doesn't count."""
    # No token is shorter than a byte, so this many fit in any case.
    size = min(_CALIBRATION_BYTES, (endpoint.context or 2 * _CALIBRATION_BYTES) // 2)
    text = Text(BYTES_PER_TOKEN, files).exactly(size, "calibration")
    body = {"model": endpoint.model, "prompt": text, "max_tokens": 1, "temperature": 0}
    try:
        answer = httpx.post(f"{endpoint.url}/v1/completions", json=body, timeout=600, trust_env=False)
        answer.raise_for_status()
        return round(len(text.encode()) / int(answer.json()["usage"]["prompt_tokens"]), 3)
    except (httpx.HTTPError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise EndpointError(
            f"{endpoint.spec.name}: cannot count tokens ({error}); give --bytes-per-token"
        ) from None


def discipline(plan: Plan, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """What was done so that no endpoint had an advantage: for the record."""
    return {
        "order": f"every endpoint gets the same requests, in blocks of {plan.block} round(s); who is first changes",
        "warm_up": f"{plan.warm_up} session(s) after each start, {plan.round_warm_up} before each round, of "
        "other texts, not counted",
        "flush": {endpoint.spec.name: endpoint.flushed for endpoint in endpoints},
        "idle_endpoints": {
            "paused": "processes of the others are stopped (SIGSTOP) while one is measured",
            "running": "the others keep running while one is measured",
            "ended": "only the measured one exists; it is started for every round",
        }[plan.between],
        "texts": "no two rounds, points or runs share a prefix: each round's are drawn by a salt of its own; answers "
        "between turns are given, not the endpoint's own",
        "answers": "greedy, ignore_eos, a fixed number of tokens",
    }


class Comparison:
    """Runs a plan. What an earlier run left in the output file is not asked again."""

    def __init__(self, plan: Plan, endpoints: Sequence[Endpoint], quiet: bool = False) -> None:
        self.plan = plan
        self.endpoints = list(endpoints)
        total = len(endpoints) * plan.rounds * len(plan.points)
        self.board = Board([endpoint.spec.name for endpoint in endpoints], total, quiet)
        self._warmed: set[tuple[str, str]] = set()
        self._texts: dict[str, str] = {}

    def asked(self, point: Point, number: int) -> str:
        """The fingerprint of one round, the same at every endpoint."""
        plan = self.plan
        work = (plan.workload.name, plan.workload.parameters(), str(point), number, plan.seed)
        return records.fingerprint("salted", work, plan.between, plan.warm_up, plan.round_warm_up)

    def mark(self, endpoint: Endpoint, point: Point, number: int) -> str:
        """The fingerprint of one round at one endpoint."""
        return records.fingerprint(self.asked(point, number), endpoint.spec.name, endpoint.spec.describe())

    def texts(self, point: Point, number: int) -> str:
        """The salt of a round's texts: drawn when it is asked first, the same at every endpoint.

        A cache that outlives a flush, Valkey say, has none of them from another round, point or run.
        """
        return self._texts.setdefault(self.asked(point, number), secrets.token_hex(8))

    def marks(self) -> list[str]:
        """Every round at every endpoint."""
        return [
            self.mark(endpoint, point, number)
            for endpoint in self.endpoints
            for point in self.plan.points
            for number in range(self.plan.rounds)
        ]

    def _done(self) -> dict[str, dict[str, Any]]:
        done = {r["glm_ab"]["fingerprint"]: r for r in records.read(self.plan.output)}
        self._texts |= {r["glm_ab"]["asked"]: r["glm_ab"]["texts"] for r in done.values()}
        return done

    def unfinished(self) -> list[Endpoint]:
        """The endpoints that an earlier run left something to ask of; what the others said of themselves is read
        back from the records.
        """
        done, found = self._done(), []
        for endpoint in self.endpoints:
            marks = [
                self.mark(endpoint, point, n) for point in self.plan.points for n in range(self.plan.rounds)
            ]
            if set(marks) <= set(done):
                endpoint.about = done[marks[0]]["server_info"]
            else:
                found.append(endpoint)
        return found

    def run(self) -> list[dict[str, Any]]:
        """All records of the plan, old ones and new. Raises EndpointError, ServerError, RuntimeError."""
        marks = self.marks()
        done = self._done()
        if old := sum(mark in done for mark in marks):
            where = self.plan.output
            print(
                f"{old} of {len(marks)} rounds are in {where}; remove it to measure them anew",
                file=sys.stderr,
            )
        with self.board.shown():
            for index, cells in enumerate(blocks(self.plan)):
                loads: dict[tuple[Point, int], Load] = {}
                for position, endpoint in enumerate(self._order(index)):
                    for point, number in cells:
                        self._round(endpoint, point, number, position, done, loads)
        return [done[mark] for mark in marks]

    def _order(self, index: int) -> list[Endpoint]:
        """Who is asked when in a block. Endpoints that must be started each time turn round instead of rotating:
        the last of a block is the first of the next, and needs no start.
        """
        if self.plan.between == "ended":
            return self.endpoints[:: -1 if index % 2 else 1]
        turn = index % len(self.endpoints)
        return self.endpoints[turn:] + self.endpoints[:turn]

    def _round(
        self,
        endpoint: Endpoint,
        point: Point,
        number: int,
        position: int,
        done: dict[str, dict[str, Any]],
        loads: dict[tuple[Point, int], Load],
    ) -> None:
        mark = self.mark(endpoint, point, number)
        name = endpoint.spec.name
        if mark in done:
            self.board.end(name, None)
            return
        asked, texts = self.asked(point, number), self.texts(point, number)
        if (point, number) not in loads:
            loads[point, number] = self.plan.workload.round(number, texts)
        load = loads[point, number]
        hold(endpoint, self.endpoints, self.plan.between)
        at = records.begin(self.plan.output, asked)
        result = self._ask(endpoint, load, point, number)
        kind = self.plan.workload.name
        record = records.line(name, kind, point, number, position, mark, result, endpoint.about, asked, texts)
        records.append(self.plan.output, record, at)
        done[mark] = record
        self.board.end(name, record["input_throughput"])

    def _ask(self, endpoint: Endpoint, load: Load, point: Point, number: int) -> Round:
        name = endpoint.spec.name
        what = f"{point}, round {number + 1} of {self.plan.rounds}"
        self.board.begin(name, what, sum(len(session.turns) for session in load.sessions))
        self._warm(endpoint, point, number)
        endpoint.flush()

        async def work() -> Round:
            async with self._client(endpoint) as client:
                seed = f"{self.plan.seed}:{number}"
                return await run_round(client, load, point, seed, lambda s: self.board.sample(name, s))

        return run_async(work())

    def _client(self, endpoint: Endpoint) -> Client:
        return Client(endpoint.url, endpoint.model, continuous_usage=self.plan.continuous_usage)

    def _warm(self, endpoint: Endpoint, point: Point, number: int) -> None:
        """Asks sessions that don't count, as many at once as the round will: more after a start than before another
        round.
        """
        started = (endpoint.spec.name, endpoint.url)
        wanted = self.plan.round_warm_up if started in self._warmed else self.plan.warm_up
        self._warmed.add(started)
        if not wanted:
            return
        salt = self.texts(point, number)
        drawn = (self.plan.workload.round(number, f"{salt}:warm{i}").sessions for i in range(wanted))
        sessions = tuple(itertools.islice(itertools.chain.from_iterable(drawn), wanted))

        async def work() -> Round:
            async with self._client(endpoint) as client:
                return await run_round(client, Load(sessions), Point(point.concurrency or 1), "warm")

        answers = [s for session in run_async(work()).samples for s in session]
        if answers and all(s.error for s in answers):
            raise EndpointError(
                f"{endpoint.spec.name}: every warm-up request failed, e.g. {answers[0].error}"
            )


def compare(
    endpoints: Sequence[Endpoint],
    bytes_per_token: float | None,
    files: Sequence[str],
    make: Callable[[float], Plan],
    between: Between,
) -> tuple[Plan, list[dict[str, Any]]]:
    """Starts the endpoints that are still needed, runs the plan, stops them.

    `make` gets the bytes of a token, which the first endpoint is asked for where they are not given. Raises
    EndpointError, ServerError, RuntimeError, SpecError.
    """
    refuse_shared_caches([endpoint.spec for endpoint in endpoints])
    needed = list(endpoints)
    if bytes_per_token:
        needed = Comparison(make(bytes_per_token), endpoints, quiet=True).unfinished()
    with ExitStack() as stack:
        started(needed, stack, between, lambda text: print(text, file=sys.stderr, flush=True))
        hold(needed[0] if needed else None, needed, between)
        plan = make(bytes_per_token or calibrate(endpoints[0], files))
        for endpoint in endpoints:
            if endpoint.context and plan.workload.largest_prompt() > endpoint.context:
                raise EndpointError(
                    f"{endpoint.spec.name} takes requests of {endpoint.context} tokens; --workload "
                    f"{plan.workload.name} has some of {plan.workload.largest_prompt()}: make them shorter"
                )
        return plan, Comparison(plan, endpoints).run()


def started(
    endpoints: Sequence[Endpoint], stack: ExitStack, between: Between, say: Callable[[str], None]
) -> None:
    """Starts all, one after the other, each paused before the next; of ended ones only the first. The stack stops
    them.
    """
    for endpoint in endpoints:
        stack.callback(endpoint.stop)
    for endpoint in endpoints if between != "ended" else endpoints[:1]:
        say(f"starting {endpoint.spec.name}")
        hold(None, endpoints, between)
        endpoint.start(lambda name, seconds, line: say(f"{name} {seconds:4.0f} s  {line[:100]}"))
