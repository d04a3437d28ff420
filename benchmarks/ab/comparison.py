"""The comparison itself: warm-up, then rounds in which every endpoint is asked the same, in drawn order.

Several cases (plans) on the same running endpoints take turns: a block of each, then the next block of each.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import secrets
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from benchmarks import _result
from benchmarks.ab import records
from benchmarks.ab.client import Client
from benchmarks.ab.endpoints import refuse_shared_caches
from benchmarks.ab.load import Point, Round, run_round
from benchmarks.ab.progress import Board
from benchmarks.ab.running import Between, Endpoint, EndpointError, hold
from benchmarks.ab.starting import FAILURES, Starting, each, judge, say, started
from benchmarks.workloads import Load, Workload
from benchmarks.workloads.text import BYTES_PER_TOKEN, Text

_T = TypeVar("_T")
_CALIBRATION_BYTES, _LEAST_CALIBRATION_BYTES = 8192, 512


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


def drawn_orders(count: int, rounds: int, rng: random.Random) -> list[list[int]]:
    """In which order `count` endpoints are asked in each of `rounds`: rotations of one drawn order, each of them as
    often as any other (by one at most), themselves in drawn order.

    Taken in turn, they would have the last of a round be the first of the next: what is slow for some seconds would
    meet one endpoint twice, and rounds would not be independent.
    """
    names = rng.sample(range(count), count)
    starts = [i % count for i in range(rounds)]
    rng.shuffle(starts)
    return [names[start:] + names[:start] for start in starts]


@functools.cache
def measured_by() -> dict[str, Any]:
    """The commit, and of the machine what makes its figures: rounds of another one are not this run's."""
    name, about = _result.machine()
    machine = {key: about.get(key) for key in ("cpu", "cores", "gpu")}
    return {"commit": _result.commit(), "machine": {"name": name, **machine}}


