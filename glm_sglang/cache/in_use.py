"""The linker of this process, for hooks that must know whether there is one. Imports nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glm_sglang.cache.linker import GlmCacheLinker

_linker: GlmCacheLinker | None = None


def in_use() -> GlmCacheLinker | None:
    """The linker that this process's scheduler has built; None without a cache, and in other processes."""
    return _linker


def set_in_use(linker: GlmCacheLinker | None) -> None:
    """For the linker's constructor and its `close`."""
    global _linker
    _linker = linker
