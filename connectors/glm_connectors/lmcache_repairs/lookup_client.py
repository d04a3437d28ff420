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
import os
import select
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from glm_connectors.lmcache_repairs.contract import Symbol
from glm_connectors.lmcache_repairs.counters import COUNTERS
from glm_connectors.lmcache_repairs.grafting import replace
from glm_connectors.lmcache_repairs.lookup_link import Kick, Link, address, framed
from glm_connectors.lmcache_repairs.lookup_table import Lookup, LookupTable, Rank, State
from glm_connectors.lmcache_repairs.lookup_wire import (
    LookupCleanup,
    LookupReply,
    decode_to_scheduler,
    encode,
    request,
)

logger = logging.getLogger(__name__)

_NOT_FOUND = -1  # UPSTREAM: LookupClientInterface.lookup_cache
# Seconds for which a lookup looks for its replies before it sleeps: as long as ranks that are well take. To sleep and be
# woken takes 0.05 to 0.1 ms where an idle core halts, as those of virtual machines do.
_AWAKE = 0.0005


class RepairedLookupClient:
    """The methods that replace those of LMCacheAsyncLookupClient; never instantiated itself."""

    config: Any
    token_database: Any
    _table: LookupTable
    _link_lock: threading.Lock
    _cut: list[Link]

    def __init__(self, config: Any, metadata: Any) -> None:
        from lmcache.v1.rpc_utils import get_zmq_rpc_path_lmcache
        from lmcache.v1.token_database import ChunkedTokenDatabase, SegmentTokenDatabase

        self.config = config
        port = (metadata.kv_connector_extra_config or {}).get("lmcache_rpc_port", 0)
        if metadata.engine_id is None:
            raise ValueError("LMCacheMetadata.engine_id: expected the engine's id, found None")
        numbers = config.get_lookup_server_worker_ids(metadata.use_mla, metadata.world_size)
        self.lookup_server_worker_ids = numbers
        numbers = numbers or list(range(metadata.world_size))
        self.world_size = len(numbers)
        ranks = [
            Rank(n, str(get_zmq_rpc_path_lmcache(metadata.engine_id, "lookup_worker", port, n)))
            for n in numbers
        ]
        database = SegmentTokenDatabase if config.enable_blending else ChunkedTokenDatabase
        self.token_database = database(config, metadata)
        self.lookup_backoff_time = float((config.extra_config or {}).get("lookup_backoff_time", 0.01))
        self._table = LookupTable(ranks, config.lookup_timeout_ms / 1000)
        COUNTERS.watch(self._table)
        self._link_lock = threading.Lock()  # of making and replacing links
        self._cut: list[Link] = []  # links that have ended, for whoever has the baton to close
        self._patience, self._patient_since = self.lookup_backoff_time, time.monotonic()
        # Whoever holds the baton receives: the scheduler while it waits for its own question, else the reply
        # thread, which `_handed` tells that there is something to read. Its kick: look at what has changed.
        self._baton = threading.Lock()
        self._handed = threading.Event()
        self._kick = Kick()
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
        frame = framed(encode(request(lookup_id, hashes, offsets, request_configs, lookup.attempt)))
        unsent = [rank for rank in table.ranks.values() if not self._send(rank, frame, lookup)]
        if unsent:
            with table.lock:
                for rank in unsent:
                    table.mark_down(rank, time.monotonic())
                loaded = table.give_up(lookup)
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
        """Ends the reply thread, which closes this client's sockets."""
        self.running = False
        self._handed.set()
        self._kick.send()
        self.thread.join(timeout=1.0)

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
                self._look(lookup, min(until, time.monotonic() + _AWAKE))
                # The rank that was asked last comes first: when it has answered, most of the others have, and
                # this thread was woken once.
                for rank in reversed(table.ranks.values()):
                    while lookup.state is State.WAITING and rank.number not in lookup.replies:
                        rest = until - time.monotonic()
                        if rest <= 0:
                            return
                        self._read(rank, int(1000 * rest) + 1)
            finally:
                self._baton.release()
            return
        with table.lock:
            settled = table.settled
            table.lock.wait_for(
                lambda: lookup.state is not State.WAITING or table.settled != settled,
                until - time.monotonic(),
            )

    def _look(self, lookup: Lookup, until: float) -> None:
        """Counts in replies as they come, without sleeping. The caller holds the baton, so no link is closed."""
        poll = select.poll()
        asked = {}
        for rank in self._table.ranks.values():
            link = rank.link
            if link is not None:
                poll.register(link, select.POLLIN)
                asked[link.fileno()] = rank, link
        while lookup.state is State.WAITING and asked and time.monotonic() < until:
            came = poll.poll(0)
            for number, _ in came:
                rank, link = asked[number]
                self._read(rank, 0)
                if rank.number in lookup.replies or rank.link is not link:
                    poll.unregister(number)
                    del asked[number]
            if not came:
                os.sched_yield()  # to ranks without a core of their own

    # -- either thread ---------------------------------------------------------------------------------------

    def _send(self, rank: Rank, frame: bytes, lookup: Lookup | None = None) -> bool:
        """False where the rank is not there or has no room; never blocks. Connects where it has to, once.

        lookup: what the frame asks for.
        """
        for _ in range(2):
            link = rank.link or self._connect(rank)
            if link is None:
                return False
            try:
                sent = link.send(frame)
            except ConnectionError:
                if self._drop(rank, link):
                    with self._table.lock:
                        missed = self._table.unanswered(rank, lookup)
                    self._release_all(missed)
                continue
            if link.pressing:
                self._hand_over(news=True)
            return sent
        return False

    def _connect(self, rank: Rank) -> Link | None:
        with self._link_lock:
            if rank.link is None and self.running:
                try:
                    rank.link = Link.to(address(rank.path))
                    if self._handed.is_set():  # the reply thread may wait without it
                        self._kick.send()
                except OSError as error:
                    if not rank.down and os.path.exists(rank.path):
                        logger.error(
                            "lookup rank %d serves LMCache without repairs (%s): call "
                            "glm_connectors.lmcache_repairs.install() in every worker process.",
                            rank.number,
                            error,
                        )
            return rank.link

    def _drop(self, rank: Rank, link: Link) -> bool:
        """The link has ended; False where another thread knows. Who receives on it at this moment closes it."""
        link.cut()
        with self._link_lock:
            mine = rank.link is link
            if mine:
                rank.link = None
                self._cut.append(link)
        return mine

    def _release(self, lookup: Lookup, ranks: list[int]) -> None:
        for number in ranks:
            frame = framed(encode(LookupCleanup(lookup.lookup_id, lookup.attempt)))
            self._send(self._table.ranks[number], frame)

    def _release_all(self, missed: list[tuple[Lookup, list[int]]]) -> None:
        for lookup, loaded in missed:
            self._release(lookup, loaded)

    def _hand_over(self, *, news: bool) -> None:
        """Has the reply thread read. `news`: it must look up from its sockets, if that is where it is."""
        if news and self._handed.is_set():
            self._kick.send()
        self._handed.set()

    def _read(self, rank: Rank, milliseconds: int) -> None:
        """Counts in the replies of one rank, waiting for them at most so long. The caller holds the baton."""
        link = rank.link
        if link is None:
            self._lost(rank)
            return
        try:
            replies = [decode_to_scheduler(frame) for frame in link.receive(milliseconds)]
        except (ConnectionError, msgspec.DecodeError) as error:
            logger.error("lookup rank %d: %s", rank.number, error)
            if self._drop(rank, link):
                self._lost(rank)
            return
        for reply in replies:
            self._count(rank, reply)

    def _count(self, rank: Rank, reply: LookupReply) -> None:
        if reply.rank != rank.number:
            COUNTERS.add("foreign_replies")
            logger.error("rank %d replied as rank %d: dropped", rank.number, reply.rank)
            return
        with self._table.lock:
            late = self._table.reply(reply)
        if late:
            self._send(rank, framed(encode(LookupCleanup(reply.lookup_id, reply.attempt))))

    def _lost(self, rank: Rank) -> None:
        """`rank` has ended: nobody waits for its replies."""
        with self._table.lock:
            missed = self._table.lost(rank, time.monotonic())
        self._release_all(missed)

    # -- the reply thread ------------------------------------------------------------------------------------

    def process_responses_from_workers(self) -> None:
        """Reads what the scheduler does not wait for, and probes the ranks that are down; else it sleeps."""
        while self.running:
            self._handed.wait()
            with self._baton:
                while self.running:
                    try:
                        self._read_any(self._probe())
                    except Exception:
                        logger.exception("a lookup reply could not be read")
                    with self._table.lock:
                        if self._table.quiet() and not self._pressing():
                            self._handed.clear()
                            break
        with self._baton, self._link_lock:
            for rank in self._table.ranks.values():
                if rank.link is not None:
                    self._cut.append(rank.link)
                    rank.link = None
            for link in self._cut:
                link.close()
            self._kick.close()

    def _pressing(self) -> bool:
        return any(rank.link is not None and rank.link.pressing for rank in self._table.ranks.values())

    def _read_any(self, milliseconds: int | None) -> None:
        """Waits for any rank or a kick; counts in what has come, and sends on what waits."""
        with self._link_lock:
            cut, self._cut = self._cut, []
            links = [(rank, rank.link) for rank in self._table.ranks.values() if rank.link is not None]
        for link in cut:
            link.close()
        poll = select.poll()
        poll.register(self._kick, select.POLLIN)
        by_number = {}
        for rank, link in links:
            poll.register(link, select.POLLIN | (select.POLLOUT if link.pressing else 0))
            by_number[link.fileno()] = rank, link
        for number, events in poll.poll(milliseconds):
            if number == self._kick.fileno():
                self._kick.take()
                continue
            rank, link = by_number[number]
            try:
                if events & select.POLLOUT:
                    link.flush()
            except ConnectionError:
                events |= select.POLLIN  # which says the same
            if events & ~select.POLLOUT:
                self._read(rank, 0)

    def _probe(self) -> int | None:
        """Probes every rank whose time has come; milliseconds until the next one, None with all up."""
        now = time.monotonic()
        with self._table.lock:
            due, following = self._table.due_probes(now)
        for rank in due:
            # No chunks: the rank's tiers are asked for nothing, which they answer with a miss if they answer
            # at all.
            COUNTERS.add("rank_probes")
            self._send(rank, framed(encode(request(self._table.probe_id(), [], [], None, 0))))
        return None if following is None else int(1000 * (following - now)) + 1


MODULE = "lmcache.v1.lookup_client.lmcache_async_lookup_client"
SYMBOLS = (
    Symbol(MODULE, "LMCacheAsyncLookupClient"),
    Symbol("lmcache.v1.lookup_client.async_lookup_message", "LookupRequestMsg"),
    Symbol("lmcache.v1.lookup_client.async_lookup_message", "LookupResponseMsg"),
    Symbol("lmcache.v1.lookup_client.async_lookup_message", "LookupCleanupMsg"),
    Symbol("lmcache.v1.rpc_utils", "get_zmq_rpc_path_lmcache"),
)
GRAFTS = tuple(
    replace(f"LMCacheAsyncLookupClient.{name}", value)
    for name, value in vars(RepairedLookupClient).items()
    if callable(value)
)
