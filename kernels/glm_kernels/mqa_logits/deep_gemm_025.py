"""DeepGEMM 0.2.5's MQA logits kernels under the names and arguments of 0.2.3, which SGLang 0.5.23 calls.

0.2.5 renamed both (`fp8_fp4_…`) and dropped `clean_logits` (it never fills what lies outside a row's range). The ragged
kernel writes compressed rows only (`max_seqlen_k` must be positive), which `expand` puts back. tests/gpu compares both
with the reference.
"""

from __future__ import annotations

from typing import Any

import torch


def _refuse_cleaning(clean_logits: bool) -> None:
    if clean_logits:
        raise ValueError(
            "clean_logits=True: sgl-deep-gemm 0.2.5 does not fill logits outside a row's range; pass False"
        )


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """Ragged scores. q [rows, heads, 128] E4M3; kv: E4M3 [keys, 128] and fp32 scales [keys]; weights [rows, heads] fp32.

    Row t is scored against keys cu_seq_len_k_start[t] … cu_seq_len_k_end[t] − 1. Returns [rows, keys] fp32; undefined
    outside that range. With max_seqlen_k > 0: [rows, max_seqlen_k], each row from its own first key on. Raises ValueError
    for clean_logits=True.
    """
    _refuse_cleaning(clean_logits)
    import deep_gemm

    width = max_seqlen_k or kv[0].shape[0]
    result: torch.Tensor = deep_gemm.fp8_fp4_mqa_logits(
        q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, width
    )
    if max_seqlen_k:
        return result
    from glm_kernels.mqa_logits.expand import expand_

    return expand_(result, cu_seq_len_k_start, cu_seq_len_k_end)


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    fused_kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor,
    max_context_len: int,
    clean_logits: bool = True,
    **more: Any,
) -> torch.Tensor:
    """Paged scores. q [batch, next_n, heads, 128] E4M3; fused_kv_cache [pages, 64, 1, 132] uint8: keys, then scales.

    weights [batch · next_n, heads] fp32; context_lens and block_table as SGLang builds them. Returns
    [batch · next_n, max_context_len] fp32. Raises ValueError for clean_logits=True.
    """
    _refuse_cleaning(clean_logits)
    import deep_gemm

    result: torch.Tensor = deep_gemm.fp8_fp4_paged_mqa_logits(
        q, fused_kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, **more
    )
    return result
