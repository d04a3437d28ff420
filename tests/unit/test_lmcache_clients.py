"""LMCache's connectors: whose bytes a client uses and for how long, holes in a prefetch, closing on their
own loop.

Oracles: LMCache's reference counts and allocator; the order in which a controlled client ends its calls; the
keys that values were stored under.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from lmcache_faults import HUNG, Pool, counters, limits, loop_in_thread, patience, responsive, run, turns


def _import(name: str) -> ModuleType:
    """A connector module; EIC's client is on no registry, so an empty module stands in for its import."""
    import importlib

    if name == "eic":
        sys.modules.setdefault("eic", ModuleType("eic"))
    return importlib.import_module(f"lmcache.v1.storage_backend.connector.{name}_connector")


CONNECTORS = {
    "RESPConnector": "redis",
    "RedisConnector": "redis",
    "RedisClusterConnector": "redis",
    "S3Connector": "s3",
    "EICConnector": "eic",
    "MockConnector": "mock",
    "SageMakerHyperPodConnector": "sagemaker_hyperpod",
}


def _bare(class_name: str, **attributes: Any) -> Any:
    """An instance without its constructor (which would connect), with the attributes that the test needs."""
    cls = getattr(_import(CONNECTORS.get(class_name, "valkey")), class_name)
    instance = object.__new__(cls)
    instance.__dict__.update(attributes)
    return instance


# -- close() -------------------------------------------------------------------------------------------------


class _Closable:
    """Stands for whatever a connector closes besides its executor."""

    def __getattr__(self, name: str) -> Any:
        async def nothing() -> None:
            return None

        return nothing


def close_every_connector() -> dict[str, str]:
    """For each connector: closed, or hung with its loop dead."""
    from lmcache.v1.storage_backend.job_executor.pq_executor import AsyncPQExecutor

    outcome = {}
    for name in CONNECTORS:
        with loop_in_thread() as loop:
            client = _Closable()
            connector = _bare(
                name,
                pq_executor=AsyncPQExecutor(loop),
                connection=client,
                cluster=client,
                lru_store=client,
                http_session=None,
                shared_memory_map=None,
                shared_memory_obj=None,
                stats=defaultdict(int),
                client=SimpleNamespace(close=lambda: None),
            )
            begun = threading.Event()

            async def close(connector: Any = connector, begun: threading.Event = begun) -> None:
                begun.set()
                await connector.close()

            future = asyncio.run_coroutine_threadsafe(close(), loop)
            assert begun.wait(30)
            if responsive(loop):
                future.result(patience())
                outcome[name] = "closed"
            else:
                outcome[name] = HUNG
    return outcome


def test_no_connector_waits_for_its_own_loop_in_close() -> None:
    assert run(close_every_connector, repaired=False) == dict.fromkeys(CONNECTORS, HUNG)
    assert run(close_every_connector, repaired=True) == dict.fromkeys(CONNECTORS, "closed")


# -- holes in a prefetch -------------------------------------------------------------------------------------


def prefetch_with_a_hole(class_name: str) -> tuple[list[int], int]:
    """Chunks 0, 1, 3, 4 exist, 2 was evicted after the lookup.

    Returns the marks of what is served, by position.
    """
    pool = Pool()
    kept: list[Any] = []

    async def get(key: int) -> Any:
        await asyncio.sleep(0)
        if key == 2:
            return None
        chunk = pool.take()
        chunk.tensor.fill_(key)
        kept.append(chunk)
        return chunk

    async def batched_get(keys: list[int]) -> list[Any]:
        return [await get(key) for key in keys]

    async def main() -> tuple[list[int], int]:
        connector = _bare(class_name, _get=get, batched_get=batched_get)
        served = await connector._batched_get_non_blocking("lookup", [0, 1, 2, 3, 4])
        return [int(chunk.tensor[0]) for chunk in served], pool.used // Pool.CHUNK

    return asyncio.run(main())


@pytest.mark.parametrize(
    "class_name",
    ["RedisConnector", "RedisClusterConnector", "S3Connector", "EICConnector", "SageMakerHyperPodConnector"],
)
def test_a_missing_chunk_ends_the_prefix_and_moves_no_other_under_its_key(class_name: str) -> None:
    # Unrepaired, key 2 gets chunk 3: StorageManager pairs keys and buffers by position.
    assert run(prefetch_with_a_hole, class_name, repaired=False) == ([0, 1, 3, 4], 4)
    assert run(prefetch_with_a_hole, class_name, repaired=True) == ([0, 1], 2)


