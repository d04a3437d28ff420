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


def test_fp8_index_keys_are_served_and_the_share_that_differs_is_reported(tmp_path: Path) -> None:
    """A server that stores index keys as a GPU does selects as the oracle does with keys rounded so."""
    args = oracle.parser().parse_args([])
    found = oracle.share_of_topk(args, tmp_path / "float32")
    assert found["tokens"] == 8 * found["index_topk"]
    assert set(found["share_by_full_layer"]) == {"0", "2"}
    assert all(0 < share < 0.1 for share in found["share_by_full_layer"].values())
    # Where a row sees no more than the top-k there is nothing to choose; beyond, the switch shows.
    assert found["max_logprob_change_below_topk"] <= oracle.BOUNDS["float32"]
    assert found["logprob_change"]["max"] > 10 * oracle.BOUNDS["float32"]
    # A key that lies on a rounding edge may fall on the other side, and change a few rows after it.
    assert found["share_of_logprobs_as_oracle_with_fp8_keys"] > 0.99
