"""What the CUDA copies need of a device, and its implementation by torch, Triton and cuda-bindings.

A test puts a simulator in this place, which runs streams in any order that their events allow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from glm_kernels.page_copy import CopyTable, Rows, gather, scatter

from glm_sglang.cache.slots import numbers_on_device
from glm_sglang.errors import UsageError

# Between two questions to an event: an eighth of the time waited so far, within these bounds. A block of 64 MiB takes
# 1.2 ms over PCIe 5, a forward 100 and more; each question takes the interpreter lock from the forward's thread.
_POLL_S, _POLL_MOST_S = 50e-6, 500e-6


class Event(Protocol):
    """torch.cuda.Event."""

    def record(self, stream: Any) -> None: ...
    def query(self) -> bool: ...


class Stream(Protocol):
    """torch.cuda.Stream."""

    def wait_event(self, event: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Strided:
    """`height` pieces of `width` bytes, `device_pitch` and `host_pitch` bytes apart."""

    device_address: int
    device_pitch: int
    host_address: int
    host_pitch: int
    width: int
    height: int


class Runtime(Protocol):
    """Nothing here waits for the device, `table` excepted."""

    def begin_thread(self) -> None:
        """Called on the save and load threads before they do anything else; cheap, and again and again."""

    def stream(self, *, urgent: bool) -> Stream:
        """A new stream, of high priority where urgent."""

    def current(self) -> Stream:
        """The calling thread's current stream."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Within it, the calling thread's current stream is this one: entered once for many calls."""

    def event(self) -> Event:
        """A new event."""

    def staging(self, size: int) -> torch.Tensor:
        """uint8 [size] on the device; it lives as long as it is referred to."""

    def table(self, rows: Sequence[Rows]) -> CopyTable:
        """The copy table of these buffers."""

    # Only within `on`, on its stream:

    def numbers(self, values: Sequence[int]) -> torch.Tensor:
        """Page numbers, int64, for kernels."""

    def page_numbers(
        self, slots: Sequence[torch.Tensor], page_tokens: int, order: Sequence[int]
    ) -> torch.Tensor:
        """Of the pages whose slots these are (`slots.numbers_on_device`), that of page order[i] at place i; int64, for
        kernels. The slots are read in the stream's order, and may be let go as soon as this returns.
        """

    def gather(self, table: CopyTable, pages: torch.Tensor, staging: torch.Tensor) -> None:
        """Pool → staging."""

    def scatter(self, table: CopyTable, pages: torch.Tensor, staging: torch.Tensor) -> None:
        """Staging → pool."""

    # Only within `on`, of any stream; on the one that is given:

    def copy(self, pieces: Sequence[Strided], *, to_host: bool, stream: Stream) -> None:
        """Between device and pinned host memory."""

    def poll(self, done: Callable[[], bool]) -> None:
        """Returns once `done()` is true. Sleeps meanwhile: no spinning, no CUDA wait."""


def cuda_bindings() -> Any:
    """cuda.bindings.runtime. UsageError where it is missing; torch asks for it on Linux."""
    try:
        from cuda.bindings import runtime  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError(
            f"the cache on a GPU needs the package cuda-bindings ({error}); install the gpu lock, or leave "
            "--glm-cache-url out"
        ) from None
    return runtime


def leave_captures_alone(bindings: Any) -> None:
    """For a thread of ours: while another captures a CUDA graph, calls of this one neither fail nor end the capture.

    SGLang captures with the mode "global", in which event queries and host registrations of any thread do.
    """
    (error, _) = bindings.cudaThreadExchangeStreamCaptureMode(
        bindings.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    )
    if error.value:
        raise RuntimeError(f"cudaThreadExchangeStreamCaptureMode: {error.name}")


class CudaRuntime:
    """One GPU. Any thread. Raises UsageError where cuda-bindings is missing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._bindings = runtime = cuda_bindings()
        self._copy = runtime.cudaMemcpy2DAsync
        self._forget_error = runtime.cudaGetLastError
        self._kinds = {
            True: runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost,
            False: runtime.cudaMemcpyKind.cudaMemcpyHostToDevice,
        }
        self._cuda: Any = torch.cuda
        self._threads = threading.local()

    def begin_thread(self) -> None:
        if not getattr(self._threads, "begun", False):
            # First: a new thread's device is GPU 0, on which the calls that follow would make a context.
            self._cuda.set_device(self.device)
            leave_captures_alone(self._bindings)
            self._threads.begun = True

    def stream(self, *, urgent: bool) -> Stream:
        stream: Stream = self._cuda.Stream(self.device, priority=-1 if urgent else 0)
        return stream

    def current(self) -> Stream:
        stream: Stream = self._cuda.current_stream(self.device)
        return stream

    def on(self, stream: Any) -> AbstractContextManager[object]:
        # The stream's device too, or cuda-bindings would make a context on GPU 0.
        context: AbstractContextManager[object] = self._cuda.stream(stream)
        return context

    def event(self) -> Event:
        event: Event = self._cuda.Event()
        return event

    def staging(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def table(self, rows: Sequence[Rows]) -> CopyTable:
        return CopyTable(rows)

    def numbers(self, values: Sequence[int]) -> torch.Tensor:
        # Allocated, used and freed in the order of the stream; torch keeps the pinned block until it was read.
        host = torch.tensor(values, dtype=torch.int64, pin_memory=True)
        return host.to(self.device, non_blocking=True)

    def page_numbers(
        self, slots: Sequence[torch.Tensor], page_tokens: int, order: Sequence[int]
    ) -> torch.Tensor:
        stream: Any = self.current()
        for one in slots:  # allocated on another stream, which would give them away while this one reads them
            one.record_stream(stream)
        return numbers_on_device(slots, page_tokens).index_select(0, self.numbers(order))

    def gather(self, table: CopyTable, pages: torch.Tensor, staging: torch.Tensor) -> None:
        gather(table, pages, staging)

    def scatter(self, table: CopyTable, pages: torch.Tensor, staging: torch.Tensor) -> None:
        scatter(table, pages, staging)

    def copy(self, pieces: Sequence[Strided], *, to_host: bool, stream: Any) -> None:
        kind, handle = self._kinds[to_host], stream.cuda_stream
        for piece in pieces:
            device, host = (
                (piece.device_address, piece.device_pitch),
                (piece.host_address, piece.host_pitch),
            )
            target, source = (host, device) if to_host else (device, host)
            (error,) = self._copy(*target, *source, piece.width, piece.height, kind, handle)
            if error.value:
                self._forget_error()  # or the next launch of somebody else reports it
                raise RuntimeError(f"cudaMemcpy2DAsync: {error.name} for {piece}")

    def poll(self, done: Callable[[], bool]) -> None:
        began = time.perf_counter()
        while not done():
            time.sleep(min(max(_POLL_S, (time.perf_counter() - began) / 8), _POLL_MOST_S))
