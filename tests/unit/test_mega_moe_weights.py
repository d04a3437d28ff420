"""Kernel layouts against DeepGEMM's own transforms, reloads, and what requantising for SM100 loses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deep_gemm
import pytest
import torch
from glm_kernels.mega_moe import ExpertWeights, calc_diff, numerics
from glm_kernels.mega_moe.interleave import deinterleave_gate_up, interleave_gate_up, prepare_sm90_
from glm_kernels.mega_moe.reload import TransformState
from glm_kernels.mega_moe.weights_sm100 import (
    Sm100Weights,
    allocate,
    pack_scales,
    prepare_sm100_,
    requantize,
    unpack_scales,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from mega_moe_cases import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Scaled = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def raw(t: torch.Tensor) -> torch.Tensor:
    """Bytes, so that equality is equality of layout."""
    return t.contiguous().view(torch.uint8)


def parameters(weights: ExpertWeights) -> Scaled:
    """Fresh copies of w13, w13_scale, w2, w2_scale, as a model's parameters hold them."""
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    return weights.w13.clone(), weights.w13_scale.clone(), weights.w2.clone(), weights.w2_scale.clone()


def load(into: Scaled, source: ExpertWeights, experts: slice = slice(None)) -> None:
    """What a weight loader does: copies checkpoint rows into parameters, knowing nothing of their layout."""
    for target, loaded in zip(into, parameters(source), strict=True):
        target[experts].copy_(loaded[experts])


