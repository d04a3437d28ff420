"""What `benchmarks.async_save` makes of a server's metrics and of times, on made-up ones."""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest

from benchmarks import _cache_servers
from benchmarks.gpu_idle import Arm

EXPOSITION = """# TYPE glm_sglang:scheduler_stall_seconds histogram
glm_sglang:scheduler_stall_seconds_bucket{le="0.0003",rank="0"} 97.0
glm_sglang:scheduler_stall_seconds_bucket{le="0.001",rank="0"} 99.0
glm_sglang:scheduler_stall_seconds_bucket{le="+Inf",rank="0"} 100.0
glm_sglang:cache_offload_pages_total{end="saved",rank="0"} 512.0
glm_sglang:cache_offload_pages_total{end="failed",rank="0"} 0.0
sglang:num_running_reqs{rank="0"} 1.0
"""


def arm(name: str, **result: object) -> Arm:
    return Arm(name, SimpleNamespace(url="http://nowhere"), dict(result))  # type: ignore[arg-type]


def test_p99_is_the_bound_of_the_bucket_that_holds_99_of_100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpx, "get", lambda *_, **__: SimpleNamespace(text=EXPOSITION))
    found = _cache_servers.metrics(arm("ours"))
    assert found["scheduler_stall_p99_s_at_most"] == 0.001
    assert found["scheduler_steps_with_work"] == 100
    assert found["cache_offload_pages_total.saved"] == 512
    assert "cache_offload_pages_total.failed" not in found


def test_a_server_without_a_cache_has_no_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpx, "get", lambda *_, **__: SimpleNamespace(text="sglang:x 1\n"))
    assert _cache_servers.metrics(arm("off"))["scheduler_stall_p99_s_at_most"] is None


def test_ratios_are_of_medians_and_of_each_turn() -> None:
    off = arm("off", step_ms={"4096": [10.0, 20.0, 30.0]}, single_ms={"4096": {"p50": 70.0}})
    ours = arm("ours", step_ms={"4096": [11.0, 21.0, 90.0]}, single_ms={"4096": {"p50": 70.5}})
    found = _cache_servers.headline([off, ours])
    assert found["step_ratio_ours_4096"] == 1.05
    assert found["step_ratios_ours_4096"] == [1.1, 1.05, 3.0]
    assert found["added_ms_ours_4096"] == 0.5
    assert not any("off" in name for name in found)


def test_a_queue_counts_the_time_between_its_middle_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One server that takes 2 ms a prompt, one at a time: the first and last answers do not count."""
    import threading
    import time

    busy = threading.Lock()

    def prefill(self: Arm, ids: list[int]) -> float:
        with busy:
            time.sleep(0.002)
        return 0.0

    monkeypatch.setattr(Arm, "prefill", prefill)
    assert _cache_servers.queue(arm("off"), 8, 0) >= 2.0
