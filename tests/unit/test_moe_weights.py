"""A layer's experts for the kernel: arranged after every load, once each; zero scales mended, damaged ones refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from glm_kernels.mega_moe import ExpertWeights, numerics
from glm_kernels.mega_moe.interleave import deinterleave_gate_up
from glm_kernels.mega_moe.limits import Arch
from glm_kernels.mega_moe.scales import mend_zero_scales_
from glm_kernels.mega_moe.weights_sm100 import unpack_scales
from mega_moe_cases import checkpoint, requantized

from glm_sglang.moe.weights import ATTRIBUTE, arrange

EXPERTS = 3


def parameters(weights: ExpertWeights) -> SimpleNamespace:
    """A layer as SGLang's loader leaves it."""
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    tensors = {
        "w13_weight": weights.w13.clone(),
        "w13_weight_scale_inv": weights.w13_scale.clone(),
        "w2_weight": weights.w2.clone(),
        "w2_weight_scale_inv": weights.w2_scale.clone(),
    }
    return SimpleNamespace(
        **{name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_sm90_reads_the_parameters_themselves() -> None:
    weights = checkpoint(1, EXPERTS)
    layer = parameters(weights)
    assert arrange(layer, Arch.SM90) == EXPERTS
    found = getattr(layer, ATTRIBUTE)
    for ours, theirs in zip((*found.l1, *found.l2), vars(layer).values(), strict=False):
        assert ours.data_ptr() == theirs.data_ptr()
    assert same(torch.stack([deinterleave_gate_up(w) for w in found.l1[0]]), weights.w13)
    assert same(found.l2[0], weights.w2)
    assert arrange(layer, Arch.SM90) == 0


def test_a_second_load_is_arranged_again_and_half_of_one_refused() -> None:
    first, second = checkpoint(1, EXPERTS), checkpoint(2, EXPERTS)
    layer = parameters(first)
    arrange(layer, Arch.SM90)
    layer.w13_weight.data[1:].view(torch.uint8).copy_(second.w13[1:].view(torch.uint8))
    assert arrange(layer, Arch.SM90) == EXPERTS - 1
    back = [deinterleave_gate_up(w) for w in layer.w13_weight.data]
    assert same(back[0], first.w13[0])
    assert same(torch.stack(back[1:]), second.w13[1:])
    layer.w13_weight.data[2, :256].view(torch.uint8).copy_(first.w13[2, :256].view(torch.uint8))
    with pytest.raises(ValueError, match="only parts"):
        arrange(layer, Arch.SM90)


def test_parameters_made_anew_are_arranged_anew() -> None:
    layer = parameters(checkpoint(1, EXPERTS))
    arrange(layer, Arch.SM90)
    layer.__dict__.update(vars(parameters(checkpoint(2, EXPERTS))))
    assert arrange(layer, Arch.SM90) == EXPERTS
    assert getattr(layer, ATTRIBUTE).l1[0].data_ptr() == layer.w13_weight.data_ptr()


def test_sm100_codes_in_place_scales_beside() -> None:
    weights = checkpoint(1, EXPERTS)
    expected, layer = requantized(weights), parameters(weights)
    assert arrange(layer, Arch.SM100) == EXPERTS
    assert arrange(layer, Arch.SM100) == 0
    found = getattr(layer, ATTRIBUTE)
    assert found.l1[0].data_ptr() == layer.w13_weight.data_ptr()
    assert expected.w2_scale is not None
    for expert in range(EXPERTS):
        assert same(deinterleave_gate_up(found.l1[0][expert]), expected.w13[expert])
        assert same(found.l2[0][expert], expected.w2[expert])
        assert torch.equal(unpack_scales(found.l2[1][expert].T), expected.w2_scale[expert])
    # The checkpoint's scales stay where the loader put them.
    assert torch.equal(layer.w13_weight_scale_inv.data, weights.w13_scale)


def zeroed(scale: torch.Tensor) -> torch.Tensor:
    scale = scale.clone()
    scale[0, 1, 0] = 0.0
    scale[1] = 0.0
    scale[2, 0, 1] = 1e-42  # subnormal: the GPU flushes it
    return scale


def test_blocks_under_a_zero_scale_stay_zero_and_get_a_usable_scale() -> None:
    weights = checkpoint(3, EXPERTS)
    assert weights.w13_scale is not None
    scale = zeroed(weights.w13_scale)
    expected = numerics.dequantize_blocks(weights.w13, scale)
    expected[expected.abs() < 1e-30] = 0.0
    codes, mended = weights.w13.clone(), scale.clone()
    count = mend_zero_scales_(codes, mended)
    assert count == 2 + scale[1].numel()
    assert bool((mended >= torch.finfo(torch.float32).tiny).all())
    assert float(mended.max()) <= max(1.0, float(weights.w13_scale.max()))
    assert torch.equal(numerics.dequantize_blocks(codes, mended), expected)
    assert mend_zero_scales_(codes, mended) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_damaged_scales_are_refused(value: float) -> None:
    layer = parameters(checkpoint(3, EXPERTS))
    layer.w2_weight_scale_inv.data[2, 0, 0] = value
    with pytest.raises(ValueError, match="local expert 2"):
        arrange(layer, Arch.SM90)


def test_arranging_mends(caplog: Any) -> None:
    weights = checkpoint(3, EXPERTS)
    layer = parameters(weights)
    layer.w13_weight_scale_inv.data.copy_(zeroed(layer.w13_weight_scale_inv.data))
    arrange(layer, Arch.SM90)
    assert bool((layer.w13_weight_scale_inv.data > 0).all())
    assert "scale of 0" in caplog.text


def effective(layer: SimpleNamespace) -> torch.Tensor:
    """The weights of the first GEMM that the kernel multiplies with, rows as in the checkpoint."""
    codes = torch.stack([deinterleave_gate_up(w) for w in layer.w13_weight.data.view(torch.uint8)])
    return numerics.dequantize_blocks(codes.view(numerics.E4M3), layer.w13_weight_scale_inv.data)


@pytest.mark.parametrize("first", ["without zeros", "with zeros"])
def test_scales_of_zero_that_come_alone_zero_the_blocks_of_the_checkpoint(first: str) -> None:
    weights = checkpoint(3, EXPERTS)
    assert weights.w13_scale is not None
    scale = weights.w13_scale.clone()
    scale[0, 1, 0] = scale[0, 3, 1] = scale[2, 0, 1] = 0.0
    expected = numerics.dequantize_blocks(weights.w13, scale)
    layer = parameters(weights)
    if first == "with zeros":
        layer.w13_weight_scale_inv.data.copy_(scale)
    arrange(layer, Arch.SM90)
    layer.w13_weight_scale_inv.data.copy_(scale)
    assert arrange(layer, Arch.SM90) == 2
    assert torch.equal(effective(layer), expected)
    assert arrange(layer, Arch.SM90) == 0
    # What comes whole afterwards is arranged as ever.
    second = checkpoint(4, EXPERTS)
    layer.w13_weight.data.view(torch.uint8).copy_(second.w13.view(torch.uint8))
    layer.w13_weight_scale_inv.data.copy_(second.w13_scale)
    assert arrange(layer, Arch.SM90) == EXPERTS
    assert torch.equal(effective(layer), numerics.dequantize_blocks(second.w13, second.w13_scale))


def test_half_of_an_expert_is_refused_before_scales_of_zero_change_its_codes() -> None:
    layer = parameters(checkpoint(3, EXPERTS))
    arrange(layer, Arch.SM90)
    layer.w13_weight.data[1, :256].view(torch.uint8).zero_()
    layer.w13_weight_scale_inv.data[1, 3, 0] = 0.0  # of the other half
    before = layer.w13_weight.data.clone()
    with pytest.raises(ValueError, match="only parts"):
        arrange(layer, Arch.SM90)
    assert same(layer.w13_weight.data, before)
