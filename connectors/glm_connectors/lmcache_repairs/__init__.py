"""Repairs of LMCache 0.5.6 in its own classes: a store that stalls costs hits, never workers or memory.

    from glm_connectors import lmcache_repairs

    lmcache_repairs.install()  # in every process that builds an LMCache engine, before it does
    lmcache_repairs.COUNTERS.snapshot()  # plain numbers for whatever exports metrics

`install` imports nothing of LMCache: modules that the process has are repaired now, others when they are
imported. It knows neither SGLang nor vLLM and does the same in either. One file a target; each says why,
how, and until when.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import asdict

from glm_connectors.lmcache_repairs import (
    clients,
    contract,
    executor,
    local_cpu,
    local_disk,
    lookup_server,
    prefetch,
    remote_backend,
    retrieve,
    signals,
)
from glm_connectors.lmcache_repairs.contract import ContractError
from glm_connectors.lmcache_repairs.counters import COUNTERS, HELP, Counters, CounterSource
from glm_connectors.lmcache_repairs.executor import ExecutorLimits
from glm_connectors.lmcache_repairs.grafting import Repair, RepairOnImport

__all__ = [
    "COUNTERS",
    "HELP",
    "REPAIRS",
    "ContractError",
    "CounterSource",
    "Counters",
    "ExecutorLimits",
    "Repair",
    "install",
    "installed",
]

logger = logging.getLogger(__name__)

REPAIRS: tuple[Repair, ...] = (
    executor.REPAIR,
    local_cpu.REPAIR,
    remote_backend.REPAIR,
    *clients.REPAIRS,
    local_disk.REPAIR,
    prefetch.REPAIR,
    lookup_server.REPAIR,
    retrieve.REPAIR,
    signals.REPAIR,
)

_lock = threading.Lock()
_finder: RepairOnImport | None = None


def install(*, limits: ExecutorLimits | None = None, allow_untested: bool | None = None) -> Counters:
    """Checks LMCache against what the repairs were tested with, then repairs it.

    A second call changes only `limits`.

    limits: bounds of the executors' shutdown and of jobs without a caller. allow_untested: go on although a
    symbol has another source than the tested one (default: the variable GLM_SGLANG_ALLOW_UNTESTED is 1).

    Raises ContractError, with nothing changed, where LMCache is another version, a symbol differs or is
    missing. Executors that exist already keep their unrepaired workers: install first.
    """
    global _finder
    if allow_untested is None:
        allow_untested = os.environ.get(contract.ALLOW_VARIABLE) == "1"
    with _lock:
        if limits is not None:
            executor.LIMITS.__dict__.update(asdict(limits))
        if _finder is not None:
            return COUNTERS
        symbols = [symbol for repair in REPAIRS for symbol in repair.symbols]
        for mismatch in contract.check(symbols, allow_untested=allow_untested):
            COUNTERS.add("untested_symbols")
            logger.warning("untested, allowed by %s: %s", contract.ALLOW_VARIABLE, mismatch)
        finder = RepairOnImport()
        for repair in REPAIRS:
            finder.add(repair)
        _finder = finder
    return COUNTERS


def installed() -> bool:
    """Whether this process repairs LMCache."""
    return _finder is not None
