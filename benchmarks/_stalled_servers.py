"""The servers of `stalled_valkey` over one Valkey: A gets first turns; one or more B get second turns."""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import orjson

from benchmarks import _stalled_signals as signals
from benchmarks._stalled_turns import Conversation, Stalls, Turn, figures, schedule, send, times

PAGE = 64
TAIL = 40  # tokens that turn two adds
ANSWER = 2
# Small enough to prefill a turn in a fraction of a second on two cores; index top-k 64, so every turn is beyond it.
MODEL = ("--dtype", "float32", "--layers", "2", "--experts", "4", "--experts-per-token", "2", "--heads", "2")
SERVER = (
    *("--skip-server-warmup", "--enable-cache-report", "--enable-metrics", "--context-length", "2048"),
    *("--chunked-prefill-size", "1024", "--glm-cache-pool-gb", "0.5"),
)
_SCRAPED_EVERY = 1.2  # seconds; the servers bring their metrics up to date once a second
_QUEUES_READ_EVERY = 2.1  # seconds: no part of a period of stalls, so that some are read late in one

_LEFT_ALONE = 30.0  # seconds that a store which is there is left alone, at most
_SETTLING = 1_000  # salt of prompts that belong to no run

Sample = Counter[str]


def deadline_s(wait: str) -> float:
    """`--glm-cache-wait` in seconds."""
    from glm_sglang import settings
    from glm_sglang.cache import options

    seconds = options.read({settings.CACHE_WAIT.name: wait}).wait_s
    return math.inf if seconds is None else seconds


