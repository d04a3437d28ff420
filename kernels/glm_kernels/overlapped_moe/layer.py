"""The layer: buffers, streams and the walk through the schedule.

All of it is queued without waiting for the device and can be captured as one CUDA graph. The buffers serve any number
of layers of one geometry in turn; the weights come with the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from glm_kernels.mega_moe import ExpertWeights
from glm_kernels.mega_moe.numerics import E4M3
from glm_kernels.overlapped_moe import rows as reference
from glm_kernels.overlapped_moe.layout import Layout, layout_reference
from glm_kernels.overlapped_moe.plan import Plan
from glm_kernels.overlapped_moe.schedule import Kind, Op, schedule
from glm_kernels.overlapped_moe.transport import Transport

_ANY_GRID = 2**30
_MOST_PROGRAMS = 8  # of 256 threads on an SM; one more would wait, and take the SMs of the next GEMM


@dataclass(frozen=True)
class Options:
    """How a step runs; nothing here changes a result.

    side_sms: SMs left to memory-bound kernels beside a GEMM, even; 0: they take turns with the GEMMs on all SMs.
    step_sms: the same for each GEMM in the schedule's order, as far as it goes; deep_gemm compiles for each number.
    leave_sms: whether the GEMMs leave them (deep_gemm.set_num_sms), or take all SMs and are slowed where both run.
    side_programs: programs an SM of the reducing kernel; the others, of half its registers, have twice as many.
    gate_cycles: how long what a GEMM's end lets go waits for the next GEMM to take its SMs; 0: not at all. order,
    early_finish: see `schedule`.
    """

    side_sms: int = 16
    step_sms: tuple[int, ...] = ()
    leave_sms: bool = True
    side_programs: int = 4
    gate_cycles: int = 6000
    order: str = "peers_second"
    early_finish: bool = False

    def __post_init__(self) -> None:
        if self.side_sms < 0 or self.side_sms % 2:
            raise ValueError(
                f"side_sms is {self.side_sms}; it must be even (GEMM clusters of 2) and not negative"
            )
        if any(sms < 2 or sms % 2 for sms in self.step_sms) or (self.step_sms and not self.side_sms):
            raise ValueError(
                f"step_sms are {self.step_sms}; they must be even, at least 2, and side_sms not 0"
            )
        if not 1 <= self.side_programs <= _MOST_PROGRAMS // 2 or self.gate_cycles < 0:
            raise ValueError(
                f"side_programs must be 1 to {_MOST_PROGRAMS // 2} and gate_cycles not negative, found "
                f"{self.side_programs} and {self.gate_cycles}"
            )

    def sms(self, step: int) -> int:
        """SMs left beside GEMM number `step`."""
        return self.step_sms[step] if step < len(self.step_sms) else self.side_sms


class Backend(Protocol):
    """The device's operations, as in `rows` and `layout`, on so many SMs (None: all). A GEMM leaves `leave` of them."""

    def layout(self, ids: torch.Tensor, out: Layout) -> None: ...
    def quantise(self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None: ...
    def place(self, *tensors: torch.Tensor, sms: int | None) -> None: ...
    def swiglu(self, *tensors: torch.Tensor, sms: int | None) -> None: ...
    def reduce(
        self,
        rows: torch.Tensor,
        place: torch.Tensor,
        weights: torch.Tensor,
        scaling: float,
        partials: torch.Tensor | None,
        out: torch.Tensor,
        *,
        sms: int | None,
    ) -> None: ...
    def gemm(self, *tensors: torch.Tensor, leave: int) -> None: ...
    def on(self, stream: str) -> contextlib.AbstractContextManager[None]: ...
    def fork(self) -> None: ...
    def mark(self, stream: str) -> Any: ...
    def wait(self, stream: str, mark: Any) -> None: ...
    def gate(self) -> None: ...
    def join(self) -> None: ...


class ReferenceBackend:
    """PyTorch on any device, one operation after the other in the schedule's order."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def layout(self, ids: torch.Tensor, out: Layout) -> None:
        layout_reference(ids, self._plan, out)

    def quantise(self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        reference.quantise_reference(x, codes, scales)

    def place(self, *tensors: torch.Tensor, sms: int | None) -> None:
        reference.place_reference(*tensors)

    def swiglu(self, *tensors: torch.Tensor, sms: int | None) -> None:
        reference.swiglu_reference(*tensors)

    def reduce(
        self,
        rows: torch.Tensor,
        place: torch.Tensor,
        weights: torch.Tensor,
        scaling: float,
        partials: torch.Tensor | None,
        out: torch.Tensor,
        *,
        sms: int | None,
    ) -> None:
        reference.reduce_reference(rows, place, weights, scaling, partials, out)

    def gemm(self, *tensors: torch.Tensor, leave: int) -> None:
        reference.grouped_gemm_reference(*tensors)

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        yield

    def fork(self) -> None:
        """Nothing to fork."""

    def mark(self, stream: str) -> None:
        """Order is the host's."""

    def wait(self, stream: str, mark: Any) -> None:
        """Order is the host's."""

    def gate(self) -> None:
        """No SM to compete for."""

    def join(self) -> None:
        """Nothing to join."""


class CudaBackend:
    """Triton kernels, deep_gemm's grouped GEMM, three streams of this object's."""

    def __init__(self, plan: Plan, device: torch.device, options: Options) -> None:
        import deep_gemm

        from glm_kernels.overlapped_moe import row_kernels
        from glm_kernels.overlapped_moe.layout_kernels import LayoutKernels

        self._kernels, self._deep_gemm, self._options = row_kernels, deep_gemm, options
        self._layout = LayoutKernels(plan, device)
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count
        most = max(options.side_sms, *options.step_sms, 0)
        if most >= self._sms:
            raise ValueError(f"side_sms or step_sms is {most}; this GPU has {self._sms} SMs")
        low, high = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
        # The layout's few programs go before the quantisation's many; a GEMM goes before what runs beside it.
        priorities = {"comm": high, "gemm": min(high + 1, low), "side": low}
        self._streams = {
            name: torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
            for name, priority in priorities.items()
        }
        self._caller: torch.cuda.Stream | None = None

    def _grid(self, sms: int | None, light: bool = True) -> int:
        return (sms or self._sms) * self._options.side_programs * (2 if light else 1)

    def layout(self, ids: torch.Tensor, out: Layout) -> None:
        self._layout(ids, out)

    def quantise(self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        # A program a unit: programs that stay would keep the layout's, which run at the same time, waiting.
        self._kernels.quantise(x, codes, scales, grid=_ANY_GRID)

    def place(self, *tensors: torch.Tensor, sms: int | None) -> None:
        self._kernels.place(*tensors, grid=self._grid(sms))

    def swiglu(self, *tensors: torch.Tensor, sms: int | None) -> None:
        self._kernels.swiglu(*tensors, grid=self._grid(sms))

    def reduce(
        self,
        rows: torch.Tensor,
        place: torch.Tensor,
        weights: torch.Tensor,
        scaling: float,
        partials: torch.Tensor | None,
        out: torch.Tensor,
        *,
        sms: int | None,
    ) -> None:
        self._kernels.reduce(rows, place, weights, scaling, partials, out, grid=self._grid(sms, light=False))

    def gemm(self, *tensors: torch.Tensor, leave: int) -> None:
        a, a_scale, w, w_scale, out, expert = tensors
        before = self._deep_gemm.get_num_sms()
        if self._options.leave_sms:
            self._deep_gemm.set_num_sms(self._sms - leave)
        try:
            self._deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, a_scale), (w, w_scale), out, expert)
        finally:
            self._deep_gemm.set_num_sms(before)

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        with torch.cuda.stream(self._streams[stream]):
            yield

    def fork(self) -> None:
        self._caller = torch.cuda.current_stream()
        for stream in self._streams.values():
            stream.wait_stream(self._caller)

    def mark(self, stream: str) -> Any:
        return self._streams[stream].record_event()

    def wait(self, stream: str, mark: Any) -> None:
        self._streams[stream].wait_event(mark)

    def gate(self) -> None:
        if self._options.gate_cycles:
            torch.cuda._sleep(self._options.gate_cycles)  # type: ignore[no-untyped-call]

    def join(self) -> None:
        assert self._caller is not None
        for stream in self._streams.values():
            self._caller.wait_stream(stream)


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
