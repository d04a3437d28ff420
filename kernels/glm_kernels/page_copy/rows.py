"""What the kernels copy: rows of a pool's buffers, one row a page, and where each lies in a staged page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rows:
    """One buffer of the pool, e.g. main KV or index keys of one layer.

    pool   uint8 [pages, bytes a page], unit stride in a row; any stride between rows. For GLM-5.x in pages of 64
           tokens: bf16 main KV 64 · 1152 = 73,728 bytes, FP8 main KV 64 · 656 = 41,984, index keys 64 · 132 = 8,448
           (64 keys of 128 bytes, then their 64 fp32 scales: SGLang's own order, which is not touched).
    start  where the row begins in a staged page, bytes.
    """

    pool: torch.Tensor
    start: int

    @property
    def size(self) -> int:
        """Bytes of a row."""
        return int(self.pool.shape[1])


@dataclass(frozen=True, slots=True)
class Extent:
    """What the other arguments of a copy must fit; found once for buffers that are copied again and again."""

    end: int
    device: torch.device


def extent(rows: Sequence[Rows]) -> Extent:
    """Raises ValueError for buffers that are not rows of bytes on one device."""
    if not rows:
        raise ValueError("no rows to copy")
    for row in rows:
        pool = row.pool
        if pool.dim() != 2 or pool.dtype != torch.uint8 or pool.stride(1) != 1 or not pool.shape[1]:
            raise ValueError(
                f"a pool's rows: expected uint8 [pages, bytes], found {pool.dtype} {tuple(pool.shape)}"
            )
        if row.start < 0:
            raise ValueError(f"a row starts at byte {row.start} of a staged page")
    devices = {row.pool.device for row in rows}
    if len(devices) != 1:
        raise ValueError(f"all buffers must be on one device, found {sorted(map(str, devices))}")
    return Extent(max(row.start + row.size for row in rows), devices.pop())


def check(of: Extent, pages: torch.Tensor, staging: torch.Tensor) -> None:
    """Raises ValueError for what a copy cannot do. Looks at shapes and strides only: page numbers may be on a device, so
    whether they are in range is the caller's business.
    """
    if pages.dim() != 1 or pages.dtype != torch.int64 or not pages.is_contiguous():
        raise ValueError(f"pages: expected contiguous int64 [n], found {pages.dtype} {tuple(pages.shape)}")
    if staging.dim() != 2 or staging.dtype != torch.uint8 or (staging.shape[0] and staging.stride(1) != 1):
        raise ValueError(f"staging: expected uint8 [n, bytes], found {staging.dtype} {tuple(staging.shape)}")
    if staging.shape[0] != pages.shape[0]:
        raise ValueError(f"{pages.shape[0]} pages and {staging.shape[0]} staged pages")
    if not pages.device == staging.device == of.device:
        raise ValueError(f"pages on {pages.device}, staging on {staging.device}, buffers on {of.device}")
    if of.end > staging.shape[1]:
        raise ValueError(f"a row ends at byte {of.end} of staged pages of {staging.shape[1]}")
