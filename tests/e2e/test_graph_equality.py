"""`benchmarks.graph_equality` in miniature, of two servers without graphs: the steps are those that were meant."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def test_two_eager_servers_are_equal_step_by_step(tmp_path: Path) -> None:
    flags = ["--reference", "--eager-servers", "1", "--seconds", "3", "--json", "--out", str(tmp_path)]
    argv = [sys.executable, "-m", "benchmarks.graph_equality", *flags]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = orjson.loads(done.stdout.splitlines()[-1])
    assert found["equal"] is True
    assert found["kl_max"] < 1e-9  # fp32 on both sides
    # One at a time there is nothing that two lists could share.
    late = [step for step in found["steps_not_as_meant"] if step["kind"] != "random lengths"]
    assert late == []
    judged = found["by_kind"]["graph_against_eager_as_the_graph"]
    assert min(kind["prompts"] for kind in judged.values()) > 0
    assert {"at a bucket", "several requests", "cached prefix", "over several chunks"} <= set(judged)
