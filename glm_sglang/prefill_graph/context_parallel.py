"""Graphs under interleaved context parallelism, for GLM-5.x.

Targets       InterleaveCPBCGInput.supports, .prepare; DSAInterleaveCPIndexerOverlap.prepare_qkv;
              indexer_with_cp_kv; RadixAttention.forward (by way of `whole`).
Why           SGLang captures interleaved CP for GLM-5.3-Flash without expert parallelism only. And a layer that
              shares another's selection gathers its KV inside a segment, where the collective keeps the sizes of the
              capture: a step with fewer tokens would then write other rows into its slots. (Layers that select
              gather at a break, with live sizes.) And GLM-5.x's indexer stores a key for every slot it is given,
              where GLM-5.3-Flash's pools keys: at its break the slots of padding are too many (and attention's lengths:
              `rows`). And breaks that own their arguments (`lifetime`) would hold 180 KB a row, layer and bucket.
How           such a layer's gather becomes a break too, as SGLang's bcg_indexer_with_kv does for the others; a step's
              slots end with its tokens. A layer's three breaks own nothing, for every replay writes anew what
              they read:
              indexer    x, q_lora, this rank's KV: the segment before it.
              gather     this rank's KV: the segment before it.
              attention  q, q_rope: the segment before it. k, k_rope: the gather or the indexer before it, all rows.
                         topk_indices: the indexer, all rows, of this layer or of the one whose selection it shares;
                         the capture holds them until the last such layer.
              segments   attention's output: the attention before it, all rows (the step's, zeros behind them).
Upstream      none.
Goes when     SGLang lists GlmMoeDsaForCausalLM there and gathers shared layers' KV at a break.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

from glm_sglang.prefill_graph import break_counts, lifetime, options

ARCHITECTURE = "GlmMoeDsaForCausalLM"
# What sparse attention's break takes beside q, k, v and its output; given anything else it keeps all that it is given.
SELECTION = "topk_indices"
KNOWN_INPUTS = frozenset({"q_rope", "k_rope", SELECTION})
KNOWN_DISPATCH = ("none", "megamoe")  # all-to-all backends whose dispatch is no break


def supports(original: Callable[[Any], bool], server_args: Any) -> bool:
    """For InterleaveCPBCGInput.supports: GLM-5.x too, with expert parallelism or without.

    Only where graphs are required: measured on two GPUs with few layers only.
    """
    return original(server_args) or (options.current().strict and not why_not(server_args))


def why_not(server_args: Any) -> str:
    """Why GLM-5.x is not captured under interleaved CP with these arguments, with what to change; "" where it is."""
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view, resolving_view

    config = resolving_view(server_args)
    names = model_config_of(server_args).hf_config.architectures
    reasons = (
        (ARCHITECTURE not in names, f"under context parallelism {ARCHITECTURE} is captured, this is {names}"),
        (
            config.speculative_algorithm is not None,
            f"a draft takes every CP rank's rows; leave out --speculative-algorithm {config.speculative_algorithm}",
        ),
        (
            config.dp_size != 1,
            f"under context parallelism one replica is captured, not --dp-size {config.dp_size}",
        ),
        (resolved_view(server_args).attn_cp_size <= 1, "--attn-cp-size is 1"),
    )
    return next((text for holds, text in reasons if holds), "")


def prepare(
    result: None, inputs: Any, runner: Any, forward_batch: Any, *, static_num_tokens: int, capture: bool
) -> None:
    """After InterleaveCPBCGInput.prepare: of the bucket's slots the step's own, at the same address.

    forward_batch.out_cache_loc [tokens of the bucket] → [tokens of the step], int64. Attention's break cuts them itself.
    """
    if options.current().ours and not capture:
        # UPSTREAM: prepare_mlp_sync_batch makes extend_num_tokens the bucket's; the lengths stay the step's.
        tokens = sum(forward_batch.extend_seq_lens_cpu)
        forward_batch.out_cache_loc = forward_batch.out_cache_loc[:tokens]


def indexer_with_kv(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """For indexer_with_cp_kv: its break owns nothing."""
    with nothing_kept():
        return original(*args, **kwargs)


def attention_break(forward_batch: Any, inputs: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Around RadixAttention.forward with these keyword arguments: its break owns nothing, where it is a known one."""
    from sglang.srt.layers.cp.interleave import is_interleave_extend
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import (
        is_in_breakable_cuda_graph,
    )

    given = {name for name, value in inputs.items() if value is not None}
    known = (
        SELECTION in given
        and given <= KNOWN_INPUTS
        and is_in_breakable_cuda_graph()
        and is_interleave_extend(forward_batch)
        and not forward_batch.mha_return_lse
    )
    return nothing_kept() if known else contextlib.nullcontext()


