"""What `benchmarks.cache_soak` lets pass and what it does not, and how it reads a server's metrics."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from benchmarks import _soak_judge as judge
from benchmarks import _soak_load as load
from benchmarks import cache_soak

RUNS_IN_ORDER: dict[str, Any] = {
    "wrong_bytes": 0,
    "probes_wrong": 0,
    "failed_requests": 0,
    "left_behind": {},
    "growth": {"memory_mib": 256.0, "threads": 8, "open_files": 16, "valkey_connections": 4},
    "sglang_complaints": [],
    "server_alive": True,
    "stall_ms": {"max": 5.0},
    "probe": {"bound": 0.1, "other_page": 0.2, "cold": 0.05},
    "counts": dict.fromkeys(judge.EXERCISED, 1),
}


def judged(**changes: Any) -> list[str]:
    found = judge.verdict({**RUNS_IN_ORDER, **changes}, judge.Limits())
    assert found["passed"] is not bool(found["failed"])
    return list(found["failed"])


def counts(**changes: int) -> dict[str, int]:
    return {**RUNS_IN_ORDER["counts"], **changes}


def test_a_run_at_every_bound_passes() -> None:
    assert judged() == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"wrong_bytes": 1}, "wrong_bytes: 1"),
        ({"probes_wrong": 1}, "probes_wrong: 1"),
        ({"failed_requests": 2}, "failed_requests: 2"),
        ({"left_behind": {'cache_pinned_bytes{owner="load"}': 4096.0}}, 'owner="load"} is 4096'),
        ({"left_behind": {"device_tokens_in_use": 64}}, "device_tokens_in_use is 64"),
        ({"growth": {**RUNS_IN_ORDER["growth"], "memory_mib": 256.1}}, "memory_mib grew by 256.1"),
        ({"growth": {**RUNS_IN_ORDER["growth"], "threads": 9}}, "threads grew by 9"),
        ({"growth": {**RUNS_IN_ORDER["growth"], "open_files": 17}}, "open_files grew by 17"),
        ({"growth": {**RUNS_IN_ORDER["growth"], "valkey_connections": 5}}, "valkey_connections grew by 5"),
        ({"sglang_complaints": ["pool memory leak detected!"]}, "pool memory leak detected!"),
        ({"server_alive": False}, "the server ended"),
        ({"stall_ms": {"max": 5.001}}, "stall_ms_max: 5.001"),
        ({"stall_ms": {"max": None}}, "stall_ms_max: None"),
        ({"counts": counts(failed_loads=1)}, "failed_loads: 1"),
        ({"counts": counts(bad_values=1)}, "bad_values: 1"),
        ({"counts": counts(pages_loaded_to_device=9, pages_checked=8)}, "9 pages were loaded, 8 checked"),
    ],
)
def test_each_fault_alone_fails(changes: dict[str, Any], said: str) -> None:
    (reason,) = judged(**changes)
    assert said in reason


@pytest.mark.parametrize("name", judge.EXERCISED)
def test_what_did_not_happen_fails(name: str) -> None:
    reasons = judged(counts=counts(**{name: 0}))
    assert f"not exercised: {name}" in reasons
    absent = {key: value for key, value in counts().items() if key != name}
    assert f"not exercised: {name}" in judged(counts=absent)


def test_pages_a_run_is_what_the_two_counters_say() -> None:
    names = ("cache_load_pages_total", "cache_load_runs_total")
    before: judge.Sample = Counter(dict(zip(names, (100, 50), strict=True)))
    after: judge.Sample = Counter(dict(zip(names, (700, 75), strict=True)))
    assert cache_soak.pages_a_run(cache_soak.counts(before, after)) == 600 / 25
    assert cache_soak.pages_a_run(cache_soak.counts(after, after)) is None


def test_without_a_bound_stalls_are_reported_only() -> None:
    run = {**RUNS_IN_ORDER, "stall_ms": {"max": 80.0}}
    assert judge.verdict(run, judge.Limits(stall_ms=None))["passed"]


def test_whatever_an_idle_server_holds_is_left_behind() -> None:
    idle: Counter[str] = Counter(
        {
            'cache_pinned_bytes{owner="load",rank="0"}': 0,
            'cache_save_queue_pages{rank="0"}': 0,
            'cache_pool_bytes{rank="0",state="resident"}': 8192,  # a cache holds pages
            'cache_evicted_pages_total{rank="0"}': 3,
        }
    )
    assert judge.left_behind(idle, 0, 0) == {}
    idle['cache_pinned_bytes{owner="load",rank="0"}'] = 4096
    idle['cache_save_queue_pages{rank="0"}'] = 1
    assert judge.left_behind(idle, 1, 64) == {
        "requests": 1,
        "device_tokens_in_use": 64,
        'cache_pinned_bytes{owner="load"}': 4096,
        "cache_save_queue_pages": 1,
    }


def scrape(longest: float, *cumulative: tuple[str, int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for bound, count in cumulative:
        found[f'scheduler_stall_seconds_bucket{{le="{bound}",rank="0"}}'] = count
        found['scheduler_stall_seconds_count{rank="0"}'] = count
    found['scheduler_stall_max_seconds{rank="0"}'] = longest  # type: ignore[assignment]
    return found


def test_the_longest_stall_of_the_load_alone() -> None:
    """Exact where the server's longest ever lies in the load; else the bound of the last bucket that grew."""
    before = scrape(0.5, ("0.001", 10), ("0.005", 10), ("+Inf", 12))
    after = scrape(0.5, ("0.001", 108), ("0.005", 110), ("+Inf", 112))
    found = judge.stalls(before, after)
    assert (found["steps"], found["p50"], found["p99"], found["max"]) == (100, 1.0, 5.0, 5.0)
    after = scrape(0.625, ("0.001", 108), ("0.005", 110), ("+Inf", 113))
    assert judge.stalls(before, after)["max"] == 625.0
    after = scrape(0.5, ("0.001", 108), ("0.005", 110), ("+Inf", 113))  # above all buckets, below the longest
    assert judge.stalls(before, after)["max"] is None


