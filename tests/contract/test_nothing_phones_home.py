"""No process of a server, and no LMCache engine, tries to leave the machine; a guard sees each attempt."""

from pathlib import Path

import httpx
import pytest

from glm_sglang.serving import Server
from tests.contract.launching import GUARD_SITE, environment, run


def attempts(log: Path) -> list[str]:
    return sorted(set(log.read_text().splitlines())) if log.exists() else []


def lmcache(log: Path, *argv: str) -> list[str]:
    env = environment(GUARD_SITE, NETWORK_GUARD_LOG=str(log), HOME=str(log.parent))
    env = {name: value for name, value in env.items() if name not in ("DO_NOT_TRACK", "LMCACHE_TRACK_USAGE")}
    ended = run("lmcache_reports", *argv, env=env)
    assert ended.code == 0, ended.err[-4000:]
    return attempts(log)


def test_the_guard_sees_what_lmcache_does_unasked(tmp_path: Path) -> None:
    assert any("lmcache.ai" in line for line in lmcache(tmp_path / "log"))


def test_an_lmcache_engine_under_our_defaults_reports_nothing(tmp_path: Path) -> None:
    assert lmcache(tmp_path / "log", "ours") == []


@pytest.mark.timeout(600)
def test_a_prefill_server_reaches_nobody_and_counts_what_it_changed(tiny: Path, tmp_path: Path) -> None:
    log = tmp_path / "attempts"
    env = environment(GUARD_SITE, NETWORK_GUARD_LOG=str(log))
    args = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "{port}")
    with Server(tiny, with_port(args), env=env, ready_timeout_s=480) as server:
        metrics = httpx.get(f"{server.url}/metrics/", trust_env=False, timeout=30).text
    assert attempts(log) == []
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("glm_sglang:"))
    assert float(values["glm_sglang:untested_upstream_symbols"]) == 0
    assert float(values["glm_sglang:hooks_installed"]) == reference_hooks()
    assert float(values['glm_sglang:build_info{platform="reference",version="0.1.0"}']) == 1
    assert "sglang:num_running_reqs" in metrics


def with_port(args: tuple[str, ...]) -> list[str]:
    from glm_sglang.serving import free_port

    return [str(free_port()) if arg == "{port}" else arg for arg in args]


def reference_hooks() -> int:
    from glm_sglang.upstream import rooms

    return len(rooms.active(rooms.hooks(), "reference", "launcher"))
