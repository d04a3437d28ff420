"""What does a page that is saved, looked up or fetched cost the scheduler's thread, in time of Python's interpreter?

A thread stands for the scheduler: it computes, in Python or in small torch operations, each of which lets go of the
interpreter as a kernel's launch does, and hands a block of pages at every step to the save queue, or asks the store
for them. Everything behind it is real (save queue, CPU pool, checksums, LMCache's repaired executor, a Valkey server),
but for the copies between device and host: pages hold what the pool's memory holds.

The thread has a core for itself, everything else, the server among it, has the others. So whenever it did not run, and
was not ready to, it waited for the interpreter: wall time less what /proc/PID/task/TID/schedstat counts as running and
as ready. That is `lost_us`, a page; `step_share` is the same of a step. `blocked` is how often it stood still, a page:
two of them are one turn of another thread, and beside a thread of the cache that runs for microseconds it is the turns
that cost. `calls_us` are its own calls, a page, waits left out; `threads_us` what the threads of the cache ran, with or
without the interpreter. On two cores the cache's threads share theirs with the server and with the kernel's copies, and
one that has the interpreter may have to wait for it: part of `lost_us` there, and not on a server's machine; `blocked`
does not depend on it. What is under way is bounded: a step that finds `QUEUED` blocks under way submits none, and only
pages that were submitted count.

Which lines have the interpreter, py-spy says: `py-spy record --gil --threads -- python -m
benchmarks.page_cost --only put --victims torch`.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import _result

TOKENS = 64  # in a page
INDEX_ROW = 132  # bytes a token of a layer's index keys
BLOCK = 32  # pages of a step: 2,048 tokens
# Of the pool: enough that all threads may have 8 MiB under way, as in any pool of a server, and five blocks.
POOL_BYTES, POOL_BLOCKS = 17 * (8 << 20), 5
QUEUED = 2  # blocks under way at once: a step that finds so many adds none
ENDS = {"put": "", "miss": "miss", "get": "complete"}  # of the prefetches
WAYS = tuple(ENDS)
VICTIMS = ("python", "torch")


@dataclass(frozen=True)
class Shape:
    """Layers of main KV, those with index keys, bytes a token and layer; milliseconds of a step of 2,048 tokens."""

    layers: int
    indexers: int
    row: int
    step_ms: float

    @property
    def page_bytes(self) -> int:
        return TOKENS * (self.layers * self.row + self.indexers * INDEX_ROW)


SHAPES = {
    "5_layers_fp8": Shape(5, 5, 656, 20),
    "5_layers_bf16": Shape(5, 5, 1152, 20),
    "78_layers_fp8": Shape(78, 21, 656, 300),
}


@dataclass(frozen=True)
class Steps:
    """lost: seconds without the interpreter, in `blocked` pieces. own: seconds in its own calls. done: pieces of work."""

    pages: int
    lost: float
    blocked: int
    own: float
    done: int


class NoCopies:
    """A `PageCopier` whose copies are done at once, as deep as the one for GPUs."""

    depth = 3

    def written(self, forward_stream: Any) -> Callable[[], None]:
        return lambda: None

    def start_save(self, pages: Sequence[int], into: Sequence[Any]) -> Callable[[], None]:
        return lambda: None

    def start_load(self, pages: Sequence[int], source: Sequence[Any], landed: Any) -> Callable[[], int]:
        raise AssertionError("nothing is loaded here")


class Victim:
    """The calling thread as a scheduler."""

    def __init__(self, kind: str) -> None:
        import torch

        self._tensor = torch.zeros(16_384)  # some 5 µs an operation, as a kernel's launch
        self._work = {"python": self._count, "torch": self._add}[kind]
        self._schedstat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)

    def _count(self) -> None:
        for number in range(200):
            _ = number + 1

    def _add(self) -> None:
        add = self._tensor.add_
        for _ in range(10):
            add(1)

    def ran_or_ready(self) -> float:
        """Seconds."""
        running, ready, _ = os.pread(self._schedstat, 64, 0).split()
        return (int(running) + int(ready)) * 1e-9

    def blocked(self) -> int:
        """How often it had to wait for something."""
        text = Path(f"/proc/self/task/{threading.get_native_id()}/status").read_text()
        return int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    def steps(self, count: int, seconds: float, submit: Callable[[int], int]) -> Steps:
        """Steps of `seconds`, each of which begins with `submit`, which says how many pages it submits."""
        pages, done, own = 0, 0, 0.0
        work, now = self._work, time.perf_counter
        self._sync()
        blocked = self.blocked()
        wall, busy = now(), self.ran_or_ready()
        for step in range(count):
            before = time.thread_time()
            pages += submit(step)
            own += time.thread_time() - before
            end = now() + seconds
            while now() < end:
                work()
                done += 1
        blocked = self.blocked() - blocked
        self._sync()
        lost = (now() - wall) - (self.ran_or_ready() - busy)
        return Steps(pages, lost, blocked, own, done)

    @staticmethod
    def _sync() -> None:
        """The kernel brings a running thread's numbers up to date at a tick or when it is switched."""
        time.sleep(1e-4)

    def close(self) -> None:
        os.close(self._schedstat)


