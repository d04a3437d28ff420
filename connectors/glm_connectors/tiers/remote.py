"""What a store has besides its pool when there is a Valkey: threads, an event loop, what runs on them, and their end."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from glm_connectors.tiers import loop
from glm_connectors.tiers.config import TierConfig
from glm_connectors.tiers.envelope import Envelope
from glm_connectors.tiers.layout import Namespace
from glm_connectors.tiers.metrics import MetricTable
from glm_connectors.tiers.pool import CpuPool
from glm_connectors.tiers.prefetch import Prefetcher
from glm_connectors.tiers.rates import Worth
from glm_connectors.tiers.saves import SaveLimits, Saver
from glm_connectors.tiers.siblings import Siblings
from glm_connectors.valkey_store import EmbeddedServer, StoreUrl, ValkeyStore
from glm_connectors.valkey_store.store import Way

logger = logging.getLogger(__name__)

_GROUP_BYTES = 8 << 20  # pages share a round trip up to here: below it, the cost of a call dominates
_GROUP = 64
_ASKED = 4  # groups that a sibling is asked for at once: a question takes both sides a few turns of the interpreter
_START_S = 5.0  # in which siblings begin; then the store goes on without


class Remote:
    """What a store has besides its pool when there is a Valkey: an event loop in a thread, LMCache's repaired
    executors on it (gets and puts apart, so that puts into a slow store keep no get waiting), their threads.
    """

    def __init__(
        self,
        url: StoreUrl,
        config: TierConfig,
        namespace: Namespace,
        writer: bool,
        siblings: Siblings | None,
        *,
        pool: CpuPool,
        worth: Worth,
        table: MetricTable,
    ) -> None:
        from lmcache.v1.storage_backend.job_executor.pq_executor import AsyncPQThreadPoolExecutor

        self._config, self.siblings = config, siblings
        self.server: EmbeddedServer | None = None
        if url.scheme == "embedded":
            self.server = EmbeddedServer(url)
            url = StoreUrl("valkey", (self.server.node,))

        def failed(way: Way, kind: str) -> None:
            table.add("cache_store_failures", way, kind)

        envelope = Envelope(namespace)
        try:
            self.valkey = ValkeyStore(
                url,
                request_timeout=config.request_timeout,
                connect_timeout=config.connect_timeout,
                ttl=config.ttl,
                name_of=envelope.name,
                on_failure=failed,
            )
        except BaseException:
            if self.server is not None:
                self.server.stop()
            raise
        self._loop = loop.new()
        shards = len(self.valkey.nodes)
        # Each thread has a connection to every shard of a cluster.
        each = -(-config.put_workers // shards) if url.cluster else config.put_workers
        put_workers = each * shards
        self._threads = ThreadPoolExecutor(config.get_workers + put_workers, "glm-valkey")
        self._loop.set_default_executor(self._threads)
        self._thread = threading.Thread(target=self._loop.run_forever, name="glm-tiers", daemon=True)
        self._thread.start()
        self._gets: Any = AsyncPQThreadPoolExecutor(self._loop, config.get_workers)
        self._puts: Any = AsyncPQThreadPoolExecutor(self._loop, put_workers) if writer else None
        # A small pool must not be all under way.
        least = pool.slots // (2 * (config.get_workers + config.put_workers))
        group = max(1, min(_GROUP, _GROUP_BYTES // envelope.value_bytes, least))
        self.prefetcher = Prefetcher(
            self._loop,
            self._gets,
            pool,
            self.valkey,
            envelope,
            worth,
            table,
            group=group,
            asked=max(1, min(_ASKED * group, least)),
            window=2 * config.get_workers,
            slots=lambda: max(1, int(config.prefetch_share * pool.slots)),
            siblings=siblings,
        )
        self.saver: Saver | None = None
        if writer:
            limits = SaveLimits(
                pages=config.save_queue,
                share_pages=lambda: int(config.put_share * pool.slots),
                patience=config.save_patience,
                group=group,
                workers=each,
            )
            self.saver = Saver(self._loop, self._puts, pool, self.valkey, envelope, table, limits)
        if siblings is not None:
            self._start_siblings(siblings)

    def _start_siblings(self, siblings: Siblings) -> None:
        """Where it comes to nothing, pages come from Valkey."""
        starting = asyncio.run_coroutine_threadsafe(siblings.start(self.prefetcher.lending), self._loop)
        try:
            starting.result(_START_S)
        except Exception as error:
            logger.warning(
                "cache: no pages from or for other ranks of this machine: %s",
                str(error) or "the event loop does not answer",
            )
            starting.cancel()
            asyncio.run_coroutine_threadsafe(siblings.close(), self._loop)

    def close(self) -> None:
        """Within: drain + the executors' bounds + the longest call."""
        self.prefetcher.close()
        if self.siblings is not None:
            closing = asyncio.run_coroutine_threadsafe(self.siblings.close(), self._loop)
            _bounded(partial(closing.result, 5))
        if self.saver is not None:
            self.saver.close(self._config.drain)
        self.valkey.stop_waiting()
        for executor in (self._puts, self._gets):
            if executor is not None:
                _bounded(partial(executor.shutdown, wait=True))
        ended = self._join_threads(self.valkey.longest_call + 2.0)
        rest = asyncio.run_coroutine_threadsafe(_cancel_rest(), self._loop)
        _bounded(partial(rest.result, 5))
        if self.saver is not None:
            self.saver.drop_all("closing")  # what came back to the queue meanwhile
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        if ended:
            self.valkey.close()
            self._loop.close()
        else:
            logger.error("a call to Valkey outlasts its timeout; its connection stays open")
        if self.server is not None:
            self.server.stop()

    def _join_threads(self, seconds: float) -> bool:
        """Ends the worker threads; False where one is still in a call after so many seconds."""
        waiting = threading.Thread(
            target=self._threads.shutdown, kwargs={"cancel_futures": True}, daemon=True
        )
        waiting.start()
        waiting.join(seconds)
        return not waiting.is_alive()


def _bounded(step: Callable[[], object]) -> None:
    """One step of closing; where it exceeds its bound, the next ones are taken all the same."""
    try:
        step()
    except TimeoutError as error:
        logger.error("closing: %s", str(error) or "the event loop does not answer")


async def _cancel_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=3)
