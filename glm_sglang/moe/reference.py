"""What SGLang's code for padded batches needs on the reference platform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def sync_batch(original: Callable[..., None], batch: Any, *args: Any, **kwargs: Any) -> None:
    """Around ForwardBatch.prepare_mlp_sync_batch. UPSTREAM: it pins memory unless `_is_cpu`, which means SGLang's own CPU
    engine and not a platform without CUDA.
    """
    from sglang.srt.model_executor import forward_batch_info

    asked = forward_batch_info._is_cpu
    forward_batch_info._is_cpu = True
    try:
        original(batch, *args, **kwargs)
    finally:
        forward_batch_info._is_cpu = asked


def reduce_scatter_tensor(group: Any, output: torch.Tensor, input: torch.Tensor) -> None:
    """For GroupCoordinator.reduce_scatter_tensor: each rank's rows of the sum over gloo; output [n, …], input [ranks · n,
    …].
    """
    torch.distributed.reduce_scatter_single(output, input.contiguous(), group=group.device_group)


def all_gather_into_tensor(group: Any, output: torch.Tensor, input: torch.Tensor) -> None:
    """For GroupCoordinator.all_gather_into_tensor: every rank's rows, in rank order, over gloo."""
    torch.distributed.all_gather_single(output, input.contiguous(), group=group.device_group)
