"""A CUDA graph on the CPU: what PyTorch runs while it captures is recorded, and runs again at every replay.

As on a GPU, an operation keeps the memory and the sizes of its capture, and Python between operations does not run
again; so whatever a step puts elsewhere than into the captured memory, or in another size, is not seen. And the
memory is the graphs': a block is a tensor's until the last reference to it is gone, and then the next one's. A graph
keeps addresses, not tensors.
"""

from __future__ import annotations

import contextlib
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# As integers huge, as floating-point numbers not numbers (in FP8, bfloat16) or so large that a square overflows.
POISON = 0x7F
LEAST = 512  # bytes of a block; blocks are powers of two, so that tensors of other sizes get them, too


class Pool:
    """Memory that every graph of this process shares. The block that was freed last is given out first."""

    def __init__(self) -> None:
        self.blocks: dict[int, np.ndarray] = {}  # by address
        self.free: dict[int, list[np.ndarray]] = {}  # by size

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values in this pool's memory; the block is the result's and its views'."""
        size = max(LEAST, 1 << (tensor.untyped_storage().nbytes() - 1).bit_length())
        free = self.free.setdefault(size, [])
        block = free.pop() if free else np.full(size, POISON, dtype=np.uint8)
        self.blocks[block.ctypes.data] = block
        owner = block[:]  # torch lets go of it with the last tensor
        weakref.finalize(owner, free.append, block)
        found = _like(torch.from_numpy(owner), tensor)
        found.copy_(tensor)
        return found

    def weak(self, value: Any) -> Any:
        """A tensor of this pool without the ownership, as sgl_kernel's weak_ref_tensor; anything else as it is."""
        if isinstance(value, torch.Tensor) and (block := self.blocks.get(address(value))) is not None:
            return _like(torch.from_numpy(block), value)
        return value

    def tensors_in(self, value: Any) -> list[torch.Tensor]:
        """This pool's tensors in an argument."""
        leaves = tree_leaves(value)
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and address(leaf) in self.blocks]

    def poison(self) -> None:
        """Leave in every block that nobody owns what other layers' and buckets' replays might."""
        for blocks in self.free.values():
            for block in blocks:
                block.fill(POISON)


def address(tensor: torch.Tensor) -> int:
    """Of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def _like(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return memory.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


POOL = Pool()


class _Record(TorchDispatchMode):
    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a capture reads a value back to the host")
        given = {address(value) for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}

        def place(value: Any) -> Any:
            made = isinstance(value, torch.Tensor) and value.numel() and address(value) not in given
            return POOL.adopt(value) if made else value

        out = tree_map(place, func(*args, **(kwargs or {})))
        if not func.is_view and "empty" not in func.__name__:  # which run nothing on a GPU
            self.calls.append((func, *(tree_map(POOL.weak, value) for value in (args, kwargs or {}, out))))
        return out


class RecordedGraph:
    """In place of torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.calls: list[Any] = []

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.mode = _Record(self.calls)
        self.mode.__enter__()

    def capture_end(self) -> None:
        self.mode.__exit__(None, None, None)
        del self.mode

    def instantiate(self) -> None:
        return

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                # Operations in place have written where they should; the rest goes where it went.
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Stream:
    """In place of torch.cuda.Stream: one order for everything."""

    stream_id = 0

    def wait_stream(self, other: object) -> None:
        return


def install() -> None:
    """Put it beneath SGLang's breakable graph, in this process, for good."""
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
        breakable_cuda_graph as module,
    )

    stream = Stream()
    torch.cuda.CUDAGraph = RecordedGraph  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda *_: stream  # type: ignore[assignment]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    device = SimpleNamespace(
        Stream=Stream, current_stream=lambda *_: stream, stream=lambda _: contextlib.nullcontext()
    )
    module.get_device_module = lambda: device
    # SGLang's leaves a CPU's tensors as they are.
    module._weak_ref_if_tensor = lambda value: tree_map(POOL.weak, value)
