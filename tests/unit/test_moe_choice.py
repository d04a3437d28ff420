"""--glm-moe: which path, why, and what is refused with which flag to change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from glm_sglang import launch_defaults
from glm_sglang.command_line import parse
from glm_sglang.errors import UsageError
from glm_sglang.moe import choice, refusals
from glm_sglang.moe.facts import CAP_VARIABLE, FIELDS, FUSE_SHARED, SKIP_GATHER, VARIABLES, Checkpoint, Facts
from glm_sglang.tiny_model.shape import PRESETS, hf_config

GLM = Checkpoint(hidden=6144, intermediate=2048, experts=256, top_k=8, block=(128, 128))


def facts(capability: tuple[int, int] | None = (9, 0), **flags: Any) -> Facts:
    return Facts(
        platform="reference" if capability is None else "cuda",
        capability=capability,
        checkpoint=GLM,
        flags={"tp_size": 8, "ep_size": 8, **flags},
    )


def test_a_node_of_eight_h200_is_accepted() -> None:
    assert refusals.find(facts()) == []
    assert refusals.find(facts(enable_prefill_cp=True, cp_strategy="interleave", attn_cp_size=8)) == []
    assert refusals.find(facts(attn_dp_size=8)) == []
    assert refusals.find(facts(dp_size=2)) == []  # replicas
    assert refusals.find(facts(enable_dp_attention=True, dp_size=8)) == []
    assert refusals.find(facts(disable_shared_experts_fusion=True, weight_cache_mode="off")) == []
    # SGLang's default, which --glm-no-defaults leaves.
    assert refusals.find(facts(disable_shared_experts_fusion=False)) == []
    assert refusals.find(facts(None)) == []


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"tp_size": 1, "ep_size": 1}, "--tp-size"),
        ({"ep_size": 4}, "--ep-size"),
        ({"tp_size": 3, "ep_size": 3}, "n_routed_experts"),
        ({"moe_dp_size": 2}, "--moe-dp-size"),
        ({"nnodes": 2}, "--nnodes"),
        ({"dtype": "float16"}, "--dtype"),
        ({"enable_prefill_cp": True, "cp_strategy": "zigzag"}, "--cp-strategy"),
        ({"enable_prefill_cp": True, "attn_dp_size": 2}, "--attn-dp-size"),
        ({"enable_prefill_cp": True, "enable_dp_attention": True, "dp_size": 2}, "--enable-dp-attention"),
        ({"enable_prefill_cp": True, "dp_size": 2}, "--dp-size is 2"),
        ({"pp_size": 2}, "--pp-size"),
        ({"dwdp_size": 8}, "--dwdp-size"),
        ({"weight_cache_mode": "client"}, "--weight-cache-mode"),
        ({"remote_instance_weight_loader_start_seed_via_transfer_engine": True}, "-seed-via-transfer-engine"),
        ({"cpu_offload_gb": 10}, "--cpu-offload-gb"),
        ({"offload_group_size": 4}, "--offload-group-size"),
        ({"enable_paged_experts": True}, "--enable-paged-experts"),
        ({"enforce_shared_experts_fusion": True}, "--enforce-shared-experts-fusion"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"enable_single_batch_overlap": True}, "--enable-single-batch-overlap"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"enable_waterfill": True}, "--enable-waterfill"),
        ({"enable_w4a4_mxfp4_megamoe": True}, "--enable-w4a4-mxfp4-megamoe"),
        ({"elastic_ep_backend": "nixl"}, "--elastic-ep-backend"),
        ({"ep_num_redundant_experts": 8}, "--ep-num-redundant-experts"),
        ({"init_expert_location": "x.json"}, "--init-expert-location"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
    ],
)
def test_what_cannot_work_names_the_flag(flags: dict[str, Any], named: str) -> None:
    found = refusals.find(facts(**flags))
    assert [sentence for sentence in found if named in sentence], found


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"block": None}, "--model-path"),
        ({"block": (64, 64)}, "[64, 64]"),
        ({"hidden": 6000}, "hidden_size"),
        ({"intermediate": 128}, "moe_intermediate_size"),
        ({"top_k": 40}, "num_experts_per_tok"),
    ],
)
def test_a_checkpoint_the_kernel_does_not_take(changed: dict[str, Any], named: str) -> None:
    found = refusals.find(replace(facts(), checkpoint=replace(GLM, **changed)))
    assert len(found) == 1
    assert named in found[0]


def test_gpus_and_caps() -> None:
    assert "SM80" in refusals.find(facts((8, 0)))[0]
    assert refusals.find(facts((10, 3))) == []
    assert CAP_VARIABLE in refusals.find(replace(facts(), cap=64))[0]
    assert refusals.find(replace(facts(None), cap=1)) == []


def test_variables_are_read_as_sglang_reads_them() -> None:
    skip = {SKIP_GATHER: "Yes"}
    assert SKIP_GATHER in refusals.find(replace(facts(attn_dp_size=2), variables=skip))[0]
    assert (
        refusals.find(replace(facts(), variables=skip)) == []
    )  # without attention DP there is nothing to gather
    assert refusals.find(replace(facts(attn_dp_size=2), variables={SKIP_GATHER: "0"})) == []
    assert FUSE_SHARED in refusals.find(replace(facts(), variables={FUSE_SHARED: "1"}))[0]
    assert refusals.find(replace(facts(), variables={FUSE_SHARED: "false"})) == []


def test_sglang_knows_every_field_and_variable() -> None:
    from sglang.srt.environ import envs
    from sglang.srt.server_args import ServerArgs

    assert set(FIELDS) <= set(ServerArgs.__struct_fields__)
    assert [name for name in VARIABLES if not hasattr(envs, name)] == []


def test_auto_takes_what_is_measured_and_says_how_far() -> None:
    two = choice.verdict(facts(tp_size=2, ep_size=2), asked=False)
    assert two.path == choice.MEGAMOE
    assert "SM90" in two.reason
    assert "EP2" in two.reason
    assert "not measured" not in two.reason
    for ranks in (4, 8):
        decision = choice.verdict(facts(tp_size=ranks, ep_size=ranks), asked=False)
        assert decision.path == choice.MEGAMOE
        assert f"EP{ranks} runs the same code and was not measured" in decision.reason
    for other, reason in (
        (facts(ep_size=1), "--ep-size"),
        (facts((10, 0)), "never measured"),
        (facts(None), "reference platform"),
        (facts(enable_eplb=True), "--enable-eplb"),
        (facts(load_format="presharded"), "--load-format"),
    ):
        decision = choice.verdict(other, asked=False)
        assert decision.path == choice.STOCK
        assert reason in decision.reason
    assert "never measured on SM100" in choice.verdict(facts((10, 0)), asked=True).reason
    with pytest.raises(UsageError, match="--enable-eplb"):
        choice.verdict(facts(enable_eplb=True), asked=True)


def test_the_reason_reaches_the_schedulers() -> None:
    environ: dict[str, str] = {}
    assert "not started by" in choice.handed_down(environ).reason
    decision = choice.Decision("megamoe", "because")
    decision.hand_down(environ)
    assert choice.handed_down(environ) == decision


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_bytes(orjson.dumps(hf_config(PRESETS["gpu"], "fp8")))
    return tmp_path


def decide(folder: Path, moe: str, *argv: str) -> choice.Decision:
    request = parse(["--model-path", str(folder), *argv])
    return choice.decide(request, "reference", {"GLM_SGLANG_MOE": moe})


@pytest.mark.parametrize(
    ("argv", "path"),
    [
        ([], "megamoe"),
        (["--load-format", "sharded_state"], "stock"),
        (["--pp-size", "2"], "stock"),
        (["--dwdp-size", "8"], "stock"),
        (["--cpu-offload-gb", "4"], "stock"),
        (["--enable-dp-attention", "--dp-size", "2"], "megamoe"),
        (
            ["--enable-dp-attention", "--dp-size", "2", "--enable-prefill-cp", "--cp-strategy", "interleave"],
            "stock",
        ),
        (["--glm-no-defaults"], "stock"),  # nothing is filled in, so SGLang would run no backend
    ],
)
def test_auto_never_takes_what_would_end_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], path: str
) -> None:
    monkeypatch.setattr(choice, "capability", lambda platform: (9, 0))
    request = parse(["--model-path", str(folder), "--tp", "8", "--ep", "8", *argv])
    assert choice.decide(request, "cuda", {}).path == path


def test_the_launcher_decides_and_fills_in(folder: Path) -> None:
    assert decide(folder, "auto", "--tp", "2").path == "stock"
    assert decide(folder, "auto", "--tp", "2", "--moe-a2a-backend", "megamoe").path == "megamoe"
    assert decide(folder, "auto", "--tp", "2", "--moe-a2a-backend", "deepep").path == "stock"
    decision = decide(folder, "megamoe", "--tp", "2")
    request = parse(["--model-path", str(folder), "--tp", "2", "--glm-moe", "megamoe", "--glm-no-defaults"])
    filled = {value.field: value.value for value in launch_defaults.fill(request, "reference", decision)}
    assert filled == {"moe_a2a_backend": "megamoe", "disable_shared_experts_fusion": True}


@pytest.mark.parametrize(
    ("moe", "argv", "message"),
    [
        ("stock", ["--moe-a2a-backend", "megamoe"], "--glm-moe megamoe"),
        ("megamoe", ["--moe-a2a-backend", "deepep"], "leave one of them out"),
        ("megamoe", [], "--tp-size is 1"),
        ("megamoe", ["--tp", "two"], "--tp-size is 'two'"),
    ],
)
def test_contradictions_are_refused(folder: Path, moe: str, argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        decide(folder, moe, *argv)


def test_a_checkpoint_that_is_not_there_yet(tmp_path: Path) -> None:
    assert decide(tmp_path / "none", "auto").path == "stock"
    with pytest.raises(UsageError, match="--model-path"):
        decide(tmp_path / "none", "megamoe")


HUB_ID, COMMIT = "zai-org/GLM-5.3-FP8", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hugging Face cache with one revision of HUB_ID's config.json; nothing else may be asked."""
    import socket

    import huggingface_hub

    repository = tmp_path / "models--zai-org--GLM-5.3-FP8"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_bytes(orjson.dumps(hf_config(PRESETS["gpu"], "fp8")))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("asked the network"))
    monkeypatch.setattr(choice, "capability", lambda platform: (9, 0))
    return snapshot


