"""The article's first signal, "store only 0 total chunks", as a number: the pool had no room for one chunk.

target    the logger of lmcache.v1.cache_engine (LMCacheEngine.store warns when an allocation fails)
why       With the pool pinned full nothing is saved any more, and the only trace is this line.
how       That logger's `warning` counts the message when its chunk count is 0, whatever the log level, and
          passes it on.
upstream  LMCacheEngine.store, deleted with its module in LMCache 0.5.7
delete    with the pin on 0.5.6
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from glm_connectors.lmcache_repairs.contract import Symbol
from glm_connectors.lmcache_repairs.counters import COUNTERS
from glm_connectors.lmcache_repairs.grafting import Graft, Repair

PHRASE = "choosing to store only"


class _CountedWarnings(Graft):
    """Not a replacement: the logger stays the object that it is."""

    def apply(self, module: ModuleType) -> None:
        logger: Any = module.logger
        original = logger.warning

        def warning(message: object, *args: object, **more: Any) -> None:
            if args == (0,) and PHRASE in str(message):
                COUNTERS.add("store_zero_chunks")
            original(message, *args, **{"stacklevel": 2, **more})

        logger.warning = warning


MODULE = "lmcache.v1.cache_engine"
REPAIR = Repair(
    module=MODULE,
    symbols=(Symbol(MODULE, "LMCacheEngine.store"),),
    grafts=(_CountedWarnings("logger", lambda original: original),),
)