# -- the bytes of a batch ------------------------------------------------------------------------------------


class _Threads:
    """Stands for ValkeyWorkerPool: its calls run for as long as the test says, whatever their callers do."""

    def __init__(self) -> None:
        self.calls: list[concurrent.futures.Future[Any]] = []

    def submit(self, *_: Any) -> concurrent.futures.Future[Any]:
        call: concurrent.futures.Future[Any] = concurrent.futures.Future()
        call.set_running_or_notify_cancel()
        self.calls.append(call)
        return call

    submit_set = submit_get_into = submit_exists = submit


def _valkey(pool: Pool, threads: _Threads) -> Any:
    local = SimpleNamespace(allocate=lambda *_: pool.take())
    return _bare(
        "ValkeyConnector",
        _pool=threads,
        local_cpu_backend=local,
        meta_shapes=[],
        meta_dtypes=[],
        meta_fmt=None,
    )


def _keys(count: int) -> list[Any]:
    return [SimpleNamespace(to_string=lambda n=n: f"key{n}") for n in range(count)]


def batched_put_with_one_failure() -> tuple[bool, bool]:
    """Whether the put has ended while a thread still reads, and once none does."""

    async def main() -> tuple[bool, bool]:
        pool, threads = Pool(), _Threads()
        chunks = [pool.take(), pool.take()]
        put = asyncio.create_task(_valkey(pool, threads)._batched_put(_keys(2), chunks))
        await turns()
        threads.calls[0].set_exception(RuntimeError("request timed out"))
        await turns()
        early = put.done()
        threads.calls[1].set_result(None)
        await turns()
        assert isinstance(put.exception(), RuntimeError)
        return early, put.done()

    return asyncio.run(main())


def test_a_batched_put_ends_when_its_last_part_has() -> None:
    assert run(batched_put_with_one_failure, repaired=False) == (True, True)
    assert run(batched_put_with_one_failure, repaired=True) == (False, True)


def batched_get_with_one_failure() -> tuple[int, int]:
    """Chunks taken while a thread still writes into one, and once none does."""

    async def main() -> tuple[int, int]:
        pool, threads = Pool(), _Threads()
        get = asyncio.create_task(_valkey(pool, threads)._batched_get(_keys(2)))
        await turns()
        threads.calls[0].set_exception(RuntimeError("request timed out"))
        await turns()
        while_writing = pool.used // Pool.CHUNK
        threads.calls[1].set_result(Pool.CHUNK)
        await turns()
        assert isinstance(get.exception(), RuntimeError)
        return while_writing, pool.used // Pool.CHUNK

    return asyncio.run(main())


def test_a_batched_get_frees_no_buffer_that_a_thread_still_writes() -> None:
    assert run(batched_get_with_one_failure, repaired=False) == (0, 0)
    assert run(batched_get_with_one_failure, repaired=True) == (2, 0)


def valkey_call_cancelled_while_its_thread_runs(method: str) -> tuple[bool, int, int]:
    """Whether the call has ended before its thread, and chunks taken before and after the thread's end."""

    async def main() -> tuple[bool, int, int]:
        pool, threads = Pool(), _Threads()
        kept: list[Any] = []
        take = pool.take
        pool.take = lambda: kept.append(take()) or kept[-1]  # type: ignore[method-assign,func-returns-value]
        connector = _valkey(pool, threads)
        keys = _keys(2)
        call = asyncio.create_task(
            connector._get(keys[0]) if method == "_get" else connector._batched_get(keys)
        )
        await turns()
        call.cancel()
        await turns()
        early, before = call.done(), pool.used // Pool.CHUNK
        for thread in threads.calls:
            if not thread.done():
                thread.set_result(Pool.CHUNK)
        await turns()
        assert call.done()
        return early, before, pool.used // Pool.CHUNK

    return asyncio.run(main())


@pytest.mark.parametrize(("method", "chunks"), [("_get", 1), ("_batched_get", 2)])
def test_a_cancelled_valkey_get_ends_with_its_threads_and_returns_its_buffers(
    method: str, chunks: int
) -> None:
    assert run(valkey_call_cancelled_while_its_thread_runs, method, repaired=False) == (True, chunks, chunks)
    assert run(valkey_call_cancelled_while_its_thread_runs, method, repaired=True) == (False, chunks, 0)


