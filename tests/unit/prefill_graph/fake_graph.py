"""A device for SGLang's breakable graph on a CPU: a caching pool that reuses freed blocks, graphs that record and replay.

SGLang's own module runs on it unchanged; what is replaced is `torch.cuda` beneath it. A block belongs to whoever
allocated it until the last Python reference to that tensor is gone, as in PyTorch's allocator; the next allocation
takes the block that was freed last.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest


class Pool:
    """Memory of equal blocks, each a list of cells."""

    def __init__(self, cells: int = 4) -> None:
        self.cells = cells
        self.memory: list[list[int]] = []
        self.free: list[int] = []
        self.recording: FakeGraph | None = None

    def empty(self) -> FakeTensor:
        """A tensor with whatever its block held before."""
        if not self.free:
            self.memory.append([0] * self.cells)
            self.free.append(len(self.memory) - 1)
        block = self.free.pop()
        owner = _Owner()
        weakref.finalize(owner, self.free.append, block)
        return FakeTensor(self, block, owner)

    def run(self, kernel: Callable[[], None]) -> None:
        """A kernel: recorded while a graph captures, run else."""
        if self.recording is None:
            kernel()
        else:
            self.recording.kernels.append(kernel)


class _Owner:
    """What keeps a block allocated."""


class FakeTensor:
    """A view of a block; `owner` None for a weak one."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, pool: Pool, block: int, owner: _Owner | None) -> None:
        self.pool, self.block, self.owner = pool, block, owner

    def numel(self) -> int:
        return self.pool.cells

    @property
    def values(self) -> list[int]:
        return self.pool.memory[self.block]

    def weak(self) -> FakeTensor:
        """As sgl_kernel's weak_ref_tensor: the address without the ownership."""
        return FakeTensor(self.pool, self.block, None)

    def fill(self, cells: slice, value: int) -> None:
        """A kernel that writes these cells; like a real one it knows the address, not the tensor."""
        memory, block = self.pool.memory, self.block
        width = len(range(*cells.indices(self.pool.cells)))
        self.pool.run(lambda: memory[block].__setitem__(cells, [value] * width))


class FakeGraph:
    """In place of torch.cuda.CUDAGraph."""

    pool: Pool  # set by `install`

    def __init__(self, keep_graph: bool = False) -> None:
        self.kernels: list[Callable[[], None]] = []

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert self.pool.recording is None
        self.pool.recording = self

    def capture_end(self) -> None:
        assert self.pool.recording is self
        self.pool.recording = None

    def instantiate(self) -> None:
        return

    def replay(self) -> None:
        assert self.pool.recording is None
        for kernel in self.kernels:
            kernel()


class _Stream:
    stream_id = 0

    def wait_stream(self, other: object) -> None:
        return


def install(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Pool]:
    """SGLang's breakable_cuda_graph module on a fresh pool."""
    import sys

    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
        breakable_cuda_graph as module,
    )

    pool = Pool()
    graph = type("Graph", (FakeGraph,), {"pool": pool})
    stream = _Stream()
    monkeypatch.setattr(
        module,
        "torch",
        SimpleNamespace(
            is_tensor=lambda value: isinstance(value, FakeTensor), cuda=SimpleNamespace(CUDAGraph=graph)
        ),
    )
    device = SimpleNamespace(
        Stream=_Stream, current_stream=lambda *_: stream, stream=lambda _: contextlib.nullcontext()
    )
    monkeypatch.setattr(module, "get_device_module", lambda: device)
    name = "sglang.srt.model_executor.runner_backend_utils.weak_ref_tensor"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(weak_ref_tensors=lambda tensor: tensor.weak()))
    return module, pool


@contextlib.contextmanager
def captured(module: Any) -> Iterator[Any]:
    """Capture what runs inside as one bucket; yields its graph."""
    graph = module.BreakableCUDAGraph()
    with module.BreakableCUDAGraphCapture(graph):
        yield graph
