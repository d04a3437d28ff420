"""The references against bytes known by construction, and the kernel against the references in Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from glm_kernels.page_copy import (
    CopyTable,
    Rows,
    gather_reference,
    kernels,
    scatter_reference,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from tests.unit.page_copy.layouts import CASES, PAGES, Case, content, pool, staged

POOL = 12


def numbers(which: str) -> torch.Tensor:
    return torch.tensor(PAGES[which], dtype=torch.int64)


@pytest.mark.parametrize("which", PAGES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gather_brings_each_pages_bytes_to_its_place(case: Case, which: str) -> None:
    staging = torch.full((len(PAGES[which]), case.page_bytes), 254, dtype=torch.uint8)
    gather_reference(pool(case, POOL), numbers(which), staging)
    assert np.array_equal(staging.numpy(), staged(case, PAGES[which]))


@pytest.mark.parametrize("which", PAGES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_scatter_writes_those_pages_and_no_other(case: Case, which: str) -> None:
    rows = pool(case, POOL, empty=True)
    scatter_reference(rows, numbers(which), torch.from_numpy(staged(case, PAGES[which])))
    for buffer, row in enumerate(rows):
        for page in range(POOL):
            expected = content(buffer, page, row.size) if page in PAGES[which] else np.full(row.size, 255)
            assert np.array_equal(row.pool[page].numpy(), expected), (buffer, page)


def test_gather_leaves_other_bytes_of_wider_staging_alone() -> None:
    case = CASES[1]
    staging = torch.full((1, case.page_bytes + 32), 254, dtype=torch.uint8)
    gather_reference(pool(case, POOL), numbers("one"), staging)
    assert (staging[0, case.page_bytes :] == 254).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages": torch.zeros(2, dtype=torch.int32)}, "int64"),
        ({"pages": torch.zeros(3, dtype=torch.int64)}, "3 pages and 2 staged pages"),
        ({"staging": torch.zeros(2, 8, dtype=torch.uint8)}, "ends at byte 16"),
        ({"rows": [Rows(torch.zeros(4, 16, dtype=torch.int8), 0)]}, "expected uint8"),
        ({"rows": []}, "no rows"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "rows": [Rows(torch.zeros(4, 16, dtype=torch.uint8), 0)],
        "pages": torch.zeros(2, dtype=torch.int64),
        "staging": torch.zeros(2, 16, dtype=torch.uint8),
    }
    arguments.update(change)
    for copy in (gather_reference, scatter_reference):
        with pytest.raises(ValueError, match=message):
            copy(**arguments)  # type: ignore[arg-type]


def test_a_table_covers_every_byte_once() -> None:
    case = CASES[1]
    rows = pool(case, POOL)
    table = CopyTable(rows)
    assert table.aligned
    covered: list[int] = []
    for address, stride, start, words in table.lines.tolist():
        row = max((row for row in rows if row.start <= start), key=lambda row: row.start)
        assert address - row.pool.data_ptr() == start - row.start
        assert stride == row.size
        covered.extend(range(start, start + 4 * words))
    assert covered == list(range(case.page_bytes))


def test_rows_of_odd_sizes_are_copied_byte_by_byte() -> None:
    table = CopyTable([Rows(torch.zeros(4, 33, dtype=torch.uint8), 0)])
    assert not table.aligned
    assert table.lines[0, 3] == 33


def test_kernels_equal_references_in_the_interpreter() -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    script = Path(__file__).with_name("interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    # 2 layouts × 4 page sets × 2 pitches
    assert done.stdout.split() == ["gather", "16", "scatter", "16"]


def moved(kernel: Any, signature: dict[str, str], constants: dict[str, Any]) -> list[str]:
    """The kernel's accesses to global memory on Hopper, but for .b64: those are the reads of tables."""
    source = ASTSource(
        fn=kernel, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants
    )
    text = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    return [line for line in re.findall(r"(?:ld|st)\.global\S*", text) if ".b64" not in line]


def test_copies_compile_to_16_byte_accesses_for_hopper() -> None:
    signature = {"table": "*i64", "pages": "*i64", "staging": "i64", "pitch": "i64"}
    found = moved(kernels._copy, signature, {"TO_STAGING": True, "ALIGNED": True, "WORDS": 4096})
    assert len(found) == 16  # 16 KiB / 128 threads / 16 bytes, in and out
    assert all(".v4.b32" in line for line in found)
