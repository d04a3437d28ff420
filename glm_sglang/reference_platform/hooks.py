"""What this room changes in SGLang, where the platform class has no say. All of it only where the platform is active."""

from __future__ import annotations

from glm_sglang.upstream.hooks import Hook, Registration

_ROOM = "glm_sglang.reference_platform"

HOOKS: tuple[Hook, ...] = (
    Hook(
        target="sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments",
        kind="around",
        function=f"{_ROOM}.adjustments:model_adjustments",
        why="DSA models read torch.cuda.get_device_capability() there, which raises without CUDA",
        remove_when="that read is guarded for out-of-tree platforms",
        platform="reference",
        scope="installed",
    ),
    Hook(
        target="sglang.srt.arg_groups.overrides._dsa_kv_cache_dtype_default",
        kind="replace",
        function=f"{_ROOM}.adjustments:kv_cache_dtype",
        why="it derives the KV dtype from the CUDA capability; the reference keeps the model's dtype",
        remove_when="platforms can name their KV dtype",
        platform="reference",
        scope="installed",
    ),
    Hook(
        target="sglang.srt.arg_groups.overrides._dsa_split_backend_resolution",
        kind="replace",
        function=f"{_ROOM}.adjustments:split_backends",
        why="it picks CUDA sparse kernels from the CUDA capability",
        remove_when="it is skipped for an attention backend other than dsa",
        platform="reference",
        scope="installed",
    ),
    Hook(
        target="sglang.srt.layers.rotary_embedding.factory.get_rope_wrapper",
        kind="around",
        function=f"{_ROOM}.adjustments:rope_wrapper",
        why="for device cpu it asserts deepseek_yarn, which GLM-5.x does not use",
        remove_when="get_rope_cpu takes plain rotary embedding",
        platform="reference",
        scope="installed",
    ),
    Hook(
        target="sglang.srt.layers.attention.dsa.dsa_indexer.Indexer.__init__",
        kind="after",
        function=f"{_ROOM}.adjustments:indexer_precision",
        why="weights_proj is created in bf16 whatever the model's dtype, so an fp32 model loses it",
        remove_when="weights_proj follows the model's dtype",
        also=("sglang.srt.layers.attention.dsa.dsa_indexer.Indexer.forward_native",),
        platform="reference",
        scope="installed",
    ),
    Hook(
        target="sglang.srt.models.deepseek_v2.MoEGate.forward",
        kind="replace",
        function=f"{_ROOM}.experts:router_forward",
        why="off CUDA the router's logits are rounded to bf16, which the GPU paths never do",
        remove_when="the non-CUDA path computes them in fp32",
        platform="reference",
        scope="installed",
    ),
    Hook(
        target="sglang.srt.model_executor.runner.eager_runner.EagerRunner._execute_extend_cp",
        kind="around",
        function=f"{_ROOM}.context_parallel:without_streams",
        why="a prefill over CP ranks hands the current CUDA stream to its gather, and without CUDA there is none",
        remove_when="it asks the device module for the stream",
        also=(
            "sglang.srt.layers.cp.interleave.InterleaveCPStrategy",
            "sglang.srt.layers.cp.utils.prepare_cp_forward",
            "sglang.srt.layers.attention.dsa.utils.dsa_use_prefill_cp",
        ),
        platform="reference",
    ),
    Hook(
        target="sglang.srt.entrypoints.engine._set_envs_and_config",
        kind="after",
        function=f"{_ROOM}.children:start_by_fork",
        why="it asks for spawn, and importing SGLang anew in every process is most of a start on two cores",
        remove_when="an import of SGLang takes a second",
        also=(
            "sglang.srt.managers.scheduler.run_scheduler_process",
            "sglang.srt.managers.detokenizer_manager.run_detokenizer_process",
        ),
        platform="reference",
    ),
)

REGISTRATIONS: tuple[Registration, ...] = (
    Registration(
        function=f"{_ROOM}.adjustments:register_resolution",
        verify=f"{_ROOM}.adjustments:resolution_registered",
        why="a stock launcher gets no flags from us, and for device cpu SGLang picks a backend that cannot serve GLM-5.x",
        also=("sglang.srt.arg_groups.platform_hook.handle_cpu_backends",),
        platform="reference",
        scope="installed",
    ),
    Registration(
        function=f"{_ROOM}.adjustments:register_backend",
        verify=f"{_ROOM}.adjustments:backend_registered",
        why="the attention backend, the indexer and the experts of the reference platform",
        also=(
            "sglang.srt.mem_cache.index_key_cache.IndexKeyCache",
            "sglang.srt.mem_cache.memory_pool.DSATokenToKVPool._create_index_key_cache",
            "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla.DeepseekMLAForwardMixin.forward_absorb_core",
            "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.apply",
        ),
        platform="reference",
        scope="installed",
    ),
)
