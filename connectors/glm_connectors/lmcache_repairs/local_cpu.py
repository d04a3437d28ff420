"""Repair of LMCache's CPU pool: an allocation never sleeps on an event loop's thread.

target    lmcache.v1.storage_backend.local_cpu_backend: LocalCPUBackend.allocate, batched_allocate
why       Connectors allocate in coroutines with upstream's default `busy_loop=True`: with the pool full of
          chunks that queued puts hold, the loop sleeps in 0.1 s steps for memory that only the loop itself
          could free. For ever.
how       On a thread that runs an event loop, `busy_loop` is off: the allocation returns None and the get is
          a miss.
upstream  not reported as far as we know
delete    when connectors pass `busy_loop=False`
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from glm_connectors.lmcache_repairs.contract import Symbol
from glm_connectors.lmcache_repairs.counters import COUNTERS
from glm_connectors.lmcache_repairs.grafting import Graft, Repair


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _without_waiting(position: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wrapper for an allocation whose `busy_loop` is positional argument number `position`, `self` not
    counted.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def allocate(self: Any, *args: Any, **kwargs: Any) -> Any:
            waits = args[position] if len(args) > position else kwargs.get("busy_loop", True)
            if not (waits and _on_event_loop()):
                return original(self, *args, **kwargs)
            if len(args) > position:
                args = (*args[:position], False, *args[position + 1 :])
            else:
                kwargs["busy_loop"] = False
            found = original(self, *args, **kwargs)
            if found is None:
                COUNTERS.add("loop_waits_refused")
            return found

        return allocate

    return make


MODULE = "lmcache.v1.storage_backend.local_cpu_backend"
REPAIR = Repair(
    module=MODULE,
    symbols=(
        Symbol(MODULE, "LocalCPUBackend.allocate"),
        Symbol(MODULE, "LocalCPUBackend.batched_allocate"),
    ),
    grafts=(
        Graft("LocalCPUBackend.allocate", _without_waiting(4)),
        Graft("LocalCPUBackend.batched_allocate", _without_waiting(5)),
    ),
)
