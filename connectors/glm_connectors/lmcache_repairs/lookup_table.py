"""What the repaired lookup client knows: lookups, their attempts and replies, and which ranks are down. No sockets."""

from __future__ import annotations

import enum
import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from glm_connectors.lmcache_repairs.counters import COUNTERS
from glm_connectors.lmcache_repairs.lookup_link import Link
from glm_connectors.lmcache_repairs.lookup_wire import LookupReply

logger = logging.getLogger(__name__)

# Seconds between probes of a rank that is down: doubled from the first to the last.
PROBE_FIRST, PROBE_LAST = 0.5, 10.0
PROBE_ID = "glm-lookup-probe-"  # and a number: a rank whose engine never answered one is to answer the next


class State(enum.Enum):
    """A lookup is WAITING until it has a result: HIT from all ranks, or a MISS without some of them."""

    WAITING = enum.auto()
    HIT = enum.auto()
    MISS = enum.auto()


@dataclass
class Lookup:
    """One attempt at one lookup id. `tokens` is valid once it is not WAITING."""

    lookup_id: str
    attempt: int
    deadline: float
    state: State = State.WAITING
    tokens: int = 0
    replies: dict[int, int] = field(default_factory=dict)


@dataclass
class Rank:
    """A lookup server. `path`: of its socket; `link`: replaced under the client's lock.

    `owed`: replies to come, {lookup id: attempt}. Of two attempts under one id the later one's, which may be the only
    one; probes and what is late don't count, or the reply thread would sleep while a reply is on its way.
    """

    number: int
    path: str
    link: Link | None = None
    owed: dict[str, int] = field(default_factory=dict)
    down: bool = False
    probe_at: float = 0.0
    probe_pause: float = PROBE_FIRST


class LookupTable:
    """State of all lookups and ranks. `lock` guards it; it is never held while sending or waiting."""

    def __init__(self, ranks: Sequence[Rank], timeout: float) -> None:
        self.lock = threading.Condition()
        self.ranks = {rank.number: rank for rank in ranks}
        self.timeout = timeout
        self.lookups: dict[str, Lookup] = {}
        self.settled = 0  # lookups that got their result, ever
        self._attempts = itertools.count(1)
        self._probes = itertools.count(1)

    def gauges(self) -> Mapping[str, int]:
        return {"dead_ranks": sum(rank.down for rank in self.ranks.values())}

    def quiet(self) -> bool:
        """No reply is owed and no rank is down: there is nothing to read or to probe."""
        return not any(rank.owed or rank.down for rank in self.ranks.values())

    def open(self, lookup_id: str, now: float) -> Lookup:
        """A new attempt; a MISS while a rank is down, since the answer is the minimum over all of them."""
        lookup = Lookup(lookup_id, next(self._attempts), now + self.timeout)
        if any(rank.down for rank in self.ranks.values()):
            lookup.state = State.MISS
            COUNTERS.add("lookups_without_rank")
        else:
            for rank in self.ranks.values():
                rank.owed[lookup_id] = lookup.attempt
        self.lookups[lookup_id] = lookup
        return lookup

    def reply(self, reply: LookupReply) -> bool:
        """Counts a reply in. True where nobody waits for it any more: its rank must release what it loaded."""
        rank = self.ranks[reply.rank]
        if rank.owed.get(reply.lookup_id) == reply.attempt:
            del rank.owed[reply.lookup_id]
        if rank.down:
            rank.down, rank.probe_pause = False, PROBE_FIRST
            logger.warning("lookup rank %d answers again", rank.number)
        if reply.lookup_id.startswith(PROBE_ID):
            return False
        lookup = self.lookups.get(reply.lookup_id)
        if lookup is None or lookup.attempt != reply.attempt or lookup.state is not State.WAITING:
            COUNTERS.add("late_replies")
            return True
        lookup.replies[reply.rank] = reply.num_hit_tokens
        if len(lookup.replies) == len(self.ranks):
            lookup.tokens = min(lookup.replies.values())
            self._settle(lookup, State.HIT)
        return False

    def expire(self, lookup: Lookup, now: float) -> list[int]:
        """The deadline has passed: a MISS, and the silent ranks are down. Returns the ranks that loaded for it."""
        silent = [rank for rank in self.ranks.values() if rank.number not in lookup.replies]
        for rank in silent:
            self.mark_down(rank, now)
        COUNTERS.add("lookups_expired")
        logger.warning(
            "lookup %s: no answer from ranks %s within %.3f s (lookup_timeout_ms), a miss",
            lookup.lookup_id,
            [rank.number for rank in silent],
            self.timeout,
        )
        self._settle(lookup, State.MISS)
        return list(lookup.replies)

    def lost(self, rank: Rank, now: float) -> list[tuple[Lookup, list[int]]]:
        """`rank` has ended: it is down. Returns as `unanswered`."""
        self.mark_down(rank, now)
        rank.probe_at = now  # it may be there again already
        return self.unanswered(rank)

    def unanswered(self, rank: Rank, spared: Lookup | None = None) -> list[tuple[Lookup, list[int]]]:
        """The connection to `rank` has ended: what was asked over it is a MISS; `spared` has yet to be asked.

        Returns each such lookup, and the ranks that loaded for it.
        """
        rank.owed = {} if spared is None else {spared.lookup_id: spared.attempt}
        missed = []
        for lookup in self.lookups.values():
            waits = lookup.state is State.WAITING and rank.number not in lookup.replies
            if waits and lookup is not spared:
                missed.append((lookup, self.give_up(lookup)))
        return missed

    def give_up(self, lookup: Lookup) -> list[int]:
        """A MISS for want of a rank, if it has no result yet. Returns the ranks that loaded for it."""
        if lookup.state is not State.WAITING:
            return []
        COUNTERS.add("lookups_without_rank")
        self._settle(lookup, State.MISS)
        return list(lookup.replies)

    def mark_down(self, rank: Rank, now: float) -> None:
        """Stops asking `rank`; the reply thread probes it from now on."""
        rank.owed = {}
        if not rank.down:
            rank.down, rank.probe_at = True, now
            logger.error("lookup rank %d is down: lookups are misses until it answers", rank.number)

    def probe_id(self) -> str:
        """The id of the next probe."""
        return f"{PROBE_ID}{next(self._probes)}"

    def due_probes(self, now: float) -> tuple[list[Rank], float | None]:
        """Ranks to probe now, and when the next probe is due; None with all ranks up."""
        down = [rank for rank in self.ranks.values() if rank.down]
        due = [rank for rank in down if rank.probe_at <= now]
        for rank in due:
            rank.probe_at = now + rank.probe_pause
            rank.probe_pause = min(2 * rank.probe_pause, PROBE_LAST)
        return due, min((rank.probe_at for rank in down), default=None)

    def _settle(self, lookup: Lookup, state: State) -> None:
        lookup.state = state
        self.settled += 1
        self.lock.notify_all()
