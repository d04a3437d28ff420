"""Compiles, side by side, the kernels that a GLM-5.x prefill compiles one after another at its first start.

`python -m benchmarks._prewarm` before or while servers start on a fresh machine; they find the kernels in the caches.
Every task is a process of its own and may fail: a server compiles what is missing. Prints seconds by task.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

WIDE = (
    (2624, 6144),
    (16384, 2048),
    (6144, 16384),
    (4096, 2048),
    (24576, 6144),
    (6144, 12288),
    (4096, 6144),
    (6144, 2048),
    (28672, 512),
)
TINY = ((1088, 1024), (4096, 512), (1024, 4096), (2048, 1024), (1024, 1024), (1024, 512), (7168, 512))
WIDE_ROWS = (16384, 8192, 2048, 512, 1)
TINY_ROWS = (4096, 3072, 2048, 1024, 512, 256, 1)


def gemm(shape: tuple[int, int], rows: Sequence[int]) -> None:
    """FP8 block GEMM [rows, k] × [n, k], as SGLang's linear layers run it."""
    import torch
    from sglang.srt.layers.quantization.fp8_utils import deepgemm_w8a8_block_fp8_linear_with_fallback

    n, k = shape
    weight = torch.zeros(n, k, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.ones(-(-n // 128), k // 128, device="cuda")
    for m in rows:
        x = torch.ones(m, k, device="cuda", dtype=torch.bfloat16)
        deepgemm_w8a8_block_fp8_linear_with_fallback(x, weight, [128, 128], scale)
    torch.cuda.synchronize()


def indexer() -> None:
    """Projections of the index keys and queries."""
    import torch
    from sglang.kernels.ops.attention.dsa import indexer_k, indexer_q
    from sglang.kernels.ops.kvcache import dsa_fused_store_index_cache

    with ThreadPoolExecutor(3) as pool:
        list(
            pool.map(
                lambda build: build(),
                (
                    lambda: indexer_k._jit_k_indexer_norm_rope_store_module(torch.bfloat16, 64),
                    lambda: indexer_q._jit_main_q_indexer_rope_first_quant_module(torch.bfloat16),
                    lambda: dsa_fused_store_index_cache.can_use_dsa_fused_store(
                        torch.bfloat16, torch.int64, 64
                    ),
                ),
            )
        )


def selection() -> None:
    """Scores and top-k."""
    import torch
    from sglang.kernels.ops.attention.dsv4 import topk

    topk.plan_topk_v2(torch.ones(4, dtype=torch.int32, device="cuda"))
    topk._jit_topk_v1_module()


def logits() -> None:
    """DeepGEMM's MQA logits."""
    import torch
    from glm_kernels.mqa_logits.deep_gemm_025 import fp8_mqa_logits
    from sglang.srt.layers import deep_gemm_wrapper  # noqa: F401  # it sets where DeepGEMM caches

    for rows in (8192, 3072):
        q = torch.zeros(rows, 32, 128, device="cuda").to(torch.float8_e4m3fn)
        k = torch.zeros(rows, 128, device="cuda").to(torch.float8_e4m3fn)
        starts = torch.zeros(rows, dtype=torch.int32, device="cuda")
        ends = torch.arange(1, rows + 1, dtype=torch.int32, device="cuda")
        weights = torch.ones(rows, 32, device="cuda")
        fp8_mqa_logits(q, (k, torch.ones(rows, device="cuda")), weights, starts, ends, clean_logits=False)
    torch.cuda.synchronize()


def norms() -> None:
    """Normalisations of the widths in use."""
    import torch
    from sglang.srt.layers.layernorm import RMSNorm

    for width in (6144, 2048, 1024, 512):
        norm = RMSNorm(width).cuda().to(torch.bfloat16)
        x = torch.ones(4, width, device="cuda", dtype=torch.bfloat16)
        norm.forward_cuda(x)
        norm.forward_cuda(x, x.clone())


def flashinfer_norm() -> None:
    """FlashInfer's LayerNorm, of the index keys."""
    import torch
    from sglang.srt.layers.layernorm import LayerNorm

    LayerNorm(128, dtype=torch.float32).cuda().forward_cuda(
        torch.ones(4, 128, device="cuda", dtype=torch.bfloat16)
    )


def rope() -> None:
    """Both rope kernels."""
    import torch
    from sglang.kernels.ops.attention import rope as module

    module._jit_rotary_embedding_module()
    module._jit_fused_rope_module(False, 64, torch.bfloat16, torch.bfloat16)


def concat() -> None:
    """Queries of absorbed attention."""
    import torch
    from sglang.kernels.ops.attention.concat_mla import concat_mla_absorb_q, concat_mla_k

    a = torch.ones(4, 64, 512, device="cuda", dtype=torch.bfloat16)
    concat_mla_absorb_q(a, a[..., :64].contiguous())
    del concat_mla_k


def activation() -> None:
    """SwiGLU and what follows it."""
    import torch
    from sglang.kernels.ops.activation.activation import activation_module

    activation_module(torch.bfloat16)
    activation_module(torch.bfloat16, fast_math=False)


def quantise() -> None:
    """Activations per 128 columns, in the layouts in use."""
    import torch
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8

    x = torch.ones(8, 2048, device="cuda", dtype=torch.bfloat16)
    sglang_per_token_group_quant_fp8(x, 128)
    sglang_per_token_group_quant_fp8(x, 128, column_major_scales=True, scale_tma_aligned=True)


def experts() -> None:
    """Routing to expert blocks."""
    import torch
    from sglang.kernels.ops.moe import moe_align

    moe_align._jit_moe_align_module(torch.int32)
    moe_align._jit_moe_align_module(torch.int32, True)


def clamp() -> None:
    """Positions."""
    import torch
    from sglang.kernels.ops.attention import clamp_position

    clamp_position._jit_clamp_position_module(torch.int64)


def fused_moe() -> None:
    """SGLang's Triton experts of true widths, and their alignment."""
    import torch
    from sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size import moe_align_block_size

    ids = torch.randint(0, 16, (2048, 8), dtype=torch.int32, device="cuda")
    for block in (64, 16, 128):
        moe_align_block_size(ids, block, 16)


TASKS: dict[str, Callable[[], Any]] = {
    **{f"gemm {n}x{k}": partial(gemm, (n, k), WIDE_ROWS) for n, k in WIDE},
    **{f"gemm {n}x{k} tiny": partial(gemm, (n, k), TINY_ROWS) for n, k in TINY},
    **{
        task.__name__: task
        for task in (
            flashinfer_norm,
            indexer,
            selection,
            logits,
            norms,
            rope,
            concat,
            activation,
            quantise,
            experts,
            clamp,
            fused_moe,
        )
    },
}


def run(name: str) -> str:
    """One task in a process; its seconds, or its error in one line."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "benchmarks._prewarm", name], capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return f"{name}: {seconds:.1f} s, failed: {lines[-1][:200] if lines else done.returncode}"
    return f"{name}: {seconds:.1f} s"


def main() -> int:
    if len(sys.argv) > 1:
        TASKS[sys.argv[1]]()
        return 0
    with ThreadPoolExecutor(len(TASKS)) as pool:
        for line in pool.map(run, TASKS):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
