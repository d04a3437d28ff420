"""Repair of LMCache's priority-queue executors: a caller that leaves costs neither a worker nor a buffer.

target    lmcache.v1.storage_backend.job_executor.pq_executor: AsyncPQExecutor, AsyncPQThreadPoolExecutor
why       Upstream's worker answers a caller that was cancelled, dies of InvalidStateError in its own error
          handler, and each timeout costs one worker. It runs jobs whose caller is gone, drops results nobody
          takes, lets a put that is running lose its bytes, hangs in shutdown with work outstanding, and
          blocks its own loop in `shutdown()`.
how       Every job is a task of its own. Its end, and nothing else, returns the references that the executor
          took on the job's buffers and answers the caller, if there still is one. A worker only decides what
          runs next.
upstream  LMCache pull request 6009 (the guard around set_result; the rest is ours)
delete    when the pinned LMCache passes tests/unit/test_lmcache_executor.py unrepaired
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import logging
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from glm_connectors.lmcache_repairs.buffers import dispose, hold, release
from glm_connectors.lmcache_repairs.contract import Symbol
from glm_connectors.lmcache_repairs.counters import COUNTERS
from glm_connectors.lmcache_repairs.grafting import Repair, replace
from glm_connectors.lmcache_repairs.settle import CallAbandonedError, end_of, outlast

logger = logging.getLogger(__name__)

_STOP = object()
_LAST = 2**31 - 1  # priority of the stop marks: behind every job
_COMPACT_AT = 64  # left jobs in a queue before it is worth rebuilding


class ExecutorClosedError(RuntimeError):
    """The executor is shut down (or went down before the job ended); to a cache this is a miss."""


@dataclass
class ExecutorLimits:
    """Bounds in seconds. `stuck`: how long a running job outlives its caller before it is cancelled."""

    drain: float = 5.0
    cancel: float = 1.0
    stuck: float = 30.0


LIMITS = ExecutorLimits()


@dataclass(eq=False)
class _State:
    """What the repair adds to an executor. Owned by the executor; touched on its loop's thread only."""

    queue: asyncio.PriorityQueue[Any]
    workers: int
    live: int = 0
    queued: set[asyncio.Future[Any]] = field(default_factory=set)  # who waits for each job in the queue
    left: set[asyncio.Future[Any]] = field(default_factory=set)  # those of them whose caller has gone
    running: dict[asyncio.Task[Any], asyncio.Future[Any]] = field(default_factory=dict)
    closing: asyncio.Task[None] | None = None
    closed: bool = False

    def gauges(self) -> Mapping[str, int]:
        """Read from any thread; single integers, so no lock."""
        return {
            "live_workers": self.live,
            "expected_workers": 0 if self.closed else self.workers,
            "queue_depth": len(self.queued) - len(self.left),
            "running_jobs": len(self.running),
        }


class ShutdownHandle:
    """What `shutdown()` returns: nothing to a thread, something to await to a coroutine on its loop."""

    def __init__(self, task: asyncio.Task[None] | None = None) -> None:
        self._task = task

    def __await__(self) -> Generator[Any, None, None]:
        if self._task is not None:
            yield from asyncio.shield(self._task).__await__()


_Job = tuple[Any, asyncio.Task[Any] | None]
# Executor and task of the job in whose context we are, to recognise a job that submits to its own executor.
_job: contextvars.ContextVar[_Job | None] = contextvars.ContextVar("job", default=None)


def _init(self: Any, loop: asyncio.AbstractEventLoop, max_workers: int = 4) -> None:
    self.loop = loop
    self._queue = asyncio.PriorityQueue()
    self._counter = itertools.count()
    self.max_workers = max_workers
    self._closed = False
    self._repair = _State(self._queue, max_workers)
    COUNTERS.watch(self._repair)
    self._workers = [asyncio.run_coroutine_threadsafe(self._worker(), loop) for _ in range(max_workers)]


