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
from benchmarks._soak_judge import sample_of
from benchmarks._soak_load import PAGE
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


def test_p99_is_the_bound_of_the_bucket_that_holds_99_of_100() -> None:
    found = _cache_servers.metrics(sample_of(EXPOSITION))
    assert found["scheduler_stall_p99_s_at_most"] == 0.001
    assert found["scheduler_steps_with_work"] == 100
    assert (found["load_wait_p99_s_at_most"], found["batches_with_loads"]) == (0.003, 4)
    assert found["cache_offload_pages_total.saved"] == 512
    assert "cache_offload_pages_total.failed" not in found


def test_between_two_scrapes_only_what_came_between_counts() -> None:
    """Two steps of a minute in the warm-up are not in the p99 of the steps; gauges are left out."""
    began = sample_of(
        """glm_sglang:scheduler_stall_seconds_bucket{le="0.0003",rank="0"} 1.0
glm_sglang:scheduler_stall_seconds_bucket{le="0.001",rank="0"} 1.0
glm_sglang:scheduler_stall_seconds_bucket{le="+Inf",rank="0"} 3.0
glm_sglang:cache_offload_pages_total{end="saved",rank="0"} 500.0
"""
    )
    ended = sample_of(
        EXPOSITION.replace('"+Inf",rank="0"} 100', '"+Inf",rank="0"} 101')
        + 'glm_sglang:cache_pool_bytes{rank="0"} 7\n'
    )
    found = _cache_servers.metrics(ended, began)
    assert found["scheduler_steps_with_work"] == 98
    assert found["scheduler_stall_p99_s_at_most"] == 0.001
    assert found["cache_offload_pages_total.saved"] == 12
    assert "cache_pool_bytes" not in found


def test_a_server_without_a_cache_has_no_stalls() -> None:
    found = _cache_servers.metrics(sample_of("sglang:x 1\n"))
    assert found["scheduler_stall_p99_s_at_most"] is None


def test_no_arm_begins_while_another_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is never done is waited for so long, and said."""
    left = {"off": [0], "ours": [9, 4, 0], "sync": [0]}
    now = 0.0

    def get(url: str, **_: Any) -> SimpleNamespace:
        pages = left[url.split("/")[2]]
        value = pages.pop(0) if len(pages) > 1 else pages[0]
        return SimpleNamespace(text=f'glm_sglang:cache_save_queue_pages{{rank="0"}} {value}\n')

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(httpx, "get", get)
    monkeypatch.setattr(_cache_servers, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now))
    arms = [Arm(name, SimpleNamespace(url=f"http://{name}")) for name in left]  # type: ignore[arg-type]
    _cache_servers.settle(arms)
    assert left["ours"] == [0]
    assert now == pytest.approx(3 * 1.2)
    left["sync"] = [5]
    _cache_servers.settle(arms)
    assert now > 20
    assert [one.result for one in arms] == [{}, {}, {"unsettled": 1}]


def test_a_wrong_page_is_the_last_that_a_cache_can_have() -> None:
    for size in (1900, 30 * PAGE, 30 * PAGE + 1):
        ids = list(range(size))
        other = _cache_servers.with_another_page(ids, "x")
        apart = [i for i, (a, b) in enumerate(zip(ids, other, strict=True)) if a != b]
        assert len(other) == size
        assert apart[-1] < (size - 1) // PAGE * PAGE
        assert apart[0] // PAGE == apart[-1] // PAGE == (size - 1) // PAGE - 1


class Measured:
    """Stands for everything that `measure` does; what was done, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        for name in ("steps", "single", "load", "busy", "settle"):
            monkeypatch.setattr(_cache_servers, name, self._doing(name))
        monkeypatch.setattr(_cache_servers, "scrape", lambda arm: sample_of(EXPOSITION))
        monkeypatch.setattr(Arm, "prefill", lambda *_: 0.0)

    def _doing(self, name: str) -> Any:
        def do(found: Any, *rest: Any, **_: Any) -> dict[str, Any]:
            if name != "settle":
                self.done.append(f"{name} {rest[0] if name != 'single' else ''}".strip())
            return {}

        return do


def test_lone_prompts_and_loads_come_before_traces_and_have_time_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = Measured(monkeypatch)
    arms = [arm(name) for name in ("off", "ours", "sync")]
    _cache_servers.measure(arms, lambda: None, lambda: 1000.0)
    first = {name: measured.done.index(name) for name in measured.done}
    assert first["steps 4096"] < first["single"] < first["load 32768"] < first["load 131072"]
    assert first["load 131072"] < first["busy 4096"]
    assert measured.done.count("steps 4096") == 7
    assert set(arms[1].result["metrics"]) >= {"steps", "loads", "at_the_end"}
    assert arms[1].result["metrics"]["steps"]["scheduler_steps_with_work"] == 0  # the same scrape twice
    # With little time left, the steps stop after three turns, for what comes behind them.
    short = Measured(monkeypatch)
    arms = [arm(name) for name in ("off", "ours")]
    _cache_servers.measure(arms, lambda: None, lambda: 50.0)
    assert short.done.count("steps 4096") == 3
    assert "single" in short.done
    assert _cache_servers.headline(arms)["skipped"]["off"][0] == "steps 4096 turn 3"


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


