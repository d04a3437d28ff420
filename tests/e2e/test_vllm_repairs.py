"""LMCache's repairs inside vLLM, as its plugin puts them there: `make test-ab`, which installs vLLM apart.

Real: vLLM 0.32's server, engine core and worker processes, its scheduler and attention on a CPU; its LMCacheConnectorV1;
LMCache 0.5.6's lookup, cache engine, storage manager, remote backend, Redis connector and executor; a Valkey server. Of
the tests: the copy between vLLM's KV blocks and LMCache's chunks, which LMCache has for GPUs only
(`vllm_site/lmcache_on_a_cpu.py`); the TCP proxy that stalls; a method that vLLM's worker is asked through
(`vllm_site/executor_report.py`).

Oracles: LMCache's count of workers (4), vLLM's own answer to the same prompt without a cache.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from glm_connectors.valkey_store import EmbeddedServer

from glm_sglang.serving import Process, free_port
from tests.unit.tiers.valkey_proxy import Fault, Proxy

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(__file__).with_name("vllm_site")
VLLM = Path(os.environ.get("VLLM_VENV", ROOT / ".vllm"))
pytestmark = [
    pytest.mark.ab,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (VLLM / "bin" / "vllm").exists(), reason=f"no vLLM at VLLM_VENV={VLLM} (make test-ab)"
    ),
]

WORKERS = 4  # UPSTREAM: AsyncPQExecutor's default
CHUNK = 128  # vLLM's block on a CPU
CHUNKS = 8
PROMPT = [32 + (7 * i + i * i) % 90 for i in range(CHUNKS * CHUNK + 20)]
TIMEOUT = 1  # of a get, in seconds
STALL = 4.0  # of Valkey
GET = b"$3\r\nGET\r\n"
ENVIRONMENT = {
    "PYTHONPATH": str(SITE),
    "PYTHONHASHSEED": "0",
    "OMP_WAIT_POLICY": "passive",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_CHUNK_SIZE": str(CHUNK),
    "LMCACHE_LOCAL_CPU": "false",
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.2",
    "LMCACHE_REMOTE_SERDE": "naive",
    "LMCACHE_BLOCKING_TIMEOUT_SECS": str(TIMEOUT),
}
CONNECTOR = {
    "kv_connector": "LMCacheConnectorV1",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in float32: greedy answers are the model's alone."""
    from benchmarks.tiny_llama import write

    folder = tmp_path_factory.mktemp("llama")
    write(folder)
    return folder


