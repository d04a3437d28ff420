"""Figures of the README are those of the recorded runs that it names."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = " ".join((ROOT / "README.md").read_text().split())


def result(name: str) -> Any:
    assert f"results/{name}.json" in README
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def test_the_largest_divergence_of_any_position() -> None:
    largest: dict[str, float] = {}
    for row in result("h200x2/moe_server")["agreement"]:
        largest[row["arm"]] = max(largest.get(row["arm"], 0.0), row["kl_max"])
    said = re.search(r"KL at most (\S+) at any position .*? megamoe has up to (\S+)\. ", README)
    assert said
    assert said[1] == f"{largest['megamoe']:.1e}".replace("e-0", "e-")
    assert said[2] == f"{largest['upstream']:.3f}"


def test_the_caches_gain_is_said_of_what_was_measured() -> None:
    found = result("cpu/ablation")
    (gain,) = (arm["speedup"] for arm in found["arms"] if arm["name"] == "3, 4 and 5 the cache")
    said = re.search(
        r"On (\w+ CPU \w+) whose .*? the cache gives (\S+) times .*? interval ([\d.]+)\D([\d.]+) \(", README
    )
    assert said
    assert {"single": "one CPU server", "pair": "a CPU pair"}[found["layout"]] == said[1]
    assert [float(word) for word in said.groups()[1:]] == [
        round(gain[k], 2) for k in ("value", "low", "high")
    ]


def test_what_a_load_exposes_is_said_beside_its_target() -> None:
    """Of a page's bytes, by what the server saved, at the rate of a load by itself."""
    found = result("h200/async_save")
    ours = found["servers"]["arms"]["ours"]
    saved = ours["metrics"]["after_steps"]
    page = saved["cache_saved_bytes_total"] / saved["cache_saved_pages_total"] - 128
    load = ours["load"]["32k"]
    copy_ms = load["tokens"] / 64 * page / found["copies"]["load_32k_tokens"]["load_gb_s"] / 1e6
    said = re.search(
        r"pool cost (\d+) ms more than from the device, (\S+) times their copy .*? costs (\d+) ms more",
        README,
    )
    assert said
    assert said[1] == f"{load['exposed_ms']:.0f}"
    assert said[2] == f"{load['exposed_ms'] / copy_ms:.1f}"
    assert int(said[3]) == int(load["recompute_ms"] - load["with_new_tokens_from_device_ms"])
    shares = sorted(
        under["exposed_share_of_copy"]
        for name in ("load_32k_tokens", "load_128k_tokens")
        for case, under in found["copies"][name].items()
        if case.startswith("under_")
    )
    listed = re.search(
        r"longer by (\S+) and (\S+) of the copy under it \(.*?\): missed, and by (\S+) where", README
    )
    assert listed
    assert [float(listed[n]) for n in (3, 1, 2)] == [round(share, 2) for share in shares]


def test_the_idle_share_at_full_depth_is_said_as_measured() -> None:
    found = result("h200/gpu_idle_78_layers")
    said = re.search(
        r"At GLM-5\.3's 78 layers .*? takes (\S+) ms in a queue, SGLang's graphs (\S+) \((\S+); "
        r".*? idles (\S+) % of a lone one \(SGLang (\S+) %",
        README,
    )
    assert said
    steps = [found["arms"][arm]["untraced"]["2048"]["step_ms_saturated"] for arm in ("ours", "stock")]
    shares = [100 * found[f"idle_share_2048_{arm}"] for arm in ("ours", "stock")]
    assert [float(word) for word in said.groups()] == [
        *(round(step, 1) for step in steps),
        round(steps[0] / steps[1], 2),
        *(round(share, 1) for share in shares),
    ]


def test_synchronous_saves_are_compared_turn_by_turn() -> None:
    arms = result("h200/async_save")["servers"]["arms"]
    ratios = [
        sync / off
        for size in ("4096", "16384")
        for sync, off in zip(arms["sync"]["step_ms"][size], arms["off"]["step_ms"][size], strict=False)
    ]
    said = re.search(r"with synchronous saves, two turns: (\S+) and (\S+), (\S+) and (\S+);", README)
    assert said
    assert [float(word) for word in said.groups()] == [pytest.approx(ratio, abs=0.006) for ratio in ratios]


def test_steps_with_saves_are_said_as_measured() -> None:
    found = result("h200/async_save")
    said = re.search(
        r"seven turns: (\S+) to (\S+) at 4,096 tokens, (\S+) in the middle, (\S+) to (\S+) at 16,384;", README
    )
    assert said
    small, large = (found["servers"][f"step_ratios_ours_{size}"] for size in (4096, 16384))
    assert len(small) == len(large) == 7
    figures = [min(small), max(small), statistics.median(small), min(large), max(large)]
    assert [float(word) for word in said.groups()] == [round(figure, 2) for figure in figures]
    lone = re.search(r"takes (\S+) ms longer \(median; target 1: missed; it was (\S+) before", README)
    assert lone
    assert [float(word) for word in lone.groups()] == [
        round(found[part]["added_ms_ours_4096"], 1) for part in ("singles_again", "servers")
    ]


def test_lookups_over_eight_ranks_are_said_as_measured() -> None:
    found = result("h200/lookup_latency")
    assert (found["ranks"], found["tokens"], found["wrong"]) == (8, 131_072, 0)
    said = re.search(
        r"h200/lookup_latency\.json`\): p50 (\S+) ms, p99 \*\*(\S+)\*\* \(ten rounds (\S+) to (\S+); "
        r".*? unrepaired (\S+); ",
        README,
    )
    assert said
    rounds = found["p99_ms_of_rounds"]
    assert len(rounds) == 10
    figures = [found["p50_ms"], found["p99_ms"], min(rounds), max(rounds)]
    assert [float(word) for word in said.groups()] == [
        *(round(figure, 2) for figure in figures),
        round(found["unrepaired"]["p99_ms"], 1),
    ]


