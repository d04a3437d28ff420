"""Repair of LMCache's remote backend: a timeout loses no buffer, a put that fails or never starts holds none.

target    lmcache.v1.storage_backend.remote_backend: RemoteBackend.get_blocking, batched_get_blocking,
          submit_put_task, batched_submit_put_task
why       A result that lands while its future is cancelled is lost; so are the results behind the first
          failure of a batch. A put whose serializer raises, or whose loop is closed, keeps its reference and
          its key for ever: that chunk is pinned, and can't be stored again. A short batch trips an assertion
          and loses all of it.
how       Gets go through `settle.hand_over`, whose cancel either wins or yields the result. A put that can't
          start gives back what it took; one that started is InstrumentedRemoteConnector's to release.
upstream  not reported as far as we know
delete    when the pinned LMCache passes tests/unit/test_lmcache_remote_backend.py unrepaired
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from glm_connectors.lmcache_repairs.buffers import dispose
from glm_connectors.lmcache_repairs.contract import Symbol
from glm_connectors.lmcache_repairs.grafting import Repair, replace
from glm_connectors.lmcache_repairs.settle import hand_over

logger = logging.getLogger(__name__)


_FAILED = object()


def _take(future: concurrent.futures.Future[Any], seconds: float) -> Any:
    """The result (None for a miss), or _FAILED: an error, or nothing within `seconds` (then the call is
    cancelled).
    """
    try:
        return future.result(seconds)
    except concurrent.futures.TimeoutError:
        if future.cancel():
            logger.warning("remote get not answered within %s s, taken for a miss", seconds)
            return _FAILED
    except Exception as error:
        logger.warning("remote get failed, taken for a miss: %s", error)
        return _FAILED
    return _take(future, seconds)  # the result came between the timeout and the cancel: it is there


def _ready_to_get(self: Any) -> bool:
    if self.local_cpu_backend is None or self.connection is None:
        logger.warning(
            "remote get without %s: a miss", "memory" if self.local_cpu_backend is None else "connection"
        )
        return False
    return True


def _get_blocking(self: Any, key: Any) -> Any:
    """The buffer of `key`, owned by the caller, or None for a miss."""
    if not _ready_to_get(self):
        return None
    return _fetch(self, [key], batched=False)[0]


def _batched_get_blocking(self: Any, keys: list[Any]) -> list[Any]:
    """A buffer (owned by the caller) or None for each key, in order."""
    if not _ready_to_get(self):
        return [None] * len(keys)
    return _fetch(self, keys, batched=self.connection.support_batched_get())


def _fetch(self: Any, keys: list[Any], *, batched: bool) -> list[Any]:
    if self._mla_worker_id_as0_mode:
        keys = [key.with_new_worker_id(0) for key in keys]
    began = time.perf_counter()
    seconds = self.config.blocking_timeout_secs
    statistics = self.stats_monitor.get_current_retrieve_stats()
    if batched:
        found = _take(hand_over(self.connection.batched_get(keys), self.loop), seconds)
        found = [] if found is _FAILED else list(found)
    else:
        if statistics is not None and len(keys) > 1:
            # UPSTREAM: InstrumentedRemoteConnector.get fills it
            statistics.detailed_metrics["remote_backend_individual_get_stats"] = {}
        found = _fetch_one_by_one(self, keys, seconds)
    elapsed = time.perf_counter() - began
    self.stats_monitor.update_interval_remote_time_to_get_sync(elapsed * 1000)
    if statistics is not None:
        name = "remote_backend_batched_get_blocking_time"
        statistics.detailed_metrics[name] = statistics.detailed_metrics.get(name, 0.0) + elapsed
    dispose(found[len(keys) :])
    found = [*found[: len(keys)], *[None] * (len(keys) - len(found))]
    if None in found:
        self._get_blocking_failed_count += 1
    return [None if buffer is None else self.deserializer.deserialize(buffer) for buffer in found]


def _fetch_one_by_one(self: Any, keys: list[Any], seconds: float) -> list[Any]:
    """All at once, taken in order up to the first failure: one deadline for a stalled store, not one for
    each key.
    """
    futures = [hand_over(self.connection.get(key), self.loop) for key in keys]
    found: list[Any] = []
    for position, future in enumerate(futures):
        result = _take(future, seconds)
        if result is _FAILED:
            for later in futures[position + 1 :]:
                if not later.cancel() and (rest := _take(later, seconds)) is not _FAILED:
                    dispose(rest)
            break
        found.append(result)
    return found


def _submit_put_task(
    self: Any, key: Any, memory_obj: Any, on_complete_callback: Callable[[Any], None] | None = None
) -> concurrent.futures.Future[Any]:
    """Starts a put of one buffer.

    The put takes its own reference; `key` can't be put again until it has ended.
    """
    nothing: concurrent.futures.Future[Any] = concurrent.futures.Future()
    nothing.set_result(None)
    if self.connection is None or self._mla_worker_id_as0_mode:
        return nothing
    with self.lock:
        if key in self.put_tasks:
            return nothing
        self.put_tasks.add(key)

    def ended(future: concurrent.futures.Future[Any]) -> None:
        self.put_callback(future, key)
        _notify(on_complete_callback, [key])

    try:
        (stored,) = _serialize(self, [memory_obj])
        return _start_put(self, self.connection.put(key, stored), [stored], ended)
    except BaseException:
        with self.lock:
            self.put_tasks.discard(key)
        raise


def _batched_submit_put_task(
    self: Any,
    keys: Sequence[Any],
    memory_objs: list[Any],
    transfer_spec: Any = None,
    on_complete_callback: Callable[[Any], None] | None = None,
) -> None:
    """Starts a put of several buffers, in one call of the connector where it can."""
    if self.connection is None:
        return
    if not self.connection.support_batched_put():
        for key, memory_obj in zip(keys, memory_objs, strict=False):
            self.submit_put_task(key, memory_obj, on_complete_callback=on_complete_callback)
        return
    if self._mla_worker_id_as0_mode:
        return

    def ended(future: concurrent.futures.Future[Any]) -> None:
        self.batched_put_callback(future, list(keys))
        _notify(on_complete_callback, keys)

    stored = _serialize(self, memory_objs)
    _start_put(self, self.connection.batched_put(keys, stored), stored, ended)


def _serialize(self: Any, memory_objs: list[Any]) -> list[Any]:
    """One reference (or one new buffer) for each; none is left when the serializer raises."""
    stored: list[Any] = []
    try:
        for memory_obj in memory_objs:
            stored.append(self.serializer.serialize(memory_obj))
    except BaseException:
        for buffer in stored:
            buffer.ref_count_down()
        raise
    return stored


def _start_put(
    self: Any,
    put: Coroutine[Any, Any, Any],
    stored: list[Any],
    ended: Callable[[concurrent.futures.Future[Any]], None],
) -> concurrent.futures.Future[Any]:
    try:
        future = asyncio.run_coroutine_threadsafe(put, self.loop)
    except RuntimeError:  # the loop is closed: InstrumentedRemoteConnector.put will not return the references
        put.close()
        for buffer in stored:
            buffer.ref_count_down()
        raise
    future.add_done_callback(ended)
    return future


def _notify(callback: Callable[[Any], None] | None, keys: Sequence[Any]) -> None:
    for key in keys if callback is not None else ():
        try:
            assert callback is not None
            callback(key)
        except Exception as error:
            logger.warning("on_complete_callback failed for %s: %s", key, error)


MODULE = "lmcache.v1.storage_backend.remote_backend"
_INSTRUMENTED = "lmcache.v1.storage_backend.connector.instrumented_connector"
REPAIR = Repair(
    module=MODULE,
    symbols=(
        Symbol(MODULE, "RemoteBackend.__init__"),
        Symbol(MODULE, "RemoteBackend.get_blocking"),
        Symbol(MODULE, "RemoteBackend.batched_get_blocking"),
        Symbol(MODULE, "RemoteBackend.submit_put_task"),
        Symbol(MODULE, "RemoteBackend.batched_submit_put_task"),
        Symbol(MODULE, "RemoteBackend.put_callback"),
        Symbol(MODULE, "RemoteBackend.batched_put_callback"),
        Symbol(_INSTRUMENTED, "InstrumentedRemoteConnector.put"),
        Symbol(_INSTRUMENTED, "InstrumentedRemoteConnector.batched_put"),
    ),
    grafts=(
        replace("RemoteBackend.get_blocking", _get_blocking),
        replace("RemoteBackend.batched_get_blocking", _batched_get_blocking),
        replace("RemoteBackend.submit_put_task", _submit_put_task),
        replace("RemoteBackend.batched_submit_put_task", _batched_submit_put_task),
    ),
)
