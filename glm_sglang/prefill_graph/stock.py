"""Where attention stays at SGLang's own breaks, these own nothing either.

Targets       DeepseekMLAForwardMixin._eager_bmm_attention; RadixAttention.forward and Indexer.forward_cuda (by way of
              `whole`).
Why           Breaks that own what they read and write (`lifetime`) hold it for each row, layer and bucket: with FP8 KV,
              or under DP attention, more than a GPU has for a chunk's buckets.
How           Every replay writes anew what the breaks of a layer read:
              indexer    x, q_lora: the segment before it. topk_result: all rows −1 by that segment, the step's by the
                         break; the capture holds it until the last layer that shares it.
              attention  q, k and their rotary parts: the segment before it; topk_indices: the indexer, all rows, of this
                         layer or of the one whose selection it shares. In one break with the absorbed product (of which
                         the buffers are): q before it is absorbed.
              segments   attention's output: the attention before it, all rows (the step's, zeros behind them: `rows`).
              Positions and the rotary table are the runner's and the model's.
Upstream      sglang issue 37606, PR 37448.
Goes when     that PR is in a release.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from glm_sglang.prefill_graph import context_parallel, options
from glm_sglang.prefill_graph.eligibility import Facts

# What attention's break takes beside q, k, v and its output; given anything else it keeps all that it is given.
KNOWN_INPUTS = context_parallel.KNOWN_INPUTS | {"cos_sin_cache", "is_neox"}

_known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def note(backend: Any, facts: Facts) -> None:
    """A runner captures with this attention backend, and without an arena."""
    _known[backend] = not why_keeping(facts)


def why_keeping(facts: Facts) -> str:
    """Why breaks without context parallelism may own what they are given; "" where all of them are known."""
    reasons = (
        (facts.backend != "DeepseekSparseAttnBackend", f"the attention backend is {facts.backend}, not dsa"),
        (facts.cp_size > 1, "context parallelism has breaks of its own"),
        (facts.dcp_size > 1, "decode context parallelism gathers keys between ranks"),
        (facts.kpool != 1, f"the indexer pools {facts.kpool} keys"),
        (facts.sharded_kv, "the KV pool is sharded over ranks"),
        (facts.unified, "--enable-unified-memory moves slots between steps"),
        (facts.hisparse, "HiSparse swaps pages by what is selected"),
    )
    return next((text for holds, text in reasons if holds), "")


def attention_break(forward_batch: Any, inputs: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Around RadixAttention.forward with these keyword arguments: its break owns nothing, where it is a known one."""
    given = {name for name, value in inputs.items() if value is not None}
    known = context_parallel.SELECTION in given and given <= KNOWN_INPUTS
    return a_break(forward_batch) if known else contextlib.nullcontext()


def bmm_attention(original: Callable[..., None], attention: Any, *args: Any, **kwargs: Any) -> None:
    """For _eager_bmm_attention: the absorbed product and attention, as one break that owns nothing."""
    from sglang.srt.model_executor.runner_utils.forward_batch import get_forward_batch

    known = kwargs.get("llama_4_scaling") is None
    with a_break(get_forward_batch()) if known else contextlib.nullcontext():
        original(attention, *args, **kwargs)


def a_break(forward_batch: Any) -> contextlib.AbstractContextManager[None]:
    """Around one known break of a layer: owns nothing, where a bucket is captured and all that it reads is known."""
    from sglang.srt.model_executor.forward_context import get_attn_backend
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import (
        is_in_breakable_cuda_graph,
    )
    from sglang.srt.model_executor.runner_utils.prefill_graph import is_in_prefill_graph_scope

    known = (
        options.current().ours
        and is_in_breakable_cuda_graph()
        and is_in_prefill_graph_scope()
        and _known.get(get_attn_backend(), False)
        and forward_batch.forward_mode.is_extend_without_speculative()
        and forward_batch.attn_cp_metadata is None
        and not forward_batch.mha_return_lse
    )
    return context_parallel.nothing_kept() if known else contextlib.nullcontext()
