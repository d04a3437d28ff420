"""What is no GLM-5.x checkpoint is refused in one line, before anything is loaded."""

import json
from pathlib import Path

import pytest

from glm_sglang import checkpoint_check
from glm_sglang.errors import UsageError

GLM = {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa"}


def config(folder: Path, content: object) -> str:
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder)


def test_a_glm_checkpoint_is_taken(tmp_path: Path) -> None:
    assert checkpoint_check.check(config(tmp_path, GLM)) == GLM


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "architectures LlamaForCausalLM, this server is for GlmMoeDsaForCausalLM",
        ),
        ({"architectures": ["Glm5NextForConditionalGeneration"]}, "Glm5NextForConditionalGeneration"),
        ({}, "architectures None"),
        ({"architectures": "GlmMoeDsaForCausalLM"}, "architectures 'GlmMoeDsaForCausalLM'"),
        ("{not json", "config.json is no JSON"),
        ("[]", "holds a list"),
    ],
)
def test_another_model_or_an_unreadable_config_is_refused(
    tmp_path: Path, content: object, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        checkpoint_check.check(config(tmp_path, content))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_paths_that_hold_no_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    file.touch()
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, message in [
        (None, "--model-path is missing"),
        ("", "--model-path is missing"),
        (str(tmp_path / "none"), "no such folder"),
        (str(file), "found a file"),
        (str(empty), "no config.json"),
    ]:
        with pytest.raises(UsageError, match=message):
            checkpoint_check.check(path)


def test_the_hub_is_reached_only_when_asked() -> None:
    with pytest.raises(
        UsageError, match=r"does not reach the hub.*hf download zai-org/GLM-5.3.*HF_HUB_OFFLINE=0"
    ):
        checkpoint_check.check("zai-org/GLM-5.3", environ={})
    assert checkpoint_check.check("zai-org/GLM-5.3", environ={"HF_HUB_OFFLINE": "0"}) is None
    assert checkpoint_check.check("zai-org/GLM-5.3", environ={"HF_HUB_OFFLINE": "1"}) is None
    with pytest.raises(UsageError, match=r"no such folder$"):
        checkpoint_check.check("/models/GLM-5.3", environ={"HF_HUB_OFFLINE": "0"})
