"""Which load formats MegaMoE takes: those whose loader arranges weights last, in SGLang as it is installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_moe_choice import facts

from glm_sglang.moe import refusals


def formats() -> list[str]:
    from sglang.srt.configs.load_config import LoadFormat

    return [one.value for one in LoadFormat]


@pytest.mark.parametrize("name", formats())
def test_every_format_is_taken_or_refused_by_name(name: str) -> None:
    found = refusals.find(facts(load_format=name))
    if name in refusals.LOAD_FORMATS:
        assert found == []
    else:
        (sentence,) = found
        assert sentence.startswith(f"--load-format is {name};")
    # Engine(load_format=LoadFormat.X)
    assert refusals.find(facts(load_format=SimpleNamespace(value=name))) == found


class Model(torch.nn.Module):
    """One layer with a quantisation method; notes what is done to it."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []
        self.layer = torch.nn.Linear(1, 1)
        self.layer.quant_method = SimpleNamespace(
            process_weights_after_loading=lambda module: self.done.append("arrange")
        )

    def load_weights(self, weights: Any) -> None:
        self.done.append("load")


@pytest.mark.parametrize("name", refusals.LOAD_FORMATS)
def test_weights_are_whole_before_they_are_arranged(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import loader as module

    model = Model()
    monkeypatch.setattr(module, "_initialize_model", lambda *_: model)
    monkeypatch.setattr(module, "_get_quantization_config", lambda *_: None)
    monkeypatch.setattr(module, "initialize_dummy_weights", lambda _: model.done.append("load"))
    monkeypatch.setattr(module, "monokernel_weights_iterator", lambda model, weights: weights)
    loader = module.get_model_loader(LoadConfig(load_format=name))
    if hasattr(loader, "_get_all_weights"):
        monkeypatch.setattr(loader, "_get_all_weights", lambda *_: iter(()))
    device = SimpleNamespace(device="cpu", device_type="cpu", gpu_id=0)
    loader.load_model(model_config=SimpleNamespace(dtype=torch.float32), device_config=device)
    assert model.done == ["load", "arrange"]
