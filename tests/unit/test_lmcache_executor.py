"""LMCache's job executors under cancelled callers and at shutdown; each fault shown on LMCache as it comes,
and repaired.

Oracles: LMCache's own reference counts and allocator, and the number of workers that were started (4).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from lmcache_faults import HUNG, Pool, counters, limits, loop_in_thread, patience, responsive, run, turns

WORKERS = 4
#: AsyncPQExecutor and AsyncPQThreadPoolExecutor, each with a `_worker` of its own.
BOTH = pytest.mark.parametrize("threads", [False, True], ids=["coroutines", "threads"])


def _executor(loop: asyncio.AbstractEventLoop, threads: bool = False) -> Any:
    from lmcache.v1.storage_backend.job_executor.pq_executor import AsyncPQExecutor, AsyncPQThreadPoolExecutor

    return (AsyncPQThreadPoolExecutor if threads else AsyncPQExecutor)(loop, max_workers=WORKERS)


def _live(executor: Any) -> int:
    return sum(not worker.done() for worker in executor._workers)


class Gate:
    """A job body that says when it has begun and ends when told, as a coroutine or on a thread."""

    def __init__(self, threads: bool = False) -> None:
        self.begun: Any = threading.Event() if threads else asyncio.Event()
        self.open: Any = threading.Event() if threads else asyncio.Event()
        self.threads = threads

    def job(self, make: Callable[[], Any]) -> Callable[[], Any]:
        def blocking() -> Any:
            self.begun.set()
            assert self.open.wait(60)
            return make()

        async def coroutine() -> Any:
            self.begun.set()
            await self.open.wait()
            return make()

        return blocking if self.threads else coroutine

    async def has_begun(self) -> None:
        await (asyncio.to_thread(self.begun.wait) if self.threads else self.begun.wait())


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _settled(executor: Any) -> None:
    """Waits for all jobs; workers that have died never take theirs, so boundedly."""
    try:
        await asyncio.wait_for(executor._queue.join(), patience())
    except TimeoutError:
        return
    await turns()


# -- a caller that leaves -----------------------------------------------------------------------------------


def workers_left_after_cancelled_calls(threads: bool) -> tuple[int, str]:
    async def main() -> tuple[int, str]:
        executor = _executor(asyncio.get_running_loop(), threads)
        for _ in range(2 * WORKERS):
            gate = Gate(threads)
            call = asyncio.create_task(executor.submit_job(gate.job(lambda: None)))
            await turns()
            has_worker = _live(executor) > 0
            if has_worker:
                await gate.has_begun()
            await _cancel(call)
            gate.open.set()
            if has_worker:
                await executor._queue.join()
                await turns()
        try:
            answer = Gate(threads)
            answer.open.set()
            after = await asyncio.wait_for(executor.submit_job(answer.job(lambda: "served")), patience())
        except TimeoutError:
            after = HUNG
        return _live(executor), after

    return asyncio.run(main())


@BOTH
def test_each_cancelled_call_costs_a_worker_until_none_is_left(threads: bool) -> None:
    assert run(workers_left_after_cancelled_calls, threads, repaired=False) == (0, HUNG)
    assert run(workers_left_after_cancelled_calls, threads, repaired=True) == (WORKERS, "served")


def workers_left_after_a_job_that_was_cancelled_itself(threads: bool) -> tuple[int, str]:
    async def main() -> tuple[int, str]:
        executor = _executor(asyncio.get_running_loop(), threads)

        def abandon() -> None:
            raise asyncio.CancelledError  # what awaiting a client's cancelled future raises

        gate = Gate(threads)
        gate.open.set()
        call = asyncio.create_task(executor.submit_job(gate.job(abandon)))
        done, _ = await asyncio.wait({call}, timeout=patience())
        return _live(executor), type(call.exception()).__name__ if done else HUNG

    return asyncio.run(main())


@BOTH
def test_a_job_whose_client_cancels_it_answers_its_caller(threads: bool) -> None:
    scenario = workers_left_after_a_job_that_was_cancelled_itself
    assert run(scenario, threads, repaired=False) == (WORKERS - 1, HUNG)
    assert run(scenario, threads, repaired=True) == (WORKERS, "CallAbandonedError")


def runs_of_jobs_cancelled_while_queued(threads: bool) -> tuple[int, dict[str, int]]:
    async def main() -> tuple[int, dict[str, int]]:
        executor = _executor(asyncio.get_running_loop(), threads)
        gates = [Gate(threads) for _ in range(WORKERS)]
        busy = [asyncio.create_task(executor.submit_job(gate.job(lambda: None))) for gate in gates]
        for gate in gates:
            await gate.has_begun()
        ran: list[int] = []
        done = Gate(threads)
        done.open.set()
        calls = [asyncio.create_task(executor.submit_job(done.job(lambda: ran.append(1)))) for _ in range(10)]
        await turns()
        for call in calls:
            await _cancel(call)
        depth = counters()["queue_depth"]
        for gate in gates:
            gate.open.set()
        await asyncio.gather(*busy)
        await _settled(executor)
        return len(ran), counters() | {"depth_while_left": depth}

    return asyncio.run(main())


@BOTH
def test_a_queued_job_whose_caller_has_left_is_skipped(threads: bool) -> None:
    ran, _ = run(runs_of_jobs_cancelled_while_queued, threads, repaired=False)
    assert 1 <= ran <= WORKERS  # each kills the worker that runs it
    ran, counted = run(runs_of_jobs_cancelled_while_queued, threads, repaired=True)
    assert ran == 0
    assert counted["skipped_jobs"] == 10
    assert counted["cancelled_jobs"] == counted["orphans_disposed"] == 0
    assert counted["depth_while_left"] == counted["queue_depth"] == 0
    assert counted["live_workers"] == counted["expected_workers"] == WORKERS


def queue_length_after_many_left_jobs(threads: bool) -> int:
    async def main() -> int:
        executor = _executor(asyncio.get_running_loop(), threads)
        gates = [Gate(threads) for _ in range(WORKERS)]
        busy = [asyncio.create_task(executor.submit_job(gate.job(lambda: None))) for gate in gates]
        for gate in gates:
            await gate.has_begun()
        job = Gate(threads).job(lambda: None)
        for _ in range(5000):
            call = asyncio.create_task(executor.submit_job(job))
            await asyncio.sleep(0)
            await _cancel(call)
        assert not any(call.done() for call in busy)
        length = int(executor._queue.qsize())
        for gate in gates:
            gate.open.set()  # threads that wait would keep `asyncio.run`
        return length

    return asyncio.run(main())


@BOTH
def test_jobs_whose_callers_left_do_not_pile_up_behind_a_stalled_store(threads: bool) -> None:
    assert run(queue_length_after_many_left_jobs, threads, repaired=False) >= 5000
    assert run(queue_length_after_many_left_jobs, threads, repaired=True) <= 64


# -- results that nobody takes ------------------------------------------------------------------------------

SHAPES: dict[str, Callable[[list[Any]], Any]] = {
    "one": lambda chunks: chunks[0],
    "list_with_misses": lambda chunks: [chunks[0], None, *chunks[1:]],
    "pairs_by_tier": lambda chunks: [[("key", chunk) for chunk in chunks]],
    "mapping": lambda chunks: {"found": tuple(chunks)},
}


def bytes_left_by_an_orphaned_result(shape: str, threads: bool) -> tuple[int, int, int]:
    pool = Pool()
    kept: list[Any] = []  # as a traceback or a cycle does: the garbage collector can't be who frees them

    def fetch() -> Any:
        chunks = [pool.take() for _ in range(1 if shape == "one" else 3)]
        kept.extend(chunks)
        return SHAPES[shape](chunks)

    async def main() -> None:
        executor = _executor(asyncio.get_running_loop(), threads)
        gate = Gate(threads)
        call = asyncio.create_task(executor.submit_job(gate.job(fetch)))
        await gate.has_begun()
        await _cancel(call)
        gate.open.set()
        await _settled(executor)

    asyncio.run(main())
    return pool.used, len(kept), counters()["orphans_disposed"]


@BOTH
@pytest.mark.parametrize("shape", list(SHAPES))
def test_the_buffers_of_a_cancelled_get_go_back_to_the_allocator(shape: str, threads: bool) -> None:
    used, taken, _ = run(bytes_left_by_an_orphaned_result, shape, threads, repaired=False)
    assert used == taken * Pool.CHUNK > 0
    used, taken, disposed = run(bytes_left_by_an_orphaned_result, shape, threads, repaired=True)
    assert (used, disposed) == (0, taken)


def bytes_left_when_cancelled_with_the_result_delivered(threads: bool) -> tuple[int, str, int, int]:
    """The worker has answered, the caller has not run yet, and is cancelled in between."""
    pool = Pool()
    kept: list[Any] = []

    async def main() -> str:
        loop = asyncio.get_running_loop()
        executor = _executor(loop, threads)
        original = loop.create_future
        calls: list[asyncio.Task[Any]] = []

        def create_future() -> asyncio.Future[Any]:
            loop.create_future = original  # type: ignore[method-assign]
            future = original()
            future.add_done_callback(lambda _done: calls[0].cancel())  # runs before the caller's own wake-up
            return future

        def fetch() -> Any:
            kept.append(pool.take())
            return kept[0]

        gate = Gate(threads)
        gate.open.set()

        async def call() -> Any:
            loop.create_future = create_future  # type: ignore[method-assign]
            return await executor.submit_job(gate.job(fetch))

        await turns()
        calls.append(asyncio.create_task(call()))
        await asyncio.gather(*calls, return_exceptions=True)
        await turns()
        return "cancelled" if calls[0].cancelled() else "answered"

    outcome = asyncio.run(main())
    return pool.used, outcome, counters()["orphans_disposed"], counters()["cancelled_jobs"]


@BOTH
def test_a_result_delivered_to_a_caller_cancelled_at_that_moment_is_disposed_of(threads: bool) -> None:
    scenario = bytes_left_when_cancelled_with_the_result_delivered
    assert run(scenario, threads, repaired=False) == (Pool.CHUNK, "cancelled", 0, 0)
    assert run(scenario, threads, repaired=True) == (0, "cancelled", 1, 1)


# -- arguments that a running job still reads ---------------------------------------------------------------


def chunk_of_a_put_whose_caller_left(batched: bool, threads: bool) -> tuple[bool, bytes, int]:
    """Whether the chunk is still ours and unchanged when the client gets to its bytes, and what is allocated
    after.
    """
    from lmcache.v1.storage_backend.connector.instrumented_connector import InstrumentedRemoteConnector

    pool = Pool(chunks=1)
    seen: list[Any] = []

    async def main() -> None:
        executor = _executor(asyncio.get_running_loop(), threads)
        gate = Gate(threads)

        class Connector:
            async def put(self, key: str, memory_obj: Any) -> None:
                await executor.submit_job(self._put, key=key, memory_obj=memory_obj)

            async def batched_put(self, keys: list[str], memory_objs: list[Any]) -> None:
                await executor.submit_job(self._put, key=keys, memory_obj=memory_objs)

            def _put(self, key: Any, memory_obj: Any) -> Any:
                """On a thread: the put; else the coroutine that is the put."""
                (chunk,) = memory_obj if batched else [memory_obj]
                view = chunk.byte_array  # the client has the address from here on
                return gate.job(lambda: seen.extend((chunk.is_valid(), bytes(view[:4]))))()

        chunk = pool.take()
        chunk.tensor.fill_(7)
        connector = InstrumentedRemoteConnector(Connector())  # returns the reference when its put ends
        put = connector.batched_put(["k"], [chunk]) if batched else connector.put("k", chunk)
        call = asyncio.create_task(put)
        await gate.has_begun()
        await _cancel(call)
        if (next_chunk := pool.take()) is not None:  # the allocator has given the bytes away
            next_chunk.tensor.fill_(9)
        gate.open.set()
        await _settled(executor)
        if next_chunk is not None:
            next_chunk.ref_count_down()

    asyncio.run(main())
    return (*seen, pool.used)


@BOTH
@pytest.mark.parametrize("batched", [False, True], ids=["put", "batched_put"])
def test_a_running_put_keeps_its_bytes_until_the_client_is_done(batched: bool, threads: bool) -> None:
    scenario = chunk_of_a_put_whose_caller_left
    assert run(scenario, batched, threads, repaired=False) == (False, bytes([9] * 4), 0)
    assert run(scenario, batched, threads, repaired=True) == (True, bytes([7] * 4), 0)


def end_of_a_job_that_is_stuck_without_a_caller() -> tuple[str, int, int, int]:
    limits(stuck=0.05)
    pool = Pool()
    ends: list[str] = []

    async def main() -> None:
        executor = _executor(asyncio.get_running_loop())
        begun = asyncio.Event()

        async def put(memory_obj: Any) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()  # a store that never answers
            except asyncio.CancelledError:
                ends.append("cancelled")
                raise

        chunk = pool.take()
        call = asyncio.create_task(executor.submit_job(put, memory_obj=chunk))
        await begun.wait()
        await _cancel(call)
        chunk.ref_count_down()
        try:
            await asyncio.wait_for(executor._queue.join(), patience())
        except TimeoutError:
            ends.append("for ever")
        ends.append(f"{_live(executor)} workers")

    asyncio.run(main())
    return ends[0], pool.used, counters()["stuck_jobs"], counters()["running_jobs"]


def test_a_job_that_outlives_its_caller_by_the_stuck_limit_is_cancelled() -> None:
    # Unrepaired: the chunk is free while the job still has it, and the worker is busy for good.
    assert run(end_of_a_job_that_is_stuck_without_a_caller, repaired=False) == ("for ever", 0, 0, 0)
    assert run(end_of_a_job_that_is_stuck_without_a_caller, repaired=True) == ("cancelled", 0, 1, 0)


# -- jobs that submit jobs ----------------------------------------------------------------------------------


def answers_to_jobs_that_submit_to_their_own_executor(threads: bool) -> str | list[int]:
    async def main() -> str | list[int]:
        loop = asyncio.get_running_loop()
        executor = _executor(loop, threads)
        gate = Gate(threads)
        gate.open.set()

        async def outer(number: int) -> int:
            return int(await executor.submit_job(gate.job(lambda: number)))

        def outer_on_a_thread(number: int) -> int:
            return asyncio.run_coroutine_threadsafe(outer(number), loop).result(2 * patience())

        job = outer_on_a_thread if threads else outer
        calls = asyncio.gather(*(executor.submit_job(job, number) for number in range(WORKERS)))
        try:
            return list(await asyncio.wait_for(calls, patience()))
        except TimeoutError:
            return HUNG

    return asyncio.run(main())


@BOTH
def test_jobs_that_submit_to_their_own_executor_do_not_wait_for_each_other(threads: bool) -> None:
    scenario = answers_to_jobs_that_submit_to_their_own_executor
    assert run(scenario, threads, repaired=False) == HUNG
    assert run(scenario, threads, repaired=True) == list(range(WORKERS))


# -- shutdown -----------------------------------------------------------------------------------------------


def shutdown_with_work_outstanding(threads: bool, left: int) -> tuple[str, list[int]]:
    """Returns: shutdown's end, and who was answered; the first `left` callers leave while their jobs run."""

    async def main() -> tuple[str, list[int]]:
        executor = _executor(asyncio.get_running_loop(), threads)
        answered: list[int] = []
        gates = [Gate(threads) for _ in range(3 * WORKERS)]

        async def call(number: int) -> None:
            answered.append(await executor.submit_job(gates[number].job(lambda: number)))

        calls = [asyncio.create_task(call(number)) for number in range(3 * WORKERS)]
        for gate in gates[:WORKERS]:
            await gate.has_begun()
        for each in calls[:left]:
            await _cancel(each)
        shutdown = asyncio.create_task(executor.shutdown_async(wait=True))
        await turns()
        for gate in gates:
            gate.open.set()
        done, _ = await asyncio.wait({shutdown}, timeout=patience())
        await asyncio.wait(calls, timeout=patience())
        return "down" if done else HUNG, sorted(answered)

    return asyncio.run(main())


