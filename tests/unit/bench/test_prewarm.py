"""`benchmarks._prewarm` without a GPU: which kernels, of which DeepGEMM."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _prewarm
from glm_sglang.tiny_model.shape import hf_config

ABLATION = ["--experts", "8", "--rows", "2048,512,8,1"]


def jobs(*words: str) -> list[tuple[str, str, dict[str, str]]]:
    return _prewarm.jobs(_prewarm.parser().parse_args(words))


def test_without_flags_it_is_everything_but_grouped_gemms() -> None:
    names = [name for _, name, _ in jobs()]
    assert not [name for name in names if name.startswith("grouped")]
    assert {"fused_moe", "logits", "gemm 24576x6144", "gemm 1088x1024 tiny"} <= set(names)


def test_experts_of_deep_gemm_have_the_models_widths_in_both_layouts() -> None:
    from benchmarks import _wide_model

    config = hf_config(_wide_model.in_proportion(78, 8), "fp8")
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    shapes = f"{2 * inner}x{hidden}", f"{hidden}x{inner}"
    names = {name for _, name, _ in jobs(*ABLATION)}
    assert {name for name in names if name.startswith("grouped")} == {
        f"grouped {shape} {layout}" for shape in shapes for layout in ("masked", "compact")
    }
    assert not {name for name in names if name.endswith("tiny")}
    assert config["num_experts_per_tok"] == _prewarm.TOP_K


def test_stocks_deep_gemm_has_its_own_kernels_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.delenv(_prewarm.PRECOMPILE, raising=False)
    found = jobs(*ABLATION, "--stock", "/stock")
    stock = {name for called, name, environ in found if called.startswith("stock's ")}
    assert stock == set(_prewarm.of_deep_gemm(8, [2048]))
    for called, _, environ in found:
        first = environ["PYTHONPATH"].split(os.pathsep)[0]
        assert first == ("/stock" if called.startswith("stock's ") else "/ours")
        assert environ[_prewarm.PRECOMPILE] == "0"
    assert len(found) == len(jobs(*ABLATION)) + len(stock)
    assert len({called for called, _, _ in found}) == len(found)


def test_grouped_gemms_are_called_as_sglangs_runner_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a step of 2,048: masked ones are padded past them, of compact ones each expert's to the alignment."""
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.deep_gemm_wrapper import compile_utils

    made: list[Any] = []

    def create(kind: Any, **sizes: int) -> Any:
        return types.SimpleNamespace(execute=lambda m: made.append((kind.name, sizes, m)))

    monkeypatch.setattr(compile_utils._BaseWarmupExecutor, "create", create)
    monkeypatch.setattr(deep_gemm_wrapper, "get_contiguous_layout_alignment", lambda m, groups: 128)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    gemm = types.SimpleNamespace()  # without a setter of the alignment
    monkeypatch.setattr("sglang.srt.layers.deep_gemm_wrapper.entrypoint.deep_gemm", gemm, raising=False)
    for masked in (True, False):
        _prewarm.grouped((4096, 6144), 8, masked, [2048, 1])
    n_k = {"n": 4096, "k": 6144, "num_groups": 8}
    assert made == [
        ("GROUPED_GEMM_NT_F8F8BF16_MASKED", {"max_m": 2304, **n_k}, 2048),
        ("GROUPED_GEMM_NT_F8F8BF16_MASKED", {"max_m": 256, **n_k}, 1),
        ("GROUPED_GEMM_NT_F8F8BF16_CONTIG", {"max_m": 17280, **n_k}, 17280),
        ("GROUPED_GEMM_NT_F8F8BF16_CONTIG", {"max_m": 1024, **n_k}, 1024),
    ]


def test_a_task_runs_in_its_own_process_with_its_environment(tmp_path: Path) -> None:
    said = _prewarm.run("no such task", [], {**os.environ, "PYTHONPATH": os.getcwd()})
    assert "failed: KeyError: 'no such task'" in said
    assert Path(sys.executable).exists()