def test_graphs_are_held_against_eager_as_often_as_said() -> None:
    found = result("h200/graph_equality")
    said = re.search(
        r"checkpoint: (\S+) steps of random lengths, .*?; (\S+) prompts\): equal by its rule, no other greedy token "
        r"\((\d+) ties\), KL at most (\S+), .*? another one for (\d+) of (\S+) prompts",
        README,
    )
    assert said
    assert found["equal"]
    assert not found["other_tokens"]
    assert found["random"]["replayed"] == found["random"]["steps"]
    repeats = found["where_eager_repeats_to_the_bit"]
    assert repeats["graph_identical_too"] == repeats["prompts"]
    alone = found["by_kind"]["graph_against_eager_alone"].values()
    assert said[4] == f"{found['kl_max']:.1e}".replace("e-0", "e-")
    assert [int(said[n].replace(",", "")) for n in (1, 2, 3, 5, 6)] == [
        found["random"]["steps"],
        found["prompts"],
        found["ties"],
        sum(kind["other_tokens"] for kind in alone),
        sum(kind["prompts"] for kind in alone),
    ]


def test_what_leaving_callers_cost_either_executor() -> None:
    found = result("cpu/executor_survival")
    said = re.search(
        r"(\S+) jobs on each of its two executors, (\d+) % of the callers leave: (\d) of (\d) workers live, "
        r"no byte lost, no wrong reply\. Unrepaired the last worker dies within (\S+) jobs \(coroutines\) and "
        r"(\S+) \(threads\); .*? and (\S+) and (\S+) puts send",
        README,
    )
    assert said
    runs = [found["by_executor"][executor] for executor in ("coroutines", "threads")]
    assert [int(word.replace(",", "")) for word in said.groups()] == [
        found["jobs"],
        round(100 * found["cancel"]),
        found["live_workers"],
        found["expected_workers"],
        *(run["unrepaired"]["jobs_submitted"] for run in runs),
        *(run["guard_alone"]["corrupt_puts"] for run in runs),
    ]
    assert found["leaked_bytes"] == found["wrong_replies"] == found["corrupt_puts"] == 0
    assert [run["unrepaired"]["live_workers"] for run in runs] == [0, 0]
    assert {run["guard_alone"]["live_workers"] for run in runs} == {found["expected_workers"]}


def test_a_restart_between_the_demos_turns_keeps_its_hits() -> None:
    usual = result("cpu/demo")["turns"]
    for what, tokens in (("valkey", "pool_tokens"), ("prefill", "valkey_tokens")):
        found = result(f"cpu/demo_restart_{what}")
        assert [(run["DEMO_RESTART"], run["status"]) for run in found["runs"]] == [(what, 0)]
        for name in ("prompt_tokens", "cached_tokens", "answer"):
            assert [turn[name] for turn in found["turns"]] == [turn[name] for turn in usual]
        said = re.search(
            rf"\((\S+) of (\S+?)(?: cached tokens)?; `benchmarks/results/cpu/demo_restart_{what}", README
        )
        assert said
        second = found["turns"][1]
        figures = [int(word.replace(",", "")) for word in said.groups()]
        assert figures == [second[tokens], second["cached_tokens"]]
    assert result("cpu/demo_restart_valkey")["turns"][1]["valkey_tokens"] == 0


def test_second_turns_under_stalls_are_said_as_measured() -> None:
    found = result("cpu/stalled_valkey")
    stalled, unrepaired = found["stalled"], found["lmcache_unrepaired"]["timeout_1_s"]
    turns = stalled["by_wait"]["2000"]
    assert (found["hit_rate_second_half"], found["pages_wrong"], found["zero_stores"]) == (1.0, 0, 0)
    assert (found["queue_at_end"], found["workers_lost"]) == (0, 0)
    assert (unrepaired["hit_rate_second_half"], unrepaired["live_workers"]) == (0.0, 0)
    said = re.search(
        r"the 92 that arrived in a stall .*? \((\S+) s to the first token at most; median of all (\S+) s, "
        r"without stalls (\S+) s\);\s(\S+) loaded pages .*? cache ≤ (\S+) ms, .*? at most (\d+) jobs .*? second half, "
        r"(\d+) stores of\snothing, (\d+) jobs",
        README,
        re.DOTALL,
    )
    assert said
    assert turns["arrived_in_a_stall"] == 92
    medians = [run["by_wait"]["2000"]["ttft_s"]["p50"] for run in (stalled, found["no_stall"])]
    assert [float(word.replace(",", "")) for word in said.groups()] == [
        round(found["ttft_max_s"], 2),
        *(round(median, 3) for median in medians),
        found["pages_checked"],
        found["scheduler_stall_p99_ms"],
        found["queue_most"],
        unrepaired["zero_stores"],
        unrepaired["queue_at_end"],
    ]


def test_what_ranks_gain_by_sharing_their_gets_is_said_as_measured() -> None:
    found = result("cpu/sibling_gets")
    said = re.search(
        r"four ranks, two cores: (\S+) s instead of (\S+) for (\S+) tokens, (\d+) pages from Valkey instead of (\d+),",
        README,
    )
    assert said
    assert (found["ranks"], found["wrong_pages"], found["incomplete"]) == (4, 0, 0)
    together, apart = found["together"], found["apart"]
    assert [said[1], said[2]] == [f"{arm['median_seconds']:.2f}" for arm in (together, apart)]
    assert said[3] == f"{found['tokens']:,}"
    assert [int(said[4]), int(said[5])] == [max(arm["sent_pages"]) for arm in (together, apart)]
