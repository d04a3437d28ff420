"""vLLM and SGLang on the same small Llama, driven by the A/B harness: `make test-ab`, which installs vLLM apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

ROOT = Path(__file__).resolve().parents[2]
VLLM = Path(os.environ.get("VLLM_VENV", ROOT / ".vllm"))
pytestmark = [
    pytest.mark.ab,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (VLLM / "bin" / "vllm").exists(), reason=f"no vLLM at VLLM_VENV={VLLM} (make test-ab)"
    ),
]
ROUNDS = 6


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in float32: greedy answers are the model's alone."""
    from benchmarks.tiny_llama import write

    folder = tmp_path_factory.mktemp("llama")
    write(folder)
    return folder


@pytest.fixture(scope="module")
def result(
    llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The comparison's result and its records."""
    folder = tmp_path_factory.mktemp("ab")
    argv = [
        sys.executable,
        "-m",
        "benchmarks.ab",
        "--config",
        "benchmarks/endpoints/llama_cpu.yaml",
        "--json",
    ]
    argv += [
        "--set",
        f"model={llama}",
        "--set",
        f"vllm={VLLM}",
        "--rounds",
        str(ROUNDS),
        "--logs",
        str(folder),
    ]
    argv += ["--sessions", "2", "--prompt-tokens", "512", "--added-tokens", "64", "--answer-tokens", "8"]
    argv += ["--concurrency", "2", "-o", str(folder / "ab.jsonl")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in (folder / "ab.jsonl").read_text().splitlines()]  # with Infinity
    return orjson.loads(done.stdout.splitlines()[-1]), lines


def test_both_get_the_same_and_none_fails(result: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    _, lines = result
    assert len(lines) == 2 * ROUNDS
    for number in range(ROUNDS):
        ours, theirs = (
            next(r for r in lines if (r["tag"], r["glm_ab"]["round"]) == (n, number))
            for n in ("SGLang", "vLLM")
        )
        assert ours["errors"] == theirs["errors"] == [""] * 4
        assert ours["input_lens"] == theirs["input_lens"]
        assert ours["output_lens"] == theirs["output_lens"] == [8] * 4
        # The same weights in float32, greedy.
        assert ours["generated_texts"] == theirs["generated_texts"]


def test_turn_two_hits_at_both_and_rounds_start_cold(
    result: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    _, lines = result
    for line in lines:
        for label, length, cached in zip(
            line["glm_ab"]["labels"], line["input_lens"], line["cached_tokens"], strict=True
        ):
            if label == "turn 1":
                assert cached < 64, (line["tag"], cached)  # the template's first tokens at most
            else:
                # Whole blocks of turn 1's prompt; vLLM's are 128 tokens on a CPU.
                assert cached >= 512 - 128 > length / 2, (line["tag"], cached)


def test_the_result_compares_them(result: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    found, _ = result
    (point,) = found["points"]
    assert point["rounds"] == ROUNDS
    speedup = point["speedups"]["vLLM"]["by_label"]["turn 1"]["ttft"]
    assert speedup["low"] <= speedup["value"] <= speedup["high"]
    assert speedup["values"] == 2 * ROUNDS
    assert found["endpoints"]["vLLM"]["about"]["version"].startswith("0.32")