def test_shutdown_drains_what_is_queued_and_running() -> None:
    state, answered = run(shutdown_with_work_outstanding, False, 0, repaired=False)
    assert state == HUNG  # workers are cancelled first, and then the queue is waited for
    assert answered == []
    assert run(shutdown_with_work_outstanding, False, 0, repaired=True) == ("down", list(range(3 * WORKERS)))


def test_shutdown_of_the_thread_executor_drains_as_before() -> None:
    """Upstream drains here first, where every caller waits: nothing to repair, and nothing lost by it."""
    expected = ("down", list(range(3 * WORKERS)))
    assert run(shutdown_with_work_outstanding, True, 0, repaired=False) == expected
    assert run(shutdown_with_work_outstanding, True, 0, repaired=True) == expected


@BOTH
def test_shutdown_drains_behind_callers_that_have_left(threads: bool) -> None:
    assert run(shutdown_with_work_outstanding, threads, WORKERS, repaired=False) == (HUNG, [])
    expected = ("down", list(range(WORKERS, 3 * WORKERS)))
    assert run(shutdown_with_work_outstanding, threads, WORKERS, repaired=True) == expected


def shutdown_with_a_job_that_never_ends(
    kind: str,
) -> tuple[str, list[str], int, int, dict[str, int]]:
    """kind: "heeds" a cancel, "ignores" it, or "thread", which can't be cancelled.

    Returns: shutdown's end, callers' errors, bytes right after it, bytes once the jobs have ended, counters.
    """
    limits(drain=0.05, cancel=0.05)
    pool = Pool()

    async def main() -> tuple[str, list[str], int, int, dict[str, int]]:
        threads = kind == "thread"
        executor = _executor(asyncio.get_running_loop(), threads)
        stalled = threading.Event() if threads else asyncio.Event()
        begun = [Gate(threads).begun for _ in range(WORKERS + 2)]

        async def put(memory_obj: Any, number: int) -> None:
            begun[number].set()
            while not stalled.is_set():
                try:
                    await stalled.wait()
                except asyncio.CancelledError:
                    if kind == "heeds":
                        raise

        def put_on_a_thread(memory_obj: Any, number: int) -> None:
            begun[number].set()
            assert stalled.wait(60)

        async def call(number: int) -> None:
            job = put_on_a_thread if threads else put
            chunk = pool.take()
            try:
                await executor.submit_job(job, memory_obj=chunk, number=number, priority=number)
            finally:
                chunk.ref_count_down()

        calls = [asyncio.create_task(call(number)) for number in range(WORKERS + 2)]
        for each in begun[:WORKERS]:
            await (asyncio.to_thread(each.wait) if threads else each.wait())
        done, _ = await asyncio.wait(
            {asyncio.create_task(executor.shutdown_async(wait=True))}, timeout=patience()
        )
        await asyncio.wait(calls, timeout=patience())
        errors = sorted(type(c.exception()).__name__ for c in calls if c.done())
        used_after, down = pool.used, "down" if done else HUNG
        stalled.set()
        if threads:
            await asyncio.get_running_loop().shutdown_default_executor()  # joins the jobs' threads
        await turns()
        return down, errors, used_after, pool.used, counters()

    return asyncio.run(main())


