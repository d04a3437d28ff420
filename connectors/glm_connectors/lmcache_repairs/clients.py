"""Repair of LMCache's connectors: a job ends when its client is done with the bytes, and a hole ends a
prefix.

target    redis_connector (RESP, Redis, RedisCluster), valkey_connector, s3_connector, eic_connector,
          sagemaker_hyperpod_connector in lmcache.v1.storage_backend.connector; valkey.worker_pool;
          native_clients.connector_client_base
why       `asyncio.gather` returns at the first failure while the other parts still read or write buffers
          that the caller then frees. A coroutine cancelled over a worker thread leaves the thread writing.
          Redis' get holds a buffer over two round trips and loses it on an error, a wrong length or an
          evicted value. `[r for r in results if r]` closes the gap of a missing chunk, so every later chunk
          is served under its predecessor's key. A failed glide call crashes the process at a later garbage
          collection.
how       The modules' global `asyncio` becomes `settle.SettlingAsyncio`; Redis' get allocates when the bytes
          are there and are as long as announced; prefetches return the chunks before the first miss.
upstream  not reported as far as we know
delete    when the pinned LMCache passes tests/unit/test_lmcache_clients.py unrepaired
"""

from __future__ import annotations

import asyncio
import functools
import logging
import traceback
from collections.abc import Callable
from typing import Any

from glm_connectors.lmcache_repairs.buffers import prefix
from glm_connectors.lmcache_repairs.contract import Symbol
from glm_connectors.lmcache_repairs.grafting import Graft, Repair, replace
from glm_connectors.lmcache_repairs.settle import SettlingAsyncio, gather, outlast

logger = logging.getLogger(__name__)

_CONNECTORS = "lmcache.v1.storage_backend.connector"
REDIS = f"{_CONNECTORS}.redis_connector"
VALKEY = f"{_CONNECTORS}.valkey_connector"
POOL = "lmcache.v1.storage_backend.valkey.worker_pool"
S3 = f"{_CONNECTORS}.s3_connector"
EIC = f"{_CONNECTORS}.eic_connector"
SAGEMAKER = f"{_CONNECTORS}.sagemaker_hyperpod_connector"
_MOCK = f"{_CONNECTORS}.mock_connector"
_BIGTABLE = f"{_CONNECTORS}.bigtable_connector"
NATIVE = "lmcache.v1.storage_backend.native_clients.connector_client_base"


def _redis_get(client_name: str) -> Callable[..., Any]:
    """`_get` for a connector whose redis-py client is its attribute `client_name`."""

    async def get(self: Any, key: Any) -> Any:
        """The buffer of `key`, or None: absent, half evicted, of another length than announced, or no
        memory.
        """
        from lmcache.v1.protocol import RemoteMetadata

        client, name = getattr(self, client_name), key.to_string()
        async with self.sem:
            header = await client.get(name + "metadata")
            if header is None:
                return None
            payload = await client.get(name + "kv_bytes")
            metadata = RemoteMetadata.deserialize(memoryview(header))
            if payload is None or len(payload) != metadata.length:
                found = "no value" if payload is None else f"{len(payload)} bytes"
                logger.warning(
                    "%s: %d bytes announced, %s found: deleted, a miss", name, metadata.length, found
                )
                await client.delete(name + "metadata")
                return None
        buffer = self.local_cpu_backend.allocate(metadata.shapes, metadata.dtypes, metadata.fmt)
        if buffer is None:
            return None
        try:
            view = memoryview(buffer.byte_array)
            (view if view.format == "B" else view.cast("B"))[: metadata.length] = payload
        except BaseException:
            buffer.ref_count_down()
            raise
        return buffer

    return get


async def _resp_get(self: Any, key: Any) -> Any:
    """One key of the native RESP client; None without memory."""
    found = await self._batched_get([key])
    return found[0]


async def _resp_batched_get(self: Any, keys: list[Any]) -> list[Any]:
    """A buffer for each key, None for those behind the first that found no memory; a failure returns all
    buffers.
    """
    found: list[Any] = []
    for _ in keys:
        buffer = self.local_cpu_backend.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt)
        if buffer is None:
            break
        found.append(buffer)
    if found:
        views = [memoryview(buffer.byte_array) for buffer in found]
        try:
            await self.client.batch_get([key.to_string() for key in keys[: len(found)]], views)
        except BaseException:
            for buffer in found:
                buffer.ref_count_down()
            raise
    return [*found, *[None] * (len(keys) - len(found))]


async def _resp_prefetch(self: Any, lookup_id: str, keys: list[Any]) -> list[Any]:
    """UPSTREAM: RESPConnector.batched_get_non_blocking, which passes the holes on."""
    from lmcache.v1.storage_backend.connector.redis_connector import Priorities

    return prefix(
        await self.pq_executor.submit_job(self._batched_get, keys=keys, priority=Priorities.PREFETCH)
    )


def _native_register(original: Callable[..., Any]) -> Callable[..., Any]:
    """Native clients use a buffer until their completion arrives, cancelled or not."""

    def register(self: Any, op: str, future_id: int, keepalive: tuple[Any, ...] = ()) -> Any:
        return outlast(original(self, op, future_id, keepalive))

    return register