def test_a_step_that_only_held_requests_back_is_a_stall_too() -> None:
    """Of those of work the quantiles are untouched, however many there are; the longest is one."""
    before, after = scrape(0.5, ("0.001", 10), ("+Inf", 10)), scrape(0.5, ("0.001", 110), ("+Inf", 110))
    for bound, count in (("0.003", 9_900), ("0.3", 10_000), ("+Inf", 10_000)):
        after[f'scheduler_hold_seconds_bucket{{le="{bound}",rank="0"}}'] = count
    found = judge.stalls(before, after)
    assert (found["steps"], found["p99"], found["hold_p99"]) == (100, 1.0, 3.0)
    assert found["max"] == found["hold_max"] == 300.0
    after['scheduler_stall_max_seconds{rank="0"}'] = 2  # of an idle step
    assert judge.stalls(before, after)["max"] == 2000.0


def test_what_a_launch_waits_for_its_loads_is_told_apart() -> None:
    before, after = scrape(0.0), scrape(0.0)
    for bound, count in (("0.003", 99), ("0.3", 100), ("+Inf", 100)):
        after[f'cache_load_wait_seconds_bucket{{le="{bound}",rank="0"}}'] = count
    found = judge.stalls(before, after)
    assert (found["load_wait_p99"], found["load_wait_max"]) == (3.0, 300.0)


def client(*other_page: float) -> load.Client:
    sizes = load.Sizes(shortest=1, longest=2, tail=1, probe=1, clients=1, live=1, probe_every=1.0)
    found = load.Client("http://nowhere", sizes, seed=0)
    found.expected, found.other_page = load.Probe((5, 6), (-0.5, -1.0), 0), list(other_page)
    return found


def test_a_probe_is_wrong_where_it_moves_by_half_of_what_a_wrong_page_would_move_it() -> None:
    asked = client(0.5, 0.25)
    assert asked.bound == 0.125
    asked.note(load.Probe((5, 7), (-0.5, -1.125), 64))  # rms 0.088; another token may follow from a rounding
    assert asked.wrong_probes == []
    asked.note(load.Probe((5, 6), (-0.5, -1.25), 0))
    assert [wrong["kind"] for wrong in asked.wrong_probes] == ["cold"]
    assert (asked.counts["probes_cached"], asked.counts["probes_cold"]) == (1, 1)
    assert asked.counts["probes_of_other_tokens"] == 1


def test_a_probe_that_cannot_tell_a_wrong_page_fails() -> None:
    """As dummy weights' answers, which depend on the last token only: nothing moves them."""
    blind = {"bound": 0.0, "other_page": 0.0, "cold": 0.0}
    (reason,) = judged(probe=blind)
    assert "the probe is blind" in reason


def test_probes_that_scatter_as_far_as_a_wrong_page_moves_them_are_not_judged() -> None:
    """The rest is: a page whose bytes are wrong fails all the same."""
    scattered = {"bound": 0.02, "other_page": 0.04, "cold": 0.03}
    assert judged(probe=scattered, probes_wrong=3) == []
    assert judged(probe=scattered | {"cold": 0.01}, probes_wrong=3) == ["probes_wrong: 3, allowed 0"]
    (reason,) = judged(probe=scattered, wrong_bytes=1)
    assert "wrong_bytes: 1" in reason
