"""The layer: buffers and the walk through the schedule.

All of it is queued without waiting for the device and can be captured as one CUDA graph. The buffers serve any number
of layers of one geometry in turn; the weights come with the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from glm_kernels.mega_moe import ExpertWeights
from glm_kernels.mega_moe.numerics import E4M3
from glm_kernels.overlapped_moe import rows as reference
from glm_kernels.overlapped_moe.backend import Backend, Options
from glm_kernels.overlapped_moe.layout import Layout
from glm_kernels.overlapped_moe.plan import Plan
from glm_kernels.overlapped_moe.schedule import Kind, Op, schedule
from glm_kernels.overlapped_moe.transport import Transport


class OverlappedMoe:
    """Buffers for one plan, and `__call__`: the layer's sum over all ranks' experts for this rank's tokens.

    transport: of the plan's geometry; scaling: routed_scaling_factor, applied with the routing weights in the sums.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        backend: Backend,
        *,
        scaling: float,
        options: Options | None = None,
    ) -> None:
        self.plan, self.transport, self.backend, self.scaling = plan, transport, backend, scaling
        self.options = options or Options()
        of, device = plan.geometry, transport.ids.device
        self.ops = schedule(
            plan,
            order=self.options.order,
            overlap=self.options.side_sms > 0,
            push=transport.pushes,
            early_finish=self.options.early_finish,
        )
        self.layout = Layout.empty(plan, device)
        self._table = reference.scale_table(plan, of.hidden // 128).to(device)

        # Row buffers: owned here, as long as the graphs that captured a call. Rows without a pair are never read, but
        # zeros cost the tensor cores less power than what happens to be there.
        def rows(width: int, dtype: torch.dtype) -> torch.Tensor:
            made = torch.empty((plan.rows, width), dtype=dtype, device=device)
            made.view(torch.uint8).zero_()
            return made

        self._a, self._inner = rows(of.hidden, E4M3), rows(of.intermediate, E4M3)
        self._gate_up = rows(2 * of.intermediate, torch.bfloat16)
        self._slots = rows(of.hidden, torch.bfloat16)
        self._a_scale = torch.ones(plan.rows * of.hidden // 128, device=device)
        self._inner_scale = torch.ones(plan.rows * of.intermediate // 128, device=device)

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: ExpertWeights,
        out: torch.Tensor,
    ) -> None:
        """x [n, H] bf16, ids [n, K] int32 global (-1: masked), weights [n, K] fp32 -> out [n, H] bf16; n <= T.

        Every rank calls, in the same order, with n of 0 too. Raises ValueError for shapes that don't fit. Under an
        exact plan, look at `layout.overflow` when the routing may be another than the plan's.
        """
        self._check(x, ids, weights, experts, out)
        backend, marks = self.backend, list[Any]()
        backend.fork()
        for op in self.ops:
            with backend.on(op.stream):
                for position in op.after:
                    if self.ops[position].stream != op.stream:
                        backend.wait(op.stream, marks[position])
                if op.gated:
                    backend.gate()
                self.do(op, x, ids, weights, experts, out)
            marks.append(backend.mark(op.stream))
        backend.join()

    def do(
        self,
        op: Op,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: ExpertWeights,
        out: torch.Tensor,
    ) -> None:
        """One operation, on the current stream."""
        transport, i = self.transport, op.index
        beside = self.options.sms(op.step)
        sms = None if op.wide else beside
        simple: dict[Kind, Callable[[], None]] = {
            Kind.ROUTING: lambda: transport.publish(ids, weights),
            Kind.QUANTISE: lambda: self.backend.quantise(
                x, transport.codes[0][: len(x)], transport.scales[0][: len(x)]
            ),
            Kind.LAYOUT: lambda: self.backend.layout(transport.ids, self.layout),
            Kind.ANNOUNCE: transport.announce,
            Kind.PULL: lambda: transport.pull(i),
            Kind.PLACE: lambda: self._place(i, sms),
            Kind.GEMM1: lambda: self._gemm1(i, experts, beside),
            Kind.SWIGLU: lambda: self._swiglu(i, sms),
            Kind.GEMM2: lambda: self._gemm2(i, experts, beside),
            Kind.REDUCE: lambda: self._reduce(i, None, sms),
            Kind.PUSH: lambda: transport.push(self.plan.sources[i].peer),
            Kind.MEET: transport.meet,
            Kind.FINISH: lambda: self._reduce(i, out, sms),
        }
        simple[op.kind]()

    def _place(self, source: int, sms: int | None) -> None:
        of, transport = self.plan.sources[source], self.transport
        tokens = slice(of.start, of.stop)
        self.backend.place(
            transport.codes[of.peer][tokens],
            transport.scales[of.peer][tokens],
            self.layout.place[of.peer, tokens],
            self._a,
            self._a_scale,
            self._table,
            sms=sms,
        )

    def _gemm1(self, chunk: int, experts: ExpertWeights, leave: int) -> None:
        assert experts.w13_scale is not None
        rows, scales = self._part(chunk, self._a_scale, self.plan.geometry.hidden)
        self.backend.gemm(
            self._a[rows],
            scales,
            experts.w13,
            experts.w13_scale,
            self._gate_up[rows],
            self.layout.expert[rows],
            leave=leave,
        )

    def _swiglu(self, chunk: int, sms: int | None) -> None:
        rows, scales = self._part(chunk, self._inner_scale, self.plan.geometry.intermediate)
        self.backend.swiglu(self._gate_up[rows], self.layout.expert[rows], self._inner[rows], scales, sms=sms)

    def _gemm2(self, chunk: int, experts: ExpertWeights, leave: int) -> None:
        assert experts.w2_scale is not None
        rows, scales = self._part(chunk, self._inner_scale, self.plan.geometry.intermediate)
        self.backend.gemm(
            self._inner[rows],
            scales,
            experts.w2,
            experts.w2_scale,
            self._slots[rows],
            self.layout.expert[rows],
            leave=leave,
        )

    def _part(self, chunk: int, flat: torch.Tensor, width: int) -> tuple[slice, torch.Tensor]:
        of = self.plan.chunks[chunk]
        return slice(of.start, of.start + of.rows), reference.chunk_scales(flat, of, width // 128)

    def _reduce(self, source: int, out: torch.Tensor | None, sms: int | None) -> None:
        of, transport = self.plan.sources[source], self.transport
        tokens = slice(of.start, of.stop)
        partials = None
        if out is None:
            target = transport.outbox[of.peer - 1][tokens]
        else:
            # A caller with fewer rows than the plan's tokens has no use for the rest.
            tokens = slice(min(of.start, len(out)), min(of.stop, len(out)))
            target = out[tokens]
            partials = transport.partials[:, tokens] if len(transport.partials) else None
        self.backend.reduce(
            self._slots,
            self.layout.place[of.peer, tokens],
            transport.weights[of.peer, tokens],
            self.scaling,
            partials,
            target,
            sms=sms,
        )

    def _check(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: ExpertWeights,
        out: torch.Tensor,
    ) -> None:
        of = self.plan.geometry
        rows = x.shape[0]
        for name, tensor, shape, dtype in (
            ("x", x, (rows, of.hidden), torch.bfloat16),
            ("ids", ids, (rows, of.top_k), torch.int32),
            ("weights", weights, (rows, of.top_k), torch.float32),
            ("out", out, (rows, of.hidden), torch.bfloat16),
        ):
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected contiguous {dtype} {shape}"
                )
        if rows > of.tokens:
            raise ValueError(f"{rows} rows; this plan takes {of.tokens} tokens a rank")
        found = (experts.num_experts, experts.hidden, experts.intermediate)
        if found != (of.experts, of.hidden, of.intermediate) or experts.w13_scale is None:
            raise ValueError(
                f"experts, hidden and intermediate are {found}; the plan has "
                f"{(of.experts, of.hidden, of.intermediate)}, in E4M3 with fp32 scales over 128 x 128"
            )
