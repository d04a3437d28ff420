"""E4M3 and UE8M0 rounding against the formats' definitions and against DeepGEMM's own Python."""

from __future__ import annotations

import math

import deep_gemm
import pytest
import torch
from glm_kernels.mega_moe import calc_diff, numerics
from glm_kernels.mega_moe.oracle import nearest_e4m3
from hypothesis import given
from hypothesis import strategies as st

_FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
_POSITIVE = st.floats(min_value=2.0**-126, max_value=2.0**127, width=32)


@given(st.lists(_FINITE, min_size=1, max_size=64))
def test_cast_is_nearest_even_and_saturates(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(numerics.to_e4m3(x).double(), nearest_e4m3(x.double()))


def test_cast_decides_every_midpoint_as_the_format_says() -> None:
    codes = torch.arange(0, 127, dtype=torch.uint8)
    exact = codes.view(numerics.E4M3).double()
    midpoints = (exact[:-1] + exact[1:]) / 2
    even = torch.where(codes[:-1] % 2 == 0, exact[:-1], exact[1:])
    assert torch.equal(numerics.to_e4m3(midpoints.float()).double(), even)


def test_widen_agrees_with_torch_on_all_256_codes() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(numerics.E4M3).view(16, 16)
    ours, torchs = numerics.widen(codes), codes.float()
    assert torch.equal(ours.isnan(), torchs.isnan())
    assert torch.equal(ours.nan_to_num(0.0), torchs.nan_to_num(0.0))
    assert torch.equal(numerics.widen(codes.T).nan_to_num(0.0), ours.T.nan_to_num(0.0))


@given(_POSITIVE)
def test_ue8m0_exponent_is_the_smallest_that_holds_amax(amax: float) -> None:
    byte = int(numerics.ue8m0_exponent(torch.tensor([amax], dtype=torch.float32)))
    assert amax <= 448.0 * 2.0 ** (byte - 127)
    assert byte == 1 or amax > 448.0 * 2.0 ** (byte - 128)


@pytest.mark.parametrize("power", range(-100, 100, 9))
def test_ue8m0_exponent_at_its_steps(power: int) -> None:
    edge = torch.tensor([448.0 * 2.0**power])
    above = torch.nextafter(edge, torch.tensor(math.inf))
    assert int(numerics.ue8m0_exponent(edge)) == 127 + power
    assert int(numerics.ue8m0_exponent(above)) == 128 + power


def test_group_of_zeros_stays_zero_and_finite() -> None:
    codes, exponents = numerics.quantize_ue8m0(torch.zeros(2, 64))
    assert torch.count_nonzero(codes.float()) == 0
    assert exponents.eq(1).all()
    codes, scales = numerics.quantize_sm90(torch.zeros(2, 128))
    assert torch.count_nonzero(numerics.dequantize_groups(codes, scales)) == 0


@pytest.mark.parametrize("spread", [1e-6, 1.0, 1e4])
def test_input_quantisation_has_deepgemms_bytes(spread: float) -> None:
    x = (torch.randn(16, 512, generator=torch.Generator().manual_seed(3)) * spread).bfloat16()
    codes, exponents = numerics.quantize_sm100_input(x)
    theirs, scales = deep_gemm.utils.per_token_cast_to_fp8(x, use_ue8m0=True, gran_k=32)
    assert torch.equal(codes.view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(numerics.ue8m0_value(exponents), scales)


def test_sm90_input_quantisation_has_deepgemms_bytes() -> None:
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(4)).bfloat16()
    codes, scales = numerics.quantize_sm90(x)
    theirs, their_scales = deep_gemm.utils.per_token_cast_to_fp8(x, use_ue8m0=False, gran_k=128)
    assert torch.equal(scales, their_scales)
    assert torch.equal(codes.view(torch.uint8), theirs.view(torch.uint8))


def test_block_quantisation_round_trips_within_half_a_step() -> None:
    w = torch.randn(2, 256, 384, generator=torch.Generator().manual_seed(5))
    codes, scales = numerics.quantize_blocks(w)
    assert scales.shape == (2, 2, 3)
    step = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    error = (numerics.dequantize_blocks(codes, scales) - w).abs()
    assert (error <= torch.maximum(w.abs() / 16, step * 2.0**-10) * 1.0001).all()


@given(st.integers(0, 1000), st.sampled_from([0.0, 1e-3, 0.1, 2.0]))
def test_calc_diff_is_deepgemms(seed: int, noise: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 8, generator=draw)
    y = x + noise * torch.randn(4, 8, generator=draw)
    assert calc_diff(x, y) == pytest.approx(float(deep_gemm.testing.calc_diff(x, y)), abs=1e-15)


def test_calc_diff_of_zeros_nan_and_shapes() -> None:
    zeros = torch.zeros(3)
    assert calc_diff(zeros, zeros) == 0.0
    assert not calc_diff(torch.tensor([float("nan"), 1.0]), torch.ones(2)) <= 1.0
    with pytest.raises(ValueError, match="equal shapes"):
        calc_diff(torch.ones(2), torch.ones(2, 1))


def test_ragged_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="no multiple of the scale group, 128"):
        numerics.quantize_sm90(torch.zeros(1, 192))
    with pytest.raises(ValueError, match="whole blocks"):
        numerics.quantize_blocks(torch.zeros(128, 192))
    with pytest.raises(ValueError, match="do not tile"):
        numerics.dequantize_blocks(torch.zeros(6, 6).to(numerics.E4M3), torch.ones(4, 2))
