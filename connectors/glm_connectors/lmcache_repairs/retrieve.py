"""Repair of LMCache's async retrieve: what a prefetch loaded is released once.

target    lmcache.v1.cache_engine: LMCacheEngine._async_process_tokens_internal
why       The retrieve releases the buffers of its lookup and leaves the lookup's event in place;
          `lookup_unpin`, which vLLM's connector calls for every request, finds it and releases them again. A
          chunk of the CPU pool is then free while the pool still serves it. Chunks that were loaded and not
          used keep their pins.
how       Reading the event takes it out of the event manager, and unused chunks lose the pins of their
          lookup.
upstream  not reported as far as we know
delete    with the pin on 0.5.6: LMCache 0.5.7 has no cache_engine
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from glm_connectors.lmcache_repairs.contract import Symbol
from glm_connectors.lmcache_repairs.grafting import Graft, Repair


def _take_event(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def process(self: Any, tokens: Any, mask: Any, ret_mask: Any, **kwargs: Any) -> Any:
        from lmcache.v1.event_manager import EventStatus, EventType

        chunks, size = original(self, tokens, mask, ret_mask, **kwargs)
        lookup_id = kwargs["req_id"]
        if self.event_manager.get_event_status(EventType.LOADING, lookup_id) is EventStatus.DONE:
            loaded = self.event_manager.pop_event(EventType.LOADING, lookup_id)
            if loaded.cancelled() or loaded.exception() is not None:
                return chunks, size
            used = {id(buffer) for _, buffer, _, _ in chunks}
            for tier in loaded.result():
                for _, buffer in tier:
                    if id(buffer) not in used and buffer.is_pinned:
                        buffer.unpin()
        return chunks, size

    return process


MODULE = "lmcache.v1.cache_engine"
REPAIR = Repair(
    module=MODULE,
    symbols=(
        Symbol(MODULE, "LMCacheEngine._async_process_tokens_internal"),
        Symbol(MODULE, "LMCacheEngine.retrieve"),
        Symbol(MODULE, "LMCacheEngine.lookup_unpin"),
        Symbol("lmcache.v1.event_manager", "EventManager"),
    ),
    grafts=(Graft("LMCacheEngine._async_process_tokens_internal", _take_event),),
)
