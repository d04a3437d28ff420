"""The arithmetic of `benchmarks.moe_server`: divergences, verdicts, the wide model's tensors."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from benchmarks import _wide_model, moe_server
from glm_sglang.tiny_model.weights import state_dict


def answer(rows: list[list[float]], first: list[float], tokens: list[int]) -> dict[str, Any]:
    """As /generate gives it: the prompt's first position has no distribution."""

    def top(probabilities: list[float]) -> list[list[Any]]:
        ordered = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
        return [[math.log(probabilities[token]), token, None] for token in ordered]

    return {
        "output_ids": tokens,
        "meta_info": {
            "input_top_logprobs": [None, *map(top, rows)],
            "output_top_logprobs": [top(first)],
        },
    }


def test_divergence_is_kl_over_the_whole_vocabulary() -> None:
    base = answer([[0.5, 0.25, 0.25]], [0.2, 0.3, 0.5], [2])
    other = answer([[0.25, 0.5, 0.25]], [0.2, 0.3, 0.5], [2])
    row = moe_server.compare(base, other)
    expected = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert row["positions"] == 2
    assert row["kl_max"] == pytest.approx(expected)
    assert row["kl_mean"] == pytest.approx(expected / 2)
    assert row["argmax_equal"] == 1
    assert row["tokens_equal"]
    assert math.isnan(moe_server.divergence({0: 0.0}, {1: 0.0}))


def test_verdicts_tell_below_from_above_the_cap() -> None:
    setting = replace(moe_server.GPU, cap=100, stock_cap=10)

    def row(arm: str, size: int, kl: float) -> dict[str, Any]:
        return {"arm": arm, "size": size, "kl_mean": kl, "tokens_equal": True}

    def judge(*more: dict[str, Any]) -> dict[str, Any]:
        rows = [row("megamoe", 200, 1e-4), row("megamoe", 201, 2e-4), row("upstream", 10, 1e-4), *more]
        found: dict[str, Any] = moe_server.verdicts("agreement", rows, setting)["agreement_verdict"]
        return found

    found = judge(row("upstream", 11, 3.0))
    ours = {"kl_below_cap": 1e-4, "kl_above_cap": 2e-4, "answers": 2, "greedy_equal": 2, "kl_undefined": 0}
    assert found["megamoe"] == ours
    assert (found["upstream"]["kl_below_cap"], found["upstream"]["kl_above_cap"]) == (1e-4, 3.0)
    assert found["ok"]
    assert found["upstream_bug_shown"]
    assert judge(row("upstream", 11, math.nan))["upstream_bug_shown"]
    assert not judge(row("upstream", 11, 1e-3))["upstream_bug_shown"]
    assert not judge(row("megamoe", 1, 1.0))["ok"]
    assert not judge(row("megamoe", 1, math.nan))["ok"]
    assert not judge({"arm": "megamoe", "size": 1, "error": "…"})["ok"]
    assert not moe_server.verdicts("agreement", [], setting)["agreement_verdict"]["ok"]


def test_the_report_survives_being_cut_short(tmp_path: Path) -> None:
    report = moe_server.Report(tmp_path / "new" / "out.json", 100.0)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(report.put, **{f"n{i}": i}) for i in range(200)]:
            done.result()
    report.put(a=1)
    report.put(b=2)
    found = json.loads((tmp_path / "new" / "out.json").read_text())
    assert (found["a"], found["b"], len(found)) == (1, 2, 203)
    assert 0 < report.left() <= 100.0
    assert moe_server.Report(None, -1.0).left() == 0.0


def test_speeds_are_medians_side_by_side() -> None:
    row = moe_server.speeds(8000, {"stock": [0.4, 0.2, 0.3], "megamoe": [0.2, 0.1, 0.9]})
    assert (row["stock_ms"], row["megamoe_ms"], row["speedup"]) == (300.0, 200.0, 1.5)
    assert row["megamoe_tokens_s"] == 40000
    assert row["stock_spread_ms"] == [200.0, 400.0]
    assert "speedup" not in moe_server.speeds(8000, {"stock": [0.4]})


def test_the_wide_model_has_the_tensors_of_a_checkpoint(tmp_path: Path) -> None:
    """At small widths, against the tiny model's own: names, shapes, dtypes; and the router spreads tokens."""
    shape = replace(
        _wide_model.true_widths(3, 16),
        hidden=512,
        intermediate=512,
        moe_intermediate=256,
        heads=8,
        q_lora_rank=512,
    )
    size = _wide_model.write(tmp_path / "wide", shape)
    files = json.loads((tmp_path / "wide" / "model.safetensors.index.json").read_text())["weight_map"]
    expected = state_dict(shape, "fp8")
    assert files.keys() == expected.keys()
    total = 0
    for name, file in files.items():
        with safe_open(tmp_path / "wide" / file, framework="pt") as tensors:
            tensor = tensors.get_tensor(name)
        assert (tensor.shape, tensor.dtype) == (expected[name].shape, expected[name].dtype), name
        total += tensor.nbytes
        if name == "model.layers.1.mlp.gate.weight":
            logits = torch.randn(2000, shape.hidden) @ tensor.float().T
            load = torch.bincount(logits.topk(8).indices.flatten(), minlength=shape.experts)
            assert int(load.min()) > 0.5 * int(load.max())
    assert total == size
    assert _wide_model.write(tmp_path / "wide", shape) == size
