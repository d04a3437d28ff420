"""How many rows a rank brings to a MoE layer: at most, for the buffer; in this pass, as every EP rank knows it.

Policy only. Under `--moe-a2a-backend megamoe` each rank routes its own rows: its slice over attention TP, its shard
over prefill CP, its requests' under attention DP (UPSTREAM: layer_boundary.factories._ffn_on_rank_rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from glm_kernels.mega_moe.chunks import align, ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """How attention spreads tokens over the ranks: sizes of its data, context and tensor parallel groups."""

    dp: int = 1
    cp: int = 1
    tp: int = 1


def shard(tokens: int, attention: Attention, *, over_cp: bool) -> int:
    """The largest share of one rank in `tokens` tokens of one DP rank, padding included.

    UPSTREAM: cp.padding.pad_logical_token_to_physical aligns a CP shard to the CP size; prepare_mlp_sync_batch pads
    a batch to the attention TP size.
    """
    if over_cp and attention.cp > 1:
        tokens = align(ceil_div(tokens, attention.cp), attention.cp)
    return ceil_div(tokens, attention.tp)


def largest(
    *, chunk: int | None, prefill_tokens: int, requests: int | None, prefill_only: bool, attention: Attention
) -> int:
    """The most rows that one rank brings to one pass, for sizing a buffer.

    chunk: --chunked-prefill-size (None or below 1: no limit but `prefill_tokens`, --max-prefill-tokens). requests:
    the most a rank decodes at once, None where it is not known yet. More rows than this are right too, in more calls.
    """
    prefill = chunk if chunk is not None and chunk > 0 else prefill_tokens
    rows = shard(max(1, prefill), attention, over_cp=True)
    decode = 0 if prefill_only or requests is None else shard(requests, attention, over_cp=False)
    return max(1, rows, decode)


def agreed(local: int, *, attention: Attention, global_tokens: Sequence[int] | None) -> int:
    """The largest row count of any EP rank in this pass, from what all of them know without asking each other.

    local: this rank's rows. Without attention DP every rank has the same batch, hence as many rows. With it (never
    beside prefill CP: refusals), the scheduler has gathered every DP rank's tokens: `global_tokens`. Raises
    RuntimeError where the two contradict each other: then ranks would make different numbers of calls, and hang.
    """
    if attention.dp == 1:
        return local
    if not global_tokens or len(global_tokens) != attention.dp:
        raise RuntimeError(
            f"attention DP of {attention.dp} ranks and token counts {global_tokens} of them: MegaMoE cannot know how "
            "often to run (SGLang's get_dp_global_num_tokens)"
        )
    bound = shard(max(global_tokens), attention, over_cp=False)
    if local > bound:
        raise RuntimeError(
            f"this rank has {local} rows, by the scheduler's counts {list(global_tokens)} no rank has more than {bound}"
        )
    return bound
