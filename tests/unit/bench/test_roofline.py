"""The roofline against the project's own limits (docs: targets) and against numbers counted another way."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks import roofline
from benchmarks.roofline import GPUS, Model

#: Sizes of GLM-5, whose every layer has an indexer: what the targets were computed for.
GLM_5 = replace(Model.from_config(roofline.glm_5_3()), full_layers=78)
GLM_5_3 = Model.from_config(roofline.glm_5_3())


def test_active_weights_are_the_published_39_9_billion() -> None:
    assert GLM_5.active_weights == pytest.approx(39.9e9, rel=0.002)
    assert GLM_5_3.full_layers == 21


@pytest.mark.parametrize(("context", "gflop"), [(4096, 98), (16384, 106), (131072, 144)])
def test_flop_a_token_as_in_the_targets(context: int, gflop: float) -> None:
    assert roofline.work(GLM_5, context).total / 1e9 == pytest.approx(gflop, rel=0.005)


@pytest.mark.parametrize(
    ("gpu", "context", "roof"),
    [
        ("h200", 4096, 138e3),
        ("h200", 16384, 125e3),
        ("h200", 131072, 95e3),
        ("b300", 4096, 315e3),
        ("b300", 16384, 284e3),
        ("b300", 131072, 217e3),
    ],
)
def test_the_roof_of_a_node_as_in_the_targets(gpu: str, context: int, roof: float) -> None:
    (point,) = roofline.points(GLM_5, GPUS[gpu], 8, [context], {})
    assert point["roof_tokens_per_s"] == pytest.approx(roof, rel=0.01)


def test_the_articles_94k_at_128k_is_43_percent_of_its_roof() -> None:
    (point,) = roofline.points(GLM_5, GPUS["b300"], 8, [], {131072: 94e3})
    assert point["share"] == pytest.approx(0.43, abs=0.005)


@pytest.mark.parametrize("context", [1, 5, 64, 65, 300])
def test_averages_equal_the_sum_over_positions(context: int) -> None:
    small = replace(GLM_5, index_topk=64)
    attended = sum(min(i, 64) for i in range(1, context + 1)) / context
    seen = sum(range(1, context + 1)) / context
    one = roofline.work(small, context)
    assert one.mla == pytest.approx(2 * 78 * 64 * attended * 1088)
    assert one.indexer == pytest.approx(2 * 78 * 32 * 128 * seen)


def test_weights_equal_the_parameters_of_a_real_checkpoint() -> None:
    """Counted from the tiny model's tensors: all linear weights, experts that a token meets, no embedding or head."""
    from glm_sglang.tiny_model.shape import PRESETS, hf_config
    from glm_sglang.tiny_model.weights import state_dict

    shape = PRESETS["cpu"]
    model = Model.from_config(hf_config(shape, "bf16"))
    expected = 0
    for name, tensor in state_dict(shape, "bf16").items():
        if tensor.dim() < 2 or "embed_tokens" in name or "lm_head" in name:
            continue
        counted = (
            ".experts." not in name or int(name.split(".experts.")[1].split(".")[0]) < shape.experts_per_token
        )
        expected += tensor.numel() * counted
    assert model.active_weights == expected


def test_cache_bytes_a_token() -> None:
    """656 B a layer and 132 B a full layer; 51 to 61 kB as in the targets; 5.8 GB/s at 94k tokens/s."""
    assert roofline.kv_bytes(GLM_5)["total"] == 78 * (656 + 132) == 61464
    assert roofline.kv_bytes(GLM_5_3) == {"main": 78 * 656, "index": 21 * 132, "total": 53940}
    assert roofline.kv_bytes(GLM_5)["total"] * 94e3 == pytest.approx(5.8e9, rel=0.01)


def test_wire_bytes_agree_with_the_layer_benchmarks() -> None:
    """benchmarks.moe_layer counts the same traffic for one layer of a rank's tokens."""
    from benchmarks import moe_layer

    layer = moe_layer.Layer(6144, 2048, 256, 8, 8)
    one = moe_layer.plan(layer, 4096, ())["wire_bytes_a_rank"]
    ours = roofline.wire_bytes(GLM_5, 8)
    for arm in ("megamoe", "gathered"):
        assert ours[arm] * 4096 / 75 == pytest.approx(one[arm], rel=1e-6)


