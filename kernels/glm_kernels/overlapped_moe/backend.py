"""How a step runs: its options, and the device's operations and streams, on a GPU or in PyTorch anywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from glm_kernels.overlapped_moe import rows as reference
from glm_kernels.overlapped_moe.layout import Layout, layout_reference
from glm_kernels.overlapped_moe.plan import Plan

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
