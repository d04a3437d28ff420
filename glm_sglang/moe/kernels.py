"""The three ways to compute one chunk of a MoE layer over all EP ranks: SM90's kernel, SM100's, the exact reference.

Each is a collective: every EP rank calls it, in the same order, with or without rows. A kernel owns its buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from glm_kernels.mega_moe import Arithmetic, ExpertWeights, mega_moe_reference
from glm_kernels.mega_moe.limits import Arch

from glm_sglang.moe.weights import ATTRIBUTE, Arranged


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What a kernel's buffer is sized for. `capacity`: tokens that one rank brings to one call at most."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Rows:
    """One rank's share of one call: x [T, H], ids [T, K] int32 global (−1 masked), weights [T, K] fp32, T may be 0."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Kernel(Protocol):
    """Writes sum over a row's slots of expert(x) · weight · scaling into `out` [T, H]."""

    name: str
    buffer_bytes: int

    def __call__(
        self, experts: Any, rows: Rows, out: torch.Tensor, *, bound: int, scaling: float, clamp: float | None
    ) -> None:
        """One chunk; no rank has more than `bound` rows in it."""


class Reference:
    """The exact arithmetic over gloo, for the reference platform: weights as loaded, in the model's dtype."""

    name = "reference"
    buffer_bytes = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(
        self, experts: Any, rows: Rows, out: torch.Tensor, *, bound: int, scaling: float, clamp: float | None
    ) -> None:
        if rows.x.shape[0] > bound:
            raise RuntimeError(f"{rows.x.shape[0]} rows in a call planned for {bound}")
        out.copy_(
            mega_moe_reference(
                rows.x,
                rows.ids,
                rows.weights,
                ExpertWeights(experts.w13_weight.data, experts.w2_weight.data),
                arithmetic=Arithmetic.EXACT,
                routed_scaling_factor=scaling,
                activation_clamp=clamp,
                group=self.group,
            )
        )


class _Symmetric:
    """Owns one symmetric buffer, shared by all layers (the kernel leaves nothing in it between calls).

    Allocated once, before the KV pool is sized; never resized or freed while the process lives, for captured graphs
    hold its address. UPSTREAM: deep_gemm.get_symm_buffer_for_mega_moe, outside torch's caching allocator.
    """

    def __init__(self, group: dist.ProcessGroup, geometry: Geometry) -> None:
        import deep_gemm

        self.library = deep_gemm
        self.buffer = deep_gemm.get_symm_buffer_for_mega_moe(
            group, geometry.experts, geometry.capacity, geometry.top_k, geometry.hidden, geometry.intermediate
        )
        self.buffer_bytes = int(self.buffer.buffer.nbytes)
        # An empty share still needs an address to write to: a tensor of no elements has none.
        self.spare = torch.empty((1, geometry.hidden), dtype=torch.bfloat16, device="cuda")


def _arranged(experts: Any) -> Arranged:
    found: Arranged = getattr(experts, ATTRIBUTE)
    return found


class Sm90(_Symmetric):
    """sgl-deep-gemm's fp8_mega_moe: E4M3 under fp32 scales over 128."""

    name = "sm90"

    def __call__(
        self, experts: Any, rows: Rows, out: torch.Tensor, *, bound: int, scaling: float, clamp: float | None
    ) -> None:
        buffer, weights, count = self.buffer, _arranged(experts), rows.x.shape[0]
        self.library.mega_moe_pre_dispatch_sm90(
            rows.x,
            rows.ids,
            rows.weights,
            buffer.x,
            buffer.x_sf,
            buffer.topk_idx,
            buffer.topk_weights,
            num_tokens=count,
            group_size=128,
            routed_scaling_factor=scaling,
        )
        self.library.fp8_mega_moe(
            out if count else self.spare,
            weights.l1,
            weights.l2,
            buffer,
            recipe=(128, 128, 128),
            activation="swiglu",
            activation_clamp=clamp,
            fast_math=True,
            num_tokens_bound=max(1, bound),
        )


class Sm100(_Symmetric):
    """sgl-deep-gemm's fp8_fp4_mega_moe with E4M3 weights under UE8M0 scales over 1 × 32. Built, never measured."""

    name = "sm100"

    def __call__(
        self, experts: Any, rows: Rows, out: torch.Tensor, *, bound: int, scaling: float, clamp: float | None
    ) -> None:
        # UPSTREAM: the clustered launch needs an even number of SMs and a margin of residency.
        from sglang.srt.layers.moe.mega_moe import _configure_mega_moe_deep_gemm_num_sms

        buffer, weights, count = self.buffer, _arranged(experts), rows.x.shape[0]
        self.library.mega_moe_pre_dispatch(
            rows.x,
            rows.ids,
            rows.weights * scaling,
            buffer.x,
            buffer.x_sf,
            buffer.topk_idx,
            buffer.topk_weights,
            num_tokens=count,
            group_size=32,
            mma_type="fp8xfp4",
        )
        with _configure_mega_moe_deep_gemm_num_sms(self.library):
            self.library.fp8_fp4_mega_moe(
                out if count else self.spare,
                weights.l1,
                weights.l2,
                buffer,
                recipe=(1, 1, 32),
                activation="swiglu",
                activation_clamp=clamp,
                fast_math=True,
            )


def build(arch: Arch | None, group: dist.ProcessGroup, geometry: Geometry) -> Kernel:
    """The kernel of this platform; `arch` is None on the reference platform. Collective: allocates on every rank."""
    if arch is None:
        return Reference(group)
    return Sm90(group, geometry) if arch is Arch.SM90 else Sm100(group, geometry)
