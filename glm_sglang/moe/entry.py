"""The functions behind this room's hooks: where SGLang asks about MegaMoE, and what it is told."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from glm_sglang import failure, platform_choice
from glm_sglang.errors import UsageError
from glm_sglang.moe import choice, refusals, state
from glm_sglang.moe.facts import FIELDS, Checkpoint, Facts

logger = logging.getLogger(__name__)


# --- at start, before weights load ---


def accept(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Around the resolution step handle_mega_moe. UPSTREAM: it refuses every device but CUDA and ROCm ones."""
    if platform_choice.current().platform == "cuda":
        # UPSTREAM: the kernel uses peer pointers only, and a multicast object fails where NVLink SHARP is off.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        previous(server_args)
        return
    from sglang.srt.arg_groups.mega_moe_hook import handle_moe_runner_backend_alias

    handle_moe_runner_backend_alias(server_args)


def judge(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Around the last step about MegaMoE, when every argument is final. Raises UsageError for what cannot work.

    UPSTREAM: validate_mega_moe_token_budget_for_model refuses chunks above the token cap for other models and lets
    GLM-5.x through to wrong answers; here more tokens than the cap are more calls.
    """
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    view = resolving_view(server_args)
    backend = view.moe_a2a_backend
    if backend != choice.MEGAMOE:
        if choice.handed_down().path == choice.MEGAMOE:
            raise UsageError(
                f"MegaMoE was decided, and SGLang made --moe-a2a-backend {backend} of it; another flag asks for that "
                "backend (--cp-strategy zigzag does): change it, or use --glm-moe stock"
            )
        previous(server_args)
        return
    config = model_config_of(server_args).hf_config.to_dict()
    platform = platform_choice.current().platform
    facts = Facts(
        platform="cuda" if platform == "cuda" else "reference",
        capability=choice.capability(platform),
        checkpoint=Checkpoint.of(config),
        flags={name: getattr(view, name) for name in FIELDS},
        cap=choice.cap(),
        variables=choice.variables(),
    )
    if reasons := refusals.find(facts):
        raise UsageError("MegaMoE cannot run here: " + "; ".join(reasons))


def register() -> None:
    """Puts `accept` and `judge` into SGLang's argument resolution."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook("handle_mega_moe")(accept)
    register_resolution_hook("validate_mega_moe_token_budget_for_model")(judge)


def registered() -> bool:
    """Whether `register` is in effect."""
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS

    return accept in _HOOKS.get("handle_mega_moe", ()) and judge in _HOOKS.get(
        "validate_mega_moe_token_budget_for_model", ()
    )


# --- loading ---


def arrange_weights(original: Callable[[Any, Any], None], method: Any, layer: Any) -> None:
    """Around Fp8MoEMethod.process_weights_after_loading_block_quant: MegaMoE's layout, after the first load and each
    other.

    What cannot be arranged ends the start (ValueError); of an update it is noted, for `updates.answer` to say.
    """
    arch = state.arch()
    if arch is None or not state.active():
        original(method, layer)
        return
    from glm_sglang.moe.weights import arrange

    running = state.running()
    unfinished = {} if running is None else running.unfinished
    unfinished.pop(layer.layer_id, None)
    try:
        arrange(layer, arch)
    except ValueError as error:
        if running is None:
            raise
        unfinished[layer.layer_id] = str(error)


def after_load(result: Any, runner: Any, *_: Any, **__: Any) -> None:
    """After ModelRunner.load_model: builds the kernel and its buffer, so that the KV pool takes what is left."""
    if runner.is_draft_worker:
        return
    try:
        running = state.set_up(runner.model)
        if running.routed is not None and state.arch() is not None:
            from glm_sglang.moe.warm import compile_kernels

            compile_kernels(running.routed, next(state.moe_layers(runner.model)).experts)
    except (RuntimeError, ValueError) as error:
        failure.end_process(UsageError(f"MegaMoE cannot run here: {error}"))


# --- running ---


def always(original: Callable[..., bool], moe: Any, hidden_states: torch.Tensor) -> bool:
    """Around should_use_mega_moe. UPSTREAM: False above the token cap or without weights, which is a wrong answer."""
    running = state.running()
    if running is None or running.routed is None:
        return original(moe, hidden_states)
    return True


def routed_experts(
    original: Callable[..., torch.Tensor], experts: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Around run_mega_routed_experts: one call upstream, which asserts the cap; here as many as it takes."""
    running = state.running()
    if running is None or running.routed is None:
        return original(experts, *args, **kwargs)
    return _routed(running.routed, experts, *args, **kwargs)


def gathered_counts(original: Callable[..., bool], *, moe_a2a_backend: Any = None) -> bool:
    """Around require_mlp_tp_gather, which also decides whether each DP rank learns the others' token counts.

    UPSTREAM: False where no dense layer gathers over DP ranks; it makes the same exception for other backends whose
    calls all ranks must agree on (flashinfer_megamoe). Nothing is gathered but the counts.
    """
    if original(moe_a2a_backend=moe_a2a_backend):
        return True
    from sglang.srt.layers.moe.utils import MoeA2ABackend, get_moe_a2a_backend
    from sglang.srt.runtime_context import get_parallel

    backend = get_moe_a2a_backend() if moe_a2a_backend is None else MoeA2ABackend(moe_a2a_backend)
    return bool(backend.is_megamoe() and get_parallel().attn_dp_enabled)


def one_bucket(original: Callable[[], bool]) -> bool:
    """Around prefill_graph_tolerates_sum_len: every rank replays the same bucket, for its calls and their bounds are
    captured with it.
    """
    running = state.running()
    return False if running is not None and running.routed is not None else original()


def _routed(
    routed: Any,
    experts: Any,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    *,
    top_k: int,
    activation_clamp: float | None = None,
    routed_scaling_factor: float = 1.0,
    activation: str = "swiglu",
    shared_l1_weights: Any = None,
    routing_in_buffer: bool = False,
    **_: Any,
) -> torch.Tensor:
    if activation != "swiglu" or shared_l1_weights is not None or routing_in_buffer:
        raise RuntimeError(
            f"MegaMoE for FP8 GLM-5.x runs SwiGLU with its own routing, asked for activation {activation!r}, shared "
            f"experts inside {shared_l1_weights is not None}, routing in the buffer {routing_in_buffer}"
        )
    out: torch.Tensor = routed(
        experts,
        hidden_states,
        topk_ids,
        topk_weights,
        top_k=top_k,
        scaling=routed_scaling_factor,
        clamp=activation_clamp,
    )
    return out


def forward(original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ModelRunner.forward: counts the pass. Raises RuntimeError where weights are not whole."""
    running = state.running()
    if running is None or runner.is_draft_worker:
        return original(runner, batch, *args, **kwargs)
    if running.blocked:
        raise RuntimeError(
            f"MegaMoE: generation was continued with experts that are not whole: {running.blocked}"
        )
    tokens = _tokens(batch)
    running.counters.discard()
    result = original(runner, batch, *args, **kwargs)
    running.counters.close(path=running.path, layers=running.layers, tokens=tokens)
    return result


def _tokens(batch: Any) -> int:
    """Tokens of a pass on the rank that counts for its group, 0 on the others. Read before the pass pads the batch."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.attn_tp_rank or parallel.attn_cp_rank or batch.forward_mode.is_idle():
        return 0
    if batch.forward_mode.is_decode():
        return int(batch.batch_size)
    # UPSTREAM: ForwardBatch.init_new gives a pass that verifies drafts no extend_num_tokens; all of its rows are drafts.
    if batch.forward_mode.is_target_verify():
        return int(batch.input_ids.shape[0])
    return int(batch.extend_num_tokens or 0)


# --- reporting ---


def internal_state(result: Any, *_: Any, **__: Any) -> None:
    """After get_internal_state: this fork's MoE, and its buffer beside the memory that SGLang reports."""
    running = state.running()
    if running is None:
        return
    found = result.internal_state
    found["glm_moe"] = running.report()
    if running.routed is not None and isinstance(found.get("memory_usage"), dict):
        found["memory_usage"]["glm_moe_buffer_gb"] = running.routed.kernel.buffer_bytes / 2**30