async def _submit_job(self: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs `fn(*args, **kwargs)` on a worker; keyword `priority` (lower first, default 0) orders the queue.

    ExecutorClosedError after or during a shutdown; CallAbandonedError where the job itself was cancelled.
    """
    priority = kwargs.pop("priority", 0)
    inside = _job.get()
    if inside is not None and inside[0] is self and inside[1] in self._repair.running:
        # UPSTREAM: SageMakerHyperPodConnector._batched_async_contains. Queued, it would wait for the worker
        # it occupies.
        COUNTERS.add("nested_jobs")
        return await self._call(fn, args, kwargs)
    if self._closed:
        COUNTERS.add("refused_jobs")
        raise ExecutorClosedError(f"{type(self).__name__} is shut down")
    done = self.loop.create_future()
    self._queue.put_nowait((priority, next(self._counter), fn, args, kwargs, done))
    self._repair.queued.add(done)
    try:
        return await done
    except BaseException:
        _leave(self._repair, done)
        raise


def _leave(state: _State, done: asyncio.Future[Any]) -> None:
    """The caller stops waiting: with the job queued, running, or its result already in `done`."""
    if not done.done():
        done.cancel()
    if done.cancelled():
        if done in state.queued:
            state.left.add(done)
            _compact(state)
    elif done.exception() is None:
        COUNTERS.add("cancelled_jobs")
        dispose(done.result())


def _compact(state: _State) -> None:
    """Drops left jobs from the queue once they are its greater half: a stalled store can't grow it."""
    if len(state.left) < _COMPACT_AT or 2 * len(state.left) < len(state.queued):
        return
    entries: list[Any] = state.queue._queue  # type: ignore[attr-defined]
    entries[:] = [entry for entry in entries if entry[5] not in state.left]
    heapq.heapify(entries)
    COUNTERS.add("skipped_jobs", len(state.left))
    for _ in state.left:
        state.queue.task_done()
    state.queued -= state.left
    state.left.clear()


async def _worker(self: Any) -> None:
    state: _State = self._repair
    state.live += 1
    try:
        while True:
            entry = await self._queue.get()
            try:
                if entry[2] is _STOP:
                    return
                await _run(self, entry)
            except Exception as error:  # nothing here should raise; if it does, it is the caller's news
                logger.exception("a job could not be run")
                if not entry[5].done():
                    entry[5].set_exception(error)
            finally:
                self._queue.task_done()
    except asyncio.CancelledError:
        return  # by shutdown; what runs goes on and settles itself
    finally:
        state.live -= 1


async def _run(self: Any, entry: tuple[Any, ...]) -> None:
    """Starts one job and waits for its end.

    The job survives a cancelled worker; `_settle` is its only epilogue.
    """
    state: _State = self._repair
    _, _, fn, args, kwargs, done = entry
    state.queued.discard(done)
    state.left.discard(done)
    if done.done():
        COUNTERS.add("skipped_jobs")
        return
    # The caller still waits, so its own references are alive at this moment; ours outlive them. Returned by
    # `_settle`.
    held = hold((args, kwargs))
    task = self.loop.create_task(_call_as_job(self, fn, args, kwargs))
    state.running[task] = done
    task.add_done_callback(lambda job: _settle(state, job, done, held))
    done.add_done_callback(lambda answered: _caller_left(self, answered, task))
    await end_of(task)


async def _call_as_job(self: Any, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    _job.set((self, asyncio.current_task()))
    return await self._call(fn, args, kwargs)


def _caller_left(self: Any, done: asyncio.Future[Any], task: asyncio.Task[Any]) -> None:
    """Starts the clock of a job that runs for nobody.

    It is not cancelled at once: its client may be mid-reply.
    """
    if not done.cancelled() or task.done():
        return

    def cancel() -> None:
        COUNTERS.add("stuck_jobs")
        logger.warning("a job without a caller ran for %.0f s; cancelling it", LIMITS.stuck)
        task.cancel()

    timer = self.loop.call_later(LIMITS.stuck, cancel)
    task.add_done_callback(lambda _ended: timer.cancel())


def _settle(state: _State, task: asyncio.Task[Any], done: asyncio.Future[Any], held: list[Any]) -> None:
    """End of a job: answer whoever still waits, else dispose; then return our references. Never raises."""
    state.running.pop(task, None)
    if done.cancelled():
        COUNTERS.add("cancelled_jobs")
    try:
        error: BaseException | None
        if task.cancelled():
            reason = ExecutorClosedError if state.closed else CallAbandonedError
            error = reason("the job was cancelled")
        else:
            error = task.exception()
        if error is not None:
            COUNTERS.add("failed_jobs")
            if not done.done():
                done.set_exception(error)
        elif not done.done():
            done.set_result(task.result())
        else:
            dispose(task.result())
    except Exception:
        logger.exception("settling a job failed")
    finally:
        release(held)


async def _call(_self: Any, fn: Callable[..., Awaitable[Any]], args: Any, kwargs: Any) -> Any:
    return await fn(*args, **kwargs)


async def _call_in_thread(self: Any, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A cancelled job stays until its thread has returned: the thread is what uses the buffers."""
    context = contextvars.copy_context()
    return await outlast(self.loop.run_in_executor(None, lambda: context.run(fn, *args, **kwargs)))


async def _shutdown_async(self: Any, wait: bool = True) -> None:
    """Refuses new jobs, drains within `LIMITS.drain`, turns away what is queued, cancels what runs.

    What has not ended `LIMITS.cancel` later is abandoned: its caller gets ExecutorClosedError now, its
    buffers stay referenced until it ends. With `wait` False nothing is drained or waited for. A second call
    waits for the first.
    """
    state: _State = self._repair
    if state.closing is None:
        self._closed = True
        state.closing = self.loop.create_task(_close(self, wait))
    if wait:
        await asyncio.shield(state.closing)


async def _close(self: Any, wait: bool) -> None:
    state: _State = self._repair
    state.closed = True
    if wait:
        try:
            await asyncio.wait_for(self._queue.join(), LIMITS.drain)
        except TimeoutError:
            logger.warning(
                "executor not drained after %.1f s: %d queued, %d running",
                LIMITS.drain,
                self._queue.qsize(),
                len(state.running),
            )
    while not self._queue.empty():
        _refuse(self._queue.get_nowait()[5])
        self._queue.task_done()
    state.queued.clear()
    state.left.clear()
    for _ in range(self.max_workers):
        self._queue.put_nowait((_LAST, next(self._counter), _STOP, None, {}, None))
    for task in list(state.running):
        task.cancel()
    if wait and state.running:
        await asyncio.wait(set(state.running), timeout=LIMITS.cancel)
    if wait and state.running:
        COUNTERS.add("abandoned_jobs", len(state.running))
        logger.error(
            "%d jobs outlast the shutdown; their buffers stay referenced until they end", len(state.running)
        )
        for done in list(state.running.values()):
            _refuse(done)
    if state.running:
        for worker in self._workers:
            worker.cancel()  # those that wait for an abandoned job; the others have their stop mark
    if wait:
        await asyncio.wait([asyncio.wrap_future(worker) for worker in self._workers], timeout=LIMITS.cancel)


def _refuse(done: asyncio.Future[Any] | None) -> None:
    if done is not None and not done.done():
        COUNTERS.add("refused_jobs")
        done.set_exception(ExecutorClosedError("the executor was shut down before this job ended"))


def _shutdown(self: Any, wait: bool = True) -> ShutdownHandle:
    """From a thread: blocks within the limits. On the executor's own loop: returns at once, to be awaited.

    UPSTREAM: RedisConnector.close, S3Connector.close, EICConnector.close, MockConnector.close and
    SageMaker's await this on the loop that it would block.
    """
    try:
        here = asyncio.get_running_loop()
    except RuntimeError:
        here = None
    if here is not None and here is self.loop:
        return ShutdownHandle(here.create_task(self.shutdown_async(wait)))
    if self.loop.is_closed():
        self._closed = self._repair.closed = True
        return ShutdownHandle()
    future = asyncio.run_coroutine_threadsafe(self.shutdown_async(wait), self.loop)
    if wait and self.loop.is_running():
        bound = LIMITS.drain + 2 * LIMITS.cancel + 2.0
        try:
            future.result(timeout=bound)
        except TimeoutError:
            raise TimeoutError(
                f"the executor's event loop did not run its shutdown within {bound:.1f} s"
            ) from None
    return ShutdownHandle()


MODULE = "lmcache.v1.storage_backend.job_executor.pq_executor"
_METHODS = {
    "__init__": _init,
    "submit_job": _submit_job,
    "_worker": _worker,
    "shutdown_async": _shutdown_async,
    "shutdown": _shutdown,
}

REPAIR = Repair(
    module=MODULE,
    symbols=(
        Symbol(MODULE, "AsyncPQExecutor"),
        Symbol(MODULE, "AsyncPQThreadPoolExecutor"),
    ),
    grafts=(
        *(replace(f"AsyncPQExecutor.{name}", method) for name, method in _METHODS.items()),
        replace("AsyncPQExecutor._call", _call),
        *(replace(f"AsyncPQThreadPoolExecutor.{name}", method) for name, method in _METHODS.items()),
        replace("AsyncPQThreadPoolExecutor._call", _call_in_thread),
    ),
)