def command(llama: Path, port: int) -> list[str]:
    argv = [str(VLLM / "bin" / "vllm"), "serve", str(llama), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--served-model-name", "llama", "--max-model-len", "2048", "--dtype", "float32"]
    argv += ["--block-size", str(CHUNK), "--enforce-eager", "--enable-prompt-tokens-details"]
    return argv


class Cached:
    """A vLLM with LMCache behind it, and what can be done with the two."""

    def __init__(self, server: Process, proxy: Proxy) -> None:
        self.server, self.proxy = server, proxy

    def post(self, path: str, **body: object) -> Any:
        answer = httpx.post(self.server.url + path, json=body, timeout=120, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ask(self) -> tuple[str, int]:
        """The answer to PROMPT, and how many of its tokens vLLM's scheduler took from LMCache: its own cache is empty."""
        self.post("/reset_prefix_cache")
        answer = self.post("/v1/completions", model="llama", prompt=PROMPT, max_tokens=8, temperature=0)
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0

    def report(self) -> dict[str, Any]:
        """Of the worker process (there is one)."""
        (found,) = self.post("/collective_rpc", method="executor_report")["results"]
        return found

    def report_once(self, check: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first report that `check` likes, or the last one within a minute."""
        deadline = time.monotonic() + 60
        while not check(found := self.report()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    def processes(self) -> dict[str, int]:
        """The processes in which the plugin says that it ran, as vLLM's log calls them."""
        lines = re.findall(r"\((\S+) pid=(\d+)\).*glm_lmcache_repairs: process", self.server.log.read_text())
        return {name: int(pid) for name, pid in lines}


@contextmanager
def serving(llama: Path, plugins: str) -> Iterator[Cached]:
    """vLLM with these of the plugins, PROMPT's chunks in Valkey and not in vLLM."""
    port = free_port()
    argv = [*command(llama, port), "--kv-transfer-config", json.dumps(CONNECTOR)]
    argv += ["--worker-extension-cls", "executor_report.Report"]
    with EmbeddedServer() as valkey:
        proxy = Proxy(valkey.port)
        address = {"LMCACHE_REMOTE_URL": f"redis://127.0.0.1:{proxy.port}", "VLLM_PLUGINS": plugins}
        try:
            with Process("vllm", argv, host="127.0.0.1", port=port, env=ENVIRONMENT | address) as server:
                yield Cached(server, proxy)
        finally:
            proxy.close()


def stalled(vllm: Cached) -> tuple[str, int]:
    """Asks while Valkey answers lookups and no get; at the end it has answered what it was asked."""
    vllm.proxy.fault = Fault("stall", "request", seconds=STALL, match=GET)
    try:
        return vllm.ask()
    finally:
        vllm.proxy.fault = None


def warm(vllm: Cached) -> str:
    """The answer without a cache; afterwards the same prompt hits, and gives the same answer from Valkey's bytes."""
    cold, cached = vllm.ask()
    assert cached == 0
    deadline = time.monotonic() + 60
    while (hit := vllm.ask()) != (cold, CHUNKS * CHUNK):
        assert time.monotonic() < deadline, hit
    assert vllm.report()["failed_gets"] == 0
    return cold


def test_unrepaired_one_stall_takes_all_workers_and_every_later_hit(llama: Path) -> None:
    with serving(llama, "lmcache_on_a_cpu") as vllm:
        answer = warm(vllm)
        before = vllm.report()
        assert not before["repaired"]
        assert before["bodies"] == ["job_executor/pq_executor.py"] * WORKERS
        assert stalled(vllm)[0] == answer
        after = vllm.report_once(lambda found: found["alive"] == 0)
        assert (after["alive"], after["bodies"]) == (0, [])
        assert vllm.ask() == (answer, 0)


def test_with_the_plugin_stalls_leave_four_of_four_workers(llama: Path) -> None:
    with serving(llama, "glm_lmcache_repairs,lmcache_on_a_cpu") as vllm:
        answer = warm(vllm)
        before = vllm.report()
        assert before["repaired"]
        assert before["executor"] == "lmcache.v1.storage_backend.job_executor.pq_executor.AsyncPQExecutor"
        assert before["bodies"] == ["lmcache_repairs/executor.py"] * WORKERS
        named = vllm.processes()
        # The API server loads it before its log is set up.
        assert "EngineCore" in named
        assert before["pid"] in set(named.values()) - {named["EngineCore"]}
        for stalls in (1, 2):
            assert stalled(vllm)[0] == answer
            # A get a worker was running when its caller left, the others were queued.
            left = {
                "cancelled_jobs": stalls * WORKERS,
                "skipped_jobs": stalls * (CHUNKS - WORKERS),
                "orphans_disposed": stalls * WORKERS,
                "running_jobs": 0,
                "queue_depth": 0,
            }
            after = vllm.report_once(lambda found, left=left: left.items() <= found["counters"].items())
            assert {name: after["counters"][name] for name in left} == left
            assert (after["alive"], after["bodies"]) == (WORKERS, before["bodies"])
            assert after["pid"] == before["pid"]
            assert (
                after["failed_gets"] == stalls
            )  # it has met the stall, and answered without what it did not get
        assert vllm.ask() == (answer, CHUNKS * CHUNK)
        assert vllm.report()["failed_gets"] == 2  # so that hit was Valkey's bytes


def test_another_lmcache_ends_vllm_with_the_remedy(llama: Path, tmp_path: Path) -> None:
    metadata = tmp_path / "lmcache-0.5.7.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: lmcache\nVersion: 0.5.7\n")
    done = subprocess.run(
        command(llama, free_port()),
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1
    assert "lmcache (distribution): expected 0.5.6, found 0.5.7\n" in done.stdout
    assert "Remedy: install lmcache==0.5.6." in done.stdout
    assert done.stdout.rstrip().endswith("(none: VLLM_PLUGINS=), without glm_lmcache_repairs.")
    assert "Application startup complete" not in done.stdout