def s3_get_cancelled_while_it_transfers() -> tuple[bool, int, int]:
    """As above, for S3Connector.get, which its caller cancels at every timeout (it runs on no executor)."""

    async def main() -> tuple[bool, int, int]:
        pool = Pool()
        kept: list[Any] = []
        transfer: concurrent.futures.Future[None] = concurrent.futures.Future()
        transfer.set_running_or_notify_cancel()

        def allocate(*_: Any) -> Any:
            kept.append(pool.take())
            return kept[-1]

        connector = _bare(
            "S3Connector",
            connection_disabled=False,
            connection_failures=0,
            object_size_cache={"key0": Pool.CHUNK},
            local_cpu_backend=SimpleNamespace(allocate=allocate),
            meta_shapes=[],
            meta_dtypes=[],
            meta_fmt=None,
            _s3_download=lambda **_: SimpleNamespace(finished_future=transfer),
        )
        call = asyncio.create_task(connector.get(_keys(1)[0]))
        await turns()
        call.cancel()
        await turns()
        early, before = call.done(), pool.used // Pool.CHUNK
        if not transfer.done():
            transfer.set_result(None)
        await turns()
        return early, before, pool.used // Pool.CHUNK

    return asyncio.run(main())


def test_a_cancelled_s3_get_ends_with_its_transfer_and_returns_its_buffer() -> None:
    assert run(s3_get_cancelled_while_it_transfers, repaired=False) == (True, 1, 1)
    assert run(s3_get_cancelled_while_it_transfers, repaired=True) == (False, 1, 0)


# -- redis: what is announced and what is there --------------------------------------------------------------


def redis_get_of(payload: bytes | None, fails: bool) -> tuple[str, int, list[str]]:
    """What a get makes of a header that announces one chunk and of `payload`: outcome, chunks left, deleted
    names.
    """

    async def main() -> tuple[str, int, list[str]]:
        import torch
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.protocol import RemoteMetadata, init_remote_metadata_info

        init_remote_metadata_info(1)
        pool = Pool()
        kept: list[Any] = []
        deleted: list[str] = []
        shapes = [torch.Size([Pool.CHUNK, 1, 1, 1])]
        header = RemoteMetadata(Pool.CHUNK, shapes, [torch.uint8], MemoryFormat.KV_2LTD).serialize()

        class Client:
            async def get(self, name: str) -> bytes | None:
                await asyncio.sleep(0)
                if name.endswith("metadata"):
                    return bytes(header)
                if fails:
                    raise ConnectionError("reset")
                return payload

            async def delete(self, name: str) -> None:
                deleted.append(name)

        def allocate(*_: Any) -> Any:
            kept.append(pool.take())
            return kept[-1]

        connector = _bare(
            "RedisConnector",
            connection=Client(),
            sem=asyncio.Semaphore(1),
            local_cpu_backend=SimpleNamespace(allocate=allocate),
        )
        try:
            chunk = await connector._get(_keys(1)[0])
            outcome = "miss" if chunk is None else "hit"
        except (ConnectionError, ValueError) as error:
            outcome = type(error).__name__
        return outcome, pool.used // Pool.CHUNK, deleted

    return asyncio.run(main())


HEADER = ["key0metadata"]


@pytest.mark.parametrize(
    ("payload", "fails", "unrepaired", "repaired"),
    [
        pytest.param(bytes(Pool.CHUNK), False, ("hit", 1, []), ("hit", 1, []), id="whole"),
        pytest.param(None, False, ("miss", 1, HEADER), ("miss", 0, HEADER), id="evicted"),
        pytest.param(bytes(100), False, ("ValueError", 1, []), ("miss", 0, HEADER), id="short"),
        pytest.param(bytes(Pool.CHUNK + 1), False, ("ValueError", 1, []), ("miss", 0, HEADER), id="long"),
        pytest.param(None, True, ("ConnectionError", 1, []), ("ConnectionError", 0, []), id="reset"),
    ],
)
def test_a_redis_get_that_is_no_hit_leaves_no_buffer(
    payload: bytes | None, fails: bool, unrepaired: Any, repaired: Any
) -> None:
    assert run(redis_get_of, payload, fails, repaired=False) == unrepaired
    assert run(redis_get_of, payload, fails, repaired=True) == repaired


# -- the native RESP client ----------------------------------------------------------------------------------


