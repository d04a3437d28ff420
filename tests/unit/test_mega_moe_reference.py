"""The single-rank reference against float64 and stock SGLang's layer, and under the layer's symmetries."""

from __future__ import annotations

import math

import pytest
import torch
from glm_kernels.mega_moe import MASKED, Arithmetic, ExpertWeights, calc_diff, mega_moe_reference
from glm_kernels.mega_moe.oracle import moe_float64
from hypothesis import given, settings
from hypothesis import strategies as st
from mega_moe_cases import ROUTINGS, SCALING, Tokens, checkpoint, requantized, shard, tokens

SAME_POINTS = 1e-5  # rounding the result to bf16 costs 1.4e-6; the rest must cost nothing beside it
ISSUE_BOUND = 1e-3


def weights_for(arithmetic: Arithmetic, weights: ExpertWeights) -> ExpertWeights:
    return requantized(weights) if arithmetic is Arithmetic.SM100 else weights


def run(batch: Tokens, weights: ExpertWeights, arithmetic: Arithmetic, **options: object) -> torch.Tensor:
    return mega_moe_reference(
        batch.x,
        batch.ids,
        batch.weights,
        weights,
        arithmetic=arithmetic,
        routed_scaling_factor=SCALING,
        **options,  # type: ignore[arg-type]
    )


def truth(batch: Tokens, weights: ExpertWeights, arithmetic: Arithmetic = Arithmetic.EXACT) -> torch.Tensor:
    return moe_float64(
        batch.x, batch.ids, batch.weights, weights, routed_scaling_factor=SCALING, arithmetic=arithmetic
    )


