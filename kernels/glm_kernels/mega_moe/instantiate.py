"""Compiles the pinned MegaMoE templates for GLM's shape with nvcc, on a machine without a GPU.

`python -m glm_kernels.mega_moe.instantiate` compiles, from the installed package's own headers: the SM90
kernel for sm_90a, to show that the harness compiles what runs on an H200, and the SM100 kernel with E4M3
weights for sm_103a, which no machine at hand can run. Tile, stage and thread counts are ours: chosen within
the templates' static asserts, not asked from the library's host heuristics, which need a device. What a pass
proves is that this weight type instantiates and assembles for that architecture: built, not measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_EM_CUDA = 190  # ELF machine of a cubin
_FLAGS = (
    "-std=c++20",
    "-O3",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "--diag-suppress=39,128,161,174,177,186,940",
    "--ptxas-options=--register-usage-level=10,--verbose",
    "--compiler-options=-fPIC,-O3,-fconcepts,-Wno-deprecated-declarations,-Wno-abi",
)
"""UPSTREAM: the flags of deep_gemm's JIT (deep_jit CompilerOptions)."""


@dataclass(frozen=True)
class Shape:
    """One layer as the kernel is specialised for it; `capacity` in tokens a rank."""

    hidden: int = 6144
    intermediate: int = 2048
    experts: int = 256
    top_k: int = 8
    ranks: int = 8
    capacity: int = 1920


@dataclass(frozen=True)
class Case:
    """A template instantiation and the architecture to assemble it for."""

    name: str
    arch: str
    source: str


@dataclass(frozen=True)
class Built:
    """What ptxas said of the one kernel in the cubin; bytes of stack and spills a thread."""

    name: str
    arch: str
    seconds: float
    cubin_bytes: int
    registers: int
    stack: int
    spills: int


def _source(header: str, kernel: str, arguments: list[object]) -> str:
    listed = ",\n        ".join(str(a).lower() if isinstance(a, bool) else str(a) for a in arguments)
    return (
        f"#include <deep_gemm/impls/{header}>\n"
        "using namespace deep_gemm;\n"
        f"[[maybe_unused]] static void* kernel = reinterpret_cast<void*>(&{kernel}<\n        {listed}>);\n"
    )


_NO_CLAMP = "cute::numeric_limits<float>::infinity()"


def sm90_case(shape: Shape, *, num_sms: int = 132) -> Case:
    """The H200's prefill tile, 128 x 256 over two math warpgroups, on the full pool."""
    pool = (
        "layout::get_num_max_pool_tokens_sm90<uint32_t>"
        f"({shape.ranks}, {shape.capacity}, {shape.top_k}, {shape.experts // shape.ranks})"
    )
    arguments: list[object] = [
        *(shape.capacity, shape.hidden, shape.intermediate, shape.experts, shape.top_k),
        shape.experts // shape.ranks,  # one wave
        *(128, 256, 128),  # BLOCK_M, BLOCK_N, BLOCK_K
        *(pool, f"2 * {pool}", pool),  # pool, scale pool, ring
        3,  # stages
        *(64, 64, 256),  # dispatch, loader and math threads
        *(num_sms, shape.ranks, _NO_CLAMP, True),
        *(0, True, False, True),  # register budget, accumulate in place, arrival counter, full sync
        *(False, 1, False, 0, 4),  # half CD, cluster, multicast on B, lag, CD passes
    ]
    source = _source("sm90_fp8_mega_moe.cuh", "sm90_fp8_mega_moe_impl", arguments)
    return Case("sm90_fp8_mega_moe", "90a", source)


def sm100_case(
    shape: Shape, *, arch: str = "103a", block_m: int = 192, stages: int = 4, num_sms: int = 148
) -> Case:
    """The SM100 kernel with E4M3 weights; MXFP8FP4 is its kind of E4M3 activations under UE8M0 scales."""
    pool = (
        "layout::get_num_max_pool_tokens<uint32_t>"
        f"({shape.ranks}, {shape.capacity}, {shape.top_k}, {shape.experts // shape.ranks})"
    )
    store_rows = 32 if block_m % 64 == 0 else 8
    arguments: list[object] = [
        *(shape.capacity, shape.hidden, shape.intermediate, shape.experts, 0, shape.top_k),
        *(block_m, 128, 128),  # BLOCK_M, BLOCK_N, BLOCK_K
        *(store_rows, min(store_rows, 16)),  # rows stored at a time by the two epilogues
        *(f"math::constexpr_align<uint32_t>({block_m}, 128)", 128),  # scale tile rows of A and B
        "MmaKind::MXFP8FP4",
        *(pool, f"layout::get_num_sf_ring_tokens<uint32_t>({pool}, layout::kMinCandidateBlockM)"),
        *(stages, shape.hidden),  # stages, bytes a dispatch pull
        *(128, 128, 256),  # dispatch, loader and epilogue threads
        *(num_sms, shape.ranks, _NO_CLAMP, "0.0f"),
        *(False, True, False, False, False, False),  # SiTU, fast math, x scales, alphas, activation scales
        False,  # FP8 combine
        "cutlass::float_e4m3_t",
    ]
    source = _source("sm100_fp8_fp4_mega_moe.cuh", "sm100_fp8_fp4_mega_moe_impl", arguments)
    return Case("sm100_fp8_fp4_mega_moe_e4m3", arch, source)


