"""A checkpoint's identity: the same for a copy, another for other weights, whatever their shapes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from glm_sglang.cache import identity
from glm_sglang.errors import UsageError
from tests.unit.cache.tree import PAGE, make_pool


def test_a_copy_is_the_same_and_other_weights_are_not(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = checkpoint("bf16", "--layers", "2")
    copy, tuned = tmp_path / "copy", tmp_path / "tuned"
    shutil.copytree(model, copy)
    shutil.copytree(model, tuned)
    file = next(tuned.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # the last tensor's values: a norm's
    file.write_bytes(data)
    mine = identity.checkpoint_digest(model)
    assert identity.checkpoint_digest(copy) == mine
    assert identity.checkpoint_digest(tuned) != mine
    assert identity.config_digest(tuned) == identity.config_digest(model)


def test_one_byte_in_the_middle_of_any_tensor_makes_other_weights(tmp_path: Path) -> None:
    """Of a file of 9 MiB: whichever tensor was tuned, its pages are not the other model's."""
    torch.manual_seed(1)
    tensors = {f"layer{i}": torch.randn(size) for i, size in enumerate((7, 16384, 16385, 1 << 20, 1 << 20))}
    model = tmp_path / "model"
    model.mkdir()
    file = model / "model.safetensors"
    save_file(tensors, file)
    whole, mine = file.read_bytes(), identity.checkpoint_digest(model)
    head = int.from_bytes(whole[:8], "little")
    spans = [entry["data_offsets"] for entry in json.loads(whole[8 : 8 + head]).values()]
    assert len(spans) == len(tensors)
    for begin, end in spans:
        changed = bytearray(whole)
        changed[8 + head + (begin + end) // 2] ^= 1
        file.write_bytes(changed)
        assert identity.checkpoint_digest(model) != mine
    file.write_bytes(whole)
    assert identity.checkpoint_digest(model) == mine


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]", b"1234567"])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match=r"model\.safetensors is no safetensors file"):
        identity.checkpoint_digest(tmp_path)


def test_of_a_config_what_it_computes_counts(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = checkpoint("bf16", "--layers", "2")
    config = json.loads((model / "config.json").read_text())
    for name, change, same in (
        ("elsewhere", {"_name_or_path": "elsewhere", "transformers_version": "0"}, True),
        ("theta", {"rope_theta": 1.0}, False),
        ("topk", {"index_topk": 65}, False),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | change))
        assert (identity.config_digest(folder) == identity.config_digest(model)) is same, name


class Hub:
    """Hugging Face's cache with one model: two commits, of which main and v1 are the first."""

    NAME = "zai/GLM"

    def __init__(self, folder: Path, model: Path) -> None:
        self.repo = folder / "models--zai--GLM"
        self.commits = ["a" * 40, "b" * 40]
        for commit in self.commits:
            shutil.copytree(model, self.repo / "snapshots" / commit)
        file = next((self.repo / "snapshots" / self.commits[1]).glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-100] ^= 1
        file.write_bytes(data)
        (self.repo / "refs").mkdir()
        for name in ("main", "v1"):
            self.move(name, 0)

    def move(self, name: str, commit: int) -> None:
        (self.repo / "refs" / name).write_text(self.commits[commit])


@pytest.fixture
def hub(checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return Hub(tmp_path, checkpoint("bf16", "--layers", "2"))


def fingerprint(**change: Any) -> bytes:
    from glm_sglang.cache.device_pages import device_pages

    fields = {"model_path": Hub.NAME, "revision": None, "dtype": "bfloat16", "quantization": None}
    fields |= {"load_format": "auto", "download_dir": None}
    pool = make_pool(2)
    return identity.namespace(
        SimpleNamespace(**(fields | change)), pool, device_pages(pool, PAGE)
    ).fingerprint


def test_a_name_on_the_hub_is_the_commit_that_is_here(
    context: None, hub: Hub, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine, or the same one after the model was updated, has other weights under the same name."""
    before = fingerprint()
    assert fingerprint(revision="v1") == before
    assert fingerprint(model_path=str(checkpoint("bf16", "--layers", "2"))) == before  # a copy of it
    hub.move("main", 1)
    after = fingerprint()
    assert after != before
    assert fingerprint(revision="v1") == before
    assert fingerprint(revision=hub.commits[0]) == before
    assert fingerprint(revision=hub.commits[1]) == after


def test_weights_may_be_in_another_cache(context: None, hub: Hub, tmp_path: Path) -> None:
    before = fingerprint()
    shutil.copytree(hub.repo, tmp_path / "elsewhere" / hub.repo.name)
    hub.move("main", 1)
    assert fingerprint(download_dir=str(tmp_path / "elsewhere")) == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"revision": "v3"}, "--revision"),
        ({"model_path": "zai/GLM-other"}, "--revision"),
        ({"model_path": "s3://bucket/model"}, "--model-path"),
    ],
)
def test_what_cannot_be_told_from_others_is_refused(
    context: None, hub: Hub, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        fingerprint(**change)
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_has_no_identity_but_for_dummies(
    context: None, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Dummy weights are made, not read: nobody else's pages are theirs."""
    model = checkpoint("bf16", "--layers", "2")
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(model / "config.json", bare)
    with pytest.raises(UsageError, match="--model-path"):
        fingerprint(model_path=str(bare))
    dummy = fingerprint(model_path=str(bare), load_format="dummy")
    assert dummy == fingerprint(model_path=str(model), load_format="dummy")
    assert dummy != fingerprint(model_path=str(model))


def test_what_changes_bytes_changes_the_name_space(context: None, hub: Hub) -> None:
    mine = fingerprint()
    assert fingerprint() == mine
    assert fingerprint(dtype="float32") != mine
    assert fingerprint(quantization="fp8") != mine
    assert fingerprint(load_format="dummy") != mine
    assert fingerprint(json_model_override_args='{"rope_theta": 1}') != mine