@pytest.mark.parametrize("arithmetic", list(Arithmetic))
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    count=st.integers(1, 9),
    experts=st.integers(2, 5),
    hidden=st.sampled_from([512, 1024]),
    intermediate=st.sampled_from([256, 512]),
    routing=st.sampled_from(ROUTINGS),
    data=st.data(),
)
def test_follows_its_quantisation_points_in_float64(
    arithmetic: Arithmetic,
    seed: int,
    count: int,
    experts: int,
    hidden: int,
    intermediate: int,
    routing: str,
    data: st.DataObject,
) -> None:
    top_k = data.draw(st.integers(1, max(1, experts // 2)))
    weights = weights_for(arithmetic, checkpoint(seed, experts, hidden, intermediate))
    batch = tokens(seed + 1, count, experts, top_k, hidden, routing)
    y = run(batch, weights, arithmetic)
    assert y.dtype == torch.bfloat16
    assert calc_diff(y, truth(batch, weights, arithmetic)) <= SAME_POINTS


@pytest.mark.parametrize("routing", ROUTINGS)
def test_sm90_is_within_the_bound_of_unquantised_float64(routing: str) -> None:
    """Two FP8 roundings of activations cost 0.94e-3 at any width; nothing else may add to them."""
    weights = checkpoint(7, 8)
    batch = tokens(8, 96, 8, 4, routing=routing)
    assert calc_diff(run(batch, weights, Arithmetic.SM90), truth(batch, weights)) <= ISSUE_BOUND


def test_sm90_at_glms_widths() -> None:
    weights = checkpoint(9, 1, 6144, 2048)
    batch = tokens(10, 6, 1, 1, 6144)
    y = run(batch, weights, Arithmetic.SM90)
    assert calc_diff(y, truth(batch, weights)) <= ISSUE_BOUND
    assert calc_diff(y, truth(batch, weights, Arithmetic.SM90)) <= SAME_POINTS


def test_sm100_loses_a_known_amount() -> None:
    """Against the float64 result: its activations 1.1e-3; the weights' requantisation as much again."""
    weights = checkpoint(11, 8)
    batch = tokens(12, 96, 8, 4)
    narrowed = requantized(weights)
    y = run(batch, narrowed, Arithmetic.SM100)
    assert calc_diff(y, truth(batch, narrowed)) <= 1.25e-3
    assert calc_diff(truth(batch, narrowed), truth(batch, weights)) <= 1.25e-3
    assert calc_diff(y, truth(batch, weights)) <= 2.5e-3


def test_second_quantisation_is_over_128_columns_on_sm90() -> None:
    """A SwiGLU output a million times larger erases all of its own group of 128 columns, not only 64."""
    hidden, intermediate = 512, 256
    w13 = torch.zeros(1, 2 * intermediate, hidden)
    w13[0, :intermediate, 0] = 4.0  # every gate
    w13[0, intermediate:, 0] = 1.0  # every up but one
    w13[0, intermediate + 64, 0] = 1e6
    w2 = torch.eye(intermediate).repeat(2, 1).unsqueeze(0)  # output column n is SwiGLU column n
    x = torch.zeros(1, hidden, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    expert = torch.zeros(1, 1, dtype=torch.int32)
    y = mega_moe_reference(x, expert, torch.ones(1, 1), ExpertWeights(w13, w2), arithmetic=Arithmetic.SM90)[0]
    small = 4.0 / (1.0 + math.exp(-4.0))
    assert float(y[64]) == pytest.approx(small * 1e6, rel=2**-8)
    assert torch.count_nonzero(y[:64]) == 0
    assert torch.count_nonzero(y[65:128]) == 0
    assert torch.allclose(y[128:256].float(), torch.tensor(small), rtol=2**-8)


@pytest.mark.parametrize("arithmetic", list(Arithmetic))
def test_dequantised_weights_give_the_same_layer(arithmetic: Arithmetic) -> None:
    weights = weights_for(arithmetic, checkpoint(13, 4))
    batch = tokens(14, 40, 4, 2)
    assert calc_diff(run(batch, weights.dequantized(), arithmetic), run(batch, weights, arithmetic)) <= 1e-6


@pytest.mark.parametrize("arithmetic", list(Arithmetic))
def test_token_order_does_not_matter(arithmetic: Arithmetic) -> None:
    weights = weights_for(arithmetic, checkpoint(17, 4))
    batch = tokens(18, 50, 4, 2)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert calc_diff(run(batch[order], weights, arithmetic), run(batch, weights, arithmetic)[order]) <= 1e-6


@pytest.mark.parametrize("arithmetic", list(Arithmetic))
def test_expert_names_do_not_matter(arithmetic: Arithmetic) -> None:
    weights = weights_for(arithmetic, checkpoint(19, 6))
    batch = tokens(20, 50, 6, 3, routing="masked")
    new_name = torch.tensor([3, 5, 0, 1, 4, 2])  # expert e becomes new_name[e]
    old_at = new_name.argsort()
    renamed = torch.where(batch.ids >= 0, new_name[batch.ids.clamp_min(0).long()].int(), batch.ids)
    shuffled = ExpertWeights(
        weights.w13[old_at],
        weights.w2[old_at],
        None if weights.w13_scale is None else weights.w13_scale[old_at],
        None if weights.w2_scale is None else weights.w2_scale[old_at],
    )
    same = run(Tokens(batch.x, renamed, batch.weights), shuffled, arithmetic)
    assert torch.equal(same, run(batch, weights, arithmetic))


@pytest.mark.parametrize("arithmetic", list(Arithmetic))
def test_slot_order_costs_no_more_than_fp32_addition(arithmetic: Arithmetic) -> None:
    weights = weights_for(arithmetic, checkpoint(21, 6))
    batch = tokens(22, 50, 6, 4)
    turned = Tokens(batch.x, batch.ids.flip(1), batch.weights.flip(1))
    assert calc_diff(run(turned, weights, arithmetic), run(batch, weights, arithmetic)) <= 1e-6


@pytest.mark.parametrize("arithmetic", list(Arithmetic))
def test_masked_slots_contribute_nothing_whatever_they_hold(arithmetic: Arithmetic) -> None:
    weights = weights_for(arithmetic, checkpoint(23, 4))
    batch = tokens(24, 20, 4, 2, routing="masked")
    poisoned = batch.weights.masked_fill(batch.ids == MASKED, float("nan"))
    padding = (batch.ids == MASKED).all(1)
    assert padding.any()
    x = batch.x.masked_fill(padding.unsqueeze(1), float("nan"))
    y = run(Tokens(x, batch.ids, poisoned), weights, arithmetic)
    assert torch.equal(y, run(batch, weights, arithmetic))
    assert torch.count_nonzero(y[padding]) == 0


@pytest.mark.parametrize("arithmetic", list(Arithmetic))
def test_no_tokens_give_no_rows(arithmetic: Arithmetic) -> None:
    weights = weights_for(arithmetic, checkpoint(25, 2))
    assert run(tokens(26, 0, 2, 2), weights, arithmetic).shape == (0, 512)


@pytest.mark.parametrize("arithmetic", list(Arithmetic))
def test_partial_sums_of_ranks_add_up(arithmetic: Arithmetic) -> None:
    """What stock EP does: each rank computes its own experts' share, the shares are added."""
    weights = weights_for(arithmetic, checkpoint(27, 6))
    batch = tokens(28, 40, 6, 3)
    parts = [run(batch, shard(weights, r, 3), arithmetic, expert_offset=2 * r) for r in range(3)]
    total = torch.stack([part.float() for part in parts]).sum(0)
    assert calc_diff(total, run(batch, weights, arithmetic)) <= 1e-5


def test_activation_clamp_is_the_kernels() -> None:
    """gate is bounded above, up on both sides: seen on one expert whose gate and up are +-x0."""
    w13 = torch.zeros(1, 512, 512)
    w13[0, :256, 0], w13[0, 256:, 0] = -1.0, -1.0
    w2 = torch.zeros(1, 512, 256)
    w2[0, 0, 0] = 1.0
    x = torch.zeros(2, 512)
    x[:, 0] = torch.tensor([-50.0, 50.0])
    one = torch.ones(2, 1)
    y = mega_moe_reference(
        x,
        torch.zeros(2, 1, dtype=torch.int32),
        one,
        ExpertWeights(w13, w2),
        arithmetic=Arithmetic.EXACT,
        activation_clamp=10.0,
    )
    sigmoid = torch.sigmoid(torch.tensor([10.0, -50.0]))
    assert torch.allclose(y[:, 0], torch.tensor([10.0, -50.0]) * sigmoid * torch.tensor([10.0, -10.0]))


def test_refusals_say_what_was_found() -> None:
    weights = checkpoint(29, 4)
    batch = tokens(30, 4, 4, 2)
    beyond = torch.tensor([[0, 4], [1, 2], [1, 2], [1, 2]])
    with pytest.raises(ValueError, match=r"expert ids span \[0, 4\]; allowed are -1 \(masked\) and \[0, 4\)"):
        run(Tokens(batch.x, beyond, batch.weights), weights, Arithmetic.SM90)
    with pytest.raises(ValueError, match=r"these experts take \[T, 512\]"):
        run(Tokens(batch.x[:, :256], batch.ids, batch.weights), weights, Arithmetic.SM90)
    with pytest.raises(ValueError, match=r"must both be \[4, K\]"):
        run(Tokens(batch.x, batch.ids[:2], batch.weights), weights, Arithmetic.SM90)
    with pytest.raises(ValueError, match="SM90 arithmetic takes bf16"):
        run(Tokens(batch.x.float(), batch.ids, batch.weights), weights, Arithmetic.SM90)
    with pytest.raises(ValueError, match="requantise the checkpoint first"):
        run(batch, weights, Arithmetic.SM100)
    with pytest.raises(ValueError, match="uint8 over 32 columns; SM90 arithmetic takes fp32 over 128"):
        run(batch, requantized(weights), Arithmetic.SM90)
    with pytest.raises(ValueError, match="E4M3 weights need w13_scale"):
        ExpertWeights(weights.w13, weights.w2)
    with pytest.raises(ValueError, match="asks for w2"):
        ExpertWeights(weights.w13, weights.w2[:, :256], weights.w13_scale, weights.w2_scale)
    with pytest.raises(ValueError, match="does not tile"):
        ExpertWeights(weights.w13, weights.w2, torch.ones(4, 3, 4), weights.w2_scale)