class Rig:
    """A store of one shape on a server, its save queue, and pages that are in the server."""

    def __init__(self, url: str, shape: Shape, block: int) -> None:
        import torch
        from glm_connectors.tiers import Namespace, PageLayout, TierConfig, TieredStore
        from glm_connectors.tiers.envelope import HEADER_BYTES

        from glm_sglang.cache.audit import Audit
        from glm_sglang.cache.saves import SaveQueue

        layout = PageLayout(
            TOKENS,
            (("kv", TOKENS * shape.layers * shape.row), ("index", TOKENS * shape.indexers * INDEX_ROW)),
        )
        space = Namespace("page cost", str(shape), "fp8", layout)
        pages = max(POOL_BLOCKS * block, POOL_BYTES // layout.page_bytes)
        config = TierConfig(
            url=url,
            pool_bytes=pages * (layout.page_bytes + 1024),
            put_share=1.0,
            prefetch_share=1.0,
            request_timeout=30.0,
        )
        self.block = block
        self.value_bytes = HEADER_BYTES + layout.page_bytes
        self.store = TieredStore(config, space, writer=True)
        self.saves = SaveQueue(
            self.store, NoCopies(), TOKENS, limit_pages=lambda: 1 << 30, count=lambda *_: None, audit=Audit()
        )
        self._indices = torch.arange(block * TOKENS)
        # One after the other, over and over, none of them is in the pool any more.
        self._sets = [self._names(f"kept {number}") for number in range(pages // block + QUEUED + 1)]
        self._tickets: list[Any] = []
        self._ends: set[str] = set()
        self._serial = 0
        for names in self._sets:
            self._save(names)
            self.settle()

    def _names(self, what: str) -> list[str]:
        return [hashlib.sha256(f"{what}/{page}".encode()).hexdigest() for page in range(self.block)]

    def _save(self, names: Sequence[str]) -> None:
        self.saves.put(names, self._indices, lambda: None)

    def prepare(self, way: str, steps: int) -> Callable[[int], int]:
        """Empties the pool. What the scheduler's thread does at a step."""
        self.store.clear()
        if way == "put":
            fresh = [self._names(f"put {step}") for step in range(steps)]
            return lambda step: self._put(fresh[step])
        sets = self._sets if way == "get" else [self._names(f"absent {step}") for step in range(steps)]
        keys = [[bytes.fromhex(name) for name in names] for names in sets]
        return lambda step: self._ask(keys[self._serial % len(keys)])

    def _put(self, names: Sequence[str]) -> int:
        queued = self.saves.queued_pages + self.store.metrics["cache_save_queue_pages"]
        if queued >= QUEUED * self.block:
            return 0
        self._save(names)
        self.saves.completed()
        return len(names)

    def _ask(self, keys: Sequence[bytes]) -> int:
        """Requests whose prefetch is done, run."""
        for ticket in [ticket for ticket in self._tickets if ticket.done]:
            self._end(ticket)
        if len(self._tickets) >= QUEUED:
            return 0
        self._serial += 1
        self._tickets.append(self.store.prefetch(f"r{self._serial}", keys))
        return len(keys)

    def _end(self, ticket: Any) -> None:
        self.store.cancel(ticket.rid)
        self._tickets.remove(ticket)
        self._ends.add(ticket.end)

    def settle(self, end: str = "") -> None:
        """Waits until nothing is under way; AssertionError where something was dropped, or a prefetch ended otherwise."""
        self.saves.quiesce()
        while self.store.metrics["cache_save_queue_pages"]:
            time.sleep(0.001)
        for ticket in list(self._tickets):
            assert ticket.wait(30)
            self._end(ticket)
        assert self._ends <= {end}, f"prefetches ended as {self._ends}"
        self._ends.clear()
        dropped = self.store.metrics.snapshot()["cache_dropped_saves"]
        assert not any(dropped.values()), dropped

    def close(self) -> None:
        self.saves.close()
        self.store.close()


def threads_ran() -> dict[str, float]:
    """Seconds that each thread has run, by its name in Python."""
    ran: dict[str, float] = {}
    for thread in threading.enumerate():
        try:
            running = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]
        except OSError:
            continue
        name = thread.name.partition("_")[0]
        ran[name] = ran.get(name, 0.0) + int(running) * 1e-9
    return ran


def measure(rig: Rig, victim: Victim, way: str, steps: int, seconds: float) -> dict[str, Any]:
    """One round of one way: microseconds a page."""
    submit = rig.prepare(way, steps)
    rig.settle()
    before = threads_ran()
    ran = victim.steps(steps, seconds, submit)
    rig.settle(ENDS[way])
    after = threads_ran()
    a_page = 1e6 / ran.pages
    caller = threading.current_thread().name
    return {
        "lost_us": a_page * ran.lost,
        "blocked": ran.blocked / ran.pages,
        "calls_us": a_page * ran.own,
        "step_share": ran.lost / (steps * seconds),
        "work": ran.done,
        "threads_us": {
            name: round(a_page * (after[name] - before.get(name, 0.0)), 1)
            for name in sorted(after)
            if name != caller and after[name] - before.get(name, 0.0) > 1e-4
        },
    }


def own_core() -> tuple[int, set[int]]:
    """A core for the calling thread, and the rest for what is started from now on."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("page_cost needs two cores: one is the scheduler's")
    return cores[0], set(cores[1:])


def rounds_of(args: argparse.Namespace, name: str, url: str, cores: tuple[int, set[int]]) -> dict[str, Any]:
    """All ways and victims of one shape, in turns: the median round of each."""
    shape = SHAPES[name]
    steps = max(4, round(args.round_s * 1000 / shape.step_ms))
    os.sched_setaffinity(0, cores[1])
    rig = Rig(url, shape, args.block)
    gc.freeze()  # as SGLang does once it is up
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    victims = {kind: Victim(kind) for kind in args.victims}
    alone: dict[str, list[int]] = {kind: [] for kind in victims}
    try:
        for number in range(args.rounds + 1):
            for kind, victim in victims.items():
                os.sched_setaffinity(0, {cores[0]})
                seconds = shape.step_ms / 1000
                quiet = victim.steps(steps, seconds, lambda step: 0)
                if number:
                    alone[kind].append(quiet.done)
                for way in args.only:
                    one = measure(rig, victim, way, steps, seconds)
                    if number:  # the first is a warm-up
                        found.setdefault((way, kind), []).append(one)
                os.sched_setaffinity(0, cores[1])
    finally:
        for victim in victims.values():
            victim.close()
        rig.close()
    result: dict[str, Any] = {"page_bytes": shape.page_bytes, "step_ms": shape.step_ms}
    for way in args.only:
        result[way] = {}
        for kind in args.victims:
            ones = found[way, kind]
            middle = sorted(ones, key=lambda one: one["lost_us"])[len(ones) // 2]
            result[way][kind] = {
                "lost_us": round(statistics.median(one["lost_us"] for one in ones), 1),
                "lost_us_rounds": [round(one["lost_us"], 1) for one in ones],
                "blocked": round(statistics.median(one["blocked"] for one in ones), 2),
                "calls_us": round(statistics.median(one["calls_us"] for one in ones), 2),
                "step_share": round(middle["step_share"], 4),
                "work_of_alone": round(middle["work"] / statistics.median(alone[kind]), 3),
                "threads_us": middle["threads_us"],
            }
            print(f"  {name} {way} beside {kind}: {result[way][kind]}", file=sys.stderr, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=list(VICTIMS))
    parser.add_argument("--block", type=int, default=BLOCK, help="pages of a step")
    parser.add_argument("--round-s", type=float, default=1.0, help="seconds of a round")
    parser.add_argument("--rounds", type=int, default=5)
    _result.add_arguments(parser)
    args = parser.parse_args()
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    from glm_connectors.valkey_store import EmbeddedServer, parse

    mine, others = own_core()
    os.sched_setaffinity(0, others)
    with EmbeddedServer(parse("embedded://?maxmemory=3gb")) as server:
        shapes = {name: rounds_of(args, name, server.url, (mine, others)) for name in args.shapes}
    os.sched_setaffinity(0, {mine, *others})
    result = {
        "pages_a_step": args.block,
        "shapes": shapes,
    }
    _result.finish("page_cost", result, args, device="cpu")


if __name__ == "__main__":
    main()
