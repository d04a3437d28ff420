"""`benchmarks.moe_layer` where there is no GPU: its plan, its refusals, and the figures it derives."""

from __future__ import annotations

import json

import pytest

from benchmarks import moe_layer
from benchmarks.moe_layer import Layer, headline, plan

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
    sizes = [
        {"tokens": t, "speedup": s, "arms": {"megamoe": {"calc_diff": d}}}
        for t, s, d in ((64, 1.4, 2e-4), (8192, 1.2, 3e-4), (16384, 1.1, 1e-4))
    ]
    assert headline(sizes) == {"speedup": 1.2, "min_speedup": 1.1, "largest_diff": 3e-4}
    assert headline(sizes[:1])["speedup"] is None


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert moe_layer.main(["--dry-run", "--hidden", "6000"]) == 2
    assert "hidden_size is 6000" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        moe_layer.main(["--dry-run", "--tokens", "0"])
    assert "positive" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert moe_layer.main(["--tokens", "64"]) == 2
    assert "--dry-run" in capsys.readouterr().err
