"""Repair of LMCache's async lookup client: the last reply wakes the waiter.

target    lmcache.v1.lookup_client.lmcache_async_lookup_client: LMCacheAsyncLookupClient
why       Upstream sleeps 10 ms in every lookup, and again in `lookup_cache` while holding the lock that its
          reply thread needs. Replies carry no rank and no attempt, so a late one counts for the next lookup
          of that id. A rank that is gone costs every lookup the whole timeout, and blocks the scheduler in
          `send` once its queue is full. An expired lookup that is asked again raises KeyError in the
          scheduler.
how       The scheduler reads the replies to its question itself, for one back-off time at most; what comes
          later is the reply thread's, which notifies it when a lookup is complete. Every attempt has a
          number, every reply its rank. A rank that misses a deadline is down: lookups are misses at once
          until it answers a probe or anything else.
upstream  LMCache pull request 6003 (the wake-up; the rest is ours), issue 4759 (a lost reply)
delete    with the pin on 0.5.6: LMCache 0.5.7 has no lookup_client
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import zmq

from glm_connectors.lmcache_repairs.contract import Symbol
from glm_connectors.lmcache_repairs.counters import COUNTERS
from glm_connectors.lmcache_repairs.grafting import replace
from glm_connectors.lmcache_repairs.lookup_table import PROBE_ID, Lookup, LookupTable, Rank, State
from glm_connectors.lmcache_repairs.lookup_wire import LookupCleanup, decode_to_scheduler, encode, request

logger = logging.getLogger(__name__)

_NEVER = -1  # as a zmq time-out
_NOT_FOUND = -1  # UPSTREAM: LookupClientInterface.lookup_cache


class RepairedLookupClient:
    """The methods that replace those of LMCacheAsyncLookupClient; never instantiated itself."""

    config: Any
    token_database: Any
    _table: LookupTable
    _send_lock: threading.Lock

    def __init__(self, config: Any, metadata: Any) -> None:
        from lmcache.v1.rpc_utils import get_zmq_context, get_zmq_rpc_path_lmcache, get_zmq_socket
        from lmcache.v1.token_database import ChunkedTokenDatabase, SegmentTokenDatabase

        self.config = config
        self.ctx = get_zmq_context(use_asyncio=False)
        port = (metadata.kv_connector_extra_config or {}).get("lmcache_rpc_port", 0)
        if metadata.engine_id is None:
            raise ValueError("LMCacheMetadata.engine_id: expected the engine's id, found None")
        numbers = config.get_lookup_server_worker_ids(metadata.use_mla, metadata.world_size)
        self.lookup_server_worker_ids = numbers
        numbers = numbers or list(range(metadata.world_size))
        self.world_size = len(numbers)

        def path(service: str, rank: int) -> str:
            return str(get_zmq_rpc_path_lmcache(metadata.engine_id, service, port, rank))

        ranks = [
            Rank(n, get_zmq_socket(self.ctx, path("lookup_worker", n), "ipc", zmq.PUSH, "connect"))
            for n in numbers
        ]
        here = path("lookup_scheduler", 0)
        self.push_sockets = [rank.socket for rank in ranks]
        self.pull_socket = get_zmq_socket(self.ctx, here, "ipc", zmq.PULL, "bind")
        # Wakes whoever reads the pull socket: an empty frame means "look at what has changed".
        self._kick_socket = get_zmq_socket(self.ctx, here, "ipc", zmq.PUSH, "connect")
        database = SegmentTokenDatabase if config.enable_blending else ChunkedTokenDatabase
        self.token_database = database(config, metadata)
        self.lookup_backoff_time = float((config.extra_config or {}).get("lookup_backoff_time", 0.01))
        self._table = LookupTable(ranks, config.lookup_timeout_ms / 1000)
        COUNTERS.watch(self._table)
        self._send_lock = threading.Lock()
        self._patience, self._patient_since = self.lookup_backoff_time, time.monotonic()
        # Whoever holds the baton owns the pull socket: the scheduler while it waits for its own question, else
        # the reply thread, which `_handed` tells that there is something to read.
        self._baton = threading.Lock()
        self._handed = threading.Event()
        self._read_timeout = _NEVER
        self.running = True
        self.thread = threading.Thread(
            target=self.process_responses_from_workers, daemon=True, name="async-lookup-client-thread"
        )
        self.thread.start()

    # -- the scheduler's thread ------------------------------------------------------------------------------

    def lookup_cache(self, lookup_id: str) -> int | None:
        """Hit tokens, None while ranks are at work, -1 for an unknown id.

        Waits once a back-off time at most.
        """
        table = self._table
        with table.lock:
            lookup = table.lookups.get(lookup_id)
            if lookup is None:
                return _NOT_FOUND
        return self._result(lookup)

    def lookup(
        self, token_ids: Any, lookup_id: str, request_configs: dict[str, str] | None = None
    ) -> int | None:
        """Hashes the tokens, asks every rank, and returns what they have answered within one back-off time,
        or None.
        """
        hashes: list[int] = []
        offsets: list[int] = []
        for start, end, value in self.token_database.process_tokens(token_ids, make_key=False):
            hashes.append(value)
            offsets.append(end - start)
        return self.lookup_hashes(hashes, offsets, lookup_id, request_configs)

    def lookup_hashes(
        self,
        hashes: Sequence[int],
        offsets: Sequence[int],
        lookup_id: str,
        request_configs: dict[str, str] | None = None,
    ) -> int | None:
        """`lookup` with the chunk hashes at hand.

        hashes: 64 bits each, one a chunk; an array("Q") is sent without being read. offsets: tokens in each
        chunk.
        """
        table = self._table
        with table.lock:
            lookup = table.open(lookup_id, time.monotonic())
            if lookup.state is State.MISS:
                return 0
        message = encode(request(lookup_id, hashes, offsets, request_configs, lookup.attempt))
        unsent = [rank for rank in table.ranks.values() if not self._send(rank.number, message)]
        if unsent:
            with table.lock:
                for rank in unsent:
                    table.mark_down(rank, time.monotonic())
                loaded = table.expire(lookup, time.monotonic()) if lookup.state is State.WAITING else []
            self._release(lookup, loaded)
            self._hand_over(news=True)
        return self._result(lookup)

    def clear_lookup_status(self, lookup_id: str) -> None:
        """The request is scheduled: its result is not asked for again. A later reply to it is a late one."""
        with self._table.lock:
            self._table.lookups.pop(lookup_id, None)

    def cancel_lookup(self, lookup_id: str) -> None:
        """The request is gone: ranks release what they have loaded for it, or will when their reply comes."""
        with self._table.lock:
            lookup = self._table.lookups.pop(lookup_id, None)
        if lookup is not None and lookup.state is not State.MISS:
            self._release(lookup, list(lookup.replies))

    def close(self) -> None:
        """Ends the reply thread and closes this client's sockets; the context is shared with others and
        stays.
        """
        self.running = False
        self._hand_over(news=True)
        self.thread.join(timeout=1.0)
        with self._send_lock:
            for socket in (*self.push_sockets, self._kick_socket):
                socket.close(linger=0)

    def _result(self, lookup: Lookup) -> int | None:
        table = self._table
        now = time.monotonic()
        # Waiting is paid from a purse of one back-off time, which fills while we don't wait: a scheduler pass
        # over many lookups waits once, not once for each.
        purse = min(self.lookup_backoff_time, self._patience + now - self._patient_since)
        pause = min(purse, lookup.deadline - now)
        if lookup.state is State.WAITING and pause > 0:
            self._wait(lookup, now + pause)
            began, now = now, time.monotonic()
            self._patience, self._patient_since = purse - (now - began), now
        loaded: list[int] = []
        with table.lock:
            expired = lookup.state is State.WAITING and now >= lookup.deadline
            if expired:
                loaded = table.expire(lookup, now)
            settled, quiet = lookup.state is not State.WAITING, table.quiet()
        if not quiet:
            self._hand_over(news=expired)  # a rank that has just gone down is to be probed
        self._release(lookup, loaded)
        return lookup.tokens if settled else None

    def _wait(self, lookup: Lookup, until: float) -> None:
        """Until `lookup` has its result or the time is up; another lookup's result may end it too."""
        table = self._table
        if self._baton.acquire(blocking=False):
            try:
                while lookup.state is State.WAITING and (rest := until - time.monotonic()) > 0:
                    self._read(int(1000 * rest) + 1)
            finally:
                self._baton.release()
            return
        with table.lock:
            settled = table.settled
            table.lock.wait_for(
                lambda: lookup.state is not State.WAITING or table.settled != settled,
                until - time.monotonic(),
            )

    # -- either thread ---------------------------------------------------------------------------------------

    def _send(self, rank: int, message: bytes) -> bool:
        """False where the rank's queue is full; never blocks."""
        with self._send_lock:
            try:
                self._table.ranks[rank].socket.send(message, zmq.NOBLOCK)
            except zmq.Again:
                return False
        return True

    def _release(self, lookup: Lookup, ranks: list[int]) -> None:
        for rank in ranks:
            self._send(rank, encode(LookupCleanup(lookup.lookup_id, lookup.attempt)))

    def _hand_over(self, *, news: bool) -> None:
        """Has the reply thread read. `news`: it must look up from its socket, if that is where it is."""
        if news and self._handed.is_set():
            with self._send_lock, suppress(zmq.Again):  # full: then there are kicks enough for it to read
                self._kick_socket.send(b"", zmq.NOBLOCK)
        self._handed.set()

    def _read(self, milliseconds: int) -> None:
        """Counts in one reply, if there is one in time. The caller holds the baton."""
        if milliseconds != self._read_timeout:
            self._read_timeout = milliseconds
            self.pull_socket.setsockopt(zmq.RCVTIMEO, milliseconds)
        try:
            frame = self.pull_socket.recv()
        except zmq.Again:
            return
        if not frame:
            return
        reply = decode_to_scheduler(frame)
        if reply.rank not in self._table.ranks:
            COUNTERS.add("foreign_replies")
            logger.error(
                "a lookup reply has rank %d, expected one of %s: dropped. Its sender has no repairs; call "
                "glm_connectors.lmcache_repairs.install() in every worker process.",
                reply.rank,
                sorted(self._table.ranks),
            )
            return
        with self._table.lock:
            late = self._table.reply(reply)
        if late:
            self._send(reply.rank, encode(LookupCleanup(reply.lookup_id, reply.attempt)))

    # -- the reply thread ------------------------------------------------------------------------------------

    def process_responses_from_workers(self) -> None:
        """Reads what the scheduler does not wait for, and probes the ranks that are down; else it sleeps."""
        while self.running:
            self._handed.wait()
            with self._baton:
                while self.running:
                    try:
                        self._read(self._probe())
                    except Exception:
                        logger.exception("a lookup reply could not be read")
                    with self._table.lock:
                        if self._table.quiet():
                            self._handed.clear()
                            break
        with self._baton:
            self.pull_socket.close(linger=0)

    def _probe(self) -> int:
        """Probes every rank whose time has come; milliseconds until the next one, _NEVER with all up."""
        now = time.monotonic()
        with self._table.lock:
            due, following = self._table.due_probes(now)
        for rank in due:
            # No chunks: the rank's tiers are asked for nothing, which they answer with a miss if they answer
            # at all.
            COUNTERS.add("rank_probes")
            self._send(rank.number, encode(request(PROBE_ID, [], [], None, 0)))
        return _NEVER if following is None else int(1000 * (following - now)) + 1


MODULE = "lmcache.v1.lookup_client.lmcache_async_lookup_client"
SYMBOLS = (
    Symbol(MODULE, "LMCacheAsyncLookupClient"),
    Symbol("lmcache.v1.lookup_client.async_lookup_message", "LookupRequestMsg"),
    Symbol("lmcache.v1.lookup_client.async_lookup_message", "LookupResponseMsg"),
    Symbol("lmcache.v1.lookup_client.async_lookup_message", "LookupCleanupMsg"),
    Symbol("lmcache.v1.rpc_utils", "get_zmq_context"),
    Symbol("lmcache.v1.rpc_utils", "get_zmq_socket"),
    Symbol("lmcache.v1.rpc_utils", "get_zmq_rpc_path_lmcache"),
)
GRAFTS = tuple(
    replace(f"LMCacheAsyncLookupClient.{name}", value)
    for name, value in vars(RepairedLookupClient).items()
    if callable(value)
)