def nothing_kept() -> contextlib.AbstractContextManager[None]:
    """Around one break for which every replay writes anew all that it reads."""
    # UPSTREAM: with --enable-symm-mem collectives write into a pool that eager collectives allocate from, too.
    from sglang.srt.distributed.device_communicators.pynccl_allocator import is_symmetric_memory_enabled

    return contextlib.nullcontext() if is_symmetric_memory_enabled() else lifetime.rewritten()


def why_keeping(config: Any) -> str:
    """Why breaks may own what they are given under CP, from SGLang's arguments; "" where all of them are known."""
    if config.enable_symm_mem:
        return "--enable-symm-mem"
    if config.moe_a2a_backend not in KNOWN_DISPATCH:
        return f"the dispatch of --moe-a2a-backend {config.moe_a2a_backend} is a break"
    if "trtllm" in (config.dsa_prefill_backend, config.dsa_decode_backend):
        return "--dsa-prefill-backend or --dsa-decode-backend trtllm"
    return ""


def prepare_qkv(
    original: Callable[..., Any],
    overlap: Any,
    q_nope: Any,
    q_pe: Any,
    k_nope: Any,
    k_pe: Any,
    topk: Any,
    *,
    defer_materialization: bool,
) -> Any:
    """For DSAInterleaveCPIndexerOverlap.prepare_qkv: a shared layer's gather as a break, in a graph."""
    if not _shared_layer_in_graph(overlap) or defer_materialization:
        return original(
            overlap, q_nope, q_pe, k_nope, k_pe, topk, defer_materialization=defer_materialization
        )
    import torch

    attention, batch = overlap.attention, overlap.forward_batch
    local = torch.cat((k_nope.flatten(1), k_pe.flatten(1)), dim=-1)
    full = local.new_empty((batch.extend_num_tokens, local.shape[-1]))
    with nothing_kept():
        _gather_break()(local, full)
    break_counts.moved(-1)
    rank = attention.kv_lora_rank
    return q_nope, q_pe, full[:, :rank].unsqueeze(1), full[:, rank:].unsqueeze(1), topk


def _shared_layer_in_graph(overlap: Any) -> bool:
    from sglang.srt.layers.cp.interleave import is_interleave_extend
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import (
        is_in_breakable_cuda_graph,
    )

    return (
        options.current().ours
        and overlap._deferred is None
        and overlap._kv is None
        and is_in_breakable_cuda_graph()
        and is_interleave_extend(overlap.forward_batch)
    )


@functools.cache
def _gather_break() -> Callable[[Any, Any], None]:
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import eager_on_graph

    return eager_on_graph(gather, capture_stub=_nothing)  # type: ignore[no-any-return]


def gather(local: Any, full: Any) -> None:
    """The break: every rank's rows of this step into `full`, in the order of the sequence; zeros behind them.

    local [captured rows of this rank, 576], full [tokens of the bucket, 576], both of the KV's dtype. Raises
    ValueError where the collective brings another number of rows than the step has.
    """
    from sglang.srt.layers.cp.base import get_cp_strategy
    from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
        get_tc_piecewise_forward_context,
    )
    from sglang.srt.runtime_context import get_parallel

    batch = get_tc_piecewise_forward_context().forward_batch
    lengths = batch.attn_cp_metadata.per_rank_logical_token
    mine = local[: lengths[get_parallel().attn_cp_rank]]
    gathered = get_cp_strategy().gather_kv_cache(mine, batch)
    rows = sum(batch.extend_seq_lens_cpu)
    if gathered.shape[0] != rows or rows > full.shape[0]:
        raise ValueError(
            f"the KV gather brought {gathered.shape[0]} rows, the step has {rows} of {full.shape[0]}"
        )
    full[:rows].copy_(gathered)
    full[rows:].zero_()


def _nothing(local: Any, full: Any) -> None:
    """While a graph is captured the gather's bytes are not read; the collective would only cost time."""
    full.zero_()