class _Native:
    """Stands for the C++ client: completions come when the test says so."""

    def __init__(self) -> None:
        import os

        self.fd = os.eventfd(0)
        self.completions: list[Any] = []
        self.order: list[str] = []

    def event_fd(self) -> int:
        return self.fd

    def submit_batch_get(self, keys: list[str], views: list[Any]) -> int:
        return 1

    submit_batch_set = submit_batch_get

    def drain_completions(self) -> list[Any]:
        found, self.completions = self.completions, []
        return found

    def close(self) -> None:
        self.order.append("threads ended")


def native_call_cancelled() -> tuple[bool, bool, list[str]]:
    """Whether a cancelled call ends before its completion, and with it; the order of things in close()."""

    async def main() -> tuple[bool, bool, list[str]]:
        from lmcache.v1.storage_backend.native_clients.connector_client_base import ConnectorClientBase

        native = _Native()
        client = ConnectorClientBase(native, asyncio.get_running_loop())
        call = asyncio.create_task(client.set("key", memoryview(bytearray(8))))
        await turns()
        call.cancel()
        await turns()
        early = call.done()
        native.completions.append((1, True, "", None))
        client._on_ready()
        await turns()
        other = asyncio.create_task(client.set("key", memoryview(bytearray(8))))
        other.add_done_callback(lambda _: native.order.append("caller answered"))
        await turns()
        fail_all = client._fail_all
        client._fail_all = lambda error: (native.order.append("answering"), fail_all(error))
        client.close()
        await turns()
        return early, call.done(), native.order

    return asyncio.run(main())


def test_a_native_call_ends_when_its_client_is_done_with_the_buffer() -> None:
    assert run(native_call_cancelled, repaired=False) == (
        True,
        True,
        ["answering", "threads ended", "caller answered"],
    )
    assert run(native_call_cancelled, repaired=True) == (
        False,
        True,
        ["threads ended", "answering", "caller answered"],
    )


def resp_batched_get(memory: int, fails: bool) -> tuple[str | list[bool], int]:
    """With memory for so many chunks of three: which are there, or the error; and chunks left."""

    async def main() -> tuple[str | list[bool], int]:
        pool = Pool(chunks=memory)
        kept: list[Any] = []

        def allocate(*_: Any) -> Any:
            kept.append(pool.take())
            return kept[-1]

        class Client:
            async def batch_get(self, keys: list[str], views: list[Any]) -> None:
                if fails:
                    raise RuntimeError("connection lost")

        connector = _bare(
            "RESPConnector",
            client=Client(),
            local_cpu_backend=SimpleNamespace(allocate=allocate),
            meta_shapes=[],
            meta_dtypes=[],
            meta_fmt=None,
        )
        try:
            found: Any = [chunk is not None for chunk in await connector._batched_get(_keys(3))]
        except (RuntimeError, AttributeError) as error:
            found = type(error).__name__
        return found, pool.used // Pool.CHUNK

    return asyncio.run(main())


def test_a_resp_get_without_memory_is_a_miss_and_a_failure_leaves_no_buffer() -> None:
    assert run(resp_batched_get, 2, False, repaired=False) == ("AttributeError", 2)
    assert run(resp_batched_get, 2, False, repaired=True) == ([True, True, False], 2)
    assert run(resp_batched_get, 3, True, repaired=False) == ("RuntimeError", 3)
    assert run(resp_batched_get, 3, True, repaired=True) == ("RuntimeError", 0)


# -- memory on the loop's thread -----------------------------------------------------------------------------


def get_with_the_pool_full() -> tuple[bool, bool, int]:
    """A chunk waits for its put, a get asks for memory on the same loop: is the loop alive, the put done?"""
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

    pool = Pool(chunks=1)
    backend = object.__new__(LocalCPUBackend)
    backend.__dict__.update(
        memory_allocator=pool.allocator,
        use_hot=False,
        layerwise=False,
        stats_monitor=SimpleNamespace(update_local_cpu_evict_metrics=lambda _: None),
    )
    put_ended, begun = threading.Event(), threading.Event()
    with loop_in_thread() as loop:
        chunk = pool.take()

        async def put() -> None:
            await asyncio.sleep(0.05)  # the store's answer
            chunk.ref_count_down()
            put_ended.set()

        async def get() -> Any:
            import torch

            begun.set()
            return backend.allocate(torch.Size([Pool.CHUNK]), torch.uint8)

        asyncio.run_coroutine_threadsafe(put(), loop)
        future = asyncio.run_coroutine_threadsafe(get(), loop)
        assert begun.wait(30)
        alive = responsive(loop)
        if alive:
            assert future.result(patience()) is None
        return alive, put_ended.wait(patience()), counters()["loop_waits_refused"]


