"""The `UnifiedCacheLinker` that SGLang's radix tree continues into: CPU pool and Valkey, by pages of 64 tokens.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "GlmCacheLinker", "linker_module_path": "glm_sglang.cache.linker"}'

(`--glm-cache-url` sets these.) SGLang calls everything here on the scheduler's thread, so nothing here waits for a
network, a copy or a device: a lookup asks the pool in memory, loads and saves are handed to threads. The exception is the
launch of a batch that loads: it waits until the load is queued on the GPU, and on a CPU until its bytes are there
(`layer_waits`). A hit is reported only for pages that are pinned in the pool, so a load cannot miss later.

Ranks: every rank has a pool of its own; SGLang intersects what they report. Those that hold the same pages save them to
Valkey in shares (`tiers.Share`). Whatever is decided by one rank alone
(a full queue, a pool without room) comes back as the result of a save, never as a refusal, because the tree counts
results in step on all ranks.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from glm_sglang import settings
from glm_sglang.cache import build
from glm_sglang.cache.arrivals import Arrivals
from glm_sglang.cache.audit import Audit
from glm_sglang.cache.copier import PageCopier
from glm_sglang.cache.device_pages import DevicePages
from glm_sglang.cache.in_use import set_in_use
from glm_sglang.cache.layer_waits import HostLayerCounter, MeasuredLayerCounter
from glm_sglang.cache.loads import Load, LoadQueue
from glm_sglang.cache.rate import PrefillRate
from glm_sglang.cache.recorder import Recorder
from glm_sglang.cache.saves import SaveQueue
from glm_sglang.cache.stalls import Kind, Observe, StallClock, log_longer, running_clock
from glm_sglang.cache.store import PageStore

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pin:
    """What a lookup has pinned for a request, until its load or the next scheduling step."""

    keys: Sequence[bytes]
    pages: Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a linker is made of; `build.parts` makes them for a server, a test makes its own.

    The linker owns all of it and closes it. counter: where None, SGLang's, on which the host waits for the bytes.
    """

    store: PageStore
    device: DevicePages
    copier: PageCopier
    recorder: Recorder
    audit: Audit
    wait_s: float | None
    prefetches: bool
    save_limit_pages: Callable[[], int]
    pool_pages: Callable[[], int] | None = None
    counter: MeasuredLayerCounter | None = None


class GlmCacheLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Built by SGLang in each scheduler process.

    Raises ValueError, naming the flag, for a model or pool that it does not serve.
    """

    glm_cache = True  # for hooks that see a linker and must not import this module

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
        parts: Parts | None = None,
    ) -> None:
        self.forward_stream = forward_stream
        self.page_tokens = int(params.page_size)
        parts = parts or build.parts(params, components)
        self.parts = parts
        self.prefetches = parts.prefetches
        self.recorder = parts.recorder
        recorder = parts.recorder
        running = running_clock() if parts.audit.on else None

        def into(name: str) -> Observe:
            return lambda seconds: recorder.observe(name, seconds)

        tell, longer = log_longer(settings.read(settings.CACHE_STALL_LOG_MS))
        self.stalls = StallClock(
            into("scheduler_stall_seconds"),
            held=into("scheduler_hold_seconds"),
            beside=None
            if running is None
            else (into("scheduler_stall_running_seconds"), into("scheduler_hold_running_seconds"), running),
            tell=tell,
            longer=longer,
        )
        self.layer_done_counter = parts.counter or HostLayerCounter(len(parts.device.layers))
        self.layer_done_counter.waiting = self._waiting_for_a_load
        self._load_waited = 0.0
        # UPSTREAM: the wrapper only asks whether a name is in here.
        self.pools: dict[PoolName, object] = {PoolName.KV: parts.device, PoolName.INDEXER: parts.device}
        self._store = parts.store
        self._saves = SaveQueue(
            parts.store,
            parts.copier,
            self.page_tokens,
            limit_pages=parts.save_limit_pages,
            pool_pages=parts.pool_pages,
            count=lambda end, pages: recorder.add("cache_offload_pages", end, amount=pages),
            audit=parts.audit,
        )
        self._loads = LoadQueue(
            parts.store,
            parts.copier,
            self.layer_done_counter,
            recorder=recorder,
            audit=parts.audit,
        )
        self.arrivals = Arrivals(parts.store, self.page_tokens, parts.wait_s, recorder=recorder)
        self.rate = PrefillRate(parts.store.note_prefill, self.page_tokens)
        self._pins: dict[str, _Pin] = {}
        self._queued: dict[str, Load] = {}
        self._next_look = 0.0
        # Set by the hooks: whose prompt is being matched, which of its pages are asked for, whether it is in earnest.
        self.matching: str | None = None
        self.tail: tuple[int, int] | None = None
        self.peeking = False
        self.loads_launched = -sys.maxsize  # the scheduler's number of the last batch with loads
        self.off = False
        self._closed = False
        recorder.gauge("cache_off", lambda: float(self.off))
        recorder.gauge("cache_waiting_requests", lambda: len(self.arrivals))
        recorder.gauge("cache_offload_queue_pages", lambda: self._saves.queued_pages)
        recorder.gauge("scheduler_stall_max_seconds", lambda: self.stalls.longest)
        recorder.start()
        set_in_use(self)

    # What SGLang's tree calls.

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Prefix lengths that can be restored, in pages; they stay pinned until the load or the next step."""
        with self.stalls.measure():
            keys = self._digests(rid, _kv(transfers).keys)
            self._drop_pin(rid)
            pages = [] if self.off else self._store.pin(keys)
            if pages:
                self._pins[rid] = _Pin(keys[: len(pages)], pages)
            return list(range(1, len(pages) + 1))

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queues the load of the pages that the lookup has pinned; the ranks may have agreed on fewer.

        Every rank answers alike: pins are taken and dropped at the same points of the same steps, and what an earlier
        lookup has found is forgotten on all of them (`gate.matching`). False, as for one that was never looked up, where
        a load is of another lookup than the pins.
        """
        with self.stalls.measure():
            transfer = _kv(transfers)
            pin = self._pins.pop(rid, None)
            count = len(transfer.keys)
            if pin is None:
                return False
            if len(pin.pages) < count or pin.keys[0].hex() != transfer.keys[0]:
                self._store.release(pin.pages)
                return False
            self._store.release(pin.pages[count:])
            self._queued[rid] = Load(pin.keys[:count], transfer.device_indices, pin.pages[:count])
            return True

    def start_layer_wise_loading(self) -> int:
        """Starts what is queued, as one batch; −1 where nothing is."""
        with self.stalls.measure(Kind.WORK if self._queued else Kind.POLL):
            if not self._queued:
                return -1
            loads, self._queued = list(self._queued.values()), {}
            return self._loads.start(loads, self.parts.copier.free(self.forward_stream))

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Whether the batch landed, or will before anybody can touch its slots (`cuda_layers` on a GPU)."""
        with self._waiting_for_a_load():
            landed = bool(self.layer_done_counter.finish(counter_index))
        self.recorder.observe("cache_load_wait_seconds", self._load_waited)
        self._load_waited = 0.0
        return landed

    @contextmanager
    def _waiting_for_a_load(self) -> Iterator[None]:
        """Around all that the scheduler's thread waits for a load, while it launches the batch or after."""
        with self.stalls.measure():
            began = time.perf_counter()
            try:
                yield
            finally:
                self._load_waited += time.perf_counter() - began

    def cancel_queued_load(self, rid: str) -> bool:
        """Whether the load had not started, and now never will."""
        load = self._queued.pop(rid, None)
        if load is None:
            return False
        with self.stalls.measure():
            self._store.release(load.pages)
        return True

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Queues a save. Always accepted: what does not fit fails as a result, in step with the other ranks."""
        with self.stalls.measure():
            transfer = _kv(transfers)
            if self.off:
                self._saves.refuse(len(transfer.keys), "weights_changed")
                return True
            written = self.parts.copier.written(self.forward_stream)
            self._saves.put(transfer.keys, transfer.device_indices, written)
            return True

    def num_completed_offloads(self) -> int:
        """Called once at the start of every scheduling step, which ends the pins of the step before."""
        self.stalls.step()
        with self.stalls.measure(Kind.WORK if self._pins else Kind.POLL):
            for rid in list(self._pins):
                self._drop_pin(rid)
            return self._saves.completed()

    def pop_completed_offload(self) -> bool:
        """The oldest save's result."""
        with self.stalls.measure():
            return self._saves.pop()

    def reset(self) -> None:
        """A flush: the device tree is empty, so the pool is emptied too; Valkey keeps what it has."""
        self._quiesce()
        self._store.clear()

    def close(self) -> None:
        """Ends the threads; then the store drains what is queued for Valkey, within its bound."""
        if self._closed:
            return
        self._closed = True
        set_in_use(None)
        self._quiesce()
        self.arrivals.close()
        self._saves.close()
        self._loads.close()
        self._store.close()
        self.recorder.close()

    # What the hooks call.

    def request_arrives(self, tree: Any, req: Any) -> None:
        """Starts hashing and prefetch of a request's missing pages."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        with self.stalls.measure():
            tokens = req.origin_input_ids + req.output_ids
            key = RadixKey(tokens, extra_key=req.extra_key, cache_salt=req.cache_salt)
            # Without a request the tree is walked and nothing else.
            device_tokens = tree.match_prefix(MatchPrefixParams(key=key)).device_prefix_len
            self.arrivals.begin(
                req.rid, tokens, req.extra_key, req.cache_salt, int(device_tokens) // self.page_tokens
            )

    def held_back(self, rids: Sequence[str], tree: Any) -> set[str]:
        """Of the waiting requests, those that go on waiting for their pages: the same on every rank."""
        with self.stalls.measure(Kind.POLL):
            undecided = [rid for rid in rids if self.arrivals.undecided(rid)]
        if not undecided:
            return set()
        with self.stalls.measure(Kind.HOLD):
            ready = torch.tensor([self.arrivals.ready(rid) for rid in undecided], dtype=torch.int32)
        # Not measured: ranks that are not in step wait for each other at a step's first collective, whichever it is.
        tree._all_reduce_attn_groups(ready, torch.distributed.ReduceOp.MIN)
        held = set()
        with self.stalls.measure(Kind.HOLD):
            for rid, agreed in zip(undecided, ready.tolist(), strict=True):
                if agreed:
                    self.arrivals.release(rid)
                else:
                    held.add(rid)
        return held

    def admitted(self, rids: Sequence[str]) -> None:
        """These requests are in a batch. Their loads are queued, and have pinned what they need."""
        with self.stalls.measure(self._kind_of(rids)):
            for rid in rids:
                self.arrivals.forget(rid)

    def looks_around(self, now: float) -> bool:
        """Whether it is time for `present`: about once a second where anybody waits."""
        if not len(self.arrivals) or now < self._next_look:
            return False
        self._next_look = now + 1.0
        return True

    def present(self, rids: Iterable[str]) -> None:
        """All requests that wait in the scheduler, now and then: what others hold would be held for ever."""
        with self.stalls.measure(Kind.HOLD):
            lost = self.arrivals.keep(rids)
        if lost:
            logger.debug("cache: %d requests have left the scheduler's queues without a word", lost)

    def weights_change(self) -> None:
        """Weights are about to be updated in place: the name space of the pages is theirs no longer."""
        if not self.off:
            logger.warning(
                "cache: weights are updated in place; the cache is off until the server starts again"
            )
        self.off, self.prefetches = True, False
        self.arrivals.clear()

    def request_gone(self, rid: str) -> None:
        """An aborted request: nothing of it is left here."""
        with self.stalls.measure(self._kind_of([rid])):
            self._drop_pin(rid)
            self.arrivals.forget(rid)

    def tail_hashes(self, tokens: int, device_hit_tokens: int) -> list[str] | None:
        """Hashes of the pages of the prompt being matched, beyond its hit on the device; None where unknown."""
        names = self.arrivals.names(self.matching) if self.matching is not None else None
        first, last = device_hit_tokens // self.page_tokens, tokens // self.page_tokens
        if names is None or len(names) < last:
            return None
        self.tail = (first, last)
        return names[first:last]

    # Inside.

    def _kind_of(self, rids: Iterable[str]) -> Kind:
        """Whether there is anything of these requests here."""
        known = any(rid in self._pins or rid in self.arrivals for rid in rids)
        return Kind.WORK if known else Kind.POLL

    def _digests(self, rid: str, names: Sequence[str]) -> list[bytes]:
        """The keys named: those made at arrival, where the names are theirs."""
        digests = self.arrivals.digests(rid) if self.tail is not None and rid == self.matching else None
        if digests is not None and self.tail is not None:
            return digests[self.tail[0] : self.tail[1]]
        return [bytes.fromhex(name) for name in names]

    def _drop_pin(self, rid: str) -> None:
        pin = self._pins.pop(rid, None)
        if pin is not None:
            self._store.release(pin.pages)

    def _quiesce(self) -> None:
        self.arrivals.clear()
        for rid in list(self._pins):
            self._drop_pin(rid)
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        self._loads.quiesce()
        self._saves.quiesce()
        self.layer_done_counter.reset()


def _kv(transfers: list[PoolTransfer]) -> PoolTransfer:
    """The one transfer of a model whose tree has a FULL component only; its pages hold the index keys too."""
    for transfer in transfers:
        if transfer.name == PoolName.KV:
            return transfer
    raise ValueError(f"expected main KV among the transfers, found {[str(t.name) for t in transfers]}")
