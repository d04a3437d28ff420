"""Keys of multi-head attention out of MLA's two parts, in one pass; the exact reference beside it."""

from __future__ import annotations

from glm_kernels.concat_mha_k.kernel import concat_mha_k
from glm_kernels.concat_mha_k.reference import concat_mha_k_reference, refuse

__all__ = ["concat_mha_k", "concat_mha_k_reference", "refuse"]
