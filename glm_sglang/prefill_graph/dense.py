"""A second graph for short prompts: all of the step, with dense attention; nothing of it runs eagerly.

Where no request has a cached prefix or more tokens than a row may select, every row sees all keys before it, and
SGLang's eager path runs multi-head attention on fresh keys, which costs less than absorbed sparse attention over the
pool. SGLang's graphs never do. This graph does: request boundaries come from device memory, for a fixed number of
requests; unused ones are empty, and the last one holds the padding rows, which attend to each other.

It is replayed in a few pieces (`cuts`), for the host to launch one while the GPU computes the one before. To launch a
graph takes it about a microsecond a kernel, and GLM-5.3's 78 layers have 2,800: in one piece the first one ran 3 ms late
(traced, beside an H200).

Eager attends densely in more steps than this graph serves: wherever no request has more than 2,048 tokens in all, so
behind a short cached prefix too (it expands the prefix's keys again), with REQUESTS requests or more, and with more rows
than the largest bucket that has a dense graph. There the sparse graph serves. Both are exact over the same keys and
round otherwise: on an H200 up to 0.09 nats in a logprob, KL up to 4e-4 (`--glm-verify-graphs` says it of each bucket).
UPSTREAM: DeepseekSparseAttnBackend.set_dsa_prefill_impl, which any longer request of the step turns to sparse for all.

Targets       BreakableCudaGraphBackend.capture_one, .replay.
Upstream      none.
Goes when     SGLang captures dense attention of DSA models.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from glm_sglang.prefill_graph import agreement, options, whole
from glm_sglang.prefill_graph.arena import REQUESTS, Arena

logger = logging.getLogger(__name__)

LABEL = "glm_dense"
# Layers of a piece over those of the one before. Of a layer of 2,048 rows an H200 takes 2.7 ms, and the host 0.04 ms to
# launch it; with 64 rows, the GPU still takes several times as long.
GROWTH = 8


def boundaries(lengths: Sequence[int], bucket: int) -> list[int]:
    """Row boundaries [REQUESTS + 1] of requests of these lengths in a bucket; fewer than REQUESTS requests.

    >>> boundaries([3, 2], 8)[:4], boundaries([3, 2], 8)[-1]
    ([0, 3, 5, 5], 8)
    """
    if not 0 < len(lengths) < REQUESTS or sum(lengths) > bucket:
        raise ValueError(f"{len(lengths)} requests of {sum(lengths)} tokens do not fit a bucket of {bucket}")
    ends = [0, *itertools.accumulate(lengths)]
    ends += [ends[-1]] * (REQUESTS + 1 - len(ends))
    ends[-1] = bucket
    return ends


@functools.cache
def cuts(group_ends: tuple[int, ...]) -> frozenset[int]:
    """Layers before whose indexer a dense graph is cut: one layer first, then pieces of up to GROWTH times the layers.

    group_ends: as the arena's; a cut is made where a layer selects, for there the sparse graph is cut as well.

    >>> sorted(cuts((0, 1, 5, 5, 5, 5, 7, 7)))
    [1]
    """
    selecting = [0, *sorted({end + 1 for end in group_ends if end + 1 < len(group_ends)})]
    found: list[int] = []
    begun, size = 0, 0
    for layer, following in itertools.pairwise([*selecting[1:], len(group_ends)]):
        if not found or following - begun > GROWTH * size:
            found.append(layer)
            begun, size = layer, layer - begun
    return frozenset(found)


def fits(arena: Arena, batch: Any, bucket: int) -> bool:
    """Whether this step may replay the dense graph of its bucket."""
    return (
        bucket in arena.dense_buckets
        and batch.batch_size < REQUESTS
        and not any(batch.extend_prefix_lens_cpu)
        and max(batch.extend_seq_lens_cpu) <= arena.dense_limit
    )


def load(arena: Arena, batch: Any, bucket: int) -> None:
    """Put a step's request boundaries where the graph reads them; it needs no other metadata."""
    import torch

    ends = torch.tensor(boundaries(batch.extend_seq_lens_cpu, bucket), dtype=torch.int32)
    if arena.ends.is_cuda:
        ends = ends.pin_memory()
    arena.ends.copy_(ends, non_blocking=True)


def capture_one(
    original: Callable[..., None], graphs: Any, shape_key: Any, forward_fn: Any, *args: Any, **kwargs: Any
) -> None:
    """For BreakableCudaGraphBackend.capture_one: the bucket, and where it may serve short prompts, its dense graph.

    Without one the sparse graph serves short prompts too, but not beside other ranks: they are in this capture's
    collectives, and would replay a graph that this one has not (capture.one_bucket says what to change).
    """
    original(graphs, shape_key, forward_fn, *args, **kwargs)
    backend = graphs._model_runner.attn_backend
    arena = whole.arena_of(backend) if options.current().ours else None
    if arena is None or shape_key.size > arena.dense_limit:
        return
    metadata, use_mha = backend.forward_metadata, backend.use_mha
    size = shape_key.size
    arena.ends.copy_(arena.ends.new_tensor(boundaries([size], size)))
    backend.forward_metadata = dataclasses.replace(
        metadata, cu_seqlens_q=arena.ends, cu_seqlens_k=arena.ends, max_seq_len_q=size, max_seq_len_k=size
    )
    backend.use_mha = arena.capturing_dense = True
    try:
        original(graphs, _dense(shape_key), forward_fn, *args, **kwargs)
    except Exception as error:
        if options.current().strict or agreement.ranks().world_size > 1:
            raise
        logger.error("prefill graph: no dense graph for %d tokens, the sparse one serves: %s", size, error)
    else:
        arena.dense_buckets.add(size)
    finally:
        backend.forward_metadata, backend.use_mha, arena.capturing_dense = metadata, use_mha, False


def replay(original: Callable[..., Any], graphs: Any, shape_key: Any, *args: Any, **kwargs: Any) -> Any:
    """For BreakableCudaGraphBackend.replay: the graph that the step was prepared for."""
    arena = whole.arena_of(graphs._model_runner.attn_backend)
    if arena is not None and arena.dense_step:
        shape_key = _dense(shape_key)
    return original(graphs, shape_key, *args, **kwargs)


def _dense(shape_key: Any) -> Any:
    return dataclasses.replace(shape_key, variant_label=LABEL)
