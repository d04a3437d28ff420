"""What captured buckets hold of a GPU's memory, from the model's sizes: for the planner, before anything is allocated.

The graph pool holds what is alive at once in one layer; every layer and every bucket uses it again, so it grows with
the rows of the largest bucket only. Where breaks own what they read and write (`lifetime`; not the ones that this room
knows), each layer of each bucket holds that beside it.
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
# What breaks keep over the tensors counted here. Measured on two H200, CP2, true widths: 3.39 GiB for 8 layers of buckets
# with 576 and 2,048 local rows, 1.93 GiB for 5 layers with 256 and 2,048; the tensors are 0.93 to 0.96 of that.
KEEPING = 1.1
_BF16, _INT32 = 2, 4


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
    q_rank: int
    selected: int

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
            q_rank=config.q_lora_rank,
            selected=config.index_topk,
        )


def row_bytes(sizes: Sizes, *, cp_size: int = 1, gathered: bool = False) -> int:
    """Bytes of the pool for one local row: the larger of attention and experts, beside residual, normed input and sum.

    Attention holds the queries, their absorbed form, both concatenated, the result, and the values of it. Experts
    hold gate and up, their product quantised, and each expert's output. Under context parallelism the selection, this
    rank's KV and every rank's are in the pool, too, and experts have every rank's rows where these are `gathered`; and
    beside the pool lie the runner's input and output, with every rank's rows.
    """
    latent = sizes.rank + sizes.rope
    attention = sizes.heads * (sizes.head_dim + sizes.rank + latent + sizes.rank + sizes.value_dim) * _BF16
    experts = sizes.experts * (2 * sizes.expert_width * _BF16 + sizes.expert_width + sizes.hidden * _BF16)
    largest = max(attention, experts * (cp_size if gathered else 1))
    exchanged = fixed = 0
    if cp_size > 1:
        exchanged = (1 + cp_size) * latent * _BF16 + sizes.selected * _INT32
        # UPSTREAM: PrefillCPBCGInput.create, BreakableCudaGraphBackend.capture_one
        fixed = 2 * cp_size * sizes.hidden * _BF16
    return int(PACKING * (largest + exchanged + 3 * sizes.hidden * _BF16)) + fixed


def kept_row_bytes(sizes: Sizes, cp_size: int) -> int:
    """Bytes that one layer's breaks keep for one local row of one bucket, if they keep any.

    Attention's break reads queries and writes as many results; without context parallelism it makes their absorbed form
    as well. The indexer's reads its input and the compressed queries and writes slots; the gather takes this rank's KV
    and gives every rank's. UPSTREAM: DeepseekV2AttentionMLA._eager_bmm_attention, RadixAttention._eager_attention.
    """
    latent = sizes.rank + sizes.rope
    queries = latent if cp_size > 1 else sizes.head_dim + sizes.rank
    attention = sizes.heads * (queries + sizes.rank) * _BF16
    indexer = (sizes.hidden + sizes.q_rank) * _BF16 + sizes.selected * _INT32
    return int(KEEPING * (attention + indexer + (1 + cp_size) * latent * _BF16))


def memory(
    sizes: Sizes, gpu_bytes: int, *, cp_size: int = 1, gathered: bool = False, keeping: int = 0
) -> Memory:
    """For the planner. `gpu_bytes` 0: unknown, no limit. `keeping`: layers whose breaks own what they read and write."""
    return Memory(
        row_peak=row_bytes(sizes, cp_size=cp_size, gathered=gathered),
        row_kept=keeping * kept_row_bytes(sizes, cp_size),
        bucket=BUCKET_BYTES,
        limit=int(gpu_bytes * SHARE),
    )
