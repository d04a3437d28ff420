"""Compiles the kernel's variants at start. UPSTREAM: deep_gemm compiles at first use, and meanwhile its peers spin in the
kernel that this rank has not launched yet; which variant runs depends on the call's `num_tokens_bound`.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from glm_sglang.moe.kernels import Rows
from glm_sglang.moe.layer import RoutedExperts

logger = logging.getLogger(__name__)


def bounds(capacity: int) -> list[int]:
    """Powers of two below the capacity, and the capacity: the kernel's tile follows a call's order of magnitude."""
    found = [1 << exponent for exponent in range(capacity.bit_length()) if 1 << exponent < capacity]
    return [*found, capacity]


def compile_kernels(routed: RoutedExperts, experts: Any) -> None:
    """Calls the kernel without rows at each bound, on every rank alike; `experts` is any layer's.

    Waits for the device.
    """
    began = time.perf_counter()
    buffer = routed.kernel.buffer  # type: ignore[attr-defined]
    hidden, top_k = buffer.hidden, buffer.num_topk
    for bound in bounds(routed.capacity):
        rows = Rows(
            torch.empty((0, hidden), dtype=torch.bfloat16, device="cuda"),
            torch.empty((0, top_k), dtype=torch.int32, device="cuda"),
            torch.empty((0, top_k), dtype=torch.float32, device="cuda"),
        )
        routed.kernel(experts, rows, rows.x, bound=bound, scaling=1.0, clamp=None)
        torch.cuda.synchronize()
    logger.info("MegaMoE: kernels ready after %.1f s", time.perf_counter() - began)
