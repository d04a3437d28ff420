"""Which machine a figure is recorded under, with an NVML that is written here."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pynvml
import pytest

from benchmarks import _result
from benchmarks.ab.endpoints import Spec
from benchmarks.ab.running import Endpoint, served_on

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 8,
        "nvmlDeviceGetHandleByIndex": lambda i: i,
        "nvmlDeviceGetUUID": lambda i: f"GPU-{i}",
        "nvmlDeviceGetName": lambda _: "NVIDIA H200",
        "nvmlDeviceGetCudaComputeCapability": lambda _: (9, 0),
    }.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize(
    ("visible", "short"), [(None, "h200x8"), ("3", "h200"), ("0,1", "h200x2"), ("", "cpu")]
)
def test_a_machine_is_named_by_its_visible_gpus(
    visible: str | None, short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert _result.machine()[0] == short
    assert _result.machine()[1].get("gpu") == (None if short == "cpu" else "NVIDIA H200")
    assert _result.machine("cpu")[0] == "cpu"
    assert "torch" not in sys.modules


def test_the_harness_does_not_load_torch() -> None:
    code = "import sys, benchmarks.ab.__main__ as ab; ab._result.machine(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize("device", ["cpu", None])
def test_a_result_is_saved_where_it_was_measured(
    device: _result.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there of another machine is left alone."""
    monkeypatch.setattr(_result, "RESULTS", tmp_path / "benchmarks" / "results")
    _result.finish("q", {"value": 1}, argparse.Namespace(save=True, json=False), device=device)
    (saved,) = tmp_path.rglob("*.json")
    assert saved.parent.name == (device or "h200x8")
    assert orjson.loads(saved.read_bytes())["machine"].get("gpus") == (None if device else 8)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where `benchmarks` lies, empty; of no repository that is around it."""
    monkeypatch.setattr(_result, "ROOT", tmp_path)
    monkeypatch.setattr(_result, "RESULTS", tmp_path / "benchmarks" / "results")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("GLM_SGLANG_COMMIT", raising=False)
    _result.commit.cache_clear()
    yield tmp_path
    _result.commit.cache_clear()


def git(folder: Path, *words: str) -> str:
    user = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", "-C", str(folder), *user, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def committed(folder: Path) -> str:
    git(folder, "init", "--quiet")
    (folder / "code.py").write_text("1")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "why")
    return git(folder, "rev-parse", "--short", "HEAD")


def finished(**result: Any) -> str:
    parser = argparse.ArgumentParser()
    _result.add_arguments(parser)
    return str(_result.finish("q", result, parser.parse_args(["--save"]), device="cpu")["commit"])


def test_a_result_names_its_commit(tree: Path) -> None:
    """Of the start: what is committed while a benchmark runs was not measured. Results are no change of the tree."""
    first = committed(tree)
    (tree / ".gitignore").write_text("*.log")
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "-m", "more")
    (tree / "a.log").write_text("1")
    assert (second := finished()) == git(tree, "rev-parse", "--short", "HEAD") != first
    assert list(tree.rglob("q.json"))
    _result.commit.cache_clear()
    assert finished() == second
    (tree / "code.py").write_text("2")
    git(tree, "commit", "--quiet", "-am", "while it runs")
    assert finished() == second
    assert finished(commit="cloned") == "cloned"


@pytest.mark.parametrize("name", ["code.py", "new.py"])
def test_a_tree_that_differs_is_dirty(name: str, tree: Path) -> None:
    head = committed(tree)
    (tree / name).write_text("other")
    assert finished() == f"{head}+dirty"


def test_an_archive_has_its_commit_from_a_variable(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one unpacked within another repository, and one without git."""
    assert finished() == "unknown"
    monkeypatch.setenv("GLM_SGLANG_COMMIT", "abc1234")
    _result.commit.cache_clear()
    assert finished() == "abc1234"
    committed(tree)
    monkeypatch.setattr(_result, "ROOT", tree / "benchmarks")
    _result.commit.cache_clear()
    assert finished() == "abc1234"
    monkeypatch.setattr(_result, "ROOT", tree)
    monkeypatch.setenv("PATH", str(tree))
    _result.commit.cache_clear()
    assert finished() == "abc1234"


def endpoint(device: str = "", command: str = "") -> Endpoint:
    found = Endpoint(
        Spec("x", processes={"server": command} if command else {}, url="" if command else "http://h")
    )
    found.about = {"device": device} if device else {}
    return found


@pytest.mark.parametrize(
    ("endpoints", "expected"),
    [
        ([endpoint("cpu"), endpoint("cpu")], "cpu"),
        ([endpoint("cpu"), endpoint()], "cpu"),  # vLLM does not say
        ([endpoint("cpu"), endpoint("cuda")], None),
        ([endpoint("cuda"), endpoint("cuda")], None),
        ([endpoint()], None),
        ([endpoint(command="python -m x --device cpu --port {port}")], "cpu"),
        ([endpoint("cuda", "python -m x --device cpu")], None),
    ],
)
def test_servers_without_a_gpu_on_a_machine_that_has_some(
    endpoints: list[Any], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLM_SGLANG_PLATFORM", raising=False)
    assert served_on(endpoints) == expected


def test_the_reference_platform_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM_SGLANG_PLATFORM", "reference")
    assert served_on([endpoint()]) == "cpu"
