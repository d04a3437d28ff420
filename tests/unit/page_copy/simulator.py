"""A device whose streams run in any order that their events allow: what is right here is right whatever the GPU does.

Nothing runs when it is queued. Whoever polls lets some operations run, chosen by a seed; so a copy that lacks an event
reads or writes too early or too late in some of the seeds, and bytes come out wrong.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from glm_kernels.page_copy import CopyTable, Rows, gather_reference, scatter_reference

from glm_sglang.cache.cuda_runtime import Strided
from glm_sglang.cache.slots import numbers_on_device


class SimEvent:
    """As CUDA's: a wait or query refers to the record that came last before it."""

    def __init__(self, device: SimDevice) -> None:
        self._device = device
        self._recorded = 0
        self.reached = 0

    def record(self, stream: Any) -> None:
        self._recorded += 1
        number = self._recorded

        def reach() -> None:
            self.reached = max(self.reached, number)

        stream.put(reach)

    def query(self) -> bool:
        self._device.run_some()
        return self.reached >= self._recorded

    def waiter(self) -> Callable[[], bool]:
        number = self._recorded
        return lambda: self.reached >= number


class SimStream:
    """Operations in order; a wait blocks those behind it."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()

    def put(self, work: Callable[[], None]) -> None:
        self._queue.append((lambda: True, work))

    def wait_event(self, event: Any) -> None:
        self._queue.append((event.waiter(), lambda: None))

    def runnable(self) -> bool:
        return bool(self._queue) and self._queue[0][0]()

    def run_one(self) -> None:
        self._queue.popleft()[1]()

    def __len__(self) -> int:
        return len(self._queue)


class SimDevice:
    """The `Runtime` of the simulator. `queued` counts operations that a thread has queued."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.streams: list[SimStream] = []
        self.current_stream = self._new()
        self.host_waits = 0
        self.copies = self.moved = 0  # queued; run
        self.break_copy_at: int | None = None
        self.paused = False
        self.stuck: set[SimStream] = set()  # streams on which nothing runs
        self.may_not_poll: int | None = None  # a thread that waits for nothing
        self._on = threading.local()
        self._lock = threading.RLock()

    def _new(self) -> SimStream:
        stream = SimStream()
        self.streams.append(stream)
        return stream

    def run_some(self) -> None:
        """Between none and a few operations, of any streams; none while the device is paused."""
        with self._lock:
            for _ in range(0 if self.paused else self._random.choice((0, 1, 2, 5))):
                able = self._able()
                if not able:
                    return
                self._random.choice(able).run_one()

    def run_all(self) -> None:
        """Until nothing is queued. AssertionError where streams wait for each other."""
        with self._lock:
            self.run_what_can()
            assert not any(self.streams), "streams wait for each other"

    def run_what_can(self) -> None:
        """Until nothing that is queued can run."""
        with self._lock:
            while able := self._able():
                self._random.choice(able).run_one()

    def _able(self) -> list[SimStream]:
        return [stream for stream in self.streams if stream not in self.stuck and stream.runnable()]

    def begin_thread(self) -> None:
        """Nothing."""

    def stream(self, *, urgent: bool) -> SimStream:
        return self._new()

    def current(self) -> SimStream:
        stream: SimStream = getattr(self._on, "stream", None) or self.current_stream
        return stream

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self._on.stream = getattr(self._on, "stream", None), stream
        try:
            yield
        finally:
            self._on.stream = before

    def event(self) -> SimEvent:
        return SimEvent(self)

    def staging(self, size: int) -> torch.Tensor:
        # Aligned as the caching allocator's blocks are.
        raw = torch.full((size + 512,), 170, dtype=torch.uint8)
        start = -raw.data_ptr() % 512
        return raw[start : start + size]

    def table(self, rows: Sequence[Rows]) -> CopyTable:
        return CopyTable(rows)

    def numbers(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64)

    def page_numbers(
        self, slots: Sequence[torch.Tensor], page_tokens: int, order: Sequence[int]
    ) -> torch.Tensor:
        numbers = torch.full((len(order),), -1, dtype=torch.int64)  # until then they are no pages
        places = torch.tensor(order, dtype=torch.int64)
        self._put(lambda: numbers.copy_(numbers_on_device(slots, page_tokens)[places]))
        return numbers

    def gather(self, table: CopyTable, pages: torch.Tensor, staging: torch.Tensor) -> None:
        self._put(lambda: gather_reference(table.rows, pages, staging))

    def scatter(self, table: CopyTable, pages: torch.Tensor, staging: torch.Tensor) -> None:
        self._put(lambda: scatter_reference(table.rows, pages, staging))

    def _put(self, work: Callable[[], None]) -> None:
        """On the stream that the calling thread is on."""
        self._on.stream.put(work)

    def copy(self, pieces: Sequence[Strided], *, to_host: bool, stream: Any) -> None:
        for piece in pieces:
            if self.copies == self.break_copy_at:
                raise RuntimeError("the copy engine says no")
            self.copies += 1
            stream.put(lambda piece=piece: self._move(piece, to_host))

    def _move(self, piece: Strided, to_host: bool) -> None:
        _copy(piece, to_host)
        self.moved += 1

    def poll(self, done: Callable[[], bool]) -> None:
        self.host_waits += 1
        assert threading.get_ident() != self.may_not_poll, "this thread waits for the device"
        ends = time.monotonic() + 20
        while not done():
            assert time.monotonic() < ends, "waits for what never comes"
            time.sleep(0.001 if self.paused else 0)


def _copy(piece: Strided, to_host: bool) -> None:
    for row in range(piece.height):
        device = piece.device_address + row * piece.device_pitch
        host = piece.host_address + row * piece.host_pitch
        ctypes.memmove(host if to_host else device, device if to_host else host, piece.width)