def run_async(work: Coroutine[Any, Any, _T]) -> _T:
    """On uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def calibrate(endpoint: Endpoint, files: Sequence[str]) -> float:
    """Bytes of this text that the endpoint counts as a token. Raises EndpointError when it doesn't count."""
    # No token is shorter than a byte, so this many fit into the context. What a server's KV holds it need not say: its
    # refusal does.
    size = min(_CALIBRATION_BYTES, (endpoint.context or 2 * _CALIBRATION_BYTES) // 2)
    while True:
        text = Text(BYTES_PER_TOKEN, files).exactly(size, "calibration")
        body = {"model": endpoint.model, "prompt": text, "max_tokens": 1, "temperature": 0}
        try:
            answer = httpx.post(f"{endpoint.url}/v1/completions", json=body, timeout=600, trust_env=False)
            if answer.status_code == 400 and size > _LEAST_CALIBRATION_BYTES:
                size //= 4
                continue
            answer.raise_for_status()
            return round(len(text.encode()) / int(answer.json()["usage"]["prompt_tokens"]), 3)
        except (httpx.HTTPError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise EndpointError(
                f"{endpoint.spec.name}: cannot count tokens ({error}); give --bytes-per-token"
            ) from None


def discipline(plan: Plan, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """What was done so that no endpoint had an advantage: for the record."""
    return {
        "order": f"every endpoint gets the same requests, in blocks of {plan.block} round(s); "
        + (
            "who is last in one is first in the next"
            if plan.between == "ended"
            else "who is first is drawn, each endpoint equally often"
        ),
        "warm_up": f"{plan.warm_up} session(s)"
        + (", or as many as are asked at once where that is more," if plan.warm_up else "")
        + f" after each start and at each new point, {plan.round_warm_up} before each further round, of other texts, "
        "not counted",
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
    """Runs a plan, by itself or in turns with others (`Cases`). What an earlier run left in the output file is not asked
    again, if this commit measured it on this machine among the same endpoints. `case`: what the plan is called, where
    there are several; `among`: names of all endpoints of the run, where some of them did not start.
    """

    def __init__(
        self,
        plan: Plan,
        endpoints: Sequence[Endpoint],
        quiet: bool = False,
        case: str = "",
        among: Sequence[str] = (),
    ) -> None:
        self.plan = plan
        self.endpoints = list(endpoints)
        self.case = case
        self.among = sorted(among or [endpoint.spec.name for endpoint in endpoints])
        self.total = len(endpoints) * plan.rounds * len(plan.points)
        self.board = Board([endpoint.spec.name for endpoint in endpoints], self.total, quiet)
        self._warmed: set[tuple[str, str, Point]] = set()
        self._texts: dict[str, str] = {}

    def asked(self, point: Point, number: int) -> str:
        """The fingerprint of one round, the same at every endpoint."""
        plan = self.plan
        work = (plan.workload.name, plan.workload.parameters(), str(point), number, plan.seed)
        how = plan.between, plan.warm_up, plan.round_warm_up
        return records.fingerprint("salted", work, how, self.among, measured_by())

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

    def done(self) -> dict[str, dict[str, Any]]:
        """What the output file holds, by fingerprint; a round that was begun keeps its texts."""
        done = {r["glm_ab"]["fingerprint"]: r for r in records.read(self.plan.output)}
        self._texts |= {r["glm_ab"]["asked"]: r["glm_ab"]["texts"] for r in done.values()}
        return done

    def unfinished(self) -> list[Endpoint]:
        """The endpoints that an earlier run left something to ask of; what the others said of themselves is read
        back from the records.
        """
        done, found = self.done(), []
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
        return Cases({self.case: self}).run()[self.case]

    def order(self, index: int) -> list[Endpoint]:
        """Who is asked when in a block: drawn for all of a point by the seed. Endpoints that must be started each time
        turn round instead: the last of a block is the first of the next, and needs no start.
        """
        plan = self.plan
        if plan.between == "ended":
            return self.endpoints[:: -1 if index % 2 else 1]
        rows = -(-plan.rounds // plan.block)
        point, turn = divmod(index, rows)
        rng = random.Random(f"order:{plan.seed}:{self.case}:{point}")
        return [self.endpoints[i] for i in drawn_orders(len(self.endpoints), rows, rng)[turn]]

    def ask(
        self,
        endpoint: Endpoint,
        point: Point,
        number: int,
        position: int,
        done: dict[str, dict[str, Any]],
        loads: dict[tuple[Point, int], Load],
    ) -> None:
        """One round at one endpoint, unless it is `done`, where its record goes. `position`: who was asked before."""
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
        named = f"{self.case}, " if self.case else ""
        what = f"{named}{point}, round {number + 1} of {self.plan.rounds}"
        self.board.begin(name, what, sum(len(session.turns) for session in load.sessions))
        self.warm(endpoint, point, number)
        endpoint.flush()

        async def work() -> Round:
            async with self._client(endpoint) as client:
                seed = f"{self.plan.seed}:{number}"
                return await run_round(client, load, point, seed, lambda s: self.board.sample(name, s))

        return run_async(work())

    def _client(self, endpoint: Endpoint) -> Client:
        return Client(endpoint.url, endpoint.model, continuous_usage=self.plan.continuous_usage)

    def warm(self, endpoint: Endpoint, point: Point, number: int) -> None:
        """Asks sessions that don't count, as many at once as the round will. Before an endpoint's first round at a point,
        and after each start, enough to have so many under way: the first batch of a size compiles and captures for it.
        Raises EndpointError when none is answered.
        """
        new = (endpoint.spec.name, endpoint.url, point)
        wanted = self.plan.round_warm_up
        if new not in self._warmed:
            self._warmed.add(new)
            wanted = self.plan.warm_up and max(self.plan.warm_up, point.concurrency or 1)
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


class Cases:
    """Several comparisons of the same endpoints in turns, so that each has some rounds whenever the time is over.

    left: whether there is time to begin a block; one that has begun is asked of every endpoint. note: is told after
    every block what there is so far, by case. fails: is told of an endpoint that cannot be asked; where it returns, the
    others go on without, unless it says that this one only lost the block, and goes on with the next.
    """

    def __init__(
        self,
        comparisons: Mapping[str, Comparison],
        left: Callable[[], bool] = lambda: True,
        note: Callable[[dict[str, list[dict[str, Any]]]], None] = lambda records: None,
        fails: Callable[[Endpoint, Exception], bool | None] | None = None,
    ) -> None:
        self.comparisons = dict(comparisons)
        self.left = left
        self.note = note
        self.fails = fails
        self.reused = 0  # rounds of an earlier run, at one endpoint each

    def turns(self) -> Iterator[tuple[int, list[tuple[Comparison, list[tuple[Point, int]]]]]]:
        """What is asked of an endpoint before the next one's turn, in order: one case's block; of endpoints that are
        started each time every case's.
        """
        rows = [[(one, cells) for cells in blocks(one.plan)] for one in self.comparisons.values()]
        for index, turn in enumerate(itertools.zip_longest(*rows)):
            cases = [case for case in turn if case is not None]
            if any(one.plan.between == "ended" for one, _ in cases):
                yield index, cases
            else:
                yield from ((index, [case]) for case in cases)

    def run(self) -> dict[str, list[dict[str, Any]]]:
        """All records by case, old ones and new. Raises EndpointError, ServerError, RuntimeError."""
        comparisons = self.comparisons.values()
        done: dict[str, dict[str, Any]] = {}
        for one in comparisons:
            done |= one.done()
        marks = [mark for one in comparisons for mark in one.marks()]
        self.reused = sum(mark in done for mark in marks)
        if done:
            say(
                f"{next(iter(comparisons)).plan.output}: {self.reused} of {len(marks)} rounds of this run are in it and "
                f"not asked again; {len(done.keys() - set(marks))} others, of another commit, machine, set of endpoints "
                "or flags, are not used; remove the file to measure all anew"
            )
        with next(iter(comparisons)).board.shown():
            for index, turn in self.turns():
                self._turn(index, turn, done)
        return self._records(done)

    def _turn(
        self,
        index: int,
        turn: Sequence[tuple[Comparison, list[tuple[Point, int]]]],
        done: dict[str, dict[str, Any]],
    ) -> None:
        endpoints = turn[0][0].order(index)
        asked = [one.mark(endpoint, *cell) for one, cells in turn for cell in cells for endpoint in endpoints]
        if not set(asked) <= done.keys() and not self.left():
            return
        loads: list[dict[tuple[Point, int], Load]] = [{} for _ in turn]
        for position, endpoint in enumerate(endpoints):
            try:
                for (one, cells), load in zip(turn, loads, strict=True):
                    for point, number in cells:
                        one.ask(endpoint, point, number, position, done, load)
            except FAILURES as error:
                if self.fails is None:
                    raise
                if self.fails(endpoint, error):
                    continue
                for one in self.comparisons.values():
                    one.endpoints = [other for other in one.endpoints if other is not endpoint]
        self.note(self._records(done))

    def _records(self, done: Mapping[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        found = {name: one.marks() for name, one in self.comparisons.items()}
        return {name: [done[mark] for mark in marks if mark in done] for name, marks in found.items()}


@dataclass(frozen=True)
class Outcome:
    """What a comparison of several cases came to. left_out: endpoints that did not start, and why; reused: rounds that an
    earlier run measured; lost: blocks that an endpoint failed at and went on.
    """

    plans: dict[str, Plan]
    records: dict[str, list[dict[str, Any]]]
    left_out: dict[str, str] = field(default_factory=dict)
    reused: int = 0
    lost: list[str] = field(default_factory=list)


def compare(
    endpoints: Sequence[Endpoint],
    bytes_per_token: float | None,
    files: Sequence[str],
    make: Callable[[float], Plan],
    between: Between,
) -> tuple[Plan, list[dict[str, Any]]]:
    """`compare_cases` of one plan, the endpoints started one after the other."""
    found = compare_cases(endpoints, bytes_per_token, files, {"": make}, Starting(between))
    return found.plans[""], found.records[""]


def compare_cases(
    endpoints: Sequence[Endpoint],
    bytes_per_token: float | None,
    files: Sequence[str],
    makes: Mapping[str, Callable[[float], Plan]],
    starting: Starting,
    left: Callable[[], bool] = lambda: True,
    note: Callable[[Outcome], None] = lambda outcome: None,
    ending: Callable[[], None] = lambda: None,
) -> Outcome:
    """Starts the endpoints that are still needed, runs the plans in turns, stops them.

    `makes` get the bytes of a token, which an endpoint is asked for where they are not given. left, note: see `Cases`.
    ending: called before the endpoints are stopped, whatever ends the run. Side by side, an endpoint that fails and still
    answers loses that block; the second time it is left out.
    Raises EndpointError, ServerError, RuntimeError, SpecError.
    """
    refuse_shared_caches([endpoint.spec for endpoint in endpoints])
    starting.check([endpoint.spec for endpoint in endpoints])
    needed = list(endpoints)
    among = [endpoint.spec.name for endpoint in endpoints]
    if bytes_per_token:
        planned = [Comparison(make(bytes_per_token), endpoints, quiet=True) for make in makes.values()]
        wanted = [endpoint for one in planned for endpoint in one.unfinished()]
        needed = [endpoint for endpoint in endpoints if endpoint in wanted]
    with ExitStack() as stack:
        left_out = started(needed, stack, starting)
        stack.callback(ending)
        judge(left_out, endpoints, starting.baseline)
        running = [endpoint for endpoint in needed if endpoint.spec.name not in left_out]
        size = bytes_per_token or calibrate(running[0], files)
        plans = {name: make(size) for name, make in makes.items()}
        for plan, endpoint in itertools.product(plans.values(), running):
            if endpoint.context and plan.workload.largest_prompt() > endpoint.context:
                raise EndpointError(
                    f"{endpoint.spec.name} takes requests of {endpoint.context} tokens; --workload "
                    f"{plan.workload.name} has some of {plan.workload.largest_prompt()}: make them shorter"
                )
        kept = [endpoint for endpoint in endpoints if endpoint.spec.name not in left_out]
        comparisons = {name: Comparison(plan, kept, case=name, among=among) for name, plan in plans.items()}
        if starting.together:
            left_out |= warm_together(list(comparisons.values()), running)
            judge(left_out, endpoints, starting.baseline)
            kept = [endpoint for endpoint in kept if endpoint.spec.name not in left_out]
            for one in comparisons.values():
                one.endpoints = kept
        one_board(list(comparisons.values()))
        lost: dict[str, str] = {}

        def outcome(found: dict[str, list[dict[str, Any]]]) -> Outcome:
            lines = [f"{name}: {why}" for name, why in lost.items()]
            return Outcome(plans, found, left_out, cases.reused, lines)

        def fails(endpoint: Endpoint, error: Exception) -> bool:
            name, why = endpoint.spec.name, str(error) or type(error).__name__
            if name not in lost and endpoint.answers():
                lost[name] = why
                say(f"{name} failed, answers still, and is asked the next rounds: {why}")
                return True
            left_out[name] = why
            judge(left_out, endpoints, starting.baseline)
            say(f"{name} is left out: {why}")
            endpoint.stop()
            return False

        cases = Cases(
            comparisons,
            left,
            lambda found: note(outcome(found)),
            fails if starting.together else None,
        )
        return outcome(cases.run())


def one_board(comparisons: Sequence[Comparison]) -> None:
    """One board that counts the rounds of all."""
    names = [endpoint.spec.name for endpoint in comparisons[0].endpoints]
    rounds = sum(one.plan.rounds * len(one.plan.points) for one in comparisons)
    board = Board(names, len(names) * rounds)
    for one in comparisons:
        one.board = board


def warm_together(comparisons: Sequence[Comparison], endpoints: Sequence[Endpoint]) -> dict[str, str]:
    """The warm-up after a start, of all endpoints at once: first requests compile kernels, for minutes where there
    are none yet. Returns those that failed, which are stopped, and why.
    """

    def warm(endpoint: Endpoint) -> None:
        endpoint.resume()
        for one in comparisons:
            for point in one.plan.points:
                one.warm(endpoint, point, 0)
        say(f"{endpoint.spec.name} is warm")

    return each(endpoints, warm)