def headers() -> Path:
    """The installed deep_gemm's include folder, found without importing it."""
    spec = importlib.util.find_spec("deep_gemm")
    if spec is None or spec.origin is None:
        raise RuntimeError("deep_gemm is not installed: pip install sgl-deep-gemm==0.2.5")
    return Path(spec.origin).parent / "include"


def nvcc() -> str:
    """CUDA_HOME's nvcc, or the one on PATH."""
    home = os.environ.get("CUDA_HOME", "")
    found = shutil.which(str(Path(home) / "bin" / "nvcc")) if home else shutil.which("nvcc")
    if found is None:
        raise RuntimeError(f"no nvcc (CUDA_HOME={home or 'unset'}): set CUDA_HOME to a CUDA 12.9 or later")
    return found


def cubin_arch(cubin: bytes) -> int:
    """The SM number a cubin was assembled for, from its ELF header; ValueError if it is no cubin."""
    if cubin[:4] != b"\x7fELF" or int.from_bytes(cubin[18:20], "little") != _EM_CUDA:
        raise ValueError("not a cubin")
    return int.from_bytes(cubin[48:52], "little") >> 8 & 0xFF


def build(case: Case, folder: Path) -> Built:
    """Compiles `case` to FOLDER/NAME.ARCH.cubin. RuntimeError carries nvcc's message if it fails."""
    stem = f"{case.name}.{case.arch}"
    source, cubin = folder / f"{stem}.cu", folder / f"{stem}.cubin"
    source.write_text(case.source)
    started = time.monotonic()
    done = subprocess.run(
        [
            *(nvcc(), str(source), "--cubin", "-o", str(cubin), f"-I{headers()}"),
            *(f"-gencode=arch=compute_{case.arch},code=sm_{case.arch}", *_FLAGS),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - started
    said = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(f"nvcc refused {case.name} for sm_{case.arch}:\n{said[-4000:]}")
    binary = cubin.read_bytes()
    if cubin_arch(binary) != int(case.arch.rstrip("af")):
        raise RuntimeError(f"{cubin.name} was assembled for sm_{cubin_arch(binary)}, not sm_{case.arch}")
    stack, stores, loads = (
        int(n)
        for n in _only(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    )
    (registers,) = (int(n) for n in _only(r"Used (\d+) registers", said))
    return Built(case.name, case.arch, round(seconds, 1), len(binary), registers, stack, stores + loads)


def _only(pattern: str, text: str) -> tuple[str, ...]:
    found = re.findall(pattern, text)
    if len(found) != 1:
        raise RuntimeError(f"ptxas reported {len(found)} kernels where one was instantiated")
    return found[0] if isinstance(found[0], tuple) else (found[0],)


def main(argv: list[str] | None = None) -> int:
    """Builds both cases (or the one named) and prints one JSON object a line."""
    parser = argparse.ArgumentParser(prog="python -m glm_kernels.mega_moe.instantiate", description=__doc__)
    parser.add_argument("--arch", choices=("90a", "100f", "103a", "all"), default="all")
    parser.add_argument("--keep", type=Path, help="folder to leave sources and cubins in")
    args = parser.parse_args(argv)
    cases = {
        "90a": sm90_case(Shape()),
        "100f": sm100_case(Shape(), arch="100f"),  # the family target that the pinned JIT asks for
        "103a": sm100_case(Shape()),
    }
    chosen = [cases["90a"], cases["103a"]] if args.arch == "all" else [cases[args.arch]]
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for case in chosen:
            print(f"compiling {case.name} for sm_{case.arch}", file=sys.stderr)
            print(json.dumps(asdict(build(case, folder))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