async def _prefetch_each(self: Any, lookup_id: str, keys: list[Any]) -> list[Any]:
    """One `_get` a key, at once; the chunks before the first miss."""
    return prefix(await gather(*(self._get(key) for key in keys)))


async def _prefetch_batch(self: Any, lookup_id: str, keys: list[Any]) -> list[Any]:
    """`batched_get` of the connector; the chunks before the first miss."""
    return prefix(await self.batched_get(keys))


def _without_frames(original: Callable[..., Any]) -> Callable[..., Any]:
    """A failed glide call's frames hold a memoryview that cffi has exported.

    Its error soon is part of a reference cycle (futures, tracebacks), and CPython's collector crashes when
    it clears such a memoryview first. So the frames are emptied here, where they have ended.
    """

    @functools.wraps(original)
    def call(self: Any, *args: Any) -> Any:
        try:
            return original(self, *args)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            args = ()
            raise

    return call


async def _valkey_close(self: Any) -> None:
    """Ends the executor, then the clients' threads, off the loop on which the last jobs settle."""
    await self._pq_executor.shutdown_async(wait=True)
    await asyncio.to_thread(self._pool.close)


def _native_close(self: Any) -> None:
    """UPSTREAM: ConnectorClientBase.close answers its callers before its threads have stopped using their
    buffers.
    """
    if not self._closed:
        self._shutdown_native(best_effort=True)
        self._client.close()
        self._fail_all(RuntimeError("the client was closed"))


def _repair(module: str, leaned_on: tuple[str, ...], *grafts: Graft) -> Repair:
    """Every replaced method is fingerprinted, and `leaned_on` besides."""
    replaced = (graft.qualname for graft in grafts if "." in graft.qualname)
    return Repair(module, tuple(Symbol(module, name) for name in (*leaned_on, *replaced)), grafts)


_SETTLE = replace("asyncio", SettlingAsyncio())

REPAIRS = (
    _repair(
        REDIS,
        (
            "RESPConnector.close",
            "RedisConnector.__init__",
            "RedisConnector._batched_put",
            "RedisConnector._put",
            "RedisConnector.close",
            "RedisClusterConnector.__init__",
            "RedisClusterConnector._batched_put",
            "RedisClusterConnector._put",
            "RedisClusterConnector.close",
        ),
        _SETTLE,
        replace("RESPConnector._get", _resp_get),
        replace("RESPConnector._batched_get", _resp_batched_get),
        replace("RESPConnector.batched_get_non_blocking", _resp_prefetch),
        replace("RedisConnector._get", _redis_get("connection")),
        replace("RedisConnector._batched_get_non_blocking", _prefetch_each),
        replace("RedisClusterConnector._get", _redis_get("cluster")),
        replace("RedisClusterConnector._batched_get_non_blocking", _prefetch_each),
    ),
    _repair(
        VALKEY,
        (
            "ValkeyConnector._get",
            "ValkeyConnector._put",
            "ValkeyConnector._batched_put",
            "ValkeyConnector._batched_get",
            "ValkeyConnector._batched_get_non_blocking",
        ),
        _SETTLE,
        replace("ValkeyConnector.close", _valkey_close),
    ),
    _repair(
        POOL,
        ("ValkeyWorkerPool.submit_set", "ValkeyWorkerPool.submit_get_into", "ValkeyWorkerPool.submit_exists"),
        Graft("ValkeyWorkerPool._do_set", _without_frames),
        Graft("ValkeyWorkerPool._do_get_into", _without_frames),
        Graft("ValkeyWorkerPool._do_exists", _without_frames),
    ),
    _repair(
        S3,
        ("S3Connector.get", "S3Connector.batched_get", "S3Connector._put", "S3Connector.close"),
        _SETTLE,
        replace("S3Connector._batched_get_non_blocking", _prefetch_batch),
    ),
    _repair(
        EIC,
        ("EICConnector._get", "EICConnector._batched_get", "EICConnector.close"),
        _SETTLE,
        replace("EICConnector._batched_get_non_blocking", _prefetch_each),
    ),
    _repair(
        SAGEMAKER,
        (
            "SageMakerHyperPodConnector.batched_get",
            "SageMakerHyperPodConnector._batched_async_contains",
            "SageMakerHyperPodConnector.close",
        ),
        _SETTLE,
        replace("SageMakerHyperPodConnector._batched_get_non_blocking", _prefetch_batch),
    ),
    _repair(
        NATIVE,
        ("ConnectorClientBase.batch_get", "ConnectorClientBase.batch_set", "ConnectorClientBase._on_ready"),
        Graft("ConnectorClientBase._register_future_async", _native_register),
        replace("ConnectorClientBase.close", _native_close),
    ),
    # Nothing to replace; they lean on `shutdown()` being awaitable on its own loop.
    Repair(_MOCK, (Symbol(_MOCK, "MockConnector.close"),), ()),
    Repair(_BIGTABLE, (Symbol(_BIGTABLE, "BigtableConnector.close"),), ()),
)
