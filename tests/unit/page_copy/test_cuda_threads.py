"""The cache's threads beside a GPU that is not the first: every call of theirs finds the thread on its own device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm_sglang.cache import cuda_pinned, cuda_runtime


class Calls:
    """cuda.bindings.runtime as far as a thread's beginning goes, and the order in which it was called."""

    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeRelaxed="relaxed")
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDeviceToHost=2, cudaMemcpyHostToDevice=1)
    cudaMemcpy2DAsync = cudaGetLastError = None

    def __init__(self) -> None:
        self.made: list[Any] = []

    def cudaThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[Any, str]:
        self.made.append(mode)
        return SimpleNamespace(value=0), "global"

    def cudaDeviceGetPCIBusId(self, size: int, device: int) -> tuple[Any, bytes]:
        return SimpleNamespace(value=0), b"ffff:ff:1f.7\0"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    monkeypatch.setattr(torch.cuda, "set_device", made.made.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for module in (cuda_runtime, cuda_pinned):
        monkeypatch.setattr(module, "cuda_bindings", lambda: made)
    return made


DEVICE = torch.device("cuda", 1)


def test_copying_threads(calls: Calls) -> None:
    runtime = cuda_runtime.CudaRuntime(DEVICE)
    runtime.begin_thread()
    runtime.begin_thread()
    assert calls.made == [DEVICE, "relaxed"]


def test_the_pinning_thread(calls: Calls) -> None:
    cuda_pinned.CudaPinner(DEVICE).begin()
    assert calls.made == [DEVICE, "relaxed"]
