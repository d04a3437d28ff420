"""LMCache's disk tier: writes that fail or never run, prefetches that run out of memory, files that are gone.

Oracles: LMCache's reference counts and allocator, the bytes that were written, and whether the tier's lock
is free.
"""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lmcache_faults import Pool, loop_in_thread, patience, run, turns


class Key(str):
    """A cache key, as far as the disk tier looks at one."""

    def to_string(self) -> str:
        return str(self)


def _tier(folder: str, loop: asyncio.AbstractEventLoop, pool: Pool) -> Any:
    """A LocalDiskBackend without its constructor, writing real files into `folder`."""
    from lmcache.v1.storage_backend.cache_policy import get_cache_policy
    from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend, LocalDiskWorker

    kept: list[Any] = []

    def allocate(*_: Any, **__: Any) -> Any:
        chunk = pool.take()
        if chunk is not None:
            kept.append(chunk)
        return chunk

    tier = object.__new__(LocalDiskBackend)
    tier.__dict__.update(
        cache_policy=get_cache_policy("LRU"),
        local_cpu_backend=SimpleNamespace(allocate=allocate),
        disk_lock=threading.Lock(),
        path=folder,
        os_disk_bs=4096,
        use_odirect=False,
        disk_worker=LocalDiskWorker(loop),
        max_cache_size=1 << 20,
        current_cache_size=0,
        keys_in_request=[],
        stats_monitor=SimpleNamespace(update_local_storage_usage=lambda _: None),
        usage=0,
        batched_msg_sender=None,
        loop=loop,
        kept=kept,
    )
    tier.dict = tier.cache_policy.init_mutable_mapping()
    return tier


def _drain(tier: Any) -> None:
    async def wait() -> None:
        await asyncio.wait_for(tier.disk_worker.executor._queue.join(), patience())
        await turns()

    asyncio.run_coroutine_threadsafe(wait(), tier.loop).result()


def _put(tier: Any, pool: Pool, mark: int) -> Key:
    key = Key(f"key{mark}")
    chunk = pool.take()
    chunk.tensor.fill_(mark)
    tier.submit_put_task(key, chunk)
    chunk.ref_count_down()
    return key


def save_on_a_full_disk(folder: str) -> tuple[int, int, int, list[str]]:
    """Chunks held, keys that can't be put again, reserved bytes, files left."""
    pool = Pool()
    with loop_in_thread() as loop:
        tier = _tier(folder, loop, pool)

        def write_file(buffer: Any, path: str) -> None:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")

        tier.write_file = write_file
        _put(tier, pool, 1)
        _drain(tier)
        return (
            pool.used // Pool.CHUNK,
            len(tier.disk_worker.put_tasks),
            tier.current_cache_size,
            os.listdir(folder),
        )


def test_a_save_that_fails_holds_nothing(tmp_path: Path) -> None:
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    os.mkdir(first), os.mkdir(second)
    assert run(save_on_a_full_disk, first, repaired=False) == (1, 1, Pool.CHUNK, ["key1.pt"])
    assert run(save_on_a_full_disk, second, repaired=True) == (0, 0, 0, [])


def save_that_is_refused(folder: str) -> tuple[int, int, int]:
    """A put for an executor that is shut down before it runs."""
    pool = Pool()
    with loop_in_thread() as loop:
        tier = _tier(folder, loop, pool)
        asyncio.run_coroutine_threadsafe(tier.disk_worker.executor.shutdown_async(wait=False), loop).result(
            30
        )
        _put(tier, pool, 1)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), loop).result(30)
        return pool.used // Pool.CHUNK, len(tier.disk_worker.put_tasks), tier.current_cache_size


def test_a_save_that_never_runs_holds_nothing(tmp_path: Path) -> None:
    assert run(save_that_is_refused, str(tmp_path), repaired=False) == (1, 1, Pool.CHUNK)
    assert run(save_that_is_refused, str(tmp_path), repaired=True) == (0, 0, 0)


def prefetch_with_memory_for(
    folder: str, chunks: int, missing: int = -1
) -> tuple[list[int], bool, int, list[int]]:
    """Three chunks are on disk.

    Marks served, whether the lock is free, chunks left once they're released, disk pins.
    """
    pool = Pool(chunks=4)
    with loop_in_thread() as loop:
        tier = _tier(folder, loop, pool)
        keys = [_put(tier, pool, mark) for mark in (1, 2, 3)]
        _drain(tier)
        taken = [pool.take() for _ in range(4 - chunks)]
        if missing >= 0:
            os.remove(tier.dict[keys[missing]].path)
        future = asyncio.run_coroutine_threadsafe(tier.batched_get_non_blocking("lookup", keys), loop)
        try:
            served = future.result(patience())
        except KeyError:
            served = []
        free = tier.disk_lock.acquire(timeout=0.1)
        if free:
            tier.disk_lock.release()
        marks = [int(chunk.tensor[0]) for chunk in served]
        for chunk in served:
            chunk.unpin()
            chunk.ref_count_down()
        for chunk in taken:
            chunk.ref_count_down()
        pins = [tier.dict[key].pin_count for key in keys if key in tier.dict]
        return marks, free, pool.used // Pool.CHUNK, pins


def test_a_prefetch_without_memory_returns_what_it_read_and_holds_no_lock(tmp_path: Path) -> None:
    marks, free, *_ = run(prefetch_with_memory_for, str(tmp_path), 2, repaired=False)
    assert not free  # every thread that touches the tier from here on stops
    assert marks != [1, 2]  # never read from disk, and served
    assert run(prefetch_with_memory_for, str(tmp_path), 2, repaired=True) == ([1, 2], True, 0, [0, 0, 0])
    assert run(prefetch_with_memory_for, str(tmp_path), 4, repaired=True) == ([1, 2, 3], True, 0, [0, 0, 0])


def test_a_prefetch_of_a_file_that_is_gone_ends_before_it(tmp_path: Path) -> None:
    marks, _, left, _ = run(prefetch_with_memory_for, str(tmp_path), 4, 1, repaired=False)
    assert (marks, left) == ([], 3)
    marks, free, left, pins = run(prefetch_with_memory_for, str(tmp_path), 4, 1, repaired=True)
    assert (marks, free, left) == ([1], True, 0)
    assert set(pins) == {0}


def prefetch_cancelled_while_its_thread_reads(folder: str) -> tuple[int, list[int]]:
    """Chunks left and disk pins when the caller of a running prefetch has gone."""
    pool = Pool()
    with loop_in_thread() as loop:
        tier = _tier(folder, loop, pool)
        key = _put(tier, pool, 1)
        _drain(tier)
        reading, go_on = threading.Event(), threading.Event()
        read_file = tier.read_file

        def slow(*args: Any) -> None:
            reading.set()
            assert go_on.wait(30)
            read_file(*args)

        tier.read_file = slow
        future = asyncio.run_coroutine_threadsafe(tier.batched_get_non_blocking("lookup", [key]), loop)
        assert reading.wait(30)
        assert future.cancel()
        asyncio.run_coroutine_threadsafe(turns(), loop).result(30)
        go_on.set()
        _drain(tier)
        return pool.used // Pool.CHUNK, [tier.dict[key].pin_count]


def test_a_cancelled_prefetch_returns_its_buffers_and_pins(tmp_path: Path) -> None:
    left, _ = run(prefetch_cancelled_while_its_thread_reads, str(tmp_path), repaired=False)
    assert left == 1
    assert run(prefetch_cancelled_while_its_thread_reads, str(tmp_path), repaired=True) == (0, [0])
