"""What the CUDA copies need of a device, and its implementation by torch, Triton and cuda-bindings.

A test puts a simulator in this place, which runs streams in any order that their events allow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from glm_kernels.page_copy import CopyTable, Rows, gather, pull, scatter

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

    def event(self) -> Event:
        """A new event."""

    def staging(self, size: int) -> torch.Tensor:
        """uint8 [size] on the device; it lives as long as it is referred to."""

    def table(self, rows: Sequence[Rows]) -> CopyTable:
        """The copy table of these buffers."""

    def numbers(self, values: Sequence[int], stream: Stream) -> torch.Tensor:
        """Page numbers, int64, for kernels on `stream`."""

    def page_numbers(
        self, slots: Sequence[torch.Tensor], page_tokens: int, order: Sequence[int], stream: Stream
    ) -> torch.Tensor:
        """Of the pages whose slots these are (`slots.numbers_on_device`), that of page order[i] at place i; int64, for
        kernels on `stream`, in whose order the slots are read. They may be let go as soon as this returns.
        """

    def gather(self, table: CopyTable, pages: torch.Tensor, staging: torch.Tensor, stream: Stream) -> None:
        """Pool → staging."""

    def scatter(self, table: CopyTable, pages: torch.Tensor, staging: torch.Tensor, stream: Stream) -> None:
        """Staging → pool."""

    def reads_host(self) -> bool:
        """Whether kernels can read pinned memory by the host's own addresses."""

    def pull(self, table: CopyTable, hosts: torch.Tensor, pages: torch.Tensor, stream: Stream) -> None:
        """Pinned host pages at these addresses → pool."""

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

    def event(self) -> Event:
        event: Event = self._cuda.Event()
        return event

    def staging(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def table(self, rows: Sequence[Rows]) -> CopyTable:
        return CopyTable(rows)

    def numbers(self, values: Sequence[int], stream: Stream) -> torch.Tensor:
        # Allocated, used and freed in the order of `stream`; torch keeps the pinned block until it was read.
        with self._cuda.stream(stream):
            host = torch.tensor(values, dtype=torch.int64, pin_memory=True)
            return host.to(self.device, non_blocking=True)

    def page_numbers(
        self, slots: Sequence[torch.Tensor], page_tokens: int, order: Sequence[int], stream: Any
    ) -> torch.Tensor:
        places = self.numbers(order, stream)
        with self._cuda.stream(stream):
            for (
                one
            ) in slots:  # allocated on another stream, which would give them away while this one reads them
                one.record_stream(stream)
            return numbers_on_device(slots, page_tokens).index_select(0, places)

    def gather(self, table: CopyTable, pages: torch.Tensor, staging: torch.Tensor, stream: Stream) -> None:
        with self._cuda.stream(stream):
            gather(table, pages, staging)

    def scatter(self, table: CopyTable, pages: torch.Tensor, staging: torch.Tensor, stream: Stream) -> None:
        with self._cuda.stream(stream):
            scatter(table, pages, staging)

    def reads_host(self) -> bool:
        # What cudaHostAlloc gives is read so anyway; what cudaHostRegister has pinned, where the device says so.
        attribute = self._bindings.cudaDeviceAttr.cudaDevAttrCanUseHostPointerForRegisteredMem
        error, value = self._bindings.cudaDeviceGetAttribute(attribute, self.device.index or 0)
        if error.value:
            raise RuntimeError(f"cudaDeviceGetAttribute: {error.name}")
        return bool(value)

    def pull(self, table: CopyTable, hosts: torch.Tensor, pages: torch.Tensor, stream: Stream) -> None:
        with self._cuda.stream(stream):
            pull(table, hosts, pages)

    def copy(self, pieces: Sequence[Strided], *, to_host: bool, stream: Any) -> None:
        kind = self._kinds[to_host]
        with self._cuda.device(
            self.device
        ):  # this thread's context, or cuda-bindings would make one on GPU 0
            for piece in pieces:
                device, host = (
                    (piece.device_address, piece.device_pitch),
                    (piece.host_address, piece.host_pitch),
                )
                target, source = (host, device) if to_host else (device, host)
                (error,) = self._copy(*target, *source, piece.width, piece.height, kind, stream.cuda_stream)
                if error.value:
                    self._forget_error()  # or the next launch of somebody else reports it
                    raise RuntimeError(f"cudaMemcpy2DAsync: {error.name} for {piece}")

    def poll(self, done: Callable[[], bool]) -> None:
        began = time.perf_counter()
        while not done():
            time.sleep(min(max(_POLL_S, (time.perf_counter() - began) / 8), _POLL_MOST_S))
