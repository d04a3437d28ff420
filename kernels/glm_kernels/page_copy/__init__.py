"""Pages of a paged KV pool, all layers at once, into a staging slot and back; the exact reference beside them."""

from __future__ import annotations

from glm_kernels.page_copy.kernels import CopyTable, gather, scatter
from glm_kernels.page_copy.reference import gather_reference, scatter_reference
from glm_kernels.page_copy.rows import Rows

__all__ = ["CopyTable", "Rows", "gather", "gather_reference", "scatter", "scatter_reference"]
