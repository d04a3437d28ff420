"""Weight scales that the SM90 kernel cannot take: zero gives NaN there, and what is not a positive number is no scale.

The kernel keeps a row's sum in units of the current block's scale and divides when it moves to the next block, so a
scale of 0 (or one that fp32 flushes to 0) divides by zero. Such a block's weights are all zero whatever its codes
hold, so it gets zero codes under a scale of its neighbours' size: the same product, exactly.
"""

from __future__ import annotations

import torch

from glm_kernels.mega_moe import numerics

_SMALLEST = torch.finfo(torch.float32).tiny  # below it a scale is subnormal


def mend_zero_scales_(codes: torch.Tensor, scales: torch.Tensor) -> int:
    """Zero codes and a usable scale for every block of `codes` [E, N, K] E4M3 whose scale is 0; returns how many.

    scales: [E, N / 128, K / 128] fp32. A mended block takes the largest scale of its expert, or 1 where all are 0.
    Raises ValueError for a scale that is negative or not finite. One device synchronisation where nothing is to do.
    """
    if bool(((scales >= _SMALLEST) & torch.isfinite(scales)).all()):
        return 0
    wrong = ~torch.isfinite(scales) | (scales < 0)
    if bool(wrong.any()):
        expert = int(wrong.flatten(1).any(1).nonzero()[0])
        raise ValueError(
            f"weight scales of local expert {expert} are negative or not finite, {int(wrong.sum())} of "
            f"{scales.numel()} in this layer; the checkpoint is damaged or was quantised wrongly"
        )
    zero = scales < _SMALLEST
    raw = codes.view(torch.uint8)
    block = numerics.WEIGHT_BLOCK
    for expert, row, column in zero.nonzero().tolist():
        raw[expert, row * block : (row + 1) * block, column * block : (column + 1) * block] = 0
    largest = scales.masked_fill(zero, 0.0).flatten(1).amax(1)
    usable = torch.where(largest > 0, largest, torch.ones_like(largest))
    scales.copy_(torch.where(zero, usable[:, None, None], scales))
    return int(zero.sum())