def test_shutdown_is_bounded_answers_every_caller_and_returns_every_buffer() -> None:
    state, errors, used, *_ = run(shutdown_with_a_job_that_never_ends, "heeds", repaired=False)
    assert (state, errors, used) == (HUNG, [], (WORKERS + 2) * Pool.CHUNK)
    state, errors, used, _, counted = run(shutdown_with_a_job_that_never_ends, "heeds", repaired=True)
    assert (state, errors, used) == ("down", ["ExecutorClosedError"] * (WORKERS + 2), 0)
    assert (counted["refused_jobs"], counted["abandoned_jobs"]) == (2, 0)
    assert counted["live_workers"] == counted["expected_workers"] == 0


@pytest.mark.parametrize("kind", ["ignores", "thread"])
def test_what_outlasts_a_shutdown_keeps_its_buffers_until_it_ends(kind: str) -> None:
    state, errors, *_ = run(shutdown_with_a_job_that_never_ends, kind, repaired=False)
    assert (state, errors) == (HUNG, [])
    state, errors, used, later, counted = run(shutdown_with_a_job_that_never_ends, kind, repaired=True)
    assert (state, errors) == ("down", ["ExecutorClosedError"] * (WORKERS + 2))
    assert (used, later) == (WORKERS * Pool.CHUNK, 0)
    assert counted["abandoned_jobs"] == WORKERS


