"""MegaMoE for FP8 GLM-5.x: exact references, weights for SM90 and SM100/SM103, chunk plan, buffer sizes.

Names load on first use: a launcher plans chunks and judges shapes without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm_kernels.mega_moe.chunks import ChunkPlan, buffer_capacity, plan_chunks, plan_for_ranks
    from glm_kernels.mega_moe.experts import Arithmetic, ExpertWeights
    from glm_kernels.mega_moe.numerics import calc_diff
    from glm_kernels.mega_moe.reference import MASKED, mega_moe_reference

__all__ = [
    "MASKED",
    "Arithmetic",
    "ChunkPlan",
    "ExpertWeights",
    "buffer_capacity",
    "calc_diff",
    "mega_moe_reference",
    "plan_chunks",
    "plan_for_ranks",
]

_MODULES = {
    "MASKED": "reference",
    "Arithmetic": "experts",
    "ChunkPlan": "chunks",
    "ExpertWeights": "experts",
    "buffer_capacity": "chunks",
    "calc_diff": "numerics",
    "mega_moe_reference": "reference",
    "plan_chunks": "chunks",
    "plan_for_ranks": "chunks",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
