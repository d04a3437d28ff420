"""The article's first signal, "store only 0 total chunks", as a number: the pool had no room for a single
chunk.

target    the logger of lmcache.v1.cache_engine (LMCacheEngine.store warns when an allocation fails)
why       With the pool pinned full nothing is saved any more, and the only trace is this line.
how       A filter on that logger counts the message with a chunk count of 0 and lets every record pass. It
          sees nothing while LMCACHE_LOG_LEVEL is above WARNING; `install` refuses that setting.
upstream  LMCacheEngine.store, deleted with its module in LMCache 0.5.7
delete    with the pin on 0.5.6
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

from glm_connectors.lmcache_repairs.contract import ContractError, Symbol
from glm_connectors.lmcache_repairs.counters import COUNTERS
from glm_connectors.lmcache_repairs.grafting import Graft, Repair

PHRASE = "choosing to store only"


class _StoreFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if PHRASE in str(record.msg) and record.args == (0,):
            COUNTERS.add("store_zero_chunks")
        return True


class _CountingFilter(Graft):
    """Not a replacement: adds the filter to the module's `logger`."""

    def apply(self, module: ModuleType) -> None:
        logger: Any = module.logger
        if not logger.isEnabledFor(logging.WARNING):
            raise ContractError(
                "LMCACHE_LOG_LEVEL: expected WARNING or lower, found a level that hides LMCache's warnings, "
                "which would leave store_zero_chunks blind. Remedy: set LMCACHE_LOG_LEVEL=WARNING."
            )
        logger.addFilter(_StoreFilter())


MODULE = "lmcache.v1.cache_engine"
REPAIR = Repair(
    module=MODULE,
    symbols=(Symbol(MODULE, "LMCacheEngine.store"),),
    grafts=(_CountingFilter("logger", lambda original: original),),
)
