"""Compiles, side by side, the kernels that a GLM-5.x prefill compiles one after another at its first start.

`python -m benchmarks._prewarm` before or while servers start on a fresh machine; they find the kernels in the caches.
Every task is a process of its own and may fail: a server compiles what is missing. Prints seconds by task.

    python -m benchmarks._prewarm --experts 8 --rows 2048,512,8,1 --stock /packages/of/stock

`--experts`: for servers of true widths whose experts, so many on a GPU, DeepGEMM multiplies (--moe-runner-backend).
`--stock`: DeepGEMM's kernels once more with this folder first on the path; another DeepGEMM looks for other names.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
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
EXPERTS = ((4096, 6144), (6144, 2048))  # gate and up, down
TOP_K = 8
PADDING = 256  # rows of an expert in the masked layout are padded to more than these: sglang's ep_moe_kernels
PRECOMPILE = (
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE"  # 1: a first call compiles a kernel for each of 16,384 row counts
)


def gemm(shape: tuple[int, int], rows: Sequence[int]) -> None:
    """FP8 block GEMM [rows, k] × [n, k], as SGLang's linear layers run it."""
    import torch
    from sglang.srt.layers.quantization.fp8_utils import deepgemm_w8a8_block_fp8_linear_with_fallback

    n, k = shape
    weight = torch.zeros(n, k, device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.ones(-(-n // 128), k // 128, device="cuda")
    for m in rows:
        x = torch.ones(m, k, device="cuda", dtype=torch.bfloat16)
        deepgemm_w8a8_block_fp8_linear_with_fallback(x, weight, [128, 128], scale)
    torch.cuda.synchronize()


def grouped(shape: tuple[int, int], experts: int, masked: bool, rows: Sequence[int]) -> None:
    """Grouped GEMM of experts for steps of so many rows, in one of the two layouts of SGLang's DeepGEMM runner: masked
    (it fits a quarter of what is free) or compact.

    UPSTREAM: pre_permute_standard_to_deep_gemm, deep_gemm_wrapper.compile_utils.
    """
    import torch
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.deep_gemm_wrapper import compile_utils
    from sglang.srt.layers.moe.moe_runner.deep_gemm import _get_compact_all_tokens

    n, k = shape
    kinds = compile_utils.DeepGemmKernelType
    create = compile_utils._BaseWarmupExecutor.create
    for m in rows:
        if masked:
            size = (m // PADDING + 1) * PADDING
            runner = create(kinds.GROUPED_GEMM_NT_F8F8BF16_MASKED, max_m=size, n=n, k=k, num_groups=experts)
            runner.execute(m=max(1, -(-m * TOP_K // experts)))
            continue
        align = deep_gemm_wrapper.get_contiguous_layout_alignment(m * TOP_K, experts)
        size = _get_compact_all_tokens(m * TOP_K, experts, align)
        with deep_gemm_wrapper.contiguous_layout_alignment_scope(align):
            runner = create(kinds.GROUPED_GEMM_NT_F8F8BF16_CONTIG, max_m=size, n=n, k=k, num_groups=experts)
            runner.execute(m=size)
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
    from sglang.srt.layers import deep_gemm_wrapper  # noqa: F401  # it sets where DeepGEMM caches

    try:
        from deep_gemm import fp8_mqa_logits  # stock's
    except ImportError:
        from glm_kernels.mqa_logits.deep_gemm_025 import fp8_mqa_logits

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


SINGLE = (flashinfer_norm, indexer, selection, norms, rope, concat, activation, quantise, experts, clamp)
AT_ONCE = 24  # processes, of about 1 GB of the GPU each: servers load beside them


def of_deep_gemm(experts: int, rows: Sequence[int]) -> dict[str, Callable[[], Any]]:
    """DeepGEMM's kernels of true widths, by task; experts: 0 where another runner has them."""
    layouts = [(shape, masked) for shape in EXPERTS for masked in (True, False)] if experts else []
    return {
        **{
            f"grouped {n}x{k} {'masked' if masked else 'compact'}": partial(
                grouped, (n, k), experts, masked, rows or WIDE_ROWS
            )
            for (n, k), masked in layouts
        },
        **{f"gemm {n}x{k}": partial(gemm, (n, k), rows or WIDE_ROWS) for n, k in WIDE},
        "logits": logits,
    }


def tasks(experts: int, rows: Sequence[int]) -> dict[str, Callable[[], Any]]:
    """Everything, by name, slowest first; without `experts` the small model's, too, and what Triton's experts need."""
    single = {task.__name__: task for task in SINGLE}
    wide = of_deep_gemm(experts, rows) | single
    if experts:
        return wide
    tiny = {f"gemm {n}x{k} tiny": partial(gemm, (n, k), TINY_ROWS) for n, k in TINY}
    return wide | tiny | {"fused_moe": fused_moe}


def run(name: str, words: Sequence[str], environ: Mapping[str, str]) -> str:
    """One task in a process; its seconds, or its error in one line."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks._prewarm", *words, "--task", name]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(environ), check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return f"{seconds:.1f} s, failed: {lines[-1][:200] if lines else done.returncode}"
    return f"{seconds:.1f} s"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks._prewarm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--experts", type=int, default=0, help="of a layer on this GPU, multiplied by DeepGEMM")
    p.add_argument(
        "--rows", type=lambda text: [int(one) for one in text.split(",")], default=[], help="of steps"
    )
    p.add_argument("--stock", default="", help="a folder with another DeepGEMM")
    p.add_argument("--task", help="this alone, in this process")
    return p


def jobs(args: argparse.Namespace) -> list[tuple[str, str, dict[str, str]]]:
    """What it is called, the task, and the environment of its process."""
    own = {PRECOMPILE: "0", **os.environ}
    found = [(name, name, own) for name in tasks(args.experts, args.rows)]
    if args.stock:
        path = os.pathsep.join(filter(None, (os.path.abspath(args.stock), own.get("PYTHONPATH"))))
        stock = {**own, "PYTHONPATH": path}
        also = [(f"stock's {name}", name, stock) for name in of_deep_gemm(args.experts, args.rows)]
        # Servers start side by side, and stock's is the one that all are compared with.
        found = [job for pair in zip(also, found, strict=False) for job in pair] + found[len(also) :]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0."""
    args = parser().parse_args(argv)
    if args.task:
        tasks(args.experts, args.rows)[args.task]()
        return 0
    rows = ",".join(map(str, args.rows))
    words = [*(("--experts", str(args.experts)) if args.experts else ()), *(("--rows", rows) if rows else ())]
    planned = jobs(args)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = {pool.submit(run, name, words, environ): called for called, name, environ in planned}
        for job in as_completed(done):
            print(f"{done[job]}: {job.result()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
