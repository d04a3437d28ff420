"""The ways to compute one MoE layer over one GPU or more that `benchmarks.moe_layer` times side by side.

Every arm is a callable without arguments that leaves its result in `Arm.out` and never waits for the device:
it can be captured as a CUDA graph. Imported only where there is a GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import deep_gemm
import torch
import torch.distributed as dist
from glm_kernels.mega_moe import MASKED, ExpertWeights, plan_chunks
from glm_kernels.mega_moe.buffer import SM90_TOKEN_ALIGNMENT
from glm_kernels.mega_moe.chunks import align
from glm_kernels.mega_moe.interleave import prepare_sm90_
from glm_kernels.mega_moe.reload import TransformState

from benchmarks.moe_layer import Layer

ROUTED_SCALING = 2.5
_ROW_ALIGNMENT = 128  # rows of one expert in a contiguous grouped GEMM


@dataclass
class Batch:
    """One rank's tokens, padded to rows that all ranks share; the pads' ids are -1.

    x [padded, H] bf16, ids [padded, K] int32, weights [padded, K] fp32; the first `count` rows are tokens.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    count: int

    @property
    def padded(self) -> int:
        return self.x.shape[0]


@dataclass
class Arm:
    """A way to compute the layer into `out` [padded, H] bf16; `parts` are its steps, timed apart."""

    name: str
    run: Callable[[], None]
    out: torch.Tensor
    parts: dict[str, Callable[[], None]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def unavailable() -> dict[str, str]:
    """Arms of the question that this machine cannot run, with the reason."""
    if importlib.util.find_spec("deep_ep") is None:
        return {"deepep": "deep_ep is not installed; the pinned stack has no build of it"}
    return {"deepep": "deep_ep is installed, but this benchmark has no arm for it yet"}


def megamoe(
    batch: Batch, weights: ExpertWeights, layer: Layer, capacity: int, bound: int, group: dist.ProcessGroup
) -> Arm:
    """The persistent kernel, in as many calls as `bound` tokens of any rank need at `capacity` tokens a call.

    The buffer is the arm's and lives as long as the graph that captured `run`.
    """
    plan = plan_chunks(bound, capacity)
    w13 = weights.w13.clone()
    prepare_sm90_(w13, TransformState())
    l1, l2 = (w13, weights.w13_scale), (weights.w2, weights.w2_scale)
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(
        group,
        layer.experts,
        align(min(capacity, bound), SM90_TOKEN_ALIGNMENT),
        layer.top_k,
        layer.hidden,
        layer.intermediate,
    )
    out = torch.zeros_like(batch.x)
    spare = batch.x.new_empty((1, layer.hidden))  # an empty share needs an address to write to

    def pre_dispatch(rows: slice) -> None:
        deep_gemm.mega_moe_pre_dispatch_sm90(
            batch.x[rows],
            batch.ids[rows],
            batch.weights[rows],
            buffer.x,
            buffer.x_sf,
            buffer.topk_idx,
            buffer.topk_weights,
            num_tokens=rows.stop - rows.start,
            group_size=128,
            routed_scaling_factor=ROUTED_SCALING,
        )

    def run() -> None:
        for chunk in range(plan.count):
            rows = plan.rows(batch.count, chunk)
            pre_dispatch(rows)
            deep_gemm.fp8_mega_moe(
                out[rows] if rows.stop > rows.start else spare,
                l1,
                l2,
                buffer,
                recipe=(128, 128, 128),
                activation="swiglu",
                fast_math=True,
                num_tokens_bound=plan.bound,
            )

    facts = {"calls": plan.count, "buffer_bytes": buffer.buffer.numel(), "tokens_a_call": plan.bound}
    return Arm("megamoe", run, out, facts=facts)


def gathered(batch: Batch, weights: ExpertWeights, layer: Layer, group: dist.ProcessGroup) -> Arm:
    """FP8 all-gather, grouped FP8 GEMMs over local experts, bf16 reduce-scatter: what MegaMoE replaces."""
    from sgl_kernel import silu_and_mul
    from sglang.kernels.ops.moe.ep_moe_kernels import ep_gather, ep_scatter
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8 as quantise

    ranks, local = dist.get_world_size(group), weights.num_experts
    total, device = batch.padded * ranks, batch.x.device
    hidden, width = layer.hidden, layer.intermediate

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    codes, scales = (
        empty(total, hidden, dtype=torch.float8_e4m3fn),
        empty(total, hidden // 128, dtype=torch.float32),
    )
    ids, routing = gather_routing(batch, group)
    mine = localised(ids, dist.get_rank(group) * local, local)
    counts = torch.bincount(mine[mine >= 0].flatten(), minlength=local).int()
    padded = ((counts + _ROW_ALIGNMENT - 1) // _ROW_ALIGNMENT * _ROW_ALIGNMENT).int()
    rows = max(int(padded.sum()), _ROW_ALIGNMENT)
    a, a_scale = (
        empty(rows, hidden, dtype=torch.float8_e4m3fn),
        empty(rows, hidden // 128, dtype=torch.float32),
    )
    a.zero_(), a_scale.fill_(1.0)
    expert_of_row, place = empty(rows, dtype=torch.int32), empty(total, layer.top_k, dtype=torch.int32)
    start = empty(local, dtype=torch.int32)
    gate_up, inner, slot = empty(rows, 2 * width), empty(rows, width), empty(rows, hidden)
    summed, out = empty(total, hidden), torch.zeros_like(batch.x)
    quantised: list[tuple[torch.Tensor, torch.Tensor]] = []

    def all_gather() -> None:
        q, s = quantise(batch.x, 128)
        dist.all_gather_into_tensor(codes.view(torch.uint8), q.view(torch.uint8), group=group)
        dist.all_gather_into_tensor(scales, s, group=group)
        dist.all_gather_into_tensor(ids, batch.ids, group=group)
        dist.all_gather_into_tensor(routing, batch.weights, group=group)

    def scatter() -> None:
        ep_scatter(codes, scales, mine, padded, counts, start, a, a_scale, expert_of_row, place)

    def gemm1() -> None:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (a, a_scale), (weights.w13, weights.w13_scale), gate_up, expert_of_row
        )

    def activate() -> None:
        silu_and_mul(gate_up, inner)
        quantised[:] = [quantise(inner, 128)]

    def gemm2() -> None:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            quantised[0], (weights.w2, weights.w2_scale), slot, expert_of_row
        )

    def gather() -> None:
        ep_gather(slot, mine, routing, place, summed)

    def reduce_scatter() -> None:
        summed.mul_(ROUTED_SCALING)
        dist.reduce_scatter_tensor(out, summed, group=group)

    steps = (all_gather, scatter, gemm1, activate, gemm2, gather, reduce_scatter)

    def run() -> None:
        for step in steps:
            step()

    def gemms() -> None:
        gemm1()
        gemm2()

    parts: dict[str, Callable[[], None]] = {step.__name__: step for step in steps} | {"gemms": gemms}
    return Arm("gathered", run, out, parts, {"rows": rows, "valid_rows": int(counts.sum())})


def stock(batch: Batch, weights: ExpertWeights, layer: Layer, group: dist.ProcessGroup) -> Arm:
    """SGLang's EP experts as `--moe-runner-backend auto` picks them without an a2a backend: Triton.

    The collectives around them are bf16; ids of other ranks' experts are -1. UPSTREAM: create_moe_runner of
    Fp8MoEMethod, inplace_fused_experts.
    """
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import inplace_fused_experts
    from sglang.srt.runtime_context import get_context

    get_context().override_server_args().install()
    ranks, local = dist.get_world_size(group), weights.num_experts
    rows = torch.empty(batch.padded * ranks, layer.hidden, dtype=torch.bfloat16, device=batch.x.device)
    ids, routing = gather_routing(batch, group)
    mine, out = localised(ids, dist.get_rank(group) * local, local), torch.zeros_like(batch.x)

    def run() -> None:
        dist.all_gather_into_tensor(rows, batch.x, group=group)
        dist.all_gather_into_tensor(routing, batch.weights, group=group)
        inplace_fused_experts(
            rows,
            weights.w13,
            weights.w2,
            routing,
            mine,
            use_fp8_w8a8=True,
            w1_scale=weights.w13_scale,
            w2_scale=weights.w2_scale,
            block_shape=[128, 128],
            routed_scaling_factor=ROUTED_SCALING,
            filter_expert=True,
        )
        dist.reduce_scatter_tensor(out, rows, group=group)

    return Arm("stock", run, out)


def gather_routing(batch: Batch, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights of all ranks' rows, [ranks * padded, K]."""
    ranks = dist.get_world_size(group)
    ids = batch.ids.new_empty((batch.padded * ranks, batch.ids.shape[1]))
    weights = batch.weights.new_empty(ids.shape)
    dist.all_gather_into_tensor(ids, batch.ids, group=group)
    dist.all_gather_into_tensor(weights, batch.weights, group=group)
    return ids, weights


def localised(ids: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Global ids as ids of this rank's experts, other ranks' masked. int32 contiguous."""
    inside = (ids >= first) & (ids < first + count)
    return torch.where(inside, ids - first, MASKED).int().contiguous()


def fp8_peak_tflops(timed: Callable[[Callable[[], None]], float], size: int = 8192) -> float:
    """TFLOP/s of a dense FP8 GEMM of size^3 on this GPU with the pinned library: what shares are of."""
    codes = torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn)
    row_scale = torch.ones(size, size // 128, device="cuda")
    block_scale = torch.ones(size // 128, size // 128, device="cuda")
    out = torch.empty(size, size, dtype=torch.bfloat16, device="cuda")
    ms = timed(lambda: deep_gemm.fp8_gemm_nt((codes, row_scale), (codes, block_scale), out))
    return 2 * size**3 / ms / 1e9
