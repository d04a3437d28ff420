"""`benchmarks.moe_layer` where there is no GPU: its plan, its refusals, and the figures it derives."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from glm_kernels.mega_moe import Arithmetic, ExpertWeights, mega_moe_reference
from mega_moe_cases import checkpoint, tokens

from benchmarks import _moe_arms, _moe_batches, moe_layer
from benchmarks.moe_layer import Layer, faults, headline, plan

GLM = Layer(hidden=6144, intermediate=2048, experts=64, top_k=8, ranks=2)


def test_dry_run_ends_with_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert moe_layer.main(["--dry-run", "--json", "--tokens", "64,16384", "--capacity", "4096"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["question"] == "moe_layer"
    assert result["dry_run"] is True
    assert [size["tokens"] for size in result["plan"]] == [64, 16384]
    assert [way["calls"] for way in result["plan"][1]["megamoe"]] == [1, 4]


def test_plan_counts_work_and_wire_bytes() -> None:
    size = plan(GLM, 8192, ())
    # two GEMMs: 2 * pairs * (2 I * H + H * I)
    assert size["tflop_a_rank"] * 1e12 == pytest.approx(2 * 65_536 * 3 * 6144 * 2048)
    assert size["weight_bytes_a_rank"] == 32 * 3 * 6144 * 2048
    row = 6144 + 48 * 4 + 2 * 6144  # codes, scales, bf16 back
    assert size["wire_bytes_a_rank"] == {"megamoe": 32_768 * row, "gathered": 8192 * row}
    assert size["megamoe"][0]["buffer_bytes"] / 2**30 == pytest.approx(1.08, abs=0.005)  # measured on 2xH200


def test_one_rank_has_nothing_on_the_wire() -> None:
    assert plan(Layer(6144, 2048, 32, 8, 1), 100, ())["wire_bytes_a_rank"] == {"megamoe": 0, "gathered": 0}


def test_headline_takes_8192_and_the_least() -> None:
    sizes: list[dict[str, Any]] = [
        {
            "tokens": t,
            "speedup": s,
            "rows_checked": 2 * t,
            "arms": {"megamoe": {"calc_diff": d, "row_diff": 2 * d}},
        }
        for t, s, d in ((64, 1.4, 2e-4), (8192, 1.2, 3e-4), (16384, 1.1, 1e-4), (0, None, 0.0))
    ]
    assert headline(sizes) == {
        "speedup": 1.2,
        "min_speedup": 1.1,
        "largest_diff": 3e-4,
        "largest_row_diff": 6e-4,
        "rows_checked": 2 * (64 + 8192 + 16384),
    }
    assert headline(sizes[:1])["speedup"] is None
    assert faults(sizes, None) == []


@pytest.mark.parametrize("wrong", [{"calc_diff": 2e-3}, {"row_diff": 0.02}, {"row_diff": math.inf}])
def test_what_is_beyond_a_bound_is_named(wrong: dict[str, float]) -> None:
    right = {"calc_diff": 2e-4, "row_diff": 4e-4}
    sizes = [{"tokens": 64, "arms": {"megamoe": right, "stock": right | wrong}}]
    (line,) = faults(sizes, right | {"written_behind": 0})
    assert line.startswith("64 tokens, stock: ")
    assert [line.partition(":")[0] for line in faults([], right | wrong | {"written_behind": 3})] == [
        "soak"
    ] * 2


# --- all rows are compared ---


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def small() -> tuple[_moe_arms.Batch, ExpertWeights]:
    given = tokens(4, 600, 6, 2, hidden=256)
    return _moe_arms.Batch(given.x, given.ids, given.weights, 600), checkpoint(3, 6, 256, 128)


def test_every_row_has_a_reference_whatever_the_slabs_are(group: dist.ProcessGroup) -> None:
    batch, weights = small()
    batch.ids[500:] = -1
    whole = _moe_batches.reference(batch, weights, group)
    want = mega_moe_reference(
        batch.x, batch.ids, batch.weights, weights, arithmetic=Arithmetic.SM90, routed_scaling_factor=2.5
    )
    assert torch.equal(whole, want)
    assert torch.equal(_moe_batches.reference(batch, weights, group, slab=77), whole)
    assert int(whole[:500].abs().amax(-1).gt(0).sum()) == 500
    assert not whole[500:].any()
    batch.x, batch.ids, batch.weights = batch.x[:0], batch.ids[:0], batch.weights[:0]
    assert _moe_batches.reference(batch, weights, group).shape == (0, 256)


@pytest.mark.parametrize("row", [0, 255, 256, 4095, 4096, 5999])
def test_a_wrong_tile_of_one_row_is_found_wherever_it_is(row: int) -> None:
    truth = torch.randn(6000, 1536, generator=torch.Generator().manual_seed(1)).bfloat16()
    right = _moe_batches.difference(truth * 1.01, truth)
    assert float(right.max()) < moe_layer.BOUND
    out = truth.clone()
    out[row, 1280:1312] = 0.0  # as 128 columns of 6,144
    whole, worst = _moe_batches.difference(out, truth).tolist()
    assert whole < moe_layer.BOUND  # nothing among so many
    assert worst > moe_layer.ROW_BOUND
    out[row, 7] = torch.nan
    assert _moe_batches.difference(out, truth).tolist() == [math.inf, math.inf]


def test_rows_of_zeros_and_no_rows_do_not_differ() -> None:
    zeros, one = torch.zeros(3, 128), torch.zeros(3, 128)
    assert _moe_batches.difference(zeros, one).tolist() == [0.0, 0.0]
    assert _moe_batches.difference(zeros[:0], one[:0]).tolist() == [0.0, 0.0]
    one[2, 5] = 1e-3
    assert _moe_batches.difference(zeros, one).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kernel", ["right", "idle", "a row short", "a row more"])
def test_a_soak_takes_nothing_of_the_call_before_for_this_ones(kernel: str) -> None:
    truth = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    holder = _moe_arms.Batch(truth, torch.zeros(64, 2), torch.zeros(64, 2), 0)
    out = truth.clone()

    def run() -> None:
        rows = holder.count + {"a row short": -1, "a row more": 1}.get(kernel, 0)
        if kernel != "idle" and holder.count:
            out[:rows] = truth[:rows]

    arm = _moe_arms.Arm(kernel, run, out)
    found = _moe_batches.soaked(arm, holder, truth, [0, 5, 63, 17]).tolist()
    assert (
        found
        == {
            "right": [0.0, 0.0, 0.0],
            "idle": [math.inf, math.inf, 0.0],
            "a row short": [math.inf, math.inf, 0.0],
            "a row more": [0.0, 0.0, 128.0],
        }[kernel]
    )


def test_a_soak_has_the_edges_and_ranks_without_tokens() -> None:
    counts = _moe_batches.soak_counts(1000, 2, 1920)
    assert counts.min() == 0
    assert counts.max() == 1920
    for edge in _moe_batches.EDGES:
        assert int((counts == edge).all(1).sum()) >= 10
    assert int((counts[:, 0] == 0).sum()) >= 140
    assert int(_moe_batches.soak_counts(1000, 1, 64).max()) == 64


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert moe_layer.main(["--dry-run", "--hidden", "6000"]) == 2
    assert "hidden_size is 6000" in capsys.readouterr().err
    for words in (("--tokens=-1",), ("--capacity", "0")):
        with pytest.raises(SystemExit):
            moe_layer.main(["--dry-run", *words])
        assert "or more" in capsys.readouterr().err


def test_no_tokens_are_one_call_without_any() -> None:
    (way,) = plan(GLM, 0, (64,))["megamoe"]
    assert (way["calls"], way["capacity"]) == (1, 128)
    assert plan(GLM, 0, ())["tflop_a_rank"] == 0


def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert moe_layer.main(["--tokens", "64"]) == 2
    assert "--dry-run" in capsys.readouterr().err
