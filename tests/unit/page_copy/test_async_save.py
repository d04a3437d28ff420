"""What `benchmarks.async_save` makes of a server's metrics and of times, on made-up ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from benchmarks import _async_save_judge, _cache_servers
from benchmarks._idle_steps import Arm
from glm_sglang.serving import ServerError

EXPOSITION = """# TYPE glm_sglang:scheduler_stall_seconds histogram
glm_sglang:scheduler_stall_seconds_bucket{le="0.0003",rank="0"} 97.0
glm_sglang:scheduler_stall_seconds_bucket{le="0.001",rank="0"} 99.0
glm_sglang:scheduler_stall_seconds_bucket{le="+Inf",rank="0"} 100.0
# TYPE glm_sglang:cache_load_wait_seconds histogram
glm_sglang:cache_load_wait_seconds_bucket{le="0.003",rank="0"} 4.0
glm_sglang:cache_load_wait_seconds_bucket{le="+Inf",rank="0"} 4.0
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
    assert (found["load_wait_p99_s_at_most"], found["batches_with_loads"]) == (0.003, 4)
    assert found["cache_offload_pages_total.saved"] == 512
    assert "cache_offload_pages_total.failed" not in found


def test_a_server_without_a_cache_has_no_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpx, "get", lambda *_, **__: SimpleNamespace(text="sglang:x 1\n"))
    assert _cache_servers.metrics(arm("off"))["scheduler_stall_p99_s_at_most"] is None


def test_ratios_are_turn_by_turn_and_their_median() -> None:
    """An arm that had one turn, or has missed one, is compared with the same turns of the other."""
    off = arm("off", step_ms={"4096": [10.0, 20.0, 30.0]}, single_ms={"4096": {"p50": 70.0}})
    ours = arm("ours", step_ms={"4096": [11.0, 21.0, 90.0]}, single_ms={"4096": {"p50": 70.5}})
    sync = arm("sync", step_ms={"4096": [17.0]})
    late = arm("late", step_ms={"4096": [None, 30.0, 30.0]})
    found = _cache_servers.headline([off, ours, sync, late])
    assert found["step_ratio_ours_4096"] == 1.1
    assert found["step_ratios_ours_4096"] == [1.1, 1.05, 3.0]
    assert found["step_ratio_sync_4096"] == 1.7
    assert found["step_ratios_late_4096"] == [1.5, 1.0]
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


def test_a_turn_that_fails_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    arms = [arm("off"), arm("ours")]

    def queue(one: Arm, size: int, turn: int) -> float:
        if (one.name, turn) == ("ours", 0):
            raise TimeoutError
        return 10.0 * (turn + 1)

    monkeypatch.setattr(_cache_servers, "queue", queue)
    with pytest.raises(TimeoutError):
        _cache_servers.steps(arms, 8, 0)
    _cache_servers.steps(arms, 8, 1)
    assert [one.result["step_ms"]["8"] for one in arms] == [[10.0, 20.0], [None, 20.0]]


def under(share: float, **more: float) -> dict[str, float]:
    return {"exposed_share_of_copy": share, **more}


def test_each_target_is_met_missed_or_not_measured() -> None:
    """32,768 tokens are 512 pages; of 1 MB each, at 51.2 GB/s, they take 10 ms, of which 25 ms are two and a half."""
    values = {
        "step_ratio_ours_4096": 1.01,
        "step_ratio_ours_16384": 1.02,
        "d2h_share_of_plain_copy": 0.79,
        "copies": {
            "plain_copy": {"h2d_gb_s": 54.0},
            "load_32k_tokens": {"load_gb_s": 51.2, "under_a_forward_of_100_ms": under(0.11)},
            "load_128k_tokens": {
                "load_gb_s": 51.2,
                "under_a_forward_of_400_ms": under(0.07, finish_ms=137.0),
            },
        },
        "arms": {
            "ours": {
                "metrics": {
                    "after_steps": {"scheduler_stall_p99_s_at_most": 0.0003},
                    "at_the_end": {
                        "scheduler_stall_p99_s_at_most": 0.005,
                        "load_wait_p99_s_at_most": 0.001,
                        "cache_saved_pages_total": 10.0,
                        "cache_saved_bytes_total": 10.0 * (1_000_000 + 128),
                    },
                },
                "load": {"32k": {"tokens": 32_768, "exposed_ms": 25.0}},
            }
        },
    }
    found = _async_save_judge.targets(values)
    assert {one["target"]: one["holds"] for one in found} == {
        "step_ratio_ours_4096": True,
        "step_ratio_ours_16384": False,
        "added_ms_ours_4096": None,
        "d2h_share_of_plain_copy": False,
        "scheduler_stall_p99_ms": False,
        "load_wait_p99_ms": True,
        "exposed_share_of_copy: load_32k_tokens under_a_forward_of_100_ms": False,
        "exposed_share_of_copy: load_128k_tokens under_a_forward_of_400_ms": True,
        "finish_ms: load_128k_tokens under_a_forward_of_400_ms": False,
        "exposed_share_of_copy: server 32k": False,
    }
    assert "exposed_share_of_copy: server 32k: 2.5, to be at most 0.1" in _async_save_judge.missed(found)
    assert not any("4096" in line for line in _async_save_judge.missed(found))


def test_of_nothing_nothing_is_missed() -> None:
    assert _async_save_judge.missed(_async_save_judge.targets({})) == []


class Starting:
    """A server that is up `needs` seconds after its start, by the clock that a wait moves; or never, where it waits for
    as long as it may: from its start, as `serving.Process.wait_ready` counts."""

    now = 0.0
    needs: dict[str, float]

    def __init__(
        self, _: Path, __: Sequence[str], *, name: str, log: Path, ready_timeout_s: float, **___: Any
    ):
        self.name, self.log, self.ready_timeout_s = name, log, ready_timeout_s
        self.began = float("nan")

    def start(self) -> None:
        self.began = Starting.now

    def wait_ready(self) -> None:
        needed, allowed = (self.began + s for s in (self.needs[self.name], self.ready_timeout_s))
        Starting.now = max(Starting.now, min(needed, allowed))
        if needed > allowed:
            raise ServerError(f"{self.name} did not answer", self.log, None)

    def stop(self) -> None:
        pass


@pytest.mark.parametrize(
    ("needs", "up"),
    [
        ({"off": 57, "ours": 62, "sync": 88}, ["off", "ours", "sync"]),
        ({"off": 1e9, "ours": 62, "sync": 62}, ["ours", "sync"]),
        ({"off": 57, "ours": 91, "sync": 1e9}, ["off"]),
    ],
)
def test_each_server_has_its_whole_time_to_start(
    needs: dict[str, float], up: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the one before took, and whether it came up or not."""

    def sleep(seconds: float) -> None:
        Starting.now += seconds

    monkeypatch.setattr(Starting, "now", 0.0)
    monkeypatch.setattr(Starting, "needs", needs, raising=False)
    monkeypatch.setattr(_cache_servers, "Server", Starting)
    monkeypatch.setattr(_cache_servers, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: Starting.now))
    arms, failed = _cache_servers.start(dict.fromkeys(needs, ()), tmp_path, tmp_path, 90.0)
    assert [arm.name for arm in arms] == up
    assert sorted([*up, *failed]) == sorted(needs)
