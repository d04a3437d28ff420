"""Runs one scenario in a process of its own, on LMCache as it comes or as repaired, and brings its result
back.

A scenario is a module-level function of a test module: it is sent by name, does its work on real LMCache
classes, and returns something that can be pickled. Both modes run the same code, so the unrepaired result
documents why a repair exists. Processes are forked from a server that has imported LMCache once (10 s here),
and are killed at their bound: on unrepaired LMCache a hang is a result, `HUNG`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

HUNG = "hung"
_PRELOAD = [
    "lmcache.v1.storage_backend.storage_manager",
    "lmcache.v1.storage_backend.connector.redis_connector",
    "lmcache.v1.storage_backend.connector.valkey_connector",
    "lmcache.v1.storage_backend.connector.s3_connector",
    "lmcache.v1.storage_backend.connector.mock_connector",
    "lmcache.v1.storage_backend.connector.sagemaker_hyperpod_connector",
    "lmcache.v1.lookup_client.lmcache_async_lookup_client",
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOAD)
os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def run(scenario: Callable[..., Any], *args: Any, repaired: bool, seconds: float = 120.0) -> Any:
    """`scenario(*args)` in a fresh process; `HUNG` where it has not returned after `seconds`.

    Where the scenario takes its process down: "exit code N", negative for a signal.
    """
    ours, theirs = _context.Pipe(duplex=False)
    process = _context.Process(target=_child, args=(theirs, scenario, args, repaired), daemon=True)
    process.start()
    theirs.close()
    try:
        # Without a bound on the import of LMCache in the fork server, which happens once.
        assert ours.recv() == "started"
        if not ours.poll(seconds):
            return HUNG
        try:
            outcome, value = ours.recv()
        except EOFError:
            process.join(60)
            return f"exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
        ours.close()
    if outcome == "raised":
        raise AssertionError(f"{scenario.__name__} raised in its process:\n{value}")
    return value


def _child(pipe: Any, scenario: Callable[..., Any], args: tuple[Any, ...], repaired: bool) -> None:
    pipe.send("started")
    try:
        if repaired:
            from glm_connectors import lmcache_repairs

            lmcache_repairs.install()
        pipe.send(("returned", scenario(*args)))
    except BaseException:
        pipe.send(("raised", traceback.format_exc()))
    pipe.close()
    os._exit(0)  # threads and loops that a fault left behind must not keep the process


def counters() -> dict[str, int]:
    """The repairs' counters of this process, all 0 where nothing is repaired."""
    from glm_connectors.lmcache_repairs import COUNTERS

    return COUNTERS.snapshot()


def patience() -> float:
    """Seconds before a scenario calls something hung: few where that is the known fault, many where it would
    be one.
    """
    from glm_connectors import lmcache_repairs

    return 60.0 if lmcache_repairs.installed() else 1.0


def limits(**bounds: float) -> None:
    """Sets the repaired executors' bounds; without effect on unrepaired ones."""
    from glm_connectors import lmcache_repairs

    if lmcache_repairs.installed():
        lmcache_repairs.install(limits=lmcache_repairs.ExecutorLimits(**bounds))


@contextmanager
def loop_in_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop as LMCache's storage manager runs it: in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)


def responsive(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the loop still runs callbacks."""
    ran = threading.Event()
    loop.call_soon_threadsafe(ran.set)
    return ran.wait(patience())


class Pool:
    """A real LMCache allocator over `chunks` chunks of 4 KiB."""

    CHUNK = 4096

    def __init__(self, chunks: int = 16) -> None:
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
        from lmcache.v1.pin_monitor import PinMonitor

        PinMonitor.GetOrCreate(LMCacheEngineConfig.from_defaults())  # pinning needs it
        self.allocator = MixedMemoryAllocator(chunks * self.CHUNK)

    def take(self) -> Any:
        """One chunk with one reference, or None when the pool is full."""
        import torch
        from lmcache.v1.memory_management import MemoryFormat

        return self.allocator.allocate(torch.Size([self.CHUNK]), torch.uint8, MemoryFormat.KV_2LTD)

    @property
    def used(self) -> int:
        """Bytes that are allocated."""
        return int(self.allocator.pin_allocator.total_allocated_size)


async def turns(count: int = 20) -> None:
    """Lets everything that is ready run, `count` rounds of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)
