"""Keys of dense attention in one pass instead of two strided copies.

SGLang's own kernels assemble k = [k_nope | k_pe of every head] where head count and both widths are powers of two, or are
DeepSeek-V3's. GLM-5.x has 192 + 64, so two copies run, 41 µs each at 2,048 rows on an H200, 78 times a step. What
SGLang's kernels take stays theirs, with the cast to an FP8 pool's dtype that they do and the copies do not.

The hook is in place in every mode, for eager steps, dense prefill graphs and SGLang's own alike: the bytes are the same.
The kernel compiles at the first call; UPSTREAM: BreakableCudaGraphBackend.capture_one runs its forward twice before it
captures, so within a capture it has been compiled.

Targets       DeepseekMHAForwardMixin._concat_and_cast_mha_k.
Why           it costs 6.4 ms of a step of 209 ms (2,048 rows, 78 layers).
Upstream      none.
Goes when     SGLang's concat_and_cast_mha_k_triton takes any width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def copies(heads: int, nope: int, rope: int) -> bool:
    """Whether upstream assembles keys of these sizes by copies on CUDA.

    >>> copies(64, 192, 64), copies(128, 128, 64), copies(64, 128, 64), copies(48, 128, 64), copies(64, 192, 0)
    (True, False, False, True, False)
    """
    if rope == 0 or (heads, nope, rope) == (128, 128, 64):
        return False
    return any(size & (size - 1) for size in (heads, nope, rope))


def concat_mha_k(original: Callable[..., Any], attention: Any, k_nope: Any, k_pe: Any, batch: Any) -> Any:
    """For DeepseekMHAForwardMixin._concat_and_cast_mha_k: [T, heads, nope + rope], contiguous."""
    from glm_kernels.concat_mha_k import concat_mha_k, refuse

    heads, nope, rope = attention.num_local_heads, attention.qk_nope_head_dim, attention.qk_rope_head_dim
    if not copies(heads, nope, rope) or refuse(k_nope, k_pe):
        return original(attention, k_nope, k_pe, batch)
    return concat_mha_k(k_nope, k_pe)
