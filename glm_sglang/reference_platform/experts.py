"""Grouped experts in PyTorch: one matrix product an expert that has tokens, nothing materialised per token."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F


def grouped_experts(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """SwiGLU experts over routed tokens.

    x [tokens, hidden]; topk_ids [tokens, k] int, −1 (or any id outside w13) for a slot that is not computed here;
    topk_weights [tokens, k] fp32; w13 [experts, 2·width, hidden], gate rows first; w2 [experts, hidden, width].
    Returns [tokens, hidden] in x's dtype; slots are summed in fp32 in ascending order of the expert's number.
    """
    experts = w13.shape[0]
    tokens, k = topk_ids.shape
    flat = topk_ids.reshape(-1).long()
    local = (flat >= 0) & (flat < experts)
    order = torch.argsort(torch.where(local, flat, experts), stable=True)
    counts = torch.bincount(flat[local], minlength=experts).tolist()
    out = torch.zeros(tokens, x.shape[1], dtype=torch.float32)
    weights = topk_weights.reshape(-1).float()
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        slots = order[start : start + count]
        rows = slots // k
        gate, up = F.linear(x[rows], w13[expert]).chunk(2, dim=-1)
        partial = F.linear(F.silu(gate) * up, w2[expert])
        out.index_add_(0, rows, partial.float() * weights[slots, None])
        start += count
    return out.to(x.dtype)


def moe_forward(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """Forward of UnquantizedFusedMoEMethod on this platform; the routed scaling factor is the model's to apply."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    config = layer.moe_runner_config
    if config.activation != "silu" or config.apply_router_weight_on_input:
        raise NotImplementedError(
            f"experts with activation {config.activation!r} and apply_router_weight_on_input="
            f"{config.apply_router_weight_on_input} do not run on the reference platform; GLM-5.x has silu and False"
        )
    weights, ids, _ = dispatch_output.topk_output
    return StandardCombineInput(
        hidden_states=grouped_experts(
            dispatch_output.hidden_states, ids, weights, layer.w13_weight, layer.w2_weight
        )
    )


def router_forward(self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """MoEGate's logits [tokens, experts] in fp32, as every GPU path computes them.

    UPSTREAM: MoEGate.forward rounds them to the model's dtype off CUDA, which moves tokens between experts.
    """
    return F.linear(hidden_states.float(), self.weight.float())
