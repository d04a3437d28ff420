"""The kernels: equal to their references in Triton's interpreter, and what they compile to for Hopper."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from glm_kernels.overlapped_moe import layout_kernels, row_kernels

LAYOUT = {"EXPERTS": 32, "PADDED": 32}
KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "count": (
        layout_kernels._count,
        {"ids": "*i32", "blocks": "*i32", "counts": "*i32", "overflow": "*i32", "first_expert": "i32"},
        {"BLOCK": 256, **LAYOUT},
    ),
    "scan": (
        layout_kernels._scan,
        {"counts": "*i32", "before": "*i32", "number": "i32"},
        {"PADDED": 32, "STEP": 256},
    ),
    "first_rows": (
        layout_kernels._first_rows,
        dict.fromkeys(
            ("before", "source_block", "home", "shift", "bound", "expert_of_row", "overflow"), "*i32"
        ),
        {"SOURCES": 3, "TILE": 128, "STEP": 1024, **LAYOUT},
    ),
    "place_pairs": (
        layout_kernels._place,
        dict.fromkeys(("ids", "blocks", "before", "home", "shift", "bound", "place"), "*i32")
        | {"first_expert": "i32"},
        {"SOURCES": 3, "BLOCK": 256, **LAYOUT},
    ),
    "quantise": (
        row_kernels._quantise,
        {"x": "*bf16", "codes": "*fp8e4nv", "scales": "*fp32", "tokens": "i32"},
        {"HIDDEN": 6144, "GROUPS": 48, "STEP": 16},
    ),
    "place": (
        row_kernels._place,
        {
            "codes": "*i32",
            "scales": "*fp32",
            "place": "*i32",
            "a": "*i32",
            "a_scale": "*fp32",
            "table": "*i32",
            "tokens": "i32",
        },
        {"WORDS": 1536, "WIDE": 2048, "GROUPS": 48, "MANY": 64, "TOP_K": 8, "SLOTS": 8},
    ),
    "swiglu": (
        row_kernels._swiglu,
        {"gate_up": "*bf16", "expert": "*i32", "codes": "*fp8e4nv", "scales": "*fp32", "rows": "i32"},
        {"WIDTH": 2048, "ROWS": 32},
    ),
    "reduce": (
        row_kernels._reduce,
        {
            "rows": "*bf16",
            "place": "*i32",
            "weights": "*fp32",
            "partials": "*bf16",
            "out": "*bf16",
            "tokens": "i32",
            "stride": "i32",
            "scaling": "fp32",
        },
        {"HIDDEN": 6144, "TOP_K": 8, "PEERS": 1, "COLUMNS": 2048},
    ),
}


def test_kernels_equal_references_in_the_interpreter() -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    script = Path(__file__).with_name("interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["layouts", "48", "rows", "2"]  # 8 geometries x 2 cuts x 3 plans


def compiled(name: str) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    function, names, constants = KERNELS[name]
    aligned = [n for n, kind in names.items() if kind.startswith("*") or n in ("rows", "stride")]
    attributes = {(function.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(
        function,
        names | dict.fromkeys(constants, "constexpr"),
        {(function.arg_names.index(n),): value for n, value in constants.items()},
        attributes,
    )
    warps = 4 if name == "first_rows" else 8
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_hopper_without_spilling(name: str, tmp_path: Path) -> None:
    import triton.backends.nvidia

    made = compiled(name)
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(made.asm["ptx"])
    ptxas = Path(triton.backends.nvidia.__path__[0]) / "bin" / "ptxas"
    command = [str(ptxas), "-v", "-arch=sm_90a", str(ptx), "-o", str(tmp_path / "kernel.cubin")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert re.findall(r"(\d+) bytes spill", told) in ([], ["0", "0"])
    # Programs an SM that Options counts on: 4 of the reducing kernel (65,536 registers, 256 threads), 8 of the others.
    registers = int(re.findall(r"Used (\d+) registers", told)[0])
    if name in ("quantise", "place", "swiglu", "reduce"):
        assert registers <= (64 if name == "reduce" else 32)


@pytest.mark.parametrize("name", ["quantise", "place", "swiglu", "reduce"])
def test_rows_move_in_16_bytes(name: str) -> None:
    ptx = compiled(name).asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4", ptx)
    # quantise stores 8 codes a thread: half of what it loads.
    assert re.search(r"st\.global\S*\.v2" if name == "quantise" else r"st\.global\S*\.v4", ptx)
