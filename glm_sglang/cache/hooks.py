"""What the cache changes in SGLang where its linker interface has nothing to say. Nothing happens without a cache."""

from __future__ import annotations

from glm_sglang.upstream.hooks import Hook

_GATE = "glm_sglang.cache.gate"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_PREFILL = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_LINKER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker"
_WRAPPER = f"{_LINKER}.UnifiedCacheLinkerWrapper"

HOOKS: tuple[Hook, ...] = (
    Hook(
        target="sglang.srt.mem_cache.kv_cache_configurator._should_elide_dsa_index_k",
        kind="around",
        function="glm_sglang.cache.elide:elide_index_keys",
        why="with any linker, prefill gets index buffers that decode has not, and every transfer between them fails",
        remove_when="upstream's linkers take layers without index keys",
    ),
    Hook(
        target="sglang.srt.mem_cache.cpp_utils.native_hash.get_native_hash",
        kind="around",
        function="glm_sglang.cache.page_keys:native_hash",
        why="it compiles a C++ extension in the scheduler when the first prompt is matched: 14 s, and OpenSSL's headers",
        remove_when="the extension comes built, or is built before the server serves",
        also=("sglang.srt.mem_cache.utils.storage_namespace_seed", "sglang.srt.mem_cache.utils.get_hash_str"),
    ),
    Hook(
        target=f"{_SCHEDULER}._prefetch_kvcache",
        kind="before",
        function=f"{_GATE}:request_arrives",
        why="a linker is not told that a request has arrived, so its pages could only be fetched when it is scheduled",
        remove_when="UnifiedCacheLinker has a call for a request's arrival",
        also=(f"{_SCHEDULER}._add_request_to_queue",),
    ),
    Hook(
        target=f"{_SCHEDULER}.get_new_batch_prefill",
        kind="around",
        function=f"{_GATE}:build_batch",
        why="with a linker, a request cannot be held back until its pages have come",
        remove_when="check_prefetch_progress is asked for linkers too",
        also=(
            f"{_SCHEDULER}._get_new_batch_prefill_raw",
            f"{_SCHEDULER}._add_request_to_queue",
            f"{_SCHEDULER}.abort_request",
            "sglang.srt.constrained.grammar_manager.GrammarManager.has_waiting_grammars",
            "sglang.srt.constrained.grammar_manager.GrammarManager.get_ready_grammar_requests",
            "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.add",
        ),
    ),
    Hook(
        target=f"{_PREFILL}.maybe_send_cached_prefix_chunk",
        kind="around",
        function=f"{_GATE}:early_send",
        why="it has NIXL read pages of a prefix that the batch before is still loading",
        remove_when="NixlKVManager waits for wait_event before it reads, as Mooncake's does",
        also=(f"{_PREFILL}.event_loop_overlap_disagg_prefill",),
    ),
    Hook(
        target="sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority",
        kind="around",
        function=f"{_GATE}:order_queue",
        why="it looks every waiting request up in the linker in every step, for an order and a load report",
        remove_when="it matches with the device alone, or remembers what it found",
        also=("sglang.srt.mem_cache.common.match_kv_cache",),
    ),
    Hook(
        target=f"{_WRAPPER}.release_request",
        kind="after",
        function=f"{_GATE}:request_gone",
        why="a linker is not told that a request which has not started to load is gone",
        remove_when="release_request reaches the linker for every request",
        also=(f"{_WRAPPER}.load_back", f"{_WRAPPER}.finish_loads", f"{_LINKER}.LayerWiseLoadCounter"),
    ),
    Hook(
        target="sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.insert",
        kind="around",
        function=f"{_GATE}:insert",
        why="with a linker the tree hashes each page that it takes in, which a measure of what the cache costs must hold",
        remove_when="an insert takes hashes that were made before",
    ),
    Hook(
        target=f"{_UPDATER}._observe_weight_load",
        kind="before",
        function=f"{_GATE}:weights_change",
        why="weights that are updated in place make every stored page another model's, and a linker is not told",
        remove_when="UnifiedCacheLinker is told of weight updates",
        also=tuple(
            f"{_UPDATER}.update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc")
        ),
    ),
    Hook(
        target=f"{_WRAPPER}.match",
        kind="around",
        function=f"{_GATE}:matching",
        why="it hashes the prompt on the scheduler's thread each time the request is looked at; _tail_hashes has no rid",
        remove_when="match takes hashes that were made before",
    ),
    Hook(
        target=f"{_WRAPPER}._sync_restorable_prefix",
        kind="around",
        function=f"{_GATE}:shortest_common",
        why="it writes a tensor element by element for each page, on the scheduler's thread: 20 ms at 131k tokens",
        remove_when="a linker can say that its restorable lengths have no gaps",
    ),
    Hook(
        target=f"{_WRAPPER}._tail_hashes",
        kind="around",
        function=f"{_GATE}:tail_hashes",
        why="as for match: the hashes made at arrival take its place",
        remove_when="match takes hashes that were made before",
    ),
)
