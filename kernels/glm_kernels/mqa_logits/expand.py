"""Compressed MQA logits moved, in place, to the columns that SGLang reads.

DeepGEMM 0.2.5 writes the score of key s for row t at column s − starts[t]; SGLang 0.5.23 reads it at column s. A row
whose range starts at key 0 (every row of a batch with one request) is right already and is not touched.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _shift_right(logits, starts, ends, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # One program owns a row. It moves blocks from the right end to the left, so that no block is written over before it
    # was read; the barriers keep one warp's stores behind every warp's loads of the same block.
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + row)
    if start > 0:
        length = tl.load(ends + row) - start
        base = logits + row * stride
        blocks = tl.cdiv(length, BLOCK)
        for i in range(blocks):
            columns = (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
            inside = columns < length
            values = tl.load(base + columns, mask=inside)
            tl.debug_barrier()
            tl.store(base + start + columns, values, mask=inside)
            tl.debug_barrier()


def expand_(logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """logits [rows, keys] fp32 on CUDA, unit stride in a row; starts, ends [rows] int32, 0 ≤ start ≤ end ≤ keys.

    Afterwards columns starts[t] … ends[t] − 1 of row t hold what columns 0 … ends[t] − starts[t] − 1 held; the others are
    undefined. Returns logits. No host synchronisation.
    """
    if logits.stride(1) != 1:
        raise ValueError(f"logits have stride {logits.stride(1)} in a row; expand_ needs 1")
    if logits.shape[0]:
        _shift_right[(logits.shape[0],)](logits, starts, ends, logits.stride(0), BLOCK=_BLOCK)
    return logits


def expand_reference(logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The same out of place, on any device; −inf in the columns that `expand_` leaves undefined."""
    position = torch.arange(logits.shape[1], device=logits.device)
    source = (position - starts[:, None]).clamp_min(0).long()
    outside = (position < starts[:, None]) | (position >= ends[:, None])
    return logits.gather(1, source).masked_fill_(outside, float("-inf"))
