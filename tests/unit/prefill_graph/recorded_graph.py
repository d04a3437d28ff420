"""A CUDA graph on the CPU: what PyTorch runs while it captures is recorded, and runs again at every replay.

As on a GPU, an operation keeps the memory and the sizes of its capture, and Python between operations does not run
again; so whatever a step puts elsewhere than into the captured memory, or in another size, is not seen.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Record(TorchDispatchMode):
    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a capture reads a value back to the host")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
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

    def instantiate(self) -> None:
        return

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                # Views and operations in place have written where they should; the rest goes where it went.
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
