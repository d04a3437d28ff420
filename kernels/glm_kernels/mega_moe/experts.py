"""The routed experts of one rank, and what each arithmetic makes of a row that was sent to one of them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from glm_kernels.mega_moe import numerics


class Arithmetic(enum.StrEnum):
    """Which rounding a reference follows.

    EXACT: fp32 throughout, nothing quantised, one cast at the end. SM90 and SM100: those kernels'
    quantisation points and intermediate dtypes. The accumulator is fp32 here; the SM90 kernel's prefill tile
    (0.2.5, hidden >= 4096) keeps a whole row's sum in the tensor core's narrower FP8 accumulator and rescales
    it every 128 of K, a difference no law here covers.
    """

    EXACT = "exact"
    SM90 = "sm90"
    SM100 = "sm100"


@dataclass(frozen=True)
class ExpertWeights:
    """Experts of one rank in checkpoint layout: rows [0, I) of `w13` are the gate, [I, 2I) the up projection.

    w13: [E, 2I, H], w2: [E, H, I]. E4M3 with `w13_scale` [E, 2I / a, H / b] and `w2_scale` [E, H / a, I / b],
    either fp32 over 128 x 128 blocks or uint8 UE8M0 exponents over 1 x 32; or bf16 / fp32 without scales. Not
    interleaved.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        experts, rows, hidden = self.w13.shape
        if rows % 2 or tuple(self.w2.shape) != (experts, hidden, rows // 2):
            raise ValueError(
                f"w13 {tuple(self.w13.shape)} asks for w2 {(experts, hidden, rows // 2)}, "
                f"found {tuple(self.w2.shape)}"
            )
        for name, w, scale in (("w13", self.w13, self.w13_scale), ("w2", self.w2, self.w2_scale)):
            if (w.dtype == numerics.E4M3) != (scale is not None):
                raise ValueError(
                    f"{name} is {w.dtype}: E4M3 weights need {name}_scale, others must not have one"
                )
            if scale is not None and (
                scale.dim() != 3
                or scale.shape[0] != experts
                or any(n % s for n, s in zip(w.shape, scale.shape, strict=True))
            ):
                raise ValueError(f"{name}_scale {tuple(scale.shape)} does not tile {name} {tuple(w.shape)}")

    @property
    def num_experts(self) -> int:
        """Experts held here, E."""
        return self.w13.shape[0]

    @property
    def hidden(self) -> int:
        """Model width, H."""
        return self.w13.shape[2]

    @property
    def intermediate(self) -> int:
        """Expert width, I."""
        return self.w2.shape[2]

    def check(self, arithmetic: Arithmetic, rows: torch.dtype) -> None:
        """Raises ValueError unless `arithmetic` is defined for these weights and for rows of this dtype."""
        if arithmetic is Arithmetic.EXACT:
            return
        if rows != torch.bfloat16:
            raise ValueError(
                f"x is {rows}; {arithmetic.name} arithmetic takes bf16, as its kernel does: use EXACT"
            )
        for name, w, scale in (("w13", self.w13, self.w13_scale), ("w2", self.w2, self.w2_scale)):
            if scale is None:
                continue
            if arithmetic is Arithmetic.SM100 and scale.dtype != torch.uint8:
                raise ValueError(
                    f"{name}_scale is {scale.dtype}; SM100 arithmetic takes UE8M0 exponents (uint8): "
                    "requantise the checkpoint first (weights_sm100.requantize)"
                )
            over = w.shape[2] // scale.shape[2]
            if arithmetic is Arithmetic.SM90 and (
                scale.dtype != torch.float32 or over != numerics.SM90_GROUP
            ):
                raise ValueError(
                    f"{name}_scale is {scale.dtype} over {over} columns; SM90 arithmetic takes fp32 over "
                    f"{numerics.SM90_GROUP}"
                )

    def dequantized(self) -> ExpertWeights:
        """The same experts in fp32 (4 bytes a weight): keep them where the reference serves many steps."""
        if self.w13_scale is None or self.w2_scale is None:
            return ExpertWeights(self.w13.float(), self.w2.float())
        return ExpertWeights(
            numerics.dequantize_blocks(self.w13, self.w13_scale),
            numerics.dequantize_blocks(self.w2, self.w2_scale),
        )


def _linear_exact(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    wide = w.float() if scale is None else numerics.dequantize_blocks(w, scale)
    return x @ wide.T


def _linear_sm90(
    codes: torch.Tensor, act_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor | None
) -> torch.Tensor:
    """[M, K] -> [M, N] fp32: sums over 128 of K, each promoted by its activation and weight scale."""
    if w_scale is None:
        return numerics.dequantize_groups(codes, act_scale) @ w.float().T
    group = numerics.SM90_GROUP
    rows_per_scale = w.shape[0] // w_scale.shape[0]
    wide, wide_w = numerics.widen(codes), numerics.widen(w)
    total = wide.new_zeros((codes.shape[0], w.shape[0]))
    for k in range(act_scale.shape[1]):
        columns = slice(k * group, (k + 1) * group)
        part = wide[:, columns] @ wide_w[:, columns].T
        total.addcmul_(torch.outer(act_scale[:, k], w_scale[:, k].repeat_interleave(rows_per_scale)), part)
    return total


def _linear_sm100(
    codes: torch.Tensor, act_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor | None
) -> torch.Tensor:
    """Block-scaled product: power-of-two scales make both operands exact in fp32. [M, K] -> [M, N] fp32."""
    return _linear_exact(numerics.dequantize_groups(codes, act_scale), w, w_scale)


def _swiglu(gate: torch.Tensor, up: torch.Tensor, clamp: float | None) -> torch.Tensor:
    if clamp is not None:
        gate, up = gate.clamp_max(clamp), up.clamp(-clamp, clamp)
    return torch.nn.functional.silu(gate) * up


def expert_rows(
    x: torch.Tensor,
    routing: torch.Tensor,
    weights: ExpertWeights,
    expert: int,
    arithmetic: Arithmetic,
    activation_clamp: float | None = None,
) -> torch.Tensor:
    """One expert over the rows sent to it: W2(quantise(SwiGLU(W13 quantise(x)) * routing weight)).

    x: [M, H]; routing: [M] fp32, the routing weight times `routed_scaling_factor`. Returns [M, H]: bf16 per
    slot for SM90 and SM100, fp32 for EXACT. The routing weight multiplies before the second quantisation, as
    in the kernels. SM100 rounds gate and up to bf16 first (UPSTREAM: sm100_fp8_fp4_mega_moe.cuh bf16_gate);
    SM90 keeps them fp32.
    """
    w13, w2 = weights.w13[expert], weights.w2[expert]
    s13 = None if weights.w13_scale is None else weights.w13_scale[expert]
    s2 = None if weights.w2_scale is None else weights.w2_scale[expert]
    scale = routing.float().unsqueeze(-1)
    if arithmetic is Arithmetic.EXACT:
        gate, up = _linear_exact(x.float(), w13, s13).chunk(2, dim=-1)
        return _linear_exact(_swiglu(gate, up, activation_clamp) * scale, w2, s2)
    if arithmetic is Arithmetic.SM90:
        gate, up = _linear_sm90(*numerics.quantize_sm90(x), w13, s13).chunk(2, dim=-1)
        hidden = _swiglu(gate, up, activation_clamp) * scale
        return _linear_sm90(*numerics.quantize_sm90(hidden, by_reciprocal=True), w2, s2).bfloat16()
    gate, up = _linear_sm100(*numerics.quantize_sm100_input(x), w13, s13).bfloat16().float().chunk(2, dim=-1)
    hidden = _swiglu(gate, up, activation_clamp) * scale
    return _linear_sm100(*numerics.quantize_ue8m0(hidden), w2, s2).bfloat16()
