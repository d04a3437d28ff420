"""The MoE layer in float64, one token and one slot after the other: what every other implementation is judged
by.

Slow on purpose: it shares nothing with the reference but the weights' dequantisation, not even the E4M3 cast.
"""

from __future__ import annotations

import torch

from glm_kernels.mega_moe.experts import Arithmetic, ExpertWeights


def _e4m3_values() -> torch.Tensor:
    """The 127 finite E4M3 values from 0 up, by definition: 4 exponent bits of bias 7, 3 fraction bits."""
    subnormal = [fraction * 2.0**-9 for fraction in range(8)]
    normal = [
        (1 + fraction / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for fraction in range(8)
    ]
    return torch.tensor(subnormal + normal[:-1], dtype=torch.float64)  # the last code is NaN


def nearest_e4m3(x: torch.Tensor) -> torch.Tensor:
    """x rounded to E4M3, ties to the even code, saturating; float64 in and out."""
    values = _e4m3_values().to(x.device)
    magnitude = x.abs().clamp_max(values[-1])
    above = torch.searchsorted(values, magnitude.contiguous()).clamp_max(len(values) - 1)
    below = (above - 1).clamp_min(0)
    up, down = values[above] - magnitude, magnitude - values[below]
    take_above = (up < down) | ((up == down) & (above % 2 == 0))
    return torch.where(take_above, values[above], values[below]) * x.sign()


def _round_trip(x: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
    """x [K] quantised and dequantised: groups of 128 under amax / 448, or of 32 under the next power of two.

    SM90 scales by the fp32 reciprocal of an fp32 scale. That is part of the definition: 448 is 7 * 64, so
    bf16 inputs under an amax divisible by 7 hit E4M3's midpoints often, and the reciprocal's rounding decides
    those ties.
    """
    if arithmetic is Arithmetic.EXACT:
        return x
    groups = x.view(-1, 128 if arithmetic is Arithmetic.SM90 else 32)
    amax = groups.abs().amax(1, keepdim=True).clamp_min(1e-30)
    if arithmetic is Arithmetic.SM100:
        scale = torch.exp2(torch.ceil(torch.log2(amax / 448.0)))
        return (nearest_e4m3(groups / scale) * scale).flatten()
    narrow = amax.float() / 448.0
    scaled = groups.float() * (1.0 / narrow)
    return (nearest_e4m3(scaled.double()) * narrow.double()).flatten()


def moe_float64(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    *,
    routed_scaling_factor: float = 1.0,
    arithmetic: Arithmetic = Arithmetic.EXACT,
    quantized_input: bool | None = None,
) -> torch.Tensor:
    """sum over slots of W2 q(silu(Wg q(x)) * (Wu q(x)) * weight * factor), with dequantised weights.

    x: [T, H]; topk_ids and topk_weights: [T, K], ids local to `weights` and -1 where masked. q is the
    identity for EXACT and the arithmetic's quantisation otherwise; `quantized_input` overrides it for x
    alone. SM90 and SM100 round a slot's output to bf16, SM100 also gate and up. Returns [T, H] float64.
    """
    wide = weights.dequantized()
    experts = {
        e: (wide.w13[e].double(), wide.w2[e].double()) for e in set(topk_ids.flatten().tolist()) - {-1}
    }
    input_arithmetic = arithmetic if quantized_input in (None, True) else Arithmetic.EXACT
    result = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, (row_ids, row_weights) in enumerate(
        zip(topk_ids.tolist(), topk_weights.double().tolist(), strict=True)
    ):
        row = _round_trip(x[token].double(), input_arithmetic)
        for expert, weight in zip(row_ids, row_weights, strict=True):
            if expert < 0:
                continue
            w13, w2 = experts[expert]
            projected = w13 @ row
            if arithmetic is Arithmetic.SM100:
                projected = projected.bfloat16().double()
            gate, up = projected[: weights.intermediate], projected[weights.intermediate :]
            inner = gate / (1.0 + torch.exp(-gate)) * up * (routed_scaling_factor * weight)
            slot = w2 @ _round_trip(inner, arithmetic)
            result[token] += slot if arithmetic is Arithmetic.EXACT else slot.bfloat16().double()
    return result
