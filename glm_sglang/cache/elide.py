"""Layers that share an indexer keep no index keys, also with this linker.

UPSTREAM: kv_cache_configurator._should_elide_dsa_index_k says no for any linker, because upstream's own cannot page a
buffer without rows. Prefill would then have index buffers that a decode server (which has no linker) has not, and
every transfer between them fails (NIXL_ERR_NOT_FOUND).
"""

from __future__ import annotations

from collections.abc import Callable

from glm_sglang.cache import options


def elide_index_keys(original: Callable[..., bool], *, is_draft_worker: bool) -> bool:
    """Around _should_elide_dsa_index_k: as without a linker, where the linker is ours."""
    from sglang.srt.runtime_context import get_memory

    memory = get_memory()
    if not (memory.enable_unified_cache_external_linker and options.read().on):
        return original(is_draft_worker=is_draft_worker)
    with memory.override(enable_unified_cache_external_linker=False):
        return original(is_draft_worker=is_draft_worker)
