"""The reference against the layer of the pinned SGLang, in the form that runs without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from glm_kernels.mega_moe import Arithmetic, calc_diff, mega_moe_reference
from mega_moe_cases import SCALING, checkpoint, tokens
from sglang.srt.layers.moe.fused_moe_native import fused_moe_forward_native


def test_reference_equals_stock_sglangs_layer() -> None:
    weights = checkpoint(15, 4)
    wide, batch = weights.dequantized(), tokens(16, 24, 4, 2)
    layer = SimpleNamespace(
        w13_weight=wide.w13,
        w2_weight=wide.w2,
        moe_runner_config=SimpleNamespace(apply_router_weight_on_input=False, activation="silu"),
    )
    dispatched = SimpleNamespace(
        hidden_states=batch.x.float(), topk_output=(batch.weights * SCALING, batch.ids.long(), None)
    )
    stock = fused_moe_forward_native(layer, dispatched).hidden_states
    exact = mega_moe_reference(
        batch.x.float(),
        batch.ids,
        batch.weights,
        wide,
        arithmetic=Arithmetic.EXACT,
        routed_scaling_factor=SCALING,
    )
    quantised = mega_moe_reference(
        batch.x, batch.ids, batch.weights, weights, arithmetic=Arithmetic.SM90, routed_scaling_factor=SCALING
    )
    assert exact.dtype == torch.float32
    assert calc_diff(exact, stock) <= 1e-10
    assert calc_diff(quantised, stock) <= 1e-3
