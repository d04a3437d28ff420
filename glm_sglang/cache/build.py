"""Makes a linker's parts in a scheduler process: the pool's pages, the store behind them, what is exported."""

from __future__ import annotations

import importlib
import logging
import math
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from glm_connectors import lmcache_repairs, tiers, valkey_store

from glm_sglang import failure
from glm_sglang.cache import identity, options
from glm_sglang.cache.audit import Audit
from glm_sglang.cache.copier import PageCopier, TorchPageCopier
from glm_sglang.cache.device_pages import DevicePages, device_pages
from glm_sglang.cache.export import Exporter
from glm_sglang.cache.recorder import Recorder
from glm_sglang.errors import UsageError

if TYPE_CHECKING:
    from glm_sglang.cache.cuda_pinned import PinnedMemory
    from glm_sglang.cache.linker import Parts

logger = logging.getLogger(__name__)
# Pages whose copies may wait: of the pool, at most this share, and no fewer than a long prompt's.
_SAVE_SHARE = 0.5
_SAVE_LEAST = 64
# A thread that computes in Python hands the interpreter over after so long: what the scheduler's waits for it whenever it
# has let go of it. Python's own is 5 ms.
_TURN_S = 1e-3


def parts(params: Any, components: Any) -> Parts:
    """What SGLang gives a linker → what it is made of. Ends the process, by one message, where it cannot be."""
    try:
        return _parts(params, components)
    except (UsageError, ValueError, MemoryError, lmcache_repairs.ContractError) as error:
        logger.debug("the cache's parts", exc_info=True)
        failure.end_process(UsageError(str(error) or "--glm-cache-pool-gb: no memory for it"))


def _parts(params: Any, components: Any) -> Parts:
    """As `parts`. Raises ValueError, UsageError, MemoryError, lmcache_repairs.ContractError."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.runtime_context import get_model, get_parallel

    from glm_sglang.cache.linker import Parts

    if set(components) != {ComponentType.FULL}:
        names = ", ".join(sorted(component.name for component in components))
        raise ValueError(f"--glm-cache-url serves GLM-5.x's radix tree (FULL); this model's has {names}")
    chosen = options.read()
    if valkey_store.uses_glide(valkey_store.parse(chosen.url)):
        threading.Thread(target=_import_client, daemon=True).start()
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    pages = device_pages(pool, int(params.page_size))
    space = identity.namespace(get_model(), pool, pages)
    groups = alike(params)
    share = share_of(groups)
    siblings = siblings_of(share, groups)
    lmcache_repairs.install()
    sys.setswitchinterval(min(_TURN_S, sys.getswitchinterval()))
    memory = pinned_memory(pages)
    exporter = Exporter(rank=str(get_parallel().tp_rank))
    store = tiers.TieredStore(
        tiers.TierConfig(url=chosen.url, pool_bytes=chosen.pool_bytes, ttl=chosen.ttl_s),
        space,
        writer=True,
        share=share,
        siblings=siblings,
        sink=exporter,
        memory=memory,
    )
    recorder = Recorder(exporter, exporter.poll)
    exporter.watch(store.metrics, recorder.table)
    copier, counter = copies(pages, memory)
    if memory is not None:
        recorder.gauge("cache_registered_bytes", memory.registered_bytes)
    logger.info(
        "cache: pages of %d bytes, a pool of %d, fingerprint %s, %s",
        pages.layout.page_bytes,
        store.pool_pages,
        space.fingerprint.hex(),
        "saved to Valkey by this rank"
        if share.of == 1
        else f"one in {share.of} saved to Valkey by this rank",
    )
    longest = min(params.req_to_token_pool.max_context_len, params.token_to_kv_pool_allocator.size)
    if share.index == 0 and (
        warning := small_pool(chosen.pool_bytes, store.prefetch_pages, pages.layout.page_tokens, longest)
    ):
        logger.warning("cache: %s", warning)
    return Parts(
        store=store,
        device=pages,
        copier=copier,
        recorder=recorder,
        audit=Audit.from_environment(),
        wait_s=chosen.wait_s,
        prefetches=True,
        counter=counter,
        save_limit_pages=lambda: max(_SAVE_LEAST, int(store.pool_pages * _SAVE_SHARE)),
        pool_pages=lambda: store.pool_pages,
    )


def small_pool(pool_bytes: int, fetched: int, page_tokens: int, longest: int) -> str | None:
    """What is said of a CPU pool of which a prompt of `longest` tokens may take `fetched` pages, too few; else None."""
    pages = longest // page_tokens
    if fetched >= pages:
        return None
    needed = math.ceil(10 * pool_bytes / (1 << 30) * pages / fetched) / 10
    return (
        f"of a prompt longer than {fetched * page_tokens} tokens only the beginning comes from Valkey, and one may have "
        f"{longest}: --glm-cache-pool-gb {needed:g} is enough for all of it"
    )


def pinned_memory(pages: DevicePages) -> PinnedMemory | None:
    """What makes the CPU pool's memory on this device; None for LMCache's own."""
    if pages.device.type != "cuda":
        return None
    from glm_sglang.cache.cuda_pinned import CudaPinner, PinnedMemory

    return PinnedMemory(CudaPinner(pages.device))


def copies(pages: DevicePages, memory: PinnedMemory | None) -> tuple[PageCopier, Any]:
    """What copies pages on this device, and the counter of its loads; None for SGLang's."""
    if memory is not None:
        from glm_sglang.cache import cuda_layers

        return cuda_layers.make(pages, memory.region_of)
    return TorchPageCopier(pages), None


def _import_client() -> None:
    """Half a second, which the first request would pay: the client is imported by the thread that uses it first."""
    importlib.import_module("glide_sync")


def alike(params: Any) -> list[Any]:
    """Groups of ranks that hold the same pages: each rank of the one with each of the other. [] for one alone.

    Ranks of one attention TP and CP group do. DP ranks have requests of their own, and pipeline stages layers of their
    own. UPSTREAM: UnifiedRadixCache._all_reduce_attn_groups, whose groups these are.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return []
    groups = (params.attn_cp_cache_group, params.attn_tp_cache_group)
    found = [group for group in groups if group is not None and distributed.get_world_size(group=group) > 1]
    return found if found or params.tp_cache_group is None else [params.tp_cache_group]


def share_of(groups: Sequence[Any]) -> tiers.Share:
    """Which of the pages that it computes this rank saves to Valkey: its share of those that `alike` ranks hold."""
    from torch import distributed

    index, of = 0, 1
    for group in groups:
        size = distributed.get_world_size(group=group)
        index, of = index * size + distributed.get_rank(group=group), of * size
    return tiers.Share(index, of)


def siblings_of(share: tiers.Share, groups: Sequence[Any]) -> tiers.Siblings | None:
    """The ranks that hold the same pages, who come here together; None for one alone."""
    from torch import distributed

    if share.of == 1:
        return None
    place = tiers.Place(share)
    known = [place.address]
    for group in reversed(groups):  # of the inner group first, then of all inner groups
        found: list[Any] = [None] * distributed.get_world_size(group=group)
        distributed.all_gather_object(found, known, group=group)
        known = [address for some in found for address in some]
    return tiers.Siblings(place, known)
