"""The tiers below a GPU's radix tree: a CPU pool and Valkey, behind one object a rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from glm_connectors.tiers.config import TierConfig
from glm_connectors.tiers.layout import Namespace
from glm_connectors.tiers.metric_list import METRICS
from glm_connectors.tiers.metrics import MetricTable, Sink
from glm_connectors.tiers.pool import OWNERS, CpuPool, Owner, Page
from glm_connectors.tiers.rates import Worth
from glm_connectors.tiers.remote import Remote
from glm_connectors.tiers.share import Share
from glm_connectors.tiers.siblings import STATES, Siblings
from glm_connectors.tiers.ticket import Ticket
from glm_connectors.valkey_store import EmbeddedServer, parse
from glm_connectors.valkey_store.store import WAYS

ALL = Share()


class TieredStore:
    """CPU pool and Valkey of one rank.

    Every method may be called from any thread. None but `Ticket.wait`, `close` and the constructor waits for
    anything but short sections under a lock; none of them touches the network.
    """

    def __init__(
        self,
        config: TierConfig,
        namespace: Namespace,
        *,
        writer: bool,
        share: Share = ALL,
        siblings: Siblings | None = None,
        sink: Sink | None = None,
        memory: Callable[..., Any] | None = None,
    ) -> None:
        """writer: whether this rank saves to Valkey. share: which of the pages that it commits (MLA: ranks of a group
        commit the same ones, and each page is put by one of them). siblings: the ranks of that group, where they lend
        each other what each has got; the store closes them. memory: as for `CpuPool`.

        Raises valkey_store.CacheUrlError, naming `--glm-cache-url`, for a bad URL or refused credentials; and
        ValueError for a pool too small for the layout. A store that is down is no error: its breaker starts
        open, and a warning is logged.
        """
        url = parse(config.url)
        self.config, self.namespace, self.share = config, namespace, share
        layout = namespace.layout
        self.metrics = MetricTable(METRICS, sink)
        self._pool = CpuPool(layout, config.pool_bytes, memory)
        self._worth = Worth(layout.page_bytes, layout.page_tokens)
        self._remote: Remote | None = None
        self._closed = threading.Lock()
        if url.scheme != "none":
            try:
                self._remote = Remote(
                    url,
                    config,
                    namespace,
                    writer,
                    siblings,
                    pool=self._pool,
                    worth=self._worth,
                    table=self.metrics,
                )
            except BaseException:
                self._pool.close()
                if siblings is not None:
                    siblings.discard()
                raise
        elif siblings is not None:
            siblings.discard()
        self._watch()

    # Looking

    def resident(self, keys: Sequence[bytes]) -> int:
        """How many pages of `keys`, from the first on, are in the CPU pool at this moment. Memory only."""
        return self._pool.prefix(keys)

    # Prefetch

    def prefetch(self, rid: str, keys: Sequence[bytes]) -> Ticket:
        """Starts to bring the missing pages of `keys` from Valkey into the pool; returns at once.

        Call it when a request arrives, and again where its ticket is `lost`; and `cancel` when it runs or is gone.
        Requests that miss the same page share its get. `done` at once where there is nothing to be held, and no Valkey,
        its breaker open, or recomputing estimated to be faster.

        Once `done`, the pages that were there and those that came, up to the first that did not, are not evicted before
        `cancel`. All requests together hold `prefetch_share` of the pool; where there is no room the prefetch waits for
        those before it (`room`). More than that is neither fetched nor held for one request: its end is then "share".

        Counts, once a request: each page is a hit or a miss of the pool at its arrival; each that was not in the pool,
        and that it may hold, is a hit or a miss of Valkey, as it is there or not when the ticket is done.
        """
        found, most = self._pool.prefix(keys), self.prefetch_pages
        self._pool.missing(keys[most:])
        missing = self._pool.missing(keys[:most])  # last: the beginning is evicted after the end
        counted = self._remote is not None and self._remote.prefetcher.knows(rid)
        if found and not counted:
            self.metrics.add("cache_hit_pages", "cpu", amount=found)
        if found < len(keys) and not counted:
            self.metrics.add("cache_miss_pages", "cpu", amount=len(keys) - found)
        ticket = Ticket(rid, keys, missing, most, counted=counted)
        if self._remote is None:
            ticket.finish("none" if found < len(keys) else "resident")
            self.metrics.add("cache_prefetches", ticket.end)
            return ticket
        self._remote.prefetcher.start(ticket)
        return ticket

    @property
    def prefetch_pages(self) -> int:
        """What `prefetch` holds for one request, and for all of them, at most."""
        return max(1, int(self.config.prefetch_share * self._pool.slots))

    @property
    def pool_pages(self) -> int:
        """How many pages the CPU pool holds; fewer than configured where not all of its memory could be pinned."""
        return self._pool.slots

    def urge(self, rid: str, turn: int) -> None:
        """The request could run now, but for its pages: its prefetch comes before those of requests that could not, and
        of those that could, in the order of their turns. Ranks must give the same ones. Unknown rids are fine."""
        if self._remote is not None:
            self._remote.prefetcher.urge(rid, turn)

    def cancel(self, rid: str) -> None:
        """The request runs, its pages pinned by `pin`, or is gone: nothing is held for it any more, and its gets are
        not started. Unknown rids are fine."""
        if self._remote is not None:
            self._remote.prefetcher.cancel(rid)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Tells the measured prefill rate, against which a load from Valkey is weighed."""
        self._worth.prefill.note(tokens, seconds)

    # Loads

    def pin(self, keys: Sequence[bytes]) -> list[Page]:
        """Pins the resident prefix of `keys` against eviction for a load; its pages, to be `release`d.

        Memory only: fit for the scheduler thread. This is the lookup: no eviction can come between it and the load.
        """
        began = time.perf_counter()
        pages = self._pool.hold(keys, "load")
        self.metrics.observe("cache_lookup_seconds", value=time.perf_counter() - began)
        return pages

    def release(self, pages: Sequence[Page]) -> None:
        """Ends a pin. Each page once; its views must not be used any more."""
        self._pool.release(pages, "load")

    # Saves

    def reserve(self, count: int, *, last: bool = True, lane: Hashable = None) -> list[Page] | None:
        """`count` slots to be filled for a save, evicting what is among the least recently used; None where the pool
        has not that many to give. All or nothing. Followed by `commit` or `abandon`.

        last: a refusal is counted; no smaller block is asked for instead. lane: names a save that reserves piece by
        piece, so that all of its pages lie next to each other.
        """
        pages = self._pool.take(count, "save", lane)
        if pages is None and last:
            self.metrics.add("cache_refused_reservations")
        return pages

    def commit(self, pages: Sequence[Page], keys: Sequence[bytes]) -> int:
        """The reserved pages are filled: they become resident under their keys, and a writer queues the puts
        of its share. A put that does not fit the queue is dropped and counted; the page stays resident. A key that
        was resident keeps its page. Returns how many pages are new."""
        if len(pages) != len(keys):
            raise ValueError(f"{len(pages)} pages for {len(keys)} keys")
        saver = self._remote.saver if self._remote is not None else None
        if saver is not None:
            self._pool.also(pages, "save")  # until their puts are queued
        new = self._pool.insert(pages, keys, "save")
        if saver is not None:
            fresh = [n for n, inserted in enumerate(new) if inserted and self.share.holds(keys[n])]
            saver.enqueue([pages[number] for number in fresh], [keys[number] for number in fresh])
            self._pool.release(pages, "save")
        return sum(new)

    def abandon(self, pages: Sequence[Page]) -> None:
        """Gives reserved pages back unused."""
        self._pool.release(pages, "save")

    # The end

    def clear(self) -> None:
        """Forgets every page of the pool, cancels prefetches and what they hold, and queued puts. Pages in Valkey
        stay: another name space is what keeps them from being used. Pages that are pinned or reserved stay valid."""
        if self._remote is not None:
            self._remote.prefetcher.cancel_all()
            if self._remote.saver is not None:
                self._remote.saver.drop_all("cleared")
        self._pool.clear()

    def close(self) -> None:
        """Drains queued puts within `config.drain`, then cancels, then releases everything; within a few
        request timeouts whatever Valkey does. Pages that the caller still holds keep the pool's memory
        allocated (an error is logged). Idempotent."""
        if not self._closed.acquire(blocking=False):
            return
        if self._remote is not None:
            self._remote.close()
        self._pool.close()

    @property
    def embedded(self) -> EmbeddedServer | None:
        """The server that `embedded://` started."""
        return self._remote.server if self._remote is not None else None

    def _watch(self) -> None:
        from glm_connectors.lmcache_repairs import COUNTERS, HELP

        pool, table = self._pool, self.metrics
        size = pool.slot_bytes
        for owner in OWNERS:
            table.read_from("cache_pinned_bytes", owner, read=partial(_held_bytes, pool, owner))
        table.read_from("cache_pool_bytes", "total", read=lambda: pool.slots * size)
        table.read_from("cache_pool_bytes", "free", read=lambda: pool.free * size)
        table.read_from("cache_pool_bytes", "resident", read=lambda: pool.resident * size)
        table.read_from("cache_evicted_pages", read=lambda: pool.evicted)
        table.read_from("cache_load_bytes_per_second", read=lambda: self._worth.load.rate.last_known)
        table.read_from("cache_prefill_tokens_per_second", read=lambda: self._worth.prefill.value)
        for name in HELP:
            table.read_from(f"lmcache_{name}", read=partial(COUNTERS.__getitem__, name))
        remote = self._remote
        if remote is None:
            return
        for way in WAYS:
            table.read_from("cache_breaker_state", way, read=partial(remote.valkey.state, way))
        if (siblings := remote.siblings) is not None:
            for state in STATES:
                table.read_from("cache_siblings", state, read=partial(siblings.count, state))
        if (saver := remote.saver) is not None:
            table.read_from("cache_save_queue_pages", read=lambda: saver.outstanding)
            table.read_from("cache_save_queue_bytes", read=lambda: saver.outstanding * size)


def _held_bytes(pool: CpuPool, owner: Owner) -> float:
    return pool.held(owner) * pool.slot_bytes