class LargestAllocation(TorchDispatchMode):
    """Bytes of the largest new tensor any operator returned: what a transform needs beside its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


# --- SM90 ---


def test_sm90_layout_is_deepgemms() -> None:
    w13, s13, w2, s2 = parameters(checkpoint(1, 3))
    (theirs13, their_s13), (theirs2, their_s2) = deep_gemm.transform_weights_for_mega_moe_sm90(
        (w13, s13), (w2, s2)
    )
    ours, untouched = w13.clone(), (s13.clone(), w2.clone(), s2.clone())
    assert prepare_sm90_(ours, TransformState()) == 3
    assert torch.equal(raw(ours), raw(theirs13))
    for mine, theirs in zip(untouched, (their_s13, theirs2, their_s2), strict=True):
        assert torch.equal(raw(mine), raw(theirs))


@given(half=st.integers(1, 12).map(lambda n: 8 * n), columns=st.integers(1, 3))
def test_interleaving_puts_row_r_where_the_kernel_looks(half: int, columns: int) -> None:
    rows = torch.arange(2 * half).unsqueeze(1).repeat(1, columns)
    mixed = interleave_gate_up(rows)
    for r in range(half):
        chunk, offset = divmod(r, 8)
        assert mixed[16 * chunk + offset, 0] == r
        assert mixed[16 * chunk + 8 + offset, 0] == half + r
    assert torch.equal(deinterleave_gate_up(mixed), rows)


def test_a_second_load_is_arranged_once_more_and_no_call_arranges_twice() -> None:
    first, second = checkpoint(2, 4), checkpoint(3, 4)
    live, state = parameters(first), TransformState()
    expected = [torch.stack([interleave_gate_up(w) for w in c.w13]) for c in (first, second)]
    assert prepare_sm90_(live[0], state) == 4
    assert prepare_sm90_(live[0], state) == 0
    assert torch.equal(raw(live[0]), raw(expected[0]))
    load(live, second)
    assert prepare_sm90_(live[0], state) == 4
    assert prepare_sm90_(live[0], state) == 0
    assert torch.equal(raw(live[0]), raw(expected[1]))
    load(live, first, slice(1, 3))
    assert prepare_sm90_(live[0], state) == 2
    assert torch.equal(raw(live[0][1:3]), raw(expected[0][1:3]))
    assert torch.equal(raw(live[0][3]), raw(expected[1][3]))


def test_loading_the_same_checkpoint_again_is_a_load() -> None:
    weights = checkpoint(4, 2)
    live, state = parameters(weights), TransformState()
    prepare_sm90_(live[0], state)
    once = live[0].clone()
    load(live, weights)
    assert prepare_sm90_(live[0], state) == 2
    assert torch.equal(raw(live[0]), raw(once))


def test_half_a_load_is_refused() -> None:
    live, state = parameters(checkpoint(5, 2)), TransformState()
    prepare_sm90_(live[0], state)
    live[0][1, :256] = checkpoint(6, 2).w13[1, :256]
    with pytest.raises(ValueError, match=r"expert 1: only parts \[0\] of 2 were loaded again"):
        prepare_sm90_(live[0], state)


def test_rows_that_interleaving_does_not_move_cannot_confuse_a_reload() -> None:
    """Constant weights are a fixed point of the permutation: their bytes say nothing about the layout."""
    w13, state = torch.ones(1, 512, 512).to(numerics.E4M3), TransformState()
    prepare_sm90_(w13, state)
    replacement = checkpoint(7, 1).w13
    w13[0, :256] = replacement[0, :256]  # the up half stays constant and loaded at once
    prepare_sm90_(w13, state)
    expected = torch.cat(
        [replacement[0, :256].view(torch.uint8), raw(torch.ones(256, 512).to(numerics.E4M3))]
    )
    assert torch.equal(raw(w13[0]), interleave_gate_up(expected))


def test_sm90_needs_the_memory_of_one_expert_only() -> None:
    w13 = checkpoint(8, 6).w13.clone()
    with LargestAllocation() as seen:
        prepare_sm90_(w13, TransformState())
    assert 0 < seen.bytes <= w13[0].numel()


def test_sm90_refuses_other_weights() -> None:
    with pytest.raises(ValueError, match="contiguous E4M3"):
        prepare_sm90_(torch.zeros(1, 16, 8), TransformState())
    with pytest.raises(ValueError, match="no multiple of 16"):
        interleave_gate_up(torch.zeros(24, 8))


# --- SM100 and SM103 ---


def deepgemm_layout(weights: ExpertWeights) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """DeepGEMM's transform of the same requantised values, by the parts of it that run without a GPU."""
    w13, s13, w2, s2 = parameters(weights)

    def packed(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = [requantize(c, s) for c, s in zip(codes, scales, strict=True)]
        values = torch.stack([numerics.ue8m0_value(exponents) for _, exponents in pairs])
        words = deep_gemm.utils.layout._pack_fp32_into_ue8m0_fallback(values)
        return torch.stack([c for c, _ in pairs]), words

    l1, l2 = packed(w13, s13), packed(w2, s2)
    transformed = deep_gemm.transform_weights_for_mega_moe(l1, l2, mma_type="fp8xfp4")
    return tuple(transformed)


def prepared(weights: ExpertWeights) -> Sm100Weights:
    w13, s13, w2, s2 = parameters(weights)
    out = allocate(w13, w2)
    assert prepare_sm100_(out, s13, s2, TransformState()) == weights.num_experts
    return out


@pytest.mark.parametrize(("hidden", "intermediate"), [(512, 256), (1024, 384)])
def test_sm100_layout_is_deepgemms(hidden: int, intermediate: int) -> None:
    weights = checkpoint(9, 3, hidden, intermediate)
    ours = prepared(weights)
    for mine, (codes, scales) in zip((ours.l1, ours.l2), deepgemm_layout(weights), strict=True):
        assert torch.equal(raw(mine.codes), raw(codes))
        assert mine.scales.shape == scales.shape
        assert mine.scales.stride() == scales.stride()
        assert torch.equal(raw(mine.scales.transpose(1, 2)), raw(scales.transpose(1, 2)))


@settings(max_examples=20)
@given(blocks=st.integers(1, 3), words=st.integers(1, 4), seed=st.integers(0, 99))
def test_every_scale_byte_is_where_the_tensor_core_reads_it(blocks: int, words: int, seed: int) -> None:
    """Law: word [k, 128 b + 4 r + q], byte j, holds row 128 b + 32 q + r, columns 128 k + 32 j."""
    exponents = torch.randint(
        1, 255, (128 * blocks, 4 * words), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    packed = pack_scales(exponents)
    assert packed.shape == (words, 128 * blocks)
    placed = packed.view(torch.uint8).view(words, blocks, 32, 4, 4)
    for k in range(words):
        for q in range(4):
            rows = exponents.view(blocks, 4, 32, words, 4)[:, q, :, k]
            assert torch.equal(placed[k, :, :, q], rows)
    assert torch.equal(unpack_scales(packed), exponents)


def test_sm100_operands_dequantise_to_the_requantised_checkpoint() -> None:
    weights = checkpoint(10, 2)
    ours = prepared(weights)
    assert weights.w13_scale is not None
    for expert in range(2):
        codes, exponents = requantize(weights.w13[expert], weights.w13_scale[expert])
        back = deinterleave_gate_up(unpack_scales(ours.l1.scales[expert].T))
        assert torch.equal(back, exponents)
        assert torch.equal(deinterleave_gate_up(raw(ours.l1.codes[expert])), raw(codes))


def block_weights(scale: float, seed: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    """256 x 512 codes that use the whole range of E4M3, all under one scale."""
    codes = numerics.to_e4m3(torch.randn(256, 512, generator=torch.Generator().manual_seed(seed)) * 120)
    return codes, torch.full((2, 4), scale)


@pytest.mark.parametrize("power", [-40, -9, 0, 7])
def test_power_of_two_scales_lose_nothing(power: int) -> None:
    codes, scale = block_weights(2.0**power)
    narrowed, exponents = requantize(codes, scale)
    assert torch.equal(
        numerics.dequantize_blocks(narrowed, exponents), numerics.dequantize_blocks(codes, scale)
    )


@settings(max_examples=40, deadline=None)
@given(scale=st.floats(1e-12, 1e6), sign=st.sampled_from([1.0, -1.0]), seed=st.integers(0, 99))
def test_requantisation_errs_by_half_a_step_and_never_overflows(scale: float, sign: float, seed: int) -> None:
    codes, scales = block_weights(sign * scale, seed)
    exact = numerics.dequantize_blocks(codes, scales)
    narrowed, exponents = requantize(codes, scales)
    assert narrowed.float().abs().max() <= 448.0
    assert not narrowed.float().isnan().any()
    groups = numerics.ue8m0_value(exponents).repeat_interleave(32, dim=1)
    half_step = torch.maximum(exact.abs() / 16, groups * 2.0**-10)
    assert ((numerics.dequantize_blocks(narrowed, exponents) - exact).abs() <= half_step).all()


def test_requantisation_error_is_what_the_documentation_states() -> None:
    """Weights of a normal distribution: 2.6 % rms, 1/16 at most where E4M3 is normal, no bias."""
    weights = checkpoint(12, 8)
    exact = weights.dequantized().w13
    assert weights.w13_scale is not None
    pairs = [requantize(w, s) for w, s in zip(weights.w13, weights.w13_scale, strict=True)]
    error = torch.stack([numerics.dequantize_blocks(c, e) for c, e in pairs]) - exact
    steps = torch.stack([numerics.ue8m0_value(e).repeat_interleave(32, dim=1) for _, e in pairs])
    normal = exact.abs() >= steps * 2.0**-6
    assert float(normal.float().mean()) >= 0.99
    assert float((error / exact)[normal].abs().max()) <= 1 / 16
    assert 0.024 <= float(error.norm() / exact.norm()) <= 0.029
    assert abs(float(error.mean())) <= 1e-3 * float(exact.abs().mean())
    assert 3.0e-4 <= calc_diff(exact + error, exact) <= 4.2e-4


def test_one_exponent_a_row_group_loses_no_more_than_one_a_block() -> None:
    """The alternative, and what stock SGLang does for SM100: a power of two for each 128 x 128 block."""
    weights = checkpoint(13, 4)
    exact = weights.dequantized().w13[0]
    spread = exact * torch.logspace(0, -4, exact.shape[1])
    codes, scale = numerics.quantize_blocks(spread)
    exact = numerics.dequantize_blocks(codes, scale)
    narrowed, exponents = requantize(codes, scale)
    ours = (numerics.dequantize_blocks(narrowed, exponents) - exact).abs()
    blocks = exact.view(4, 128, 4, 128).transpose(1, 2)
    power = numerics.ue8m0_value(numerics.ue8m0_exponent(blocks.abs().amax((2, 3))))[..., None, None]
    theirs = (numerics.to_e4m3(blocks / power).float() * power).transpose(1, 2).reshape_as(exact) - exact
    assert (ours <= theirs.abs()).all()
    assert ours.sum() < theirs.abs().sum()


@contextmanager
def unmoved(weights: Sm100Weights) -> Iterator[None]:
    """Addresses a captured graph holds must survive."""
    held = [t.data_ptr() for t in (weights.l1.codes, weights.l1.scales, weights.l2.codes, weights.l2.scales)]
    yield
    assert held == [
        t.data_ptr() for t in (weights.l1.codes, weights.l1.scales, weights.l2.codes, weights.l2.scales)
    ]


def test_sm100_reload_converts_what_was_loaded_and_only_that() -> None:
    first, second = checkpoint(14, 4), checkpoint(15, 4)
    live, state = parameters(first), TransformState()
    out = allocate(live[0], live[2])
    assert prepare_sm100_(out, live[1], live[3], state) == 4
    assert prepare_sm100_(out, live[1], live[3], state) == 0
    with unmoved(out):
        load(live, second, slice(2, 4))
        assert prepare_sm100_(out, live[1], live[3], state) == 2
        assert prepare_sm100_(out, live[1], live[3], state) == 0
    for expert, source in ((0, first), (1, first), (2, second), (3, second)):
        expected = prepared(source)
        for mine, theirs in ((out.l1, expected.l1), (out.l2, expected.l2)):
            assert torch.equal(raw(mine.codes[expert]), raw(theirs.codes[expert]))
            assert torch.equal(mine.scales[expert], theirs.scales[expert])


def test_sm100_refuses_scales_without_weights_and_weights_in_part() -> None:
    first, second = checkpoint(16, 2), checkpoint(17, 2)
    live, state = parameters(first), TransformState()
    out = allocate(live[0], live[2])
    prepare_sm100_(out, live[1], live[3], state)
    kept = live[1].clone()
    live[1][0] *= 2
    with pytest.raises(ValueError, match=r"expert 0: only parts \[2, 3\] of 6"):
        prepare_sm100_(out, live[1], live[3], state)
    live[1].copy_(kept)
    live[2][1].copy_(second.w2[1])
    with pytest.raises(ValueError, match=r"expert 1: only parts \[4\] of 6"):
        prepare_sm100_(out, live[1], live[3], state)


def test_weights_with_power_of_two_scales_reload() -> None:
    """Their requantised w2 may equal the checkpoint's bytes: only w13 tells the layouts apart."""
    codes, scale = block_weights(1.0)
    w13 = torch.stack([codes.repeat(2, 1)])
    live = (
        w13.clone(),
        scale.repeat(2, 1).unsqueeze(0),
        torch.full((1, 512, 256), 448.0).to(numerics.E4M3),
        torch.ones(1, 4, 2),
    )
    source = tuple(t.clone() for t in live)
    state, out = TransformState(), allocate(live[0], live[2])
    assert prepare_sm100_(out, live[1], live[3], state) == 1
    assert torch.equal(raw(live[2]), raw(source[2]))
    once = out.l1.codes.clone()
    for target, loaded in zip(live, source, strict=True):
        target.copy_(loaded)
    assert prepare_sm100_(out, live[1], live[3], state) == 1
    assert torch.equal(raw(out.l1.codes), raw(once))


def test_sm100_needs_the_memory_of_one_expert_only() -> None:
    live = parameters(checkpoint(18, 6))
    out = allocate(live[0], live[2])
    one_expert_fp32 = 4 * live[0][0].numel()
    with LargestAllocation() as seen:
        prepare_sm100_(out, live[1], live[3], TransformState())
    assert 0 < seen.bytes <= one_expert_fp32


def test_sm100_refuses_what_it_cannot_convert() -> None:
    codes, scale = block_weights(1.0)
    wide = torch.zeros(1, 512, 512, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="not finite"):
        requantize(codes, scale * float("nan"))
    with pytest.raises(ValueError, match="not those of 128 x 128 blocks"):
        requantize(codes, torch.ones(256, 16))
    with pytest.raises(ValueError, match="contiguous E4M3 with fp32 scales"):
        prepare_sm100_(allocate(wide, wide), torch.ones(1, 4, 4), torch.ones(1, 4, 4), TransformState())
    with pytest.raises(ValueError, match="multiples of"):
        pack_scales(torch.zeros(64, 4, dtype=torch.uint8))
