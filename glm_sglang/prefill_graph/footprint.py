"""What captured buckets hold of a GPU's memory, from the model's sizes: for the planner, before anything is allocated.

The graph pool holds what is alive at once in one layer; every layer and every bucket uses it again, so it grows with
the rows of the largest bucket only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from glm_sglang.prefill_graph.buckets import Memory

SHARE = 1 / 8  # of a GPU's memory, for prefill graphs; the rest is for weights and KV
BUCKET_BYTES = 16 << 20  # executables of one bucket: a few thousand nodes
# The pool over what is alive at once, for blocks don't pack. Measured on one H200: SGLang's own graphs of 8,192 rows of
# true GLM-5.x widths held 3.5 GiB, 459 KB a row, of which 307 KB are alive.
PACKING = 1.5
_BF16 = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of one layer on one rank. `heads` and `expert_width` are the rank's; `experts` the experts a token is sent to."""

    hidden: int
    heads: int
    head_dim: int
    rank: int
    rope: int
    value_dim: int
    experts: int
    expert_width: int

    @classmethod
    def of(cls, config: Any, *, attention_tp: int, moe_tp: int) -> Sizes:
        """From a checkpoint's hf_config and the sizes of the tensor-parallel groups."""
        return cls(
            hidden=config.hidden_size,
            heads=config.num_attention_heads // attention_tp,
            head_dim=config.qk_nope_head_dim + config.qk_rope_head_dim,
            rank=config.kv_lora_rank,
            rope=config.qk_rope_head_dim,
            value_dim=config.v_head_dim,
            experts=config.num_experts_per_tok,
            expert_width=config.moe_intermediate_size // moe_tp,
        )


def row_bytes(sizes: Sizes) -> int:
    """Bytes of the pool for one row: the larger of attention and experts, beside residual, normed input and sum.

    Attention holds the queries, their absorbed form, both concatenated, the result, and the values of it. Experts
    hold gate and up, their product quantised, and each expert's output.
    """
    latent = sizes.rank + sizes.rope
    attention = sizes.heads * (sizes.head_dim + sizes.rank + latent + sizes.rank + sizes.value_dim) * _BF16
    experts = sizes.experts * (2 * sizes.expert_width * _BF16 + sizes.expert_width + sizes.hidden * _BF16)
    return int(PACKING * (max(attention, experts) + 3 * sizes.hidden * _BF16))


def memory(sizes: Sizes, gpu_bytes: int) -> Memory:
    """For the planner. `gpu_bytes` 0: unknown, no limit."""
    return Memory(row_peak=row_bytes(sizes), bucket=BUCKET_BYTES, limit=int(gpu_bytes * SHARE))
