"""What this room changes in SGLang: MegaMoE for FP8 GLM-5.x, always, in as many calls as it takes, or no server.

Target        the MegaMoE path of DeepseekV2MoE, its weights, its buffer, and its checks of arguments.
Upstream      none reported.
Goes when     SGLang runs FP8-block GLM-5.x above its token cap, on SM100, and refuses what it cannot run.
"""

from __future__ import annotations

from glm_sglang.upstream.hooks import Hook, HookKind, Registration

_ENTRY = "glm_sglang.moe.entry"
_MEGA = "sglang.srt.layers.moe.mega_moe"
_LOADER = "sglang.srt.model_loader.loader"
_BACKENDS = "sglang.srt.model_executor.runner_backend"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATES = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_ENGINE = "sglang.srt.checkpoint_engine.checkpoint_engine_worker"
_MOE = "sglang.srt.models.deepseek_v2.DeepseekV2MoE"
_GRAPHS: tuple[tuple[str, HookKind], ...] = (("capture_one", "before"), ("replay", "after"))

HOOKS: tuple[Hook, ...] = (
    Hook(
        target=f"{_MEGA}.should_use_mega_moe",
        kind="around",
        function=f"{_ENTRY}:always",
        why="above the token cap and without built weights it says no; the layer then adds up one rank's experts only",
        remove_when="a layer under --moe-a2a-backend megamoe never falls back to forward_normal",
        also=(
            f"{_MEGA}.is_mega_moe_experts_ready",
            f"{_MOE}.forward",
            f"{_MOE}.forward_normal",
            "sglang.srt.layers.moe.token_dispatcher.standard.StandardDispatcher.dispatch",
            "sglang.srt.layers.layer_boundary.factories._resolve_ffn",
        ),
    ),
    Hook(
        target=f"{_MEGA}.run_mega_routed_experts",
        kind="around",
        function=f"{_ENTRY}:routed_experts",
        why="it makes one kernel call and asserts that every rank's tokens fit it",
        remove_when="it runs in chunks whose count all ranks agree on",
        also=(
            f"{_MEGA}.forward_mega_moe",
            f"{_MEGA}._run_mega_routed",
            "sglang.srt.layers.dp_attention.set_dp_buffer_len_from_batch",
            "sglang.srt.layers.cp.padding.pad_logical_token_to_physical",
            "sglang.srt.models.deepseek_common.moe_transport.MoeRowTransport.__init__",
            "sglang.srt.model_executor.forward_batch_info.ForwardBatch.moe_num_token_non_padded",
        ),
    ),
    Hook(
        target="sglang.srt.layers.quantization.fp8.Fp8MoEMethod.process_weights_after_loading_block_quant",
        kind="around",
        function=f"{_ENTRY}:arrange_weights",
        why="it arranges SM90 weights once, so a second load is not arranged, and FP8 weights for SM100 never",
        remove_when="it builds FP8 weights for SM100 and arranges again what was loaded again",
        also=(
            "sglang.srt.layers.moe.mega_moe_sm90.build_sm90_mega_moe_experts_weights",
            # refusals.LOAD_FORMATS
            f"{_LOADER}.get_model_loader",
            f"{_LOADER}.DefaultModelLoader.load_model",
            f"{_LOADER}.DefaultModelLoader.load_weights_and_postprocess",
            f"{_LOADER}.DummyModelLoader.load_model",
            f"{_LOADER}.RunaiModelStreamerLoader.load_model",
        ),
        platform="cuda",
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        kind="after",
        function=f"{_ENTRY}:after_load",
        why="the kernel's buffer is allocated at the first pass, after the KV pool has taken the memory",
        remove_when="SGLang allocates it with the weights",
        also=("sglang.srt.model_executor.model_runner.ModelRunner.initialize",),
    ),
    Hook(
        target="sglang.srt.utils.common.require_mlp_tp_gather",
        kind="around",
        function=f"{_ENTRY}:gathered_counts",
        why="where no dense layer spans DP ranks, a rank knows only its own tokens, and ranks would make unlike calls",
        remove_when="attention DP always shares its token counts under megamoe, as it does under flashinfer_megamoe",
    ),
    Hook(
        target="sglang.srt.model_executor.forward_batch_info.prefill_graph_tolerates_sum_len",
        kind="around",
        function=f"{_ENTRY}:one_bucket",
        why="under attention DP it lets ranks replay graphs of different sizes, which hold different numbers of calls",
        remove_when="a captured MegaMoE call is right whatever the other ranks replay",
    ),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner.forward",
        kind="around",
        function=f"{_ENTRY}:forward",
        why="calls, tokens, chunks and rows of the MoE layers are counted by path",
        remove_when="SGLang counts which path its MoE layers took",
    ),
    *(
        Hook(
            target=f"{_BACKENDS}.{backend}.{name}",
            kind=kind,
            function=f"glm_sglang.moe.graphs:{name}",
            why="a replayed graph runs no Python, so its MoE layers' calls and rows are those that its capture counted",
            remove_when="SGLang counts which path its MoE layers took",
            platform="cuda",
        )
        for backend in (
            "full_cuda_graph_backend.FullCudaGraphBackend",
            "breakable_cuda_graph_backend.BreakableCudaGraphBackend",
        )
        for name, kind in _GRAPHS
    ),
    *(
        Hook(
            target=f"{_UPDATES}.{name}",
            kind="around",
            function="glm_sglang.moe.updates:answer",
            why="a half-loaded expert on one rank ends its scheduler, or is a success; all ranks must answer alike",
            remove_when="process_weights_after_loading can refuse an update on all ranks alike",
            also=also,
        )
        for name, also in (
            ("end_weight_update", (f"{_SCHEDULER}.pause_generation", f"{_SCHEDULER}.continue_generation")),
            ("update_weights_from_disk", ()),
            (
                "update_weights_from_ipc",
                (f"{_ENGINE}.SGLangCheckpointEngineWorkerExtensionImpl.get_post_hook",),
            ),
        )
    ),
    Hook(
        target="sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state",
        kind="after",
        function=f"{_ENTRY}:internal_state",
        why="/server_info says which path the MoE layers run and what their buffer takes",
        remove_when="plugins can contribute to the internal state",
    ),
    Hook(
        target="sglang.srt.model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch",
        kind="around",
        function="glm_sglang.moe.reference:sync_batch",
        why="an all-to-all backend pads batches there, through pinned memory, which needs the CUDA runtime",
        remove_when="it asks is_pin_memory_available",
        platform="reference",
    ),
    *(
        Hook(
            target=f"sglang.srt.distributed.parallel_state.GroupCoordinator.{name}",
            kind="replace",
            function=f"glm_sglang.moe.reference:{name}",
            why="rows that each rank routes by itself are scattered and gathered with an operator that only CUDA has",
            remove_when="the operator is registered for every device",
            platform="reference",
        )
        for name in ("reduce_scatter_tensor", "all_gather_into_tensor")
    ),
)

REGISTRATIONS: tuple[Registration, ...] = (
    Registration(
        function=f"{_ENTRY}:register",
        verify=f"{_ENTRY}:registered",
        why="what MegaMoE cannot do is refused before weights load, and the reference platform is not refused",
        also=(
            "sglang.srt.arg_groups.mega_moe_hook.handle_mega_moe",
            "sglang.srt.arg_groups.mega_moe_hook.check_mega_moe_compat",
            "sglang.srt.arg_groups.mega_moe_hook.validate_mega_moe_token_budget_for_model",
            "sglang.srt.arg_groups.overrides._a2a_ep_size",
        ),
    ),
)
