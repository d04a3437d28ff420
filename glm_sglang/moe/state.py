"""This process's MoE: built once after the weights are loaded, before SGLang sizes its KV pool; reported on request."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from glm_kernels.mega_moe.buffer import SM90_TOKEN_ALIGNMENT
from glm_kernels.mega_moe.chunks import buffer_capacity
from glm_kernels.mega_moe.limits import Arch

from glm_sglang import platform_choice
from glm_sglang.moe import choice, refusals
from glm_sglang.moe.counters import Counters
from glm_sglang.moe.kernels import Geometry, build
from glm_sglang.moe.layer import RoutedExperts
from glm_sglang.moe.rows import Attention, largest
from glm_sglang.moe.weights import ATTRIBUTE, arrange

logger = logging.getLogger(__name__)


@dataclass
class Running:
    """What this rank's MoE layers run on, and why; `routed` is None for SGLang's own path."""

    path: str
    reason: str
    layers: int
    counters: Counters
    routed: RoutedExperts | None = None
    # Of weight updates: by layer, what this rank could not arrange; and what no rank may compute with.
    unfinished: dict[int, str] = field(default_factory=dict)
    blocked: str = ""

    def report(self) -> dict[str, Any]:
        """For /server_info."""
        found: dict[str, Any] = {
            "path": self.path,
            "reason": self.reason,
            "layers": self.layers,
            "counts": self.counters.report(),
        }
        if self.routed is not None:
            found |= {
                "kernel": self.routed.kernel.name,
                "tokens_a_call": self.routed.capacity,
                "buffer_bytes": self.routed.kernel.buffer_bytes,
            }
        return found


_running: Running | None = None


def running() -> Running | None:
    """This process's, None before the weights are loaded and in processes without a model."""
    return _running


def active() -> bool:
    """Whether this server's MoE layers run MegaMoE. Asks SGLang, so that no two parts can disagree."""
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend

    return bool(get_moe_a2a_backend().is_megamoe())


def arch() -> Arch | None:
    """The kernel family of this process's device; None on the reference platform."""
    if platform_choice.current().platform != "cuda":
        return None
    import torch

    return refusals.ARCHS[torch.cuda.get_device_capability()]


def set_up(model: Any) -> Running:
    """Finds the MoE layers of a loaded model and builds what they share. Collective over the EP group.

    Raises RuntimeError where a layer could not run MegaMoE, or there is none: then the server must not start.
    """
    global _running
    layers = list(moe_layers(model))
    reason = choice.handed_down().reason
    if active() and not layers:
        raise RuntimeError(
            f"{type(model).__name__} has no MoE layers of SGLang's GLM-5.x (--model-impl sglang); use --glm-moe stock"
        )
    if not active():
        _running = Running(choice.STOCK, reason, len(layers), Counters())
        _running.counters.publish()
        return _running
    for layer in layers:
        _check(layer)
    capacity = tokens_a_call()
    config = layers[0].config
    from sglang.srt.layers.dp_attention import get_dp_global_num_tokens
    from sglang.srt.runtime_context import get_parallel

    geometry = Geometry(
        experts=layers[0].experts.num_experts,
        top_k=config.num_experts_per_tok,
        hidden=config.hidden_size,
        intermediate=config.moe_intermediate_size,
        capacity=capacity,
    )
    group = get_parallel().moe_ep_group.device_group
    routed = RoutedExperts(build(arch(), group, geometry), capacity, attention(), get_dp_global_num_tokens)
    _running = Running(choice.MEGAMOE, reason, len(layers), routed.counters, routed)
    _running.counters.publish()
    logger.info(
        "MegaMoE (%s): %d layers, %d tokens a rank and call, buffer %.2f GiB, allocated before the KV pool",
        routed.kernel.name,
        len(layers),
        capacity,
        routed.kernel.buffer_bytes / 2**30,
    )
    return _running


def moe_layers(model: Any) -> Iterator[Any]:
    """Every DeepseekV2MoE of a model, in its order."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE

    return (module for module in model.modules() if isinstance(module, DeepseekV2MoE))


def _check(layer: Any) -> None:
    if layer.num_fused_shared_experts:
        raise RuntimeError(
            f"layer {layer.layer_id} fuses {layer.num_fused_shared_experts} shared experts into the routed ones; "
            "MegaMoE for FP8 runs them apart: --disable-shared-experts-fusion"
        )
    if layer.mega_shared_l1_weights is not None:
        raise RuntimeError(
            "SGLANG_OPT_DEEPGEMM_MEGA_MOE_FUSE_SHARED_EXPERTS put a layer's shared experts into the kernel; set it to 0"
        )
    family = arch()
    if family is None:
        return
    if not hasattr(layer.experts, ATTRIBUTE):
        raise RuntimeError(
            f"layer {layer.layer_id}'s experts are no FP8 blocks that MegaMoE runs ({type(layer.experts).__name__} with "
            f"{type(layer.experts.quant_method).__name__}); use --glm-moe stock"
        )
    # Nothing is left to arrange, unless somebody wrote weights after they were arranged: in which order, who knows.
    if late := arrange(layer.experts, family):
        raise RuntimeError(
            f"{late} experts of layer {layer.layer_id} were written after they were arranged for MegaMoE; its loader "
            "must arrange last (--load-format auto does), or use --glm-moe stock"
        )


def attention() -> Attention:
    """How SGLang spreads tokens over this server's ranks."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return Attention(dp=parallel.attn_dp_size, cp=parallel.attn_cp_size, tp=parallel.attn_tp_size)


def tokens_a_call() -> int:
    """The buffer's tokens a rank: the largest pass's even share within the cap, no more than it needs."""
    from sglang.srt.runtime_context import get_context

    args = get_context().resolved_server_args_dict()
    rows = largest(
        chunk=args["chunked_prefill_size"],
        prefill_tokens=args["max_prefill_tokens"],
        requests=args["max_running_requests"],
        prefill_only=args["disaggregation_mode"] == "prefill",
        attention=attention(),
    )
    return buffer_capacity(rows, choice.cap(), 1 if arch() is None else SM90_TOKEN_ALIGNMENT)
