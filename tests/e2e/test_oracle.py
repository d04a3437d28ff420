"""The oracle: every case of `benchmarks.oracle` within its bound. FP8 stands for what rounds; bf16 is `slow`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import oracle


@pytest.mark.parametrize("dtype", ["float32", "fp8", pytest.param("bf16", marks=pytest.mark.slow)])
def test_every_case_agrees_with_transformers(dtype: str, tmp_path: Path) -> None:
    """Greedy tokens equal, logprobs within the bound, cached tokens as many as can be: 52 cases over two servers."""
    rows = oracle.run_dtype(oracle.parser().parse_args(["--dtype", dtype]), dtype, tmp_path / dtype)
    assert len(rows) == 52
    assert [row for row in rows if not oracle.passed(row)] == []