def shutdown_called_on_its_own_loop(threads: bool) -> tuple[bool, str]:
    with loop_in_thread() as loop:
        executor = _executor(loop, threads)
        begun = threading.Event()

        async def close() -> str:
            begun.set()
            await executor.shutdown(wait=True)
            return "closed"

        future = asyncio.run_coroutine_threadsafe(close(), loop)
        assert begun.wait(5)
        alive = responsive(loop)
        return alive, future.result(60) if alive else HUNG


@BOTH
def test_shutdown_on_its_own_loop_does_not_wait_for_itself(threads: bool) -> None:
    assert run(shutdown_called_on_its_own_loop, threads, repaired=False) == (False, HUNG)
    assert run(shutdown_called_on_its_own_loop, threads, repaired=True) == (True, "closed")


def shutdown_called_from_a_thread(threads: bool) -> tuple[int, int]:
    with loop_in_thread() as loop:
        executor = _executor(loop, threads)
        executor.shutdown(wait=True)
        executor.shutdown(wait=True)  # a second call has nothing to do
        return _live(executor), counters()["expected_workers"]


@BOTH
def test_shutdown_from_a_thread_returns_with_all_workers_gone(threads: bool) -> None:
    assert run(shutdown_called_from_a_thread, threads, repaired=True) == (0, 0)


def submit_after_shutdown(threads: bool) -> str:
    async def main() -> str:
        executor = _executor(asyncio.get_running_loop(), threads)
        await turns()
        await executor.shutdown_async(wait=False)
        await turns()
        call: Awaitable[Any] = executor.submit_job(Gate(threads).job(lambda: None))
        try:
            await asyncio.wait_for(call, patience())
        except TimeoutError:
            return HUNG
        except RuntimeError as error:
            return type(error).__name__
        return "served"

    return asyncio.run(main())


@BOTH
def test_a_job_for_an_executor_that_is_down_is_refused(threads: bool) -> None:
    assert run(submit_after_shutdown, threads, repaired=False) == HUNG
    assert run(submit_after_shutdown, threads, repaired=True) == "ExecutorClosedError"
