"""What prefill graphs change in SGLang. All of it only where `--glm-prefill-graph` is not off."""

from __future__ import annotations

from glm_sglang.upstream.hooks import Hook, Registration

_ROOM = "glm_sglang.prefill_graph"
_RUNNER = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner"
_BREAKS = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"
_DSA = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"
_INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer"
_GRAPHS = "sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend.BreakableCudaGraphBackend"
_OVERLAP = "sglang.srt.layers.cp.interleave.DSAInterleaveCPIndexerOverlap"
_MLA = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla.DeepseekMLAForwardMixin"
_MHA = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha.DeepseekMHAForwardMixin"
_CAPTURED = "SGLang captures DSA attention with lengths from device memory"

HOOKS: tuple[Hook, ...] = (
    Hook(
        target=f"{_BREAKS}._weak_ref_if_tensor",
        kind="around",
        function=f"{_ROOM}.lifetime:keep",
        why="break inputs are held without ownership and later buckets reuse their blocks: wrong bytes",
        remove_when="PR 37448 is in a release",
        upstream="https://github.com/sgl-project/sglang/issues/37606",
        also=(
            f"{_BREAKS}.eager_on_graph",
            f"{_BREAKS}.BreakableCUDAGraph",
            f"{_BREAKS}.BreakableCUDAGraphCapture",
            f"{_GRAPHS}.capture_one",
        ),
        platform="cuda",
    ),
    Hook(
        target=f"{_RUNNER}._init_forward_metadata_for_capture",
        kind="after",
        function=f"{_ROOM}.whole:bind_capture",
        why="captured attention must read lengths from buffers that every step refills",
        remove_when=_CAPTURED,
        also=(f"{_DSA}.init_forward_metadata", f"{_DSA}.get_indexer_metadata"),
        platform="cuda",
    ),
    Hook(
        target=f"{_RUNNER}._prepare_forward_metadata_for_replay",
        kind="around",
        function=f"{_ROOM}.whole:bind_replay",
        why="a step's lengths go into the buffers that captured attention reads",
        remove_when=_CAPTURED,
        also=(
            f"{_RUNNER}.load_batch",
            f"{_RUNNER}.execute",
            "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.resolve_prefill_shared_read_ends",
            "sglang.srt.model_executor.runner_utils.shared_read_event.maybe_publish_prefill_shared_read_done",
            "sglang.srt.managers.scheduler.Scheduler._apply_war_barrier",
        ),
        platform="cuda",
    ),
    Hook(
        target="sglang.srt.layers.radix_attention.RadixAttention.forward",
        kind="around",
        function=f"{_ROOM}.whole:attention_forward",
        why="sparse attention runs eagerly between graphs although its sizes are the bucket's",
        remove_when=_CAPTURED,
        also=(
            f"{_DSA}.forward_extend",
            f"{_DSA}._forward_flashmla_sparse",
            "sglang.srt.layers.radix_attention.RadixAttention._eager_attention",
            "sglang.srt.layers.attention.graph_utils.allocate_attention_outputs",
            "sglang.srt.layers.attention.graph_utils.attention_input_scope",
            "sglang.srt.layers.attention.graph_utils._zero_padded_tokens",
            "sglang.srt.layers.cp.padding.attention_output_tokens",
        ),
        platform="cuda",
    ),
    Hook(
        target=f"{_MLA}._can_fuse_bmm_into_attention",
        kind="around",
        function=f"{_ROOM}.whole:can_fuse_bmm",
        why="with attention in the segment, the absorbed product belongs there too",
        remove_when=_CAPTURED,
        also=(f"{_MLA}.forward_absorb_prepare",),
        platform="cuda",
    ),
    Hook(
        target=f"{_MLA}._eager_bmm_attention",
        kind="around",
        function=f"{_ROOM}.stock:bmm_attention",
        why="breaks own what they read and write, which for a chunk's buckets is more than a GPU has",
        remove_when="PR 37448 is in a release",
        upstream="https://github.com/sgl-project/sglang/issues/37606",
        also=(
            f"{_MLA}.forward_absorb_core",
            f"{_INDEXER}._forward_cuda_k_only",
            "sglang.srt.layers.attention.dsa.dsa_prefill_cuda_graph.pcg_dsa_indexer_prefill_split",
            "sglang.srt.distributed.device_communicators.pynccl_allocator.is_symmetric_memory_enabled",
        ),
        platform="cuda",
    ),
    Hook(
        target=f"{_INDEXER}.forward_cuda",
        kind="around",
        function=f"{_ROOM}.whole:indexer_forward",
        why="the whole indexer runs eagerly between graphs although only its selection depends on live lengths",
        remove_when=_CAPTURED,
        also=(
            f"{_INDEXER}._fused_q_prepare_and_store",
            f"{_INDEXER}._fused_k_prepare_and_store",
            f"{_INDEXER}._get_topk_ragged",
        ),
        platform="cuda",
    ),
    Hook(
        target=f"{_GRAPHS}.capture_one",
        kind="around",
        function=f"{_ROOM}.dense:capture_one",
        why="short prompts run absorbed sparse attention in a graph, which costs more than eager's dense attention",
        remove_when="SGLang captures dense attention of DSA models",
        also=(
            f"{_DSA}._forward_standard_mha",
            f"{_INDEXER}._fused_k_weights",
            "sglang.srt.models.deepseek_common.attention_backend_handler.handle_attention_dsa",
            f"{_MHA}.forward_normal_prepare",
        ),
        platform="cuda",
    ),
    Hook(
        target=f"{_GRAPHS}.replay",
        kind="around",
        function=f"{_ROOM}.dense:replay",
        why="a step of short prompts replays its bucket's dense graph",
        remove_when="SGLang captures dense attention of DSA models",
        platform="cuda",
    ),
    Hook(
        target=f"{_RUNNER}.capture_one_shape",
        kind="around",
        function=f"{_ROOM}.capture:one_bucket",
        why="one bucket that cannot be captured ends the start with a message that does not name it",
        remove_when="SGLang goes on without a bucket that fails",
        platform="cuda",
    ),
    Hook(
        target=f"{_RUNNER}._capture_one_stream",
        kind="after",
        function=f"{_ROOM}.capture:all_buckets",
        why="ranks must hold the same buckets, or one replays where another runs eagerly and both hang",
        remove_when="SGLang agrees on captured buckets",
        also=(f"{_RUNNER}.can_run_graph", f"{_RUNNER}.can_replay_locally"),
        platform="cuda",
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs",
        kind="after",
        function=f"{_ROOM}.counts:after_capture",
        why="every series of this room's metrics is there before the first step, and how many buckets there are",
        remove_when="never",
        platform="cuda",
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs",
        kind="after",
        function=f"{_ROOM}.verify:after_capture",
        why="--glm-verify-graphs compares graphs with the eager model before the server is ready",
        remove_when="never",
        also=(
            f"{_RUNNER}.capture_prepare",
            "sglang.srt.managers.scheduler_components.dp_attn._update_gather_batch",
            "sglang.srt.model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch",
        ),
        platform="cuda",
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner._forward_raw",
        kind="after",
        function=f"{_ROOM}.reasons:name_eager_step",
        why="an eager prefill step is a bare False in SGLang's log and metrics",
        remove_when="SGLang says why it did not replay",
        also=(
            "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_prefill_stats",
        ),
        platform="cuda",
    ),
    Hook(
        target="sglang.srt.layers.cp.bcg.interleave_bcg.InterleaveCPBCGInput.supports",
        kind="around",
        function=f"{_ROOM}.context_parallel:supports",
        why="graphs under interleaved CP are refused for GlmMoeDsaForCausalLM and with expert parallelism",
        remove_when="SGLang lists GlmMoeDsaForCausalLM there",
        also=("sglang.srt.layers.cp.bcg.supports_prefill_cp_bcg",),
        platform="cuda",
    ),
    Hook(
        target="sglang.srt.layers.cp.bcg.interleave_bcg.InterleaveCPBCGInput.prepare",
        kind="after",
        function=f"{_ROOM}.context_parallel:prepare",
        why="at the indexer's break a padded step has more slots than keys, and its store refuses that",
        remove_when="SGLang cuts out_cache_loc at the indexer's break",
        also=(
            "sglang.srt.layers.cp.bcg.interleave_bcg._indexer_with_kv",
            f"{_INDEXER}._store_index_k_cache",
        ),
        platform="cuda",
    ),
    Hook(
        target="sglang.srt.layers.attention.graph_utils.attention_output_tokens",
        kind="after",
        function=f"{_ROOM}.rows:output_rows",
        why="of a step that was padded to its bucket attention's break neither writes nor clears the padding's rows",
        remove_when="SGLang clears all that it doesn't write",
        also=("sglang.srt.layers.radix_attention.RadixAttention._eager_attention",),
        platform="cuda",
    ),
    Hook(
        target="sglang.srt.layers.attention.dsa.utils.pad_dsa_cache_seqlens",
        kind="around",
        function=f"{_ROOM}.rows:cached_lengths",
        why="at attention's break a padded step has more lengths than queries, and flashmla_kv's schedule is wrong",
        remove_when="SGLang cuts the lengths where it cuts the queries",
        also=(
            f"{_DSA}.init_forward_metadata",
            f"{_DSA}._forward_flashmla_kv",
            f"{_DSA}._forward_flashmla_sparse",
            "sglang.srt.layers.cp.padding.attention_query_tokens",
            "sglang.srt.layers.attention.graph_utils._attention_on_real_rows",
            "sglang.srt.layers.attention.graph_utils.padded_extend_real_tokens",
        ),
        platform="cuda",
    ),
    Hook(
        target="sglang.srt.layers.cp.interleave.indexer_with_cp_kv",
        kind="around",
        function=f"{_ROOM}.context_parallel:indexer_with_kv",
        why="breaks own what they read and write, which for a chunk's buckets is more than a GPU has",
        remove_when="PR 37448 is in a release",
        upstream="https://github.com/sgl-project/sglang/issues/37606",
        also=(
            "sglang.srt.layers.cp.bcg.interleave_bcg._indexer_with_kv",
            "sglang.srt.layers.cp.interleave.run_indexer_with_kv_gather",
            "sglang.srt.distributed.device_communicators.pynccl_allocator.is_symmetric_memory_enabled",
        ),
        platform="cuda",
    ),
    Hook(
        target=f"{_OVERLAP}.prepare_qkv",
        kind="around",
        function=f"{_ROOM}.context_parallel:prepare_qkv",
        why="a layer that shares its selection gathers KV inside a segment, with the capture's sizes",
        remove_when="SGLang gathers shared layers' KV at a break",
        also=("sglang.srt.layers.attention.dsa_backend.prepare_kv_for_attention",),
        platform="cuda",
    ),
)

REGISTRATIONS: tuple[Registration, ...] = (
    Registration(
        function=f"{_ROOM}.resolution:register",
        verify=f"{_ROOM}.resolution:registered",
        why="buckets up to the chunk instead of SGLang's 8,192 tokens",
        also=(
            "sglang.srt.arg_groups.memory_hook.handle_gpu_memory_settings",
            "sglang.srt.arg_groups.overrides._dsa_kv_cache_dtype_default",
            "sglang.srt.arg_groups.overrides._dsa_split_backend_resolution",
        ),
        platform="cuda",
    ),
)
