"""MegaMoE for FP8 GLM-5.x: exact references, weights for SM90 and SM100/SM103, chunk plan, buffer sizes."""

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
