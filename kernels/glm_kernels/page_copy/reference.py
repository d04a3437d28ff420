"""The copies, exactly, in PyTorch: what the kernels must equal byte for byte."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from glm_kernels.page_copy.rows import Rows, check, extent


def gather_reference(rows: Sequence[Rows], pages: torch.Tensor, staging: torch.Tensor) -> None:
    """Row pages[i] of each buffer goes to staging[i, start : start + size]. Other bytes of staging stay as they are.

    pages int64 [n], staging uint8 [n, bytes].
    """
    check(extent(rows), pages, staging)
    for row in rows:
        staging[:, row.start : row.start + row.size] = row.pool.index_select(0, pages)


def scatter_reference(rows: Sequence[Rows], pages: torch.Tensor, staging: torch.Tensor) -> None:
    """The way back: staging[i, start : start + size] goes to row pages[i] of each buffer. Pages are distinct; no other
    row is touched.
    """
    check(extent(rows), pages, staging)
    for row in rows:
        row.pool.index_copy_(0, pages, staging[:, row.start : row.start + row.size])
