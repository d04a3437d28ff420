"""May attention and indexer be captured here? Decided once a runner, from plain values; foreseen by the planner."""

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
            facts.ragged,
            "an FP8 KV pool is dequantised by live lengths; --kv-cache-dtype bfloat16 is captured",
        ),
        (
            facts.impl != "flashmla_sparse",
            f"--dsa-prefill-backend {facts.impl} is not captured, flashmla_sparse is",
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


def foreseen(config: Any, model: Any, *, cp_size: int, capability: int | None) -> Facts:
    """What the target model's runner will be, from SGLang's arguments, also before SGLang has chosen what was left out.

    `config` SGLang's arguments as far as they are resolved, `model` the checkpoint's hf_config, `capability` the GPU's
    major compute capability (None: unknown). What is not known counts as what is not captured.
    UPSTREAM: arg_groups.overrides._dsa_kv_cache_dtype_default, ._dsa_split_backend_resolution.
    """
    from sglang.srt.environ import envs

    dtype = config.kv_cache_dtype
    if dtype == "auto" and capability is not None:
        dtype = "fp8_e4m3" if capability >= 10 else "bfloat16"
    plain = dtype in ("bfloat16", "bf16")
    chosen = (config.attention_backend, config.prefill_attention_backend, config.decode_attention_backend)
    other = next((name for name in chosen if name not in (None, "dsa", "nsa")), None)
    return Facts(
        backend=other or "DeepseekSparseAttnBackend",
        impl=config.dsa_prefill_backend or "flashmla_sparse",  # UPSTREAM: BF16's default
        ragged=not plain,
        fused=bool(envs.SGLANG_DSA_FUSE_TOPK.get()),
        topk=config.dsa_topk_backend,
        fusion=not envs.SGLANG_DISABLE_DSA_INDEXER_FUSION.get()
        and getattr(model, "indexer_rope_interleave", False),
        kpool=int(getattr(model, "index_kpool", 1)),
        cp_size=cp_size,
        dcp_size=int(config.dcp_size or 1),
        dp_size=int(config.attn_dp_size or 1),
        sharded_kv=bool(config.enable_kv_cache_sharding or config.enable_dsa_cache_layer_split),
        unified=bool(config.enable_unified_memory),
        hisparse=bool(config.enable_hisparse),
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
