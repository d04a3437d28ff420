"""Repair of LMCache's prefetch over all tiers: every lookup is answered once, whatever a tier does.

target    lmcache.v1.storage_backend.storage_manager: StorageManager.async_lookup_and_prefetch
why       A tier that raises while it is asked, or while it loads, makes upstream answer nobody: the
          scheduler waits for its whole lookup timeout, what the other tiers loaded is lost, and its event
          stays for ever.
how       A failing tier counts as a miss from there on. The others' results reach
          `prefetch_all_done_callback`, which answers with the contiguous prefix. What goes wrong outside the
          tiers is answered with 0.
upstream  not reported as far as we know
delete    when the pinned LMCache passes tests/unit/test_lmcache_prefetch.py unrepaired
"""

from __future__ import annotations

import asyncio
import functools
import logging
from dataclasses import dataclass
from typing import Any

from glm_connectors.lmcache_repairs.contract import Symbol
from glm_connectors.lmcache_repairs.counters import COUNTERS
from glm_connectors.lmcache_repairs.grafting import Repair, replace

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Tier:
    """A storage backend with hits: the keys it announced and its load of them."""

    backend: Any
    keys: list[Any]
    load: asyncio.Task[Any]


async def _lookup_and_prefetch(
    self: Any,
    lookup_id: str,
    keys: list[Any],
    cum_chunk_lengths: list[int],
    search_range: list[str] | None = None,
    pin: bool = False,
    keys_per_chunk: int = 1,
) -> None:
    """Asks the tiers in order for the rest of the prefix, starts their loads, and has the scheduler answered.

    keys: `keys_per_chunk` of them a chunk; cum_chunk_lengths: tokens up to each chunk's end, from 0, one
    more than chunks.
    """
    try:
        if keys_per_chunk < 1 or len(keys) != (len(cum_chunk_lengths) - 1) * keys_per_chunk:
            raise ValueError(
                f"{len(keys)} keys: expected keys_per_chunk ({keys_per_chunk}) for each of the "
                f"{len(cum_chunk_lengths) - 1} chunks of cum_chunk_lengths"
            )
        tiers = await _start_loads(
            self, lookup_id, keys, cum_chunk_lengths, search_range, pin, keys_per_chunk
        )
    except BaseException:
        _answer(self, lookup_id, 0)
        raise
    if not tiers:
        _answer(self, lookup_id, 0)
        return
    expected = [len(tier.keys) // keys_per_chunk for tier in tiers]
    all_done = asyncio.create_task(_collect(tiers, pin))
    from lmcache.v1.event_manager import EventType

    self.event_manager.add_event(EventType.LOADING, lookup_id, all_done)
    all_done.add_done_callback(
        lambda done: self.prefetch_all_done_callback(
            done, lookup_id, cum_chunk_lengths, expected, keys_per_chunk=keys_per_chunk
        )
    )


async def _start_loads(
    self: Any,
    lookup_id: str,
    keys: list[Any],
    lengths: list[int],
    search_range: list[str] | None,
    pin: bool,
    keys_per_chunk: int,
) -> list[_Tier]:
    """The tiers with hits, in order, each with a running load of whole chunks."""
    tiers: list[_Tier] = []
    for name, backend in self.get_active_storage_backends(search_range=search_range):
        if tiers and not keys:
            break
        try:
            hits = await backend.batched_async_contains(lookup_id, keys, pin)
        except Exception as error:
            COUNTERS.add("lost_tiers")
            logger.warning("tier %s could not be asked, taken for a miss: %s", name, error)
            continue
        chunks = hits // keys_per_chunk
        whole = chunks * keys_per_chunk
        if pin:
            for key in keys[whole:hits]:  # a chunk without all of its layers is a miss and holds no pins
                backend.unpin(key)
        if not chunks:
            continue
        mine, keys = keys[:whole], keys[whole:]
        load = backend.batched_get_non_blocking(lookup_id, mine, {"cum_chunk_lengths": lengths[: chunks + 1]})
        task = asyncio.create_task(self.async_serializer.run(load, chunks))
        task.add_done_callback(
            functools.partial(self.prefetch_single_done_callback, keys=mine, backend_name=name)
        )
        lengths = lengths[chunks:]
        tiers.append(_Tier(backend, mine, task))
    return tiers


async def _collect(tiers: list[_Tier], pinned: bool) -> list[list[tuple[Any, Any]]]:
    """(key, buffer) pairs for each tier; nothing for a tier that failed, whose lookup pins are returned
    here.
    """
    results = await asyncio.gather(*(tier.load for tier in tiers), return_exceptions=True)
    collected: list[list[tuple[Any, Any]]] = []
    for tier, result in zip(tiers, results, strict=True):
        if isinstance(result, BaseException):
            COUNTERS.add("lost_tiers")
            logger.warning("a tier's load of %d keys failed, taken for a miss: %s", len(tier.keys), result)
            for key in tier.keys if pinned else ():
                tier.backend.unpin(key)
            result = []
        collected.append(list(zip(tier.keys, result, strict=False)))
    return collected


def _answer(self: Any, lookup_id: str, tokens: int) -> None:
    if self.async_lookup_server is not None:
        self.async_lookup_server.send_response_to_scheduler(lookup_id, tokens)


MODULE = "lmcache.v1.storage_backend.storage_manager"
REPAIR = Repair(
    module=MODULE,
    symbols=tuple(
        Symbol(MODULE, name)
        for name in (
            "StorageManager.async_lookup_and_prefetch",
            "StorageManager.prefetch_all_done_callback",
            "StorageManager.prefetch_single_done_callback",
            "StorageManager.get_active_storage_backends",
            "AsyncSingleSerializer.run",
        )
    ),
    grafts=(replace("StorageManager.async_lookup_and_prefetch", _lookup_and_prefetch),),
)
