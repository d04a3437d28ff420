"""What the indexer changes in SGLang: which DeepGEMM functions it calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from glm_sglang.upstream.hooks import Hook

_UTILS = "sglang.srt.layers.attention.dsa.utils"
_WHY = "sgl-deep-gemm 0.2.5 renamed the kernel: stock SGLang stops at the first sparse prefill with an AttributeError"
_REMOVE = "SGLang calls sgl-deep-gemm 0.2.5's names"


def mqa_logits() -> Callable[..., Any]:
    """For resolve_fp8_mqa_logits_fn."""
    from glm_kernels.mqa_logits.deep_gemm_025 import fp8_mqa_logits

    return fp8_mqa_logits


def paged_mqa_logits() -> Callable[..., Any]:
    """For resolve_fp8_paged_mqa_logits_fn."""
    from glm_kernels.mqa_logits.deep_gemm_025 import fp8_paged_mqa_logits

    return fp8_paged_mqa_logits


HOOKS: tuple[Hook, ...] = (
    Hook(
        target=f"{_UTILS}.resolve_fp8_mqa_logits_fn",
        kind="replace",
        function="glm_sglang.indexer.hooks:mqa_logits",
        why=_WHY,
        remove_when=_REMOVE,
        also=("sglang.srt.layers.attention.dsa.dsa_indexer.Indexer._get_topk_ragged",),
        platform="cuda",
    ),
    Hook(
        target=f"{_UTILS}.resolve_fp8_paged_mqa_logits_fn",
        kind="replace",
        function="glm_sglang.indexer.hooks:paged_mqa_logits",
        why=_WHY,
        remove_when=_REMOVE,
        also=("sglang.srt.layers.attention.dsa.dsa_indexer.Indexer._get_topk_paged",),
        platform="cuda",
    ),
)