VALUES: dict[str, Any] = {
    "step_ratio_ours_4096": 1.01,
    "step_ratio_ours_16384": 1.02,
    "d2h_share_of_plain_copy": 0.79,
    "copies": {
        "plain_copy": {"h2d_gb_s": 54.0},
        "load_32k_tokens": {
            "gigabytes": 1.7,
            "load_gb_s": 51.2,
            "load_scattered_gb_s": 34.0,
            "under_a_forward_of_100_ms": under(0.11, forward_alone_ms=105.0),
            "scattered_under_a_forward_of_100_ms": under(0.09, forward_alone_ms=105.0),
        },
        "load_128k_tokens": {
            "gigabytes": 7.07,
            "load_gb_s": 51.2,
            "under_a_forward_of_100_ms": under(0.35, forward_alone_ms=105.0),
            "under_a_forward_of_400_ms": under(0.07, forward_alone_ms=430.0, finish_ms=137.0),
        },
    },
    "arms": {
        "ours": {
            "metrics": {
                "steps": {"scheduler_stall_p99_s_at_most": 0.0003},
                "loads": {"load_wait_p99_s_at_most": 0.001},
                "at_the_end": {
                    "scheduler_stall_p99_s_at_most": 0.005,
                    "load_wait_p99_s_at_most": 0.003,
                    "cache_saved_pages_total": 10.0,
                    "cache_saved_bytes_total": 10.0 * (1_000_000 + 128),
                },
            },
            "load": {
                "32k": {
                    "tokens": 32_768,
                    "exposed_ms": 25.0,
                    "samples_ms": {"from_device": [80.0, 80.5], "from_pool": [105.0, 105.25]},
                    "answer": {"cached": 1856, "apart": 0.02, "one_other_page": 0.1},
                }
            },
        }
    },
}


def test_each_target_is_met_missed_or_not_judged() -> None:
    """32,768 tokens are 512 pages; of 1 MB each, at 51.2 GB/s, they take 10 ms, of which 25 ms are two and a half."""
    found = _async_save_judge.targets(VALUES)
    assert {one["target"]: one["holds"] for one in found} == {
        "step_ratio_ours_4096": True,
        "step_ratio_ours_16384": False,
        "added_ms_ours_4096": None,
        "d2h_share_of_plain_copy": False,
        "scheduler_stall_p99_ms: steps": True,
        "scheduler_stall_p99_ms: at the end": None,
        "load_wait_p99_ms: loads": True,
        "load_wait_p99_ms: at the end": None,
        "exposed_share_of_copy: load_32k_tokens under_a_forward_of_100_ms": False,
        "exposed_share_of_copy: load_32k_tokens scattered_under_a_forward_of_100_ms": True,
        "exposed_share_of_copy: load_128k_tokens under_a_forward_of_100_ms": None,
        "exposed_share_of_copy: load_128k_tokens under_a_forward_of_400_ms": True,
        "finish_ms: load_128k_tokens under_a_forward_of_400_ms": False,
        "exposed_share_of_copy: server 32k": False,
        "answer_apart_of_a_wrong_page: server 32k": True,
    }
    assert "exposed_share_of_copy: server 32k: 2.5, to be at most 0.1" in _async_save_judge.missed(found)
    assert not any("4096" in line for line in _async_save_judge.missed(found))
    (impossible,) = [one for one in found if "load_128k_tokens under_a_forward_of_100" in one["target"]]
    assert impossible["why"] == "impossible: the copy takes 138 ms, the forward over it 105"


def server_load(**changes: Any) -> dict[str, Any]:
    """What is said of the exposed share of a server's load, without copies of the same run."""
    ours = VALUES["arms"]["ours"]
    one = {**ours["load"]["32k"], **changes}
    values = {"copy_gb_s_stated": 51.2, "arms": {"ours": {**ours, "load": {"32k": one}}}}
    found = _async_save_judge.targets(values)
    (target,) = [one for one in found if one["target"].startswith("exposed_share_of_copy: server")]
    return target


def test_a_servers_load_is_judged_by_a_stated_rate_and_not_below_its_noise() -> None:
    target = server_load()
    assert (target["holds"], target["found"], target["copy_gb_s_is"]) == (False, 2.5, "stated")
    samples = {"from_device": [80.0, 82.0], "from_pool": [81.0, 81.0]}
    target = server_load(exposed_ms=0.0, samples_ms=samples)
    assert (target["holds"], target["found"]) == (None, 0.0)
    assert target["why"] == "the bound is 1.00 ms, equal samples are 2.00 ms apart"
    assert target["samples_ms"] == samples


def test_an_answer_that_no_page_moves_tells_nothing() -> None:
    ours = VALUES["arms"]["ours"]
    blind = {"cached": 1856, "apart": 0.0, "one_other_page": 0.0}
    values = {"arms": {"ours": {**ours, "load": {"32k": {**ours["load"]["32k"], "answer": blind}}}}}
    (target,) = [one for one in _async_save_judge.targets(values) if one["target"].startswith("answer")]
    assert (target["found"], target["holds"]) == (None, None)
    assert "one page moves it by 0" in target["why"]


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
