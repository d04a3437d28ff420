"""A padded step's attention has the step's own rows: so have its lengths, and behind them its output is zeros.

Targets       pad_dsa_cache_seqlens; graph_utils.attention_output_tokens.
Why           Where ranks sync token counts (DP attention, or any parallelism with MegaMoE) or share a step's tokens,
              SGLang pads a step, up to its bucket, before a runner has it. At attention's break, and eagerly without
              context parallelism, it cuts queries, keys and slots to the step's own rows, and leaves the lengths as long
              as the padded step: flashmla_kv, which it takes on Hopper for FP8 KV, then has a schedule for more rows than
              queries, and flashmla_sparse scans past short contexts. And at the break it clears the output behind the
              padded step's rows only: between them and the step's own, what others left in that block goes on.
Upstream      none.
Goes when     SGLang cuts the lengths where it cuts the queries, and clears all that it doesn't write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from glm_sglang.prefill_graph import options


def cached_lengths(original: Callable[[Any, Any], Any], forward_batch: Any, lengths: Any) -> Any:
    """For pad_dsa_cache_seqlens: lengths of the rows that attention has.

    lengths [this rank's rows of the step], int32 → the same, or with zeros for the padding's rows. Eagerly attention has
    the padding's rows under context parallelism, and on a rank without a request.
    """
    if not options.current().ours:
        return original(forward_batch, lengths)
    shared = forward_batch.attn_cp_metadata
    if shared is not None:
        own = getattr(shared, "graph_num_tokens", None) is not None
    else:
        own = _extends(forward_batch) and lengths.shape[0] == forward_batch.global_num_token_non_padded_cpu
    return lengths if own else original(forward_batch, lengths)


def output_rows(result: Any, forward_batch: Any, raw: int | None) -> int | None:
    """After attention_output_tokens: rows of the output that the break writes, None while a graph is captured."""
    own = forward_batch.global_num_token_non_padded_cpu
    if (
        not options.current().ours
        or result is None
        or forward_batch.attn_cp_metadata is not None
        or own is None
    ):
        return None  # SGLang's result
    return min(int(result), int(own))


def _extends(forward_batch: Any) -> bool:
    # UPSTREAM: graph_utils.padded_extend_real_tokens
    mode = forward_batch.forward_mode
    return bool(mode.is_extend() and not mode.is_target_verify())