def of_hub(*argv: str, environ: dict[str, str] | None = None) -> choice.Decision:
    request = parse(["--model-path", HUB_ID, "--tp", "8", "--ep", "8", *argv])
    return choice.decide(request, "cuda", environ or {})


@pytest.mark.parametrize("flags", [(), ("--revision", "main"), ("--revision", COMMIT)])
def test_a_hub_id_in_the_cache_is_judged_as_its_folder_is(cached: Path, flags: tuple[str, ...]) -> None:
    request = parse(["--model-path", str(cached), "--tp", "8", "--ep", "8"])
    assert of_hub(*flags) == choice.decide(request, "cuda", {})
    assert of_hub(*flags).path == choice.MEGAMOE
    assert of_hub(*flags, environ={"GLM_SGLANG_MOE": "megamoe"}).path == choice.MEGAMOE


def test_another_models_snapshot_is_refused_as_its_folder_is(cached: Path) -> None:
    (cached / "config.json").write_bytes(orjson.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(UsageError, match="LlamaForCausalLM, this server is for GlmMoeDsaForCausalLM"):
        of_hub()


@pytest.mark.parametrize(
    ("flags", "environ"),
    [(("--revision", "v2"), {}), ((), {"SGLANG_USE_MODELSCOPE": "true"})],
)
def test_what_the_cache_does_not_hold_is_not_judged(
    cached: Path, flags: tuple[str, ...], environ: dict[str, str]
) -> None:
    decision = of_hub(*flags, environ=environ)
    assert decision.path == choice.STOCK
    assert "not there yet" in decision.reason
    with pytest.raises(UsageError, match="in the Hugging Face cache"):
        of_hub(*flags, environ={"GLM_SGLANG_MOE": "megamoe"} | environ)
