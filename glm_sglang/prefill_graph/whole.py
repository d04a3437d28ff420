"""Captures what SGLang runs at breaks: the sparse attention, and of the indexer all but the selection.

SGLang runs two breaks a layer for GLM-5.x: the whole indexer, and the absorbed product with attention and KV
write. Here the segments hold the attention, both KV writes, the indexer's projections, rope, quantisation and
gate. What stays is one break for each layer that selects: gather the keys, score them, take the top k; their
sizes follow the length of the context. Layers that share a selection have none.

Targets       Indexer.forward_cuda, RadixAttention.forward, DeepseekMLAForwardMixin._can_fuse_bmm_into_attention;
              PrefillCudaGraphRunner._init_forward_metadata_for_capture, ._prepare_forward_metadata_for_replay.
Upstream      none.
Goes when     SGLang captures DSA attention with lengths from device memory.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

from glm_sglang.prefill_graph import break_counts, context_parallel, eligibility, options, stock
from glm_sglang.prefill_graph.arena import Arena

logger = logging.getLogger(__name__)

_arenas: weakref.WeakKeyDictionary[Any, Arena | None] = weakref.WeakKeyDictionary()


def arena_of(backend: Any) -> Arena | None:
    """The arena of the runner that captures with this attention backend; None where it keeps SGLang's breaks."""
    return _arenas.get(backend)


def bind_capture(
    result: Any, runner: Any, forward_batch: Any, shape_key: Any, *args: Any, **kwargs: Any
) -> None:
    """After the capture's metadata is made: let the kernels that will be captured read the arena instead."""
    backend = runner.model_runner.attn_backend
    if not _captures(runner):
        return
    if backend not in _arenas:
        _arenas[backend] = _create(runner, backend)
    if (arena := _arenas[backend]) is not None:
        _load(arena, backend, forward_batch, shape_key.size)
        backend.forward_metadata = dataclasses.replace(
            backend.forward_metadata, dsa_cache_seqlens_int32=arena.lengths[: shape_key.size]
        )


def bind_replay(
    original: Callable[..., Any], runner: Any, forward_batch: Any, static_forward_batch: Any, shape_key: Any
) -> Any:
    """For _prepare_forward_metadata_for_replay: make a step's metadata and write it where captured kernels read.

    Returns where the step's last read of tables shared with the scheduler lies.
    """
    from glm_sglang.prefill_graph import dense

    backend = runner.model_runner.attn_backend
    arena = arena_of(backend) if _captures(runner) else None
    if arena is None:
        return original(runner, forward_batch, static_forward_batch, shape_key)
    arena.dense_step = dense.fits(arena, static_forward_batch, shape_key.size)
    if arena.dense_step:
        dense.load(arena, static_forward_batch, shape_key.size)
        return _read_end(None, forward_batch)
    result = original(runner, forward_batch, static_forward_batch, shape_key)
    _load(arena, backend, static_forward_batch, shape_key.size)
    return _read_end(result, forward_batch)


def _read_end(declared: Any, batch: Any) -> Any:
    """The scheduler may change its tables once the metadata is made: graphs and breaks read copies of them only.

    SGLang has not audited the DSA backend and lets the scheduler's stream wait for the whole forward pass, so what
    it prepares for the next step runs on the GPU after this one instead of beside it. A cache that offloads behind
    that stream needs the wait. UPSTREAM: Scheduler._apply_war_barrier, AttentionBackend.shared_read_ends.
    """
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.runtime_context import get_memory

    declared = declared or SharedReadEnds.UNKNOWN
    if declared is not SharedReadEnds.UNKNOWN or batch.forward_mode != ForwardMode.EXTEND:
        return declared
    if envs.SGLANG_FORCE_COARSE_WAR_BARRIER.get() or not envs.SGLANG_ENABLE_PREFILL_WAR_READ_DONE.get():
        return declared
    return declared if get_memory().enable_unified_cache_external_linker else SharedReadEnds.PRE_REPLAY


def _captures(runner: Any) -> bool:
    return options.current().ours and runner.prefill_backend_name == "breakable"


def _create(runner: Any, backend: Any) -> Arena | None:
    facts = eligibility.facts(runner, backend)
    if reason := eligibility.why_not(facts):
        logger.warning("prefill graph: attention and indexer stay at SGLang's breaks: %s", reason)
        stock.note(backend, facts)
        return None
    from sglang.srt.configs.model_config import dsa_layer_skips_topk

    config = runner.model_runner.model_config.hf_config
    layers = range(config.num_hidden_layers)
    arena = Arena.create(
        runner.max_num_tokens,
        index_topk=backend.dsa_index_topk,
        index_heads=config.index_n_heads,
        head_dim=config.index_head_dim,
        group_ends=eligibility.group_ends([bool(dsa_layer_skips_topk(config, layer)) for layer in layers]),
        device=runner.device,
        dense_limit=_dense_limit(backend),
    )
    logger.info(
        "prefill graph: attention and indexer are captured; buffers of %d rows, %.2f GiB",
        runner.max_num_tokens,
        arena.bytes / 2**30,
    )
    return arena


def _dense_limit(backend: Any) -> int:
    """Tokens up to which a prompt's attention is dense in SGLang's eager path; 0 where its kernel is not captured."""
    from sglang.srt.environ import envs

    if not backend.supports_mha_one_shot or backend.device_sm_major != 9:
        return 0
    return min(int(backend.dsa_index_topk), int(envs.SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD.get()))


