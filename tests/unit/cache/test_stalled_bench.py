"""How `benchmarks.stalled_valkey` reads servers' metrics, and what it makes of turns and stalls."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from benchmarks import _stalled_servers as servers
from benchmarks import _stalled_signals as signals
from benchmarks import _stalled_turns as turns


def buckets(*counts: tuple[str, int]) -> Counter[str]:
    return Counter(
        {f'scheduler_stall_seconds_bucket{{le="{bound}",rank="0"}}': count for bound, count in counts}
    )


def test_p99_is_the_bound_of_the_bucket_that_holds_it() -> None:
    before = buckets(("0.001", 50), ("0.005", 50), ("+Inf", 50))
    after = buckets(("0.001", 149), ("0.005", 150), ("+Inf", 150))
    assert servers.p99(before, after) == 0.001  # 99 of 100
    after = buckets(("0.001", 148), ("0.005", 149), ("+Inf", 150))
    assert servers.p99(before, after) == 0.005
    after = buckets(("0.001", 140), ("0.005", 140), ("+Inf", 150))
    assert servers.p99(before, after) == float("inf")
    assert servers.p99(before, before) == 0.0


def test_steps_that_only_hold_requests_back_have_a_p99_of_their_own() -> None:
    """However many they are, those with work are judged by themselves, and the longer of the two counts."""

    def scrape(stall: int, hold: int) -> Counter[str]:
        found: Counter[str] = Counter({"scheduler_stall_seconds_count": stall})
        for kind, bound, count in (("stall", "0.003", stall), ("hold", "0.0001", hold)):
            found[f'scheduler_{kind}_seconds_bucket{{le="{bound}"}}'] = count
            found[f'scheduler_{kind}_seconds_bucket{{le="+Inf"}}'] = count
        return found

    before, after = scrape(10, 0), scrape(110, 100_000)
    assert servers.Bench._p99_ms([before], [after], "seconds") == 3.0
    after['scheduler_hold_seconds_bucket{le="+Inf"}'] += 2_000
    assert servers.Bench._p99_ms([before], [after], "seconds") == float("inf")
    with pytest.raises(RuntimeError, match="observed no scheduler_stall_seconds"):
        servers.Bench._p99_ms([before], [before], "seconds")


def test_counters_by_what_they_grew_in_this_run() -> None:
    before = [Counter({'cache_dropped_saves_total{reason="full"}': 2}), Counter[str]()]
    after = [
        Counter(
            {'cache_dropped_saves_total{reason="full"}': 5, 'cache_dropped_saves_total{reason="down"}': 1}
        ),
        Counter({'cache_dropped_saves_total{reason="full"}': 4}),
    ]
    assert servers.moved(before, after, "cache_dropped_saves_total") == 8
    ended = Counter(
        {'cache_prefetches_total{end="complete",rank="0"}': 7, 'cache_prefetches_total{end="miss"}': 0}
    )
    assert servers.ends(Counter(), ended) == {"complete": 7}


def test_turns_arrive_as_often_as_asked_and_think_over_a_whole_period() -> None:
    found = turns.schedule(6000, rate=3.0, together=4, think=3.0, period=5.0, seed=1)
    assert found == turns.schedule(6000, rate=3.0, together=4, think=3.0, period=5.0, seed=1)
    assert [c.number for c in found] == list(range(6000))
    assert len({c.first for c in found}) == 1500
    # 6,000 at 3 a second; its standard deviation is 2.6 %.
    assert found[-1].first == pytest.approx(2000, rel=0.1)
    thought = [c.second - c.first for c in found]
    assert min(thought) >= 3.0
    assert max(thought) <= 8.0
    # Where in a period of 5 s second turns arrive is uniform: 30 % in the last 1.5 s (standard deviation 1.2 %).
    assert sum(c.second % 5.0 >= 3.5 for c in found) / 6000 == pytest.approx(0.3, abs=0.05)


def test_hits_of_turns_that_a_stall_met_stand_apart() -> None:
    stalls = [(3.5, 5.0), (8.5, 10.0)]
    found = [
        turns.Turn(arrived=9.9, ttft=0.2, seconds=0.3, hit_tokens=256),  # 0.1 s left
        turns.Turn(arrived=3.6, ttft=0.7, seconds=0.8, hit_tokens=0),  # 1.4 s left
        turns.Turn(arrived=3.4, ttft=0.2, seconds=0.3, hit_tokens=256),  # overtaken by one
        turns.Turn(arrived=5.0, ttft=0.1, seconds=0.2, hit_tokens=128),  # at its end
    ]
    figures = turns.figures(found, stalls, cacheable=256, deadline=0.5)
    assert figures["second_turns"] == 4
    assert figures["hit_rate"] == 640 / 1024
    assert figures["hit_rate_second_half"] == 384 / 512  # by arrival: those at 5.0 and 9.9
    assert figures["hit_rate_possible"] == 0.75
    assert (figures["arrived_in_a_stall"], figures["hit_rate_arrived_in_a_stall"]) == (2, 0.5)
    assert figures["hit_rate_arrived_outside"] == 0.75
    assert (figures["met_a_stall"], figures["hit_rate_met_a_stall"]) == (3, 0.6667)
    assert figures["ttft_s"] == {"mean": 0.3, "p50": 0.2, "p90": 0.7, "p99": 0.7, "max": 0.7}
    assert figures["ttft_s_arrived_in_a_stall"]["max"] == 0.7
    empty = turns.figures(found, [], cacheable=256, deadline=0.5)
    assert empty["hit_rate_arrived_in_a_stall"] is None
    assert empty["ttft_s_arrived_in_a_stall"] == {}
    nobody = turns.figures(
        [], stalls, cacheable=256, deadline=0.5
    )  # an executor that has died answers no turn
    assert (nobody["hit_rate"], nobody["hit_rate_possible"], nobody["ttft_s"]) == (None, None, {})


def test_the_longest_queue_of_a_run_is_kept_and_what_reading_raises_is_raised() -> None:
    depths, read = [0, 7, 3], threading.Event()

    def depth() -> int:
        if not depths:
            read.set()
            return 1
        return depths.pop(0)

    queues = signals.Longest(depth, every=0.0)
    queues.start()
    assert read.wait(60)
    assert queues.end() == 7
    broken = signals.Longest(lambda: signals.gauge([Counter()], signals.QUEUE), every=0.0)
    broken.start()
    broken.join()
    with pytest.raises(RuntimeError, match="no server has lmcache_queue_depth"):
        broken.end()


def test_a_gauge_is_the_sum_over_ranks_and_servers_and_of_no_other_name() -> None:
    first = Counter({'lmcache_queue_depth{rank="0"}': 2, 'lmcache_queue_depth{rank="1"}': 3})
    second = Counter({'lmcache_queue_depth{rank="0"}': 4, 'lmcache_queue_depths{rank="0"}': 100})
    assert signals.gauge([first, second], signals.QUEUE) == 9
    assert signals.gauge([Counter({'lmcache_queue_depth{rank="0"}': 0})], signals.QUEUE) == 0


def test_the_signals_of_several_runs_are_those_of_the_worst() -> None:
    healthy = {"zero_stores": 0, "queue_most": 5, "queue_at_end": 0, "live_workers": 8, "expected_workers": 8}
    dying = {"zero_stores": 2, "queue_most": 3, "queue_at_end": 3, "live_workers": 7, "expected_workers": 8}
    expected = {"zero_stores": 3, "queue_most": 5, "queue_at_end": 3, "workers_lost": 1}
    assert signals.worst([healthy, dying, healthy | {"zero_stores": 1}]) == expected


def test_the_servers_export_what_the_signals_are_read_from() -> None:
    from glm_connectors.tiers.metric_list import METRICS

    exported = {metric.name + ("_total" if metric.kind == "counter" else "") for metric in METRICS}
    names = {*signals.ZERO_STORES, signals.QUEUE, "lmcache_live_workers", "lmcache_expected_workers"}
    assert names <= exported