class Bench:
    """Servers and a Valkey, for as many runs as are asked for. Each B is asked every second turn, at the same moment."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack, waits: Sequence[str]) -> None:
        """waits: `--glm-cache-wait` of each B; A has the first of them. None is given to a server whose default it is."""
        from glm_connectors.valkey_store import EmbeddedServer

        from glm_sglang import settings
        from glm_sglang.serving import Server
        from glm_sglang.tiny_model.__main__ import main as make_model

        self.cached_tokens = args.pages * PAGE
        self.waits = list(waits)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.model, self.audit = folder / "model", folder / "audit"
        if make_model([str(self.model), *MODEL]) != 0:
            raise SystemExit(1)
        self.valkey = stack.enter_context(EmbeddedServer())
        threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
        env = {"GLM_SGLANG_CACHE_AUDIT": str(self.audit), "OMP_NUM_THREADS": threads}
        self.servers = []
        for name, wait in (("a", waits[0]), *((f"b-{wait}", wait) for wait in waits)):
            own = () if wait == settings.CACHE_WAIT.default else ("--glm-cache-wait", wait)
            flags = (*SERVER, "--glm-cache-url", self.valkey.url, *own)
            self.servers.append(Server(self.model, flags, name=f"stalled-{name}", env=env))
        for server in self.servers:
            stack.callback(server.stop)
            server.start()
        for server in self.servers:
            server.wait_ready()
        # Ended here before the servers do (5 s): a request on a connection that is being closed is lost.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)
        self.clients = [
            stack.enter_context(httpx.Client(base_url=s.url, timeout=120, trust_env=False, limits=limits))
            for s in self.servers
        ]
        self.pages_hit = 0
        self._fresh = 0
        self._warm_up()

    def _warm_up(self) -> None:
        """What the first request of a kind makes is made now: cold prompts, and hits from Valkey."""
        seconds = range(1, len(self.servers))
        for seed in (-1, -2):
            self.ask(0, self.prompt(seed, 0))
        time.sleep(1.0)  # until they are in Valkey
        for server in seconds:
            for seed in (-1, -2):
                self.ask(server, self.prompt(seed, 0, second=True))
            for seed in (-3, -4):
                self.ask(server, self.prompt(seed * (server + 1), 1))

    def _settle(self) -> None:
        """Nothing of the run before is left: every breaker is closed again, by operations if need be. RuntimeError
        where one is not after as long as a breaker may leave a store alone, and a half more."""
        ends = time.monotonic() + 1.5 * _LEFT_ALONE
        while True:
            states = [
                value
                for server in range(len(self.servers))
                for key, value in self.metrics(server).items()
                if key.startswith("cache_breaker_state")
            ]
            if not any(states):
                return
            if time.monotonic() > ends:
                raise RuntimeError(f"Valkey runs, and breakers stay open: {states}")
            for server in range(len(self.servers)):
                self._fresh += 1
                self.ask(server, self.prompt(self._fresh, _SETTLING))

    def prompt(self, conversation: int, salt: int, second: bool = False) -> list[int]:
        """Tokens of a first turn, or of the second, which begins with them. No two conversations share a page."""
        generator = random.Random(conversation * 1_000_003 + salt)
        return [generator.randrange(32, 127) for _ in range(self.cached_tokens + 1 + (TAIL if second else 0))]

    def ask(self, server: int, ids: list[int]) -> Turn:
        """One turn, answered. RuntimeError for an answer that is none."""
        sampling = {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
        arrived = time.monotonic()
        first, last = 0.0, b""
        with self.clients[server].stream("POST", "/generate", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    first = first or time.monotonic()
                    last = line[6:].encode()
        ended = time.monotonic()
        answer = orjson.loads(last or b"{}")
        output = tuple(answer.get("output_ids", ()))
        if len(output) != ANSWER:
            raise RuntimeError(f"expected {ANSWER} tokens of {self.servers[server].name}, found {answer}")
        hit = min(answer["meta_info"]["cached_tokens"], self.cached_tokens)
        return Turn(arrived, first - arrived, ended - arrived, hit, output)

    def run(
        self, args: argparse.Namespace, *, turns: int, stall: float, together: int, salt: int, oracle: bool
    ) -> dict[str, Any]:
        """`turns` conversations, and the figures of this run alone, by `--glm-cache-wait` of the server B."""
        arrivals = schedule(turns, args.rate, together, args.think, args.period, args.seed)
        self._settle()
        before = [self.metrics(server) for server in range(len(self.servers))]
        stalls = Stalls(self.valkey.pid, stall, args.period)
        queues = signals.Longest(self._queued, _QUEUES_READ_EVERY)
        began = time.monotonic()
        stalls.start()
        queues.start()
        try:
            firsts, seconds, late = self._send(arrivals, salt)
        finally:
            stalls.end()
            queue_most = queues.end()
        took = time.monotonic() - began
        after = [self.metrics(server) for server in range(len(self.servers))]
        queue_at_end = signals.gauge(after, signals.QUEUE)
        arms: dict[str, Any] = {}
        for number, (wait, found) in enumerate(zip(self.waits, seconds, strict=True), start=1):
            self.pages_hit += sum(turn.hit_tokens for turn in found) // PAGE
            arms[wait] = figures(found, stalls.intervals, self.cached_tokens, deadline_s(wait))
            arms[wait]["expired_waits"] = moved(
                before[number : number + 1], after[number : number + 1], "cache_expired_waits_total"
            )
            arms[wait]["prefetch_ends"] = ends(before[number], after[number])
        result: dict[str, Any] = {
            "stall_s": stall,
            "together": together,
            "stalls": len(stalls.intervals),
            "stalled_share": round(sum(ended - start for start, ended in stalls.intervals) / took, 3),
            "seconds": round(took, 1),
            "second_turns_behind_a_late_first": late,
            "first_turns_ttft_s": times(firsts),
            "scheduler_stall_p99_ms": self._p99_ms(before, after, "running_seconds"),
            "scheduler_stall_by_the_wall_p99_ms": self._p99_ms(before, after, "seconds"),
            "dropped_saves": moved(before, after, "cache_dropped_saves_total"),
            "failed_operations": moved(before, after, "cache_store_failures_total"),
            "zero_stores": sum(moved(before, after, name) for name in signals.ZERO_STORES),
            "queue_most": max(queue_most, queue_at_end),
            "queue_at_end": queue_at_end,
            "live_workers": signals.gauge(after, "lmcache_live_workers"),
            "expected_workers": signals.gauge(after, "lmcache_expected_workers"),
            "by_wait": arms,
        }
        if len(seconds) > 1:
            result["answers_that_differ"] = sum(
                len({arm[c.number].answer for arm in seconds}) > 1 for c in arrivals
            )
        if oracle:
            checked, wrong = self._check_answers(seconds[0], salt)
            result |= {"answers_checked": checked, "answers_wrong": wrong}
        return result

    def _send(self, arrivals: Sequence[Conversation], salt: int) -> tuple[list[Turn], list[list[Turn]], int]:
        """First turns; second turns by server B, in the order of conversations; second turns that had to wait for their
        first's answer, and so came later than scheduled."""
        late = 0
        with ThreadPoolExecutor(256) as workers:
            firsts: dict[int, Future[Turn]] = {}
            seconds: list[dict[int, Future[Turn]]] = [{} for _ in self.waits]

            def first(conversation: int) -> None:
                firsts[conversation] = workers.submit(self.ask, 0, self.prompt(conversation, salt))

            def after_first(server: int, conversation: int, ids: list[int]) -> Turn:
                firsts[conversation].result()
                return self.ask(server, ids)

            def second(conversation: int) -> None:
                nonlocal late
                late += not firsts[conversation].done()
                ids = self.prompt(conversation, salt, second=True)
                for server, found in enumerate(seconds, start=1):
                    found[conversation] = workers.submit(after_first, server, conversation, ids)
                if conversation % 50 == 49:
                    print(f"  second turn {conversation + 1}", file=sys.stderr, flush=True)

            send(
                [(c.first, partial(first, c.number)) for c in arrivals]
                + [(c.second, partial(second, c.number)) for c in arrivals]
            )
            return (
                [firsts[c.number].result() for c in arrivals],
                [[found[c.number].result() for c in arrivals] for found in seconds],
                late,
            )

    def _check_answers(self, turns: Sequence[Turn], salt: int) -> tuple[int, int]:
        """A dozen of the answers against transformers' on the same weights: what a cold server says."""
        from glm_sglang.oracle import Oracle

        oracle = Oracle(self.model)
        sample = range(0, len(turns), max(1, len(turns) // 12))
        wrong = sum(
            list(turns[c].answer) != oracle.greedy(self.prompt(c, salt, second=True), ANSWER) for c in sample
        )
        return len(sample), wrong

    def check_pages(self) -> dict[str, int]:
        """Every page that any server has loaded, against the bytes under which some server saved it.

        RuntimeError where a hit was reported whose load is not among them.
        """
        from glm_sglang.cache.audit import mismatches

        checked, wrong = mismatches(self.audit)
        if checked < self.pages_hit:
            raise RuntimeError(f"{self.pages_hit} pages were reported as hits, {checked} were checked")
        return {"pages_hit": self.pages_hit, "pages_checked": checked, "pages_wrong": len(wrong)}

    @staticmethod
    def _p99_ms(before: Sequence[Sample], after: Sequence[Sample], clock: str) -> float:
        """Of the worst server: of its steps with work in the cache, or of those that only held requests back, whichever
        are longer. RuntimeError where no work was observed.

        clock: how the metrics' names end.
        """
        if not moved(before, after, f"scheduler_stall_{clock}_count"):
            raise RuntimeError(f"the servers have observed no scheduler_stall_{clock}")
        return round(
            1e3
            * max(
                p99(earlier, later, f"scheduler_{kind}_{clock}")
                for earlier, later in zip(before, after, strict=True)
                for kind in ("stall", "hold")
            ),
            3,
        )

    def metrics(self, server: int) -> Sample:
        """Our samples of one scrape, by name and labels."""
        if server == 0:
            time.sleep(_SCRAPED_EVERY)
        return self._scrape(server)

    def _queued(self) -> int:
        """Jobs that wait in the servers' executors for a worker, those whose caller has left apart."""
        return signals.gauge([self._scrape(server) for server in range(len(self.servers))], signals.QUEUE)

    def _scrape(self, server: int) -> Sample:
        found: Sample = Counter()
        for line in self.clients[server].get("/metrics").text.splitlines():
            if line.startswith("glm_sglang:"):
                name, _, value = line.rpartition(" ")
                found[name.removeprefix("glm_sglang:")] = float(value)  # type: ignore[assignment]
        return found


def moved(before: Sequence[Sample], after: Sequence[Sample], name: str) -> int:
    """How much a counter grew, over its children and the servers."""
    grown = 0.0
    for earlier, later in zip(before, after, strict=True):
        grown += sum(value - earlier[key] for key, value in later.items() if key.startswith(name))
    return round(grown)


def ends(before: Sample, after: Sample) -> dict[str, int]:
    """How prefetches ended, those that occurred."""
    found: dict[str, int] = {}
    for key, value in after.items():
        if key.startswith("cache_prefetches_total") and (grown := round(value - before[key])):
            found[re.findall(r'end="(\w+)"', key)[0]] = grown
    return found


def p99(before: Sample, after: Sample, name: str = "scheduler_stall_seconds") -> float:
    """Upper bound, in seconds, of the bucket of a histogram that holds the 99th percentile."""
    buckets: list[tuple[float, float]] = []
    for key, value in after.items():
        if key.startswith(f"{name}_bucket"):
            bound = re.findall(r'le="([^"]+)"', key)[0]
            buckets.append((math.inf if bound == "+Inf" else float(bound), value - before[key]))
    buckets.sort()
    total = buckets[-1][1] if buckets else 0.0
    return next((bound for bound, count in buckets if total and count >= 0.99 * total), 0.0)