def test_an_allocation_on_the_loop_does_not_wait_for_what_only_the_loop_can_free() -> None:
    assert run(get_with_the_pool_full, repaired=False) == (False, False, 0)
    assert run(get_with_the_pool_full, repaired=True) == (True, True, 1)


def allocation_off_the_loop_waits() -> bool:
    """A thread that may wait for memory still does."""
    import torch
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

    pool = Pool(chunks=1)
    backend = object.__new__(LocalCPUBackend)
    backend.__dict__.update(
        memory_allocator=pool.allocator,
        use_hot=False,
        layerwise=False,
        stats_monitor=SimpleNamespace(update_local_cpu_evict_metrics=lambda _: None),
    )
    chunk = pool.take()
    threading.Timer(0.2, chunk.ref_count_down).start()
    return backend.allocate(torch.Size([Pool.CHUNK]), torch.uint8) is not None


def test_a_thread_that_may_wait_for_memory_still_does() -> None:
    assert run(allocation_off_the_loop_waits, repaired=True)


# -- valkey's close ------------------------------------------------------------------------------------------


def close_valkey_with_a_put_in_flight() -> tuple[bool, int, int]:
    """Whether the loop lives while the pool closes; chunks at the end of close and after the thread's."""
    limits(drain=0.05, cancel=0.05)

    async def main() -> tuple[bool, int, int]:
        from lmcache.v1.storage_backend.job_executor.pq_executor import AsyncPQExecutor

        loop = asyncio.get_running_loop()
        pool, threads = Pool(), _Threads()
        connector = _valkey(pool, threads)
        connector._pq_executor = AsyncPQExecutor(loop)
        closing, ticks = threading.Event(), []

        def close() -> None:  # as ValkeyWorkerPool.close: waits for its threads
            closing.set()
            assert threads.calls[0].result(30) is None

        connector._pool.close = close

        async def put() -> None:
            chunk = pool.take()
            try:
                await connector.put(_keys(1)[0], chunk)
            finally:
                chunk.ref_count_down()

        call = asyncio.create_task(put())
        await turns()
        closed = asyncio.create_task(connector.close())
        await asyncio.to_thread(closing.wait)
        ticks.append(pool.used // Pool.CHUNK)
        threads.calls[0].set_result(None)
        await closed
        await asyncio.gather(call, return_exceptions=True)
        await turns()
        return True, ticks[0], pool.used // Pool.CHUNK

    return asyncio.run(main())


def test_closing_valkey_keeps_the_loop_alive_and_the_bytes_until_the_thread_is_done() -> None:
    assert run(close_valkey_with_a_put_in_flight, repaired=False, seconds=3) == HUNG
    assert run(close_valkey_with_a_put_in_flight, repaired=True) == (True, 1, 0)


# -- failed glide calls and the garbage collector ------------------------------------------------------------


def collect_after_failed_glide_gets() -> str:
    """Batches of gets that time out in glide, as through a stall, and the collector's runs between them."""
    import gc

    import cffi
    from lmcache.v1.storage_backend.valkey.worker_pool import ValkeyWorkerPool

    ffi = cffi.FFI()

    class Client:
        def get(self, key: bytes, buffer: memoryview) -> bytes:
            exported = ffi.from_buffer(buffer)  # as glide_sync does for the length of the call
            raise RuntimeError(f"timed out, {len(exported)} bytes asked for")

        def close(self) -> None:
            return None

    class Clients(ValkeyWorkerPool):
        def _get_client(self) -> Client:
            self._has_buffer_get = True
            return Client()

    async def main() -> None:
        pool = Pool()
        connector = _valkey(pool, Clients([("nowhere", 0)], num_workers=8))
        for number in range(1000):
            if number % 10 == 0:
                gc.collect()
            try:
                await connector._batched_get(_keys(4))
            except RuntimeError:
                assert pool.used == 0
            else:
                raise AssertionError("expected a time-out")
        gc.collect()

    asyncio.run(main())
    return "alive"


def test_failed_glide_calls_do_not_crash_the_garbage_collector() -> None:
    # UPSTREAM: CPython clears a memoryview that cffi still exports (seen with 3.11), and the process is gone.
    if sys.version_info < (3, 12):
        assert run(collect_after_failed_glide_gets, repaired=False) == "exit code -11"
    assert run(collect_after_failed_glide_gets, repaired=True) == "alive"