def write(path: Path, value: Any) -> Path:
    path.write_bytes(orjson.dumps(value))
    return path


def test_shares_come_from_a_long_context_result(tmp_path: Path) -> None:
    times = {"requests": 2, "prompt_tokens": 2 * 4000, "ttft_ms": {"median": {"value": 500.0}}}
    point = {"point": "concurrency 1", "endpoints": {"ours": {"by_label": {"all": times, "4k": times}}}}
    file = write(tmp_path / "r.json", {"kind": "ab", "workload": "long_context", "points": [point]})
    assert roofline.from_result(file, "ours") == {4096: 8000.0}
    with pytest.raises(ValueError, match="allowed: ours"):
        roofline.from_result(file, "theirs")
    with pytest.raises(ValueError, match=r"no long_context result of benchmarks\.ab, and none of .*gpu_idle"):
        roofline.from_result(write(tmp_path / "x.json", {"kind": "ab", "workload": "mixed"}), "ours")


def test_a_step_behind_a_prefix_is_what_the_whole_prompt_takes_more() -> None:
    gpu = GPUS["h200"]
    first, second = (
        roofline.step_seconds(GLM_5_3, gpu, 1, 2048),
        roofline.step_seconds(GLM_5_3, gpu, 1, 2048, 2048),
    )
    assert first + second == pytest.approx(roofline.step_seconds(GLM_5_3, gpu, 1, 4096))
    assert first < second
    (point,) = roofline.points(GLM_5_3, gpu, 1, [2048], {})
    assert 2048 / first == pytest.approx(point["roof_tokens_per_s"], rel=1e-4)


RESULTS = Path(roofline.__file__).parent / "results"


def test_the_share_of_a_gpu_idle_result(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the recorded one: of its own model, whose 8 experts are those that a token meets."""
    file = RESULTS / "h200" / "gpu_idle_78_layers_deep_gemm.json"
    idle = roofline.Idle.read(file)
    assert idle is not None
    assert idle.model() == replace(GLM_5_3, experts=8)
    monkeypatch.setattr("sys.argv", ["roofline", "--gpu", "h200", "--result", str(file), "--json"])
    assert roofline.main() == 0
    found = orjson.loads(capsys.readouterr().out.splitlines()[-1])
    steps = {(one["arm"], one["rows"]): one for one in found["steps"]}
    recorded = orjson.loads(file.read_bytes())["arms"]["ours"]["untraced"]["2048"]
    ours = steps["ours", 2048]
    assert ours["share"] == pytest.approx(ours["roof_ms"] / recorded["step_ms_saturated"], rel=1e-3)
    assert ours["share_alone"] < ours["share"]
    assert {one["context"]: one["share"] for one in found["points"]} == pytest.approx(
        {rows: steps["ours", rows]["share"] for rows in (2048, 8192)}, rel=1e-3
    )
    assert (found["gpus"], found["not_measured"]) == (1, [])


@pytest.mark.parametrize("flag", ["--gpus=8", "--model=/nowhere"])
def test_a_gpu_idle_result_has_its_own_model_and_gpus(
    flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = RESULTS / "h200" / "gpu_idle_78_layers_deep_gemm.json"
    monkeypatch.setattr("sys.argv", ["roofline", "--gpu", "h200", "--result", str(file), flag])
    assert roofline.main() == 2
    assert "neither --model nor --gpus" in capsys.readouterr().err
    bare = write(tmp_path / "x.json", {"question": "gpu_idle", "model": {"layers": 8}, "arms": {}})
    with pytest.raises(ValueError, match="has no dense_layers of its model"):
        roofline.Idle.read(bare)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama"}, "must be 'glm_moe_dsa'"),
        ({"model_type": "glm_moe_dsa"}, "has no num_hidden_layers"),
    ],
)
def test_another_model_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Model.from_config(config)


def test_words_that_measure_nothing_are_refused() -> None:
    assert roofline.measured("128k=94000") == (131072, 94000.0)
    with pytest.raises(argparse.ArgumentTypeError, match="CONTEXT=TOKENS_PER_S"):
        roofline.measured("94000")
