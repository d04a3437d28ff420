"""Repair of LMCache's async lookup server: replies say who answers what, exactly once, and never block the
rank.

target    lmcache.v1.lookup_client.lmcache_async_lookup_client: LMCacheAsyncLookupServer
why       See lookup_client. Besides, a failing engine leaves the scheduler without an answer; `send` stops
          the storage loop once a scheduler no longer reads; a second request under an id that is still
          loading overwrites the first one's event, whose buffers are then lost.
how       The server remembers which attempt each id is at. A request that repeats or extends what is loading
          is answered by that load; another one under the same id is a miss. Errors are answered with 0.
          Sends don't block.
upstream  not reported as far as we know
delete    with the pin on 0.5.6: LMCache 0.5.7 has no lookup_client
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glm_connectors.lmcache_repairs.contract import Symbol
from glm_connectors.lmcache_repairs.counters import COUNTERS
from glm_connectors.lmcache_repairs.grafting import Repair, replace
from glm_connectors.lmcache_repairs.lookup_client import GRAFTS as CLIENT_GRAFTS
from glm_connectors.lmcache_repairs.lookup_client import MODULE
from glm_connectors.lmcache_repairs.lookup_client import SYMBOLS as CLIENT_SYMBOLS
from glm_connectors.lmcache_repairs.lookup_link import Inlet, Link, address, framed
from glm_connectors.lmcache_repairs.lookup_wire import (
    LookupCleanup,
    LookupReply,
    LookupRequest,
    Offsets,
    decode_to_rank,
    encode,
    hashes_of,
)

logger = logging.getLogger(__name__)

_REMEMBERED = 4096  # answered ids whose attempt is kept, to tell a stale cleanup from a present one


@dataclass
class _Asked:
    """What an id is at. asker: where the answer goes; hashes: those being loaded."""

    asker: Link
    attempt: int
    hashes: Sequence[int]
    answered: bool = False


class RepairedLookupServer:
    """The methods that replace those of LMCacheAsyncLookupServer; never instantiated itself."""

    def __init__(self, lmcache_engine: Any, metadata: Any) -> None:
        from lmcache.v1.rpc_utils import get_zmq_rpc_path_lmcache

        if metadata.engine_id is None:
            raise ValueError("LMCacheMetadata.engine_id: expected the engine's id, found None")
        port = (metadata.kv_connector_extra_config or {}).get("lmcache_rpc_port", 0)
        path = get_zmq_rpc_path_lmcache(metadata.engine_id, "lookup_worker", port, metadata.worker_id)
        self._inlet = Inlet(address(path))
        self.lmcache_engine = lmcache_engine
        self._rank = metadata.worker_id
        # Guards `_asked`; the engine is never called under it.
        self._lock = threading.Lock()
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self.running = True
        self.thread = threading.Thread(
            target=self.process_requests_from_scheduler, daemon=True, name="async-lookup-server-thread"
        )
        self.thread.start()

    def process_requests_from_scheduler(self) -> None:
        """Serves requests until closed. Sole user of the inlet, which it closes."""
        try:
            while self.running:
                for link, frame in self._inlet.wait():
                    try:
                        self._serve(link, decode_to_rank(frame))
                    except Exception:
                        logger.exception("a lookup request could not be served")
        finally:  # also where the process has no file left to accept with: the scheduler knows at once
            self._inlet.close()

    def _serve(self, link: Link, message: LookupRequest | LookupCleanup) -> None:
        lookup_id = message.lookup_id
        if isinstance(message, LookupCleanup):
            with self._lock:
                asked = self._asked.get(lookup_id)
                stale = asked is not None and asked.attempt != message.attempt
            if not stale:
                self.lmcache_engine.cleanup_memory_objs(lookup_id)
            return
        hashes = hashes_of(message)
        with self._lock:
            asked = self._asked.get(lookup_id)
            if asked is not None and not asked.answered:
                loading = asked.hashes
                if hashes[: len(loading)] == loading:
                    asked.asker, asked.attempt = link, message.attempt  # its load answers this one
                else:
                    self._reply(link, lookup_id, 0, message.attempt)
                return
            self._asked[lookup_id] = _Asked(link, message.attempt, hashes)
            self._asked.move_to_end(lookup_id)
            while len(self._asked) > _REMEMBERED and next(iter(self._asked.values())).answered:
                self._asked.popitem(last=False)
        if asked is not None:
            # What an earlier attempt loaded and nobody took.
            self.lmcache_engine.cleanup_memory_objs(lookup_id)
        try:
            self.lmcache_engine.async_lookup_and_prefetch(
                lookup_id=lookup_id,
                hashes=hashes,
                offsets=Offsets(message.offsets),
                pin=True,
                request_configs=message.request_configs,
            )
        except Exception:
            self.send_response_to_scheduler(lookup_id, 0)
            raise

    def send_response_to_scheduler(self, lookup_id: str, num_hit_tokens: int) -> None:
        """Answers the attempt that `lookup_id` is at.

        Called on the storage loop's thread and on the server's.
        """
        with self._lock:
            asked = self._asked.get(lookup_id)
            if asked is None or asked.answered:
                logger.error("no lookup %s waits on rank %d for an answer", lookup_id, self._rank)
                return
            asked.answered, asked.hashes = True, []
            self._reply(asked.asker, lookup_id, num_hit_tokens, asked.attempt)

    def _reply(self, link: Link, lookup_id: str, num_hit_tokens: int, attempt: int) -> None:
        frame = framed(encode(LookupReply(lookup_id, num_hit_tokens, self._rank, attempt)))
        try:
            sent = link.send(frame)
        except OSError:  # gone, or closed with this server
            sent = False
        if not sent:
            COUNTERS.add("unsent_replies")
            logger.error("the scheduler reads no lookup replies; the one to %s is dropped", lookup_id)
        elif link.pressing:
            self._inlet.wake()

    def close(self) -> None:
        """Ends the thread, which closes the sockets."""
        if self.running:
            self.running = False
            self._inlet.wake()
        self.thread.join(timeout=1.0)


REPAIR = Repair(
    module=MODULE,
    symbols=(
        *CLIENT_SYMBOLS,
        Symbol(MODULE, "LMCacheAsyncLookupServer"),
        Symbol("lmcache.v1.cache_engine", "LMCacheEngine.async_lookup_and_prefetch"),
        Symbol("lmcache.v1.cache_engine", "LMCacheEngine.cleanup_memory_objs"),
    ),
    grafts=(
        *CLIENT_GRAFTS,
        *(
            replace(f"LMCacheAsyncLookupServer.{name}", value)
            for name, value in vars(RepairedLookupServer).items()
            if callable(value)
        ),
    ),
)
