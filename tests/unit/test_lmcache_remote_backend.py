"""LMCache's remote backend: results that meet a timeout, puts that fail or never start.

Oracles: LMCache's reference counts and allocator, and the keys that the backend says are being put.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from types import SimpleNamespace
from typing import Any

from lmcache_faults import HUNG, Pool, counters, loop_in_thread, patience, run


def _backend(
    loop: asyncio.AbstractEventLoop, connection: Any, timeout: float = 60.0, **attributes: Any
) -> Any:
    """A RemoteBackend without its constructor, on a real instrumented connector around `connection`."""
    from lmcache.v1.storage_backend.connector.instrumented_connector import InstrumentedRemoteConnector
    from lmcache.v1.storage_backend.naive_serde.naive_serde import NaiveDeserializer, NaiveSerializer
    from lmcache.v1.storage_backend.remote_backend import RemoteBackend

    backend = object.__new__(RemoteBackend)
    backend.__dict__.update(
        loop=loop,
        connection=InstrumentedRemoteConnector(connection),
        config=SimpleNamespace(blocking_timeout_secs=timeout, extra_config=None),
        local_cpu_backend=object(),
        serializer=NaiveSerializer(),
        deserializer=NaiveDeserializer(),
        stats_monitor=SimpleNamespace(
            update_interval_remote_time_to_get_sync=lambda _: None, get_current_retrieve_stats=lambda: None
        ),
        put_tasks=set(),
        lock=threading.Lock(),
        _mla_worker_id_as0_mode=False,
        _get_blocking_failed_count=0,
        _put_failed_count=0,
    )
    backend.__dict__.update(attributes)
    return backend


class Connection:
    """A connector whose calls end when the test says."""

    def __init__(self, pool: Pool, batched: bool = False) -> None:
        self.pool = pool
        self.batched = batched
        self.kept: list[Any] = []
        self.asked = threading.Event()
        self.answer = threading.Event()

    def support_batched_get(self) -> bool:
        return self.batched

    def support_batched_put(self) -> bool:
        return self.batched

    async def _wait(self) -> None:
        self.asked.set()
        await asyncio.to_thread(self.answer.wait)

    async def get(self, key: Any) -> Any:
        await self._wait()
        self.kept.append(self.pool.take())
        return self.kept[-1]

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self._wait()


class _Race:
    """Makes `Future.cancel` of the waiting thread find the result already there."""

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self.connection = connection
        self.loop = loop
        self.original = concurrent.futures.Future.cancel

    def __enter__(self) -> None:
        race = self

        def cancel(future: concurrent.futures.Future[Any]) -> bool:
            race.connection.answer.set()
            # The result lands between the timeout and the cancel.
            concurrent.futures.wait([future], timeout=30)
            return race.original(future)

        concurrent.futures.Future.cancel = cancel  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        concurrent.futures.Future.cancel = self.original  # type: ignore[method-assign]


def get_whose_result_meets_its_timeout() -> tuple[bool, int]:
    pool = Pool()
    connection = Connection(pool)
    with loop_in_thread() as loop:
        backend = _backend(loop, connection, timeout=0.1)
        with _Race(connection, loop):
            chunk = backend.get_blocking("key")
        return chunk is not None, pool.used // Pool.CHUNK


def test_a_result_between_timeout_and_cancel_is_taken() -> None:
    assert run(get_whose_result_meets_its_timeout, repaired=False) == (False, 1)
    assert run(get_whose_result_meets_its_timeout, repaired=True) == (True, 1)


def get_that_times_out() -> tuple[bool, int, int]:
    pool = Pool()
    connection = Connection(pool)
    with loop_in_thread() as loop:
        backend = _backend(loop, connection, timeout=0.1)
        chunk = backend.get_blocking("key")
        connection.answer.set()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result(patience())
        return chunk is None, pool.used, counters()["orphans_disposed"]


def test_a_timed_out_get_is_a_miss() -> None:
    assert run(get_that_times_out, repaired=False) == (True, 0, 0)
    assert run(get_that_times_out, repaired=True) == (True, 0, 0)


def gets_behind_a_failure() -> tuple[list[bool], int]:
    """Three gets at once; the first fails when the others have their chunks."""
    pool = Pool()

    class Failing(Connection):
        async def get(self, key: Any) -> Any:
            if key == 0:
                while len(self.kept) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                raise RuntimeError("connection lost")
            self.kept.append(self.pool.take())
            return self.kept[-1]

    connection = Failing(pool)
    with loop_in_thread() as loop:
        found = _backend(loop, connection).batched_get_blocking([0, 1, 2])
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result(patience())
        return [chunk is not None for chunk in found], pool.used // Pool.CHUNK


def test_results_behind_a_failure_go_back() -> None:
    assert run(gets_behind_a_failure, repaired=False) == ([False] * 3, 2)
    assert run(gets_behind_a_failure, repaired=True) == ([False] * 3, 0)


def short_batch() -> tuple[str | list[bool], int]:
    """A connector answers three keys with two chunks (MockConnector at the first miss)."""
    pool = Pool()

    class Short(Connection):
        async def batched_get(self, keys: list[Any]) -> list[Any]:
            self.kept += [pool.take(), pool.take()]
            return list(self.kept)

    connection = Short(pool, batched=True)
    with loop_in_thread() as loop:
        try:
            found = _backend(loop, connection).batched_get_blocking([0, 1, 2])
        except AssertionError:
            return "AssertionError", pool.used // Pool.CHUNK
        return [chunk is not None for chunk in found], pool.used // Pool.CHUNK


def test_a_short_batch_is_a_prefix() -> None:
    assert run(short_batch, repaired=False) == ("AssertionError", 2)
    assert run(short_batch, repaired=True) == ([True, True, False], 2)


def put_on_a_closed_loop(batched: bool) -> tuple[int, set[Any]]:
    """Chunks and keys that a put holds which could not be started."""
    pool = Pool()
    loop = asyncio.new_event_loop()
    loop.close()
    backend = _backend(loop, Connection(pool, batched))
    chunk = pool.take()
    try:
        if batched:
            backend.batched_submit_put_task(["key"], [chunk])
        else:
            backend.submit_put_task("key", chunk)
    except RuntimeError:
        chunk.ref_count_down()  # the storing side's own reference
    return pool.used // Pool.CHUNK, backend.put_tasks


def test_a_put_that_can_not_start_holds_nothing() -> None:
    assert run(put_on_a_closed_loop, False, repaired=False) == (1, {"key"})
    assert run(put_on_a_closed_loop, True, repaired=False) == (1, set())
    for batched in (False, True):
        assert run(put_on_a_closed_loop, batched, repaired=True) == (0, set())


def put_whose_serializer_raises() -> tuple[int, set[Any]]:
    pool = Pool()

    def serialize(_: Any) -> Any:
        raise ValueError("not this shape")

    with loop_in_thread() as loop:
        backend = _backend(loop, Connection(pool), serializer=SimpleNamespace(serialize=serialize))
        chunk = pool.take()
        try:
            backend.submit_put_task("key", chunk)
        except ValueError:
            chunk.ref_count_down()
        return pool.used // Pool.CHUNK, backend.put_tasks


def test_a_put_that_can_not_be_serialized_holds_neither_chunk_nor_key() -> None:
    assert run(put_whose_serializer_raises, repaired=False) == (1, {"key"})
    assert run(put_whose_serializer_raises, repaired=True) == (0, set())


def put_that_succeeds() -> tuple[int, int, int, list[str]]:
    """The same key put twice while the first is running, then again: how often the connector was asked."""
    pool = Pool()
    notified: list[str] = []

    class Counting(Connection):
        puts = 0

        async def put(self, key: Any, memory_obj: Any) -> None:
            Counting.puts += 1
            await self._wait()

    connection = Counting(pool)
    with loop_in_thread() as loop:
        backend = _backend(loop, connection)
        chunk = pool.take()
        first = backend.submit_put_task("key", chunk, on_complete_callback=notified.append)
        assert connection.asked.wait(30)
        backend.submit_put_task("key", chunk)
        during = chunk.get_ref_count()
        connection.answer.set()
        first.result(30)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result(30)
        backend.submit_put_task("key", chunk).result(30)
        return Counting.puts, during, chunk.get_ref_count(), notified


def test_a_put_holds_one_reference_while_it_runs_and_its_key_once() -> None:
    for repaired in (False, True):
        assert run(put_that_succeeds, repaired=repaired) == (2, 2, 1, ["key"]), HUNG
