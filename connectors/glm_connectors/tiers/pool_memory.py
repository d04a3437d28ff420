"""The memory of a CPU pool: LMCache's allocator, huge pages, and what can't be given back."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from typing import Any

logger = logging.getLogger(__name__)

_HUGE = 2 << 20
_KEPT: list[Any] = []  # allocators of pools that were closed with slots in use


def lmcache() -> tuple[Any, Any, Any]:
    """torch, LMCache's allocator class and format, with LMCache repaired, quiet and not phoning home."""
    from glm_connectors import lmcache_repairs

    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
    lmcache_repairs.install()
    import torch
    from lmcache.v1.memory_allocators.pin_memory_allocator import PinMemoryAllocator
    from lmcache.v1.memory_management import MemoryFormat

    return torch, PinMemoryAllocator, MemoryFormat.BINARY_BUFFER


def prefer_huge_pages(buffer: Any) -> None:
    """Has the memory of a tensor that holds nothing yet come in pages of 2 MiB, where the kernel has them to give.

    LMCache touches its memory when it allocates it: it is given back, and comes anew, huge, when it is used. In pages
    of 4 KiB a page's checksum takes a quarter longer, and a get up to half (`python -m benchmarks.store_bandwidth`).
    Pinned memory stays as it is.
    """
    if buffer.is_pinned():
        return
    start = -(-buffer.data_ptr() // _HUGE) * _HUGE
    length = (buffer.data_ptr() + buffer.numel() - start) // _HUGE * _HUGE
    if length <= 0:
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    for advice in (mmap.MADV_DONTNEED, mmap.MADV_HUGEPAGE):
        if madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice):
            logger.info("the CPU pool stays in small pages: %s", os.strerror(ctypes.get_errno()))
            return


def keep(allocator: Any, why: str) -> bool:
    """Keeps the memory for ever, and says why. False: it was not given back."""
    logger.error("the pool's memory stays allocated: %s", why)
    _KEPT.append(allocator)
    return False
