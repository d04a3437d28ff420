"""May attention and indexer be captured here? Decided once a runner, from plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a runner and its attention backend are, as far as capture depends on it.

    impl       `--dsa-prefill-backend` as resolved. ragged: its indices address a gathered KV, not the pool.
    fused      top-k kernels write slots of the pool; backend of the top-k in `topk`.
    fusion     the indexer runs SGLang's fused projections (CUDA, interleaved rope).
    """

    backend: str
    impl: str
    ragged: bool = False
    fused: bool = True
    topk: str = "sgl-kernel"
    fusion: bool = True
    kpool: int = 1
    cp_size: int = 1
    dcp_size: int = 1
    dp_size: int = 1
    draft: bool = False
    sharded_kv: bool = False
    unified: bool = False
    hisparse: bool = False


def why_not(facts: Facts) -> str:
    """The reason why SGLang's breaks stay, "" for none."""
    reasons = (
        (facts.draft, "it is the draft model's runner"),
        (facts.backend != "DeepseekSparseAttnBackend", f"the attention backend is {facts.backend}, not dsa"),
        (facts.cp_size > 1, "context parallelism gathers keys between ranks, by live lengths"),
        (facts.dp_size > 1, "DP attention pads each rank by what the others hold"),
        (facts.dcp_size > 1, "decode context parallelism gathers keys between ranks"),
        (
            facts.impl != "flashmla_sparse",
            f"--dsa-prefill-backend {facts.impl} is not captured, flashmla_sparse is",
        ),
        (
            facts.ragged,
            "an FP8 KV pool is dequantised by live lengths; --kv-cache-dtype bfloat16 is captured",
        ),
        (not facts.fused, "the top-k kernel does not write slots (SGLANG_DSA_FUSE_TOPK=0)"),
        (facts.topk != "sgl-kernel", f"--dsa-topk-backend {facts.topk} is not captured, sgl-kernel is"),
        (
            not facts.fusion,
            "the indexer's projections are not fused (SGLANG_DISABLE_DSA_INDEXER_FUSION, or its rope)",
        ),
        (facts.kpool != 1, f"the indexer pools {facts.kpool} keys"),
        (facts.sharded_kv, "the KV pool is sharded over ranks"),
        (facts.unified, "--enable-unified-memory moves slots between steps"),
        (facts.hisparse, "HiSparse swaps pages by what is selected"),
    )
    return next((text for holds, text in reasons if holds), "")


def facts(runner: Any, backend: Any) -> Facts:
    """Read off a PrefillCudaGraphRunner and its model runner's attention backend."""
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import TopkTransformMethod
    from sglang.srt.runtime_context import get_memory, get_parallel

    name = type(backend).__name__
    if name != "DeepseekSparseAttnBackend":
        return Facts(backend=name, impl="")
    parallel = get_parallel()
    method = backend.get_topk_transform_method(runner.capture_forward_mode)
    indexers = [indexer for indexer in runner.dsa_indexers or () if indexer is not None]
    return Facts(
        backend=name,
        impl=str(backend.dsa_prefill_impl),
        ragged=method == TopkTransformMethod.RAGGED,
        fused=bool(backend.use_fused_topk),
        topk=str(backend.dsa_topk_backend.value),
        fusion=bool(indexers) and all(indexer.use_dsa_indexer_fusion for indexer in indexers),
        kpool=int(backend.dsa_index_kpool),
        cp_size=int(parallel.attn_cp_size),
        dcp_size=int(backend.dcp_size),
        dp_size=int(parallel.attn_dp_size),
        draft=bool(runner.model_runner.is_draft_worker),
        sharded_kv=backend._kv_shard_pool is not None or hasattr(backend.token_to_kv_pool, "_is_layer_owned"),
        unified=bool(get_memory().enable_unified_memory),
        hisparse=backend.hisparse_coordinator is not None,
    )


def group_ends(shares: Sequence[bool]) -> tuple[int, ...]:
    """For each layer, the last layer that runs before the next break. `shares[i]`: layer i selects nothing itself.

    >>> group_ends([False, False, True, True, False])
    (0, 3, 3, 3, 4)
    """
    ends = [0] * len(shares)
    end = len(shares) - 1
    for layer in range(len(shares) - 1, -1, -1):
        ends[layer] = end
        if not shares[layer]:
            end = layer - 1
    return tuple(ends)