def _load(arena: Arena, backend: Any, batch: Any, bucket: int) -> None:
    arena.load(batch, backend.forward_metadata, backend.get_indexer_metadata(0, batch), bucket)


def _active(forward_batch: Any) -> Arena | None:
    """The arena, where a layer runs for a graph (warm-up or capture) and its attention is to be captured."""
    from sglang.srt.model_executor.forward_context import get_attn_backend
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import (
        is_in_breakable_cuda_graph,
    )
    from sglang.srt.model_executor.runner_utils.prefill_graph import is_in_prefill_graph_scope

    if not (is_in_breakable_cuda_graph() and is_in_prefill_graph_scope()):
        return None
    if not forward_batch.forward_mode.is_extend_without_speculative():
        return None
    return arena_of(get_attn_backend())


def can_fuse_bmm(original: Callable[..., bool], attention: Any, forward_batch: Any) -> bool:
    """The absorbed product belongs to the segment where the attention does."""
    return _active(forward_batch) is None and original(attention, forward_batch)


def attention_forward(
    original: Callable[..., Any],
    layer: Any,
    q: Any,
    k: Any,
    v: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    key_value_num_tokens: int | None = None,
    **kwargs: Any,
) -> Any:
    """For RadixAttention.forward: the backend itself, in the segment."""
    arena = _active(forward_batch)
    sparse = kwargs.get("topk_indices") is not None
    if arena is None or not (sparse or arena.capturing_dense):
        with (
            context_parallel.attention_break(forward_batch, kwargs),
            stock.attention_break(forward_batch, kwargs),
        ):
            return original(layer, q, k, v, forward_batch, save_kv_cache, key_value_num_tokens, **kwargs)
    from sglang.srt.model_executor.forward_context import get_attn_backend

    k = k.view(-1, layer.tp_k_head_num, layer.v_head_dim if sparse else layer.qk_head_dim)
    if sparse:
        break_counts.moved(1)
    else:
        v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
    return get_attn_backend().forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)


def indexer_forward(
    original: Callable[..., Any],
    indexer: Any,
    x: Any,
    q_lora: Any,
    positions: Any,
    forward_batch: Any,
    layer_id: int,
    return_indices: bool = True,
    use_cuda_graph: bool = True,
) -> Any:
    """For Indexer.forward_cuda: everything but the selection in the segment, the selection at a break."""
    arena = _active(forward_batch) if use_cuda_graph else None
    if arena is None or not (return_indices or arena.capturing_dense):
        with stock.a_break(forward_batch):
            return original(
                indexer, x, q_lora, positions, forward_batch, layer_id, return_indices, use_cuda_graph
            )
    from sglang.kernels.ops.quantization.act_quant_triton import act_quant
    from sglang.srt.state_capturer.indexer_topk import maybe_capture_indexer_topk

    if arena.capturing_dense:
        _cut_dense(arena, layer_id)
        keys, _ = indexer._fused_k_weights(x)
        indexer._fused_k_prepare_and_store(keys, positions, forward_batch, layer_id, act_quant)
        return None
    rows = x.shape[0]
    query, gate = indexer._fused_q_prepare_and_store(
        x, q_lora, positions, forward_batch, layer_id, act_quant, enable_dual_stream=False
    )
    arena.query[:rows].copy_(query)
    arena.gate[:rows].copy_(gate)
    _selection_break()(arena, indexer, layer_id)
    return maybe_capture_indexer_topk(layer_id, arena.topk[:rows])


def _cut_dense(arena: Arena, layer_id: int) -> None:
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import breakable_cuda_graph

    from glm_sglang.prefill_graph import dense

    if layer_id in dense.cuts(arena.group_ends):
        breakable_cuda_graph.break_graph()


@functools.cache
def _selection_break() -> Callable[[Arena, Any, int], None]:
    # Late: SGLang's module must not be imported before the hooks are in place.
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import eager_on_graph

    return eager_on_graph(select)  # type: ignore[no-any-return]


def select(arena: Arena, indexer: Any, layer_id: int) -> None:
    """The break: choose each row's keys from the pool, by the queries that the segment left in the arena."""
    from sglang.srt.layers.attention.dsa.dsa_indexer import _broadcast_indexer_topk_from_rank0
    from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool

    _wait_for_loads(get_token_to_kv_pool(), arena.group_ends[layer_id])
    rows, batch = arena.rows, arena.batch
    if not arena.dense:
        metadata = get_attn_backend().get_indexer_metadata(layer_id, batch)
        indexer._get_topk_ragged(
            False, batch, layer_id, arena.query[:rows], arena.gate[:rows], metadata, arena.topk
        )
    _broadcast_indexer_topk_from_rank0(arena.topk[:rows])


def _wait_for_loads(pool: Any, last_layer: int) -> None:
    """Wait for a cached prefix on its way into the pool, up to the last layer before the next break.

    SGLang waits layer by layer where attention runs; captured attention cannot, so the break before it does.
    UPSTREAM: KVCache._wait_for_layer.
    """
    counter = getattr(pool, "layer_transfer_counter", None)
    if counter is not None:
        counter.wait_until(last_layer - pool.start_layer)
