"""NIXL descriptors for pools that lie in host memory.

SGLang names NIXL's memory kind VRAM wherever a KV or state buffer is registered, described or prepared for transfer.
On the reference platform those buffers are host memory, which NIXL and UCX know as DRAM; everything else about the
transfer (page indices, strided descriptors, notifications, aux data) is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def as_host_memory(kind: Any) -> Any:
    """`VRAM` → `DRAM`; anything else as it is."""
    return "DRAM" if kind == "VRAM" else kind


def descriptors(
    agent: Any, rows: Any, mem_type: Any = None, *rest: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before nixl_agent.register_memory and get_xfer_descs: (rows, mem_type, …)."""
    return (agent, rows, as_host_memory(mem_type), *rest), kwargs


def prepared_descriptors(
    agent: Any, agent_name: str, rows: Any, mem_type: Any = None, *rest: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before nixl_agent.prep_xfer_dlist: (agent_name, rows, mem_type, …)."""
    return (agent, agent_name, rows, as_host_memory(mem_type), *rest), kwargs


def host_register(buffer: Any, registration_granularity_bytes: int | None = None) -> None:
    """For _cuda_host_register: pinning is a CUDA notion; without CUDA, host memory is ready as allocated."""


def send_cached_prefix(original: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Around maybe_send_cached_prefix_chunk: sends a cached prefix early without an event to wait for."""
    overlap = scheduler.enable_overlap
    scheduler.enable_overlap = False
    try:
        original(scheduler, *args, **kwargs)
    finally:
        scheduler.enable_overlap = overlap
