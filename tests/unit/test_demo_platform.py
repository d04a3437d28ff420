"""What needs no GPU runs on the reference platform on a machine with GPUs too: `make setup` installs no CUDA kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from glm_sglang import platform_choice, settings
from launch import demo
from tests.conftest import pytest_collection_finish

ROOT = Path(__file__).parents[2]


class Reached(Exception):
    """The demo has come to its servers."""


def chosen(environ: dict[str, str] | None = None) -> str:
    """The platform of a server that is started in this environment."""
    setting = (
        settings.read(settings.PLATFORM, environ) if environ is not None else settings.read(settings.PLATFORM)
    )
    return platform_choice.choose(setting, platform_choice.detect(), "launcher").platform


@pytest.fixture(autouse=True)
def sm90(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU that GLM-5.x's kernels run on, and torch built for it."""
    device = platform_choice.Device("H200", (9, 0))
    monkeypatch.setattr(platform_choice, "_ask_nvml", lambda: ({"GPU-1": device}, ""))
    monkeypatch.setattr(platform_choice, "torch_cuda_version", lambda: "13.0")
    monkeypatch.setenv(settings.PLATFORM.name, "auto")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(("given", "platform"), [(None, "reference"), ("cuda", "cuda")])
def test_the_demos_servers(monkeypatch: pytest.MonkeyPatch, given: str | None, platform: str) -> None:
    def started() -> Path:
        raise Reached

    monkeypatch.setattr(demo, "end_at_signals", lambda: None)
    monkeypatch.setattr(demo, "checkpoint", started)
    assert chosen() == "cuda"
    monkeypatch.delenv(settings.PLATFORM.name)
    if given:
        monkeypatch.setenv(settings.PLATFORM.name, given)
    with pytest.raises(Reached):
        demo.main()
    assert chosen() == platform


@pytest.mark.parametrize("name", ["cpu", "llama_cpu"])
def test_the_servers_of_make_bench(name: str) -> None:
    endpoints = yaml.safe_load((ROOT / f"benchmarks/endpoints/{name}.yaml").read_text())["endpoints"]
    servers = [endpoint for endpoint in endpoints.values() if "python -m" in endpoint["command"]]
    assert servers
    for endpoint in servers:
        assert chosen(endpoint.get("env", {})) == "reference"


def test_the_servers_of_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.PLATFORM.name)
    pytest_collection_finish(request.session)
    assert chosen() == "reference"
