"""Repair of LMCache's disk tier: failed or unrun jobs release what was taken for them; no lock outlives a
call.

target    lmcache.v1.storage_backend.local_disk_backend: LocalDiskWorker.submit_task,
          LocalDiskBackend.async_save_bytes_to_disk, batched_get_non_blocking,
          batched_async_load_bytes_from_disk
why       A write that fails (disk full) or never runs keeps its chunk referenced and its key in `put_tasks`
          for ever: the same pinned pool as with dead workers. A prefetch that runs out of memory returns
          with `disk_lock` held, which stops every thread that touches the tier, and returns buffers that
          were never read.
how       The save returns its reference however it ends. A job that did not run is undone by its submitter.
          A prefetch keeps the prefix that fits, reads it, and returns what it read.
upstream  LMCache issue 3855 (lock leak when the allocator returns nothing)
delete    when the pinned LMCache passes tests/unit/test_lmcache_local_disk.py unrepaired
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from glm_connectors.lmcache_repairs.buffers import dispose
from glm_connectors.lmcache_repairs.contract import Symbol
from glm_connectors.lmcache_repairs.grafting import Graft, Repair, replace

logger = logging.getLogger(__name__)


def _submit_task(original: Callable[..., Any]) -> Callable[..., Any]:
    async def submit_task(
        self: Any, task_type: str, task: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Runs `task` on the disk workers. A put that never ran gives back its reference and its key."""
        ran = False

        def run(*a: Any, **k: Any) -> Any:
            nonlocal ran
            ran = True
            return task(*a, **k)

        try:
            return await original(self, task_type, run, *args, **kwargs)
        except BaseException:
            if task_type == "put" and not ran:
                backend = task.__self__  # type: ignore[attr-defined]  # the bound LocalDiskBackend.async_save_bytes_to_disk
                _forget_reserved(backend, kwargs["memory_obj"])
                kwargs["memory_obj"].ref_count_down()
                self.remove_put_task(kwargs["key"])
            raise

    return submit_task


def _forget_reserved(backend: Any, memory_obj: Any) -> None:
    """Undoes LocalDiskBackend.submit_put_task's reservation for a chunk that won't be on disk."""
    with backend.disk_lock:
        backend.current_cache_size -= memory_obj.get_physical_size()


def _save(
    self: Any, key: Any, memory_obj: Any, on_complete_callback: Callable[[Any], None] | None = None
) -> None:
    """Writes a chunk to its file, on a disk worker's thread. OSError from the file system, with nothing kept.

    The caller of `submit_put_task` took one reference for this job and reserved `get_physical_size()` bytes.
    """
    path = self._key_to_path(key)
    try:
        payload = memory_obj.byte_array
        self.write_file(payload, path)
        described = memory_obj.metadata
        self.usage += len(payload)
        self.stats_monitor.update_local_storage_usage(self.usage)
        self.insert_key(
            key,
            memory_obj.get_physical_size(),
            described.shape,
            described.dtype,
            described.fmt,
            cached_positions=described.cached_positions,
        )
    except BaseException:
        with suppress(OSError):
            os.remove(path)
        _forget_reserved(self, memory_obj)
        raise
    finally:
        memory_obj.ref_count_down()
        self.disk_worker.remove_put_task(key)
    if on_complete_callback is not None:
        try:
            on_complete_callback(key)
        except Exception as error:
            logger.warning("on_complete_callback failed for %s: %s", key, error)


async def _prefetch(self: Any, lookup_id: str, keys: list[Any], transfer_spec: Any = None) -> list[Any]:
    """Reads the prefix of `keys` that is on disk and finds memory; its buffers are pinned and belong to the
    caller.
    """
    found: list[Any] = []
    paths: list[str] = []
    for key in keys:
        with self.disk_lock:
            entry = self.dict.get(key)
            if entry is None:
                break
            buffer = self.local_cpu_backend.allocate(entry.shape, entry.dtype, entry.fmt, busy_loop=False)
            if buffer is None:
                logger.warning("no memory for chunk %d of %d of lookup %s", len(found), len(keys), lookup_id)
                break
            entry.pin()
            self.cache_policy.update_on_hit(key, self.dict)
            buffer.pin()
            found.append(buffer)
            paths.append(entry.path)
    if not found:
        return found
    ran = False

    def load(**kwargs: Any) -> list[Any]:
        nonlocal ran
        ran = True
        return self.batched_async_load_bytes_from_disk(**kwargs)  # type: ignore[no-any-return]

    try:
        return await self.disk_worker.submit_task(  # type: ignore[no-any-return]
            "prefetch", load, paths=paths, keys=keys[: len(found)], memory_objs=found
        )
    except BaseException:
        if not ran:
            for key in keys[: len(found)]:
                self.unpin(key)
            dispose(found)
        raise


def _load(
    self: Any, paths: list[str], keys: list[Any], memory_objs: list[Any], write_back: bool = False
) -> list[Any]:
    """Fills the buffers, on a disk worker's thread; returns the prefix that could be read in full.

    The buffers are ours until we return: what isn't returned goes back to the allocator.
    """
    good = 0
    try:
        for path, key, buffer in zip(paths, keys, memory_objs, strict=True):
            try:
                complete = os.path.getsize(path) == len(buffer.byte_array)
            except OSError:
                complete = False
            if not complete:
                logger.warning("%s is gone or of another length: a miss", path)
                break
            self.read_file(key, buffer.byte_array, path)
            with self.disk_lock:
                entry = self.dict.get(key)
            if entry is None:
                break
            buffer.metadata.cached_positions = entry.cached_positions
            good += 1
    except BaseException:
        good = 0
        raise
    finally:
        for key in keys:
            self.unpin(key)
        dispose(memory_objs[good:])
    return memory_objs[:good]


MODULE = "lmcache.v1.storage_backend.local_disk_backend"
REPAIR = Repair(
    module=MODULE,
    symbols=tuple(
        Symbol(MODULE, name)
        for name in (
            "LocalDiskWorker.submit_task",
            "LocalDiskWorker.remove_put_task",
            "LocalDiskWorker.close",
            "LocalDiskBackend.submit_put_task",
            "LocalDiskBackend.async_save_bytes_to_disk",
            "LocalDiskBackend.batched_get_non_blocking",
            "LocalDiskBackend.batched_async_load_bytes_from_disk",
            "LocalDiskBackend.insert_key",
            "LocalDiskBackend.unpin",
            "LocalDiskBackend.write_file",
            "LocalDiskBackend.read_file",
        )
    ),
    grafts=(
        Graft("LocalDiskWorker.submit_task", _submit_task),
        replace("LocalDiskBackend.async_save_bytes_to_disk", _save),
        replace("LocalDiskBackend.batched_get_non_blocking", _prefetch),
        replace("LocalDiskBackend.batched_async_load_bytes_from_disk", _load),
    ),
)
