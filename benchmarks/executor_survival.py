"""Do LMCache's executor workers, buffers and replies survive callers that leave at every stage of a job?

Gets, batched gets, puts and existence checks run through each of LMCache's executors (`AsyncPQExecutor`, whose jobs
are coroutines; `AsyncPQThreadPoolExecutor`, whose jobs are threads, as those of its Valkey connector) and its
allocator; a seeded share of the callers is cancelled while queued, while running, or at the moment their result is
delivered. The same jobs on LMCache as it comes run until its last worker is dead. A third run has the article's fix
alone, the guard around the answer: its workers live, and its buffers show what the guard leaves open. The figures on
top are the repaired executors', of each the worse one.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _lmcache_modes, _result

WORKERS = 4
CALLERS = 64  # at once
CHUNK = 16384
CHUNKS = 4 * CALLERS  # in the pool
STAGES = ("queued", "running", "finished")
GUARDED = "guard_alone"
EXECUTORS = ("coroutines", "threads")
#: What the result has on top, of both executors: the fewest workers, the most of what must not be.
WORST: dict[str, Callable[..., int]] = {
    "live_workers": min,
    "expected_workers": max,
    "leaked_bytes": max,
    "wrong_replies": max,
    "corrupt_puts": max,
    "callers_left_waiting": max,
}
STALLED_AFTER = 3.0  # seconds without a reply, with no worker left


class GuardedFuture(asyncio.Future):  # type: ignore[type-arg]
    """The article's fix, seen from the future: an answer to a caller that has left is dropped."""

    def set_result(self, result: Any) -> None:
        if not self.done():
            super().set_result(result)

    def set_exception(self, exception: Any) -> None:
        if not self.done():
            super().set_exception(exception)


class Loop(asyncio.SelectorEventLoop):
    """Can cancel a task at the moment the next future made for it is answered, before the task sees the
    answer.
    """

    guarded = False
    cancel_when_answered: asyncio.Task[Any] | None = None

    def create_future(self) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = GuardedFuture(loop=self) if self.guarded else super().create_future()
        task, self.cancel_when_answered = self.cancel_when_answered, None
        if task is not None:
            future.add_done_callback(lambda _: task.cancel())
        return future


Steps = Generator[None, None, Any]


class Store:
    """Stands for a remote store: stamps what it returns with the key, checks what it is given, takes a few turns of
    the loop between the first and the second step of a job.
    """

    def __init__(self, pool: Any, rng: random.Random, loop: asyncio.AbstractEventLoop) -> None:
        self.pool, self.rng, self.loop = pool, rng, loop
        self.corrupt_puts = 0

    async def coroutine(self, kind: str, key: int, started: asyncio.Future[None], **more: Any) -> Any:
        """A job of `AsyncPQExecutor`."""
        steps: Steps = getattr(self, kind)(key, **more)
        next(steps)
        await self._turns(started)
        return end(steps)

    def thread(self, kind: str, key: int, started: asyncio.Future[None], **more: Any) -> Any:
        """A job of `AsyncPQThreadPoolExecutor`."""
        steps: Steps = getattr(self, kind)(key, **more)
        next(steps)
        asyncio.run_coroutine_threadsafe(self._turns(started), self.loop).result()
        return end(steps)

    async def _turns(self, started: asyncio.Future[None]) -> None:
        if not started.done():
            started.set_result(None)
        for _ in range(self.rng.randint(1, 3)):
            await asyncio.sleep(0)

    def _chunk(self, key: int) -> Any:
        chunk = allocate(self.pool)
        if chunk is not None:
            stamp(chunk, key)
        return chunk

    def get(self, key: int) -> Steps:
        chunk = self._chunk(key)
        yield
        return chunk

    def batched_get(self, key: int) -> Steps:
        chunks = [self._chunk(key) for _ in range(3)]
        yield
        return chunks

    def exists(self, key: int) -> Steps:
        yield
        return key

    def put(self, key: int, memory_obj: Any) -> Steps:
        view = memory_obj.byte_array.cast("B")  # as a client does: from here on it has the address
        yield
        stamps = {int.from_bytes(view[start : start + 8], "little") for start in (0, CHUNK - 8)}
        self.corrupt_puts += stamps != {key}


def end(steps: Steps) -> Any:
    """Runs the second step. Returns the job's result."""
    try:
        next(steps)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("a job has two steps")


def allocate(pool: Any) -> Any:
    """A chunk with one reference, or None."""
    import torch
    from lmcache.v1.memory_management import MemoryFormat

    return pool.allocate(torch.Size([CHUNK]), torch.uint8, MemoryFormat.KV_2LTD)


def stamp(chunk: Any, key: int) -> None:
    view = chunk.byte_array.cast("B")
    view[:8] = view[CHUNK - 8 :] = key.to_bytes(8, "little")


def stamped(reply: Any) -> set[int]:
    """The keys that a reply carries."""
    if isinstance(reply, int):
        return {reply}
    chunks = [chunk for chunk in (reply if isinstance(reply, list) else [reply]) if chunk is not None]
    return {int.from_bytes(bytes(chunk.byte_array.cast("B")[:8]), "little") for chunk in chunks}


