"""The entry point that vLLM calls for the repairs of LMCache, without vLLM; with it: tests/e2e/test_vllm_repairs.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, logging, sys
from importlib.metadata import entry_points
said = []
class Said(logging.Handler):
    def emit(self, record): said.append((record.name.partition(".")[0], record.levelname, record.getMessage()))
logging.getLogger("vllm").addHandler(Said())  # which vLLM configures
logging.getLogger("vllm").setLevel(logging.INFO)
(plugin,) = entry_points(group="vllm.general_plugins", name="glm_lmcache_repairs")
install = plugin.load()
loaded = sorted({name.partition(".")[0] for name in sys.modules} & {"lmcache", "torch", "sglang"})
install()
install()
called = sorted({name.partition(".")[0] for name in sys.modules} & {"lmcache", "torch", "sglang"})
from lmcache.v1.storage_backend.job_executor import pq_executor
print(json.dumps({
    "loaded": loaded, "called": called, "said": said, "sglang": "sglang" in sys.modules,
    "workers": [getattr(pq_executor, name)._worker.__module__
                for name in ("AsyncPQExecutor", "AsyncPQThreadPoolExecutor")],
}))
"""


def run(path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GLM_SGLANG_")}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_repairs_what_lmcache_imports_later_and_says_so() -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # A vLLM environment has no SGLang, and vLLM on a CPU does not bear plugins that import LMCache.
    assert (found["loaded"], found["called"], found["sglang"]) == ([], [], False)
    assert found["workers"] == ["glm_connectors.lmcache_repairs.executor"] * 2
    assert [line[:2] for line in found["said"]] == [
        ["vllm", "INFO"]
    ] * 2  # a line a call; vLLM calls once a process


def test_another_lmcache_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    metadata = tmp_path / "lmcache-0.5.7.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: lmcache\nVersion: 0.5.7\n")
    done = run(tmp_path)
    assert done.returncode == 1
    assert "ContractError: " in done.stderr
    assert "expected 0.5.6, found 0.5.7" in done.stderr
    assert "Remedy: install lmcache==0.5.6." in done.stderr
    assert done.stderr.rstrip().endswith("without glm_lmcache_repairs.")


def test_a_vllm_without_lmcache_starts(tmp_path: Path) -> None:
    program = """
import sys
sys.modules["lmcache"] = None  # as where it is not installed
from glm_connectors import vllm_plugin
import logging
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
vllm_plugin.install()
print(sorted(name for name in sys.modules if name.startswith("glm_connectors.lmcache_repairs")))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    said, repaired = done.stdout.splitlines()
    assert "LMCache is not installed here" in said
    assert repaired == "[]"