class Survey:
    """One run: its executor, its pool, and what became of its callers."""

    def __init__(self, args: argparse.Namespace, loop: Loop) -> None:
        from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
        from lmcache.v1.storage_backend.job_executor import pq_executor

        threads = args.executor == "threads"
        self.args, self.loop = args, loop
        self.rng = random.Random(args.seed)
        self.pool = MixedMemoryAllocator(CHUNKS * CHUNK)
        kind = pq_executor.AsyncPQThreadPoolExecutor if threads else pq_executor.AsyncPQExecutor
        self.executor = kind(loop, max_workers=WORKERS)
        self.store = Store(self.pool, random.Random(args.seed + 1), loop)
        self.job = self.store.thread if threads else self.store.coroutine
        self.outcomes: Counter[str] = Counter()
        self.wrong_replies = 0
        self.last_reply = time.monotonic()

    @property
    def live(self) -> int:
        return sum(not worker.done() for worker in self.executor._workers)

    async def call(self, key: int, kind: str, stage: str) -> None:
        """One caller, cancelled at `stage` ("" for never)."""
        started: asyncio.Future[None] = self.loop.create_future()
        task = self.loop.create_task(self.submit(key, kind, started, stage))
        if stage == "queued":
            await asyncio.sleep(0)  # it is in the queue, and no worker has seen it
            task.cancel()
        elif stage == "running":
            await asyncio.wait({started, task}, return_when=asyncio.FIRST_COMPLETED)
            task.cancel()
        try:
            reply = await task
        except asyncio.CancelledError:
            self.outcomes[f"cancelled_{stage}"] += 1
            return
        self.last_reply = time.monotonic()
        self.outcomes["answered"] += 1
        if kind != "put":
            self.wrong_replies += stamped(reply) != {key}
        for chunk in reply if isinstance(reply, list) else [reply]:
            if hasattr(chunk, "ref_count_down"):
                chunk.ref_count_down()

    async def submit(self, key: int, kind: str, started: asyncio.Future[None], stage: str) -> Any:
        chunk = None
        more: dict[str, Any] = {}
        if kind == "put":
            chunk = more["memory_obj"] = allocate(self.pool)
            if chunk is None:
                return None
            stamp(chunk, key)
        try:
            if stage == "finished":
                self.loop.cancel_when_answered = asyncio.current_task()
            return await self.executor.submit_job(
                self.job, kind, key, started, priority=self.rng.randint(1, 4), **more
            )
        finally:
            if chunk is not None:
                # UPSTREAM: InstrumentedRemoteConnector.put, at once when it is cancelled
                chunk.ref_count_down()

    async def run(self) -> dict[str, Any]:
        began = time.monotonic()
        callers: set[asyncio.Task[None]] = set()
        settled_rss = 0
        submitted = 0
        for key in range(self.args.jobs):
            while len(callers) >= CALLERS and not self.stalled():
                _, callers = await asyncio.wait(
                    callers, timeout=STALLED_AFTER / 4, return_when=asyncio.FIRST_COMPLETED
                )
            if self.stalled():
                break
            stage = self.rng.choice(STAGES) if self.rng.random() < self.args.cancel else ""
            kind = self.rng.choices(("get", "batched_get", "put", "exists"), (4, 1, 4, 1))[0]
            callers.add(self.loop.create_task(self.call(key, kind, stage)))
            submitted += 1
            await asyncio.sleep(0)
            if key == self.args.jobs // 5:
                settled_rss = rss()
            if key % 20_000 == 0:
                print(f"  {key} jobs, {self.live} workers", file=sys.stderr, flush=True)
        while callers and not self.stalled():
            _, callers = await asyncio.wait(callers, timeout=STALLED_AFTER / 4)
        for _ in range(50):
            await asyncio.sleep(0)
        seconds = time.monotonic() - began
        return {
            "jobs_submitted": submitted,
            "live_workers": self.live,
            "expected_workers": WORKERS,
            "leaked_bytes": int(self.pool.pin_allocator.total_allocated_size),
            "wrong_replies": self.wrong_replies,
            "corrupt_puts": self.store.corrupt_puts,
            "callers_left_waiting": len(callers),
            "outcomes": dict(sorted(self.outcomes.items())),
            "allocator_consistent": bool(self.pool.memcheck()),
            "rss_drift": round(rss() / settled_rss - 1, 4) if settled_rss else None,
            "jobs_per_second": round(submitted / seconds),
        }

    def stalled(self) -> bool:
        return self.live == 0 and time.monotonic() - self.last_reply > STALLED_AFTER


def rss() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Rescues(logging.Filter):
    """Counts (and hushes) LMCache's warning that the garbage collector had to free a buffer."""

    count = 0

    def filter(self, record: logging.LogRecord) -> bool:
        found = "being garbage collected" in str(record.msg)
        Rescues.count += found
        return not found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One mode's run."""
    import lmcache.v1.memory_management as memory_management
    from glm_connectors.lmcache_repairs import COUNTERS

    memory_management.logger.addFilter(Rescues())
    loop = Loop()
    loop.guarded = args.mode == GUARDED
    loop.set_exception_handler(lambda *_: None)
    asyncio.set_event_loop(loop)
    survey = Survey(args, loop)
    figures = loop.run_until_complete(survey.run())
    figures["freed_by_garbage_collector"] = Rescues.count
    figures["counters"] = {name: value for name, value in COUNTERS.snapshot().items() if value}
    return figures


def worst(figures: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Of each of `WORST` that of the worse run."""
    return {name: choose(run[name] for run in figures) for name, choose in WORST.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--cancel", type=float, default=0.3, help="share of the callers that is cancelled")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--executor", choices=EXECUTORS, help=argparse.SUPPRESS)  # a child process's
    _lmcache_modes.add_arguments(parser)
    _result.add_arguments(parser)
    args = parser.parse_args()
    modes = ("repaired", "unrepaired", GUARDED)
    found = {
        executor: _lmcache_modes.each(
            "executor_survival", measure, args, modes, more=("--executor", executor)
        )
        for executor in EXECUTORS
    }
    result = {"jobs": args.jobs, "cancel": args.cancel, "seed": args.seed}
    result |= worst([figures["repaired"] for figures in found.values()])
    _result.finish("executor_survival", result | {"by_executor": found}, args, device="cpu")


if __name__ == "__main__":
    main()
