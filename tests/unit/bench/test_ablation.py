"""Arms and arithmetic of the ablation and of the decode fan-in; no server runs."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import decode_fanin
from benchmarks.ab import records
from benchmarks.ab.client import Sample
from benchmarks.ab.comparison import Comparison
from benchmarks.ab.endpoints import Ports
from benchmarks.ab.load import Point, Round
from benchmarks.ab.running import Endpoint
from benchmarks.ablation import analysis
from benchmarks.ablation.arms import ALL, CHANGES, NONE, STOCK, Arm, Setup, arms, known_flags

ROOT = Path(__file__).resolve().parents[3]
EVERY_FLAG = frozenset(word for change in CHANGES for word in change.on if word.startswith("--"))


def setup(platform: str = "gpu", **more: Any) -> Setup:
    return Setup(model="/m", layout="pair", platform=platform, values={"cache": "embedded://"}, **more)


def command(found: list[Arm], name: str, process: str = "prefill") -> str:
    spec = next(arm.spec for arm in found if arm.name == name)
    assert spec is not None
    return spec.processes[process]


def test_each_alone_turns_on_one_and_all_turn_on_every_one() -> None:
    found = arms(setup(), flags=EVERY_FLAG)
    measured = [arm.name for arm in found if arm.spec]
    assert measured == [STOCK, NONE, "1 MegaMoE", "2 prefill graphs", "3, 4 and 5 the cache", ALL]
    for name, on in (
        (NONE, ("stock", "off", "none")),
        ("1 MegaMoE", ("megamoe", "off", "none")),
        ("2 prefill graphs", ("stock", "auto", "none")),
        ("3, 4 and 5 the cache", ("stock", "off", "embedded://")),
        (ALL, ("megamoe", "auto", "embedded://")),
    ):
        words = command(found, name).split()
        flags = ("--glm-moe", "--glm-prefill-graph", "--glm-cache-url")
        assert tuple(words[words.index(flag) + 1] for flag in flags) == on
    # Stock is SGLang's launcher and knows none of our flags; decode is the same in every arm.
    assert "-m sglang.launch_server" in command(found, STOCK)
    assert "--glm-" not in command(found, STOCK)
    assert len({command(found, name, "decode") for name in measured}) == 1


def test_every_change_of_the_article_is_an_arm_with_a_state() -> None:
    found = {arm.name: arm for arm in arms(setup("cpu"), flags=EVERY_FLAG)}
    for number in "12345":
        assert any(number in name for name in found)
    assert found["1 MegaMoE"].state == "not on this platform (cpu)"
    assert found["4 async save"].state.startswith("no switch of its own")
    assert found[ALL].state == "the same as 3, 4 and 5 the cache"
    assert found[ALL].spec is None


def test_a_build_without_a_flag_says_so_and_never_passes_it() -> None:
    found = arms(setup(), flags=EVERY_FLAG - {"--glm-prefill-graph"})
    graphs = next(arm for arm in found if arm.name == "2 prefill graphs")
    assert graphs.state == "not built: this build has no --glm-prefill-graph"
    assert all("--glm-prefill-graph" not in command(found, arm.name) for arm in found if arm.spec)
    chosen = arms(setup(), only=["cache"], flags=EVERY_FLAG)
    assert next(arm for arm in chosen if arm.name == "1 MegaMoE").state == "left out by --changes"


def test_the_flags_are_the_launchers() -> None:
    """Every switch is spelt as the launcher spells it, or its arm would say "not built" for ever."""
    assert known_flags() >= EVERY_FLAG


def test_devices_and_flags_reach_their_process() -> None:
    one = setup(flags="--tp 2", decode_flags="--tp 1", env={"CUDA_VISIBLE_DEVICES": "0,1"})
    found = arms(one, flags=EVERY_FLAG)
    assert command(found, ALL).startswith("env CUDA_VISIBLE_DEVICES=0,1 python -m glm_sglang.launch_server")
    assert "--tp 2" in command(found, STOCK)
    assert "--tp 1" in command(found, ALL, "decode")
    assert "CUDA_VISIBLE_DEVICES" not in command(found, ALL, "decode")


def test_shares_add_up_when_changes_do_not_interact() -> None:
    singles = {"a": [1.5] * 6, "b": [1.2] * 6}

    def says(value: float, words: str = "faster") -> dict[str, Any]:
        return {"value": value, "says": words}

    shares = [analysis.share(says(v[0]), says(1.8)) for v in singles.values()]
    assert sum(s for s in shares if s) == pytest.approx(1.0)
    found = analysis.interaction(singles, [1.5 * 1.2] * 6)
    assert found is not None
    assert found["value"] == 1.0
    worse = analysis.interaction(singles, [1.5] * 6)
    assert worse is not None
    assert worse["value"] == pytest.approx(1 / 1.2, abs=1e-4)
    assert "take from each other" in worse["says"]
    assert "help each other (1.111 [1.111, 1.111])" in analysis.interaction(singles, [2.0] * 6)["says"]  # type: ignore[index]
    assert "undecided: 2 errors" in analysis.interaction(singles, [2.0] * 6, "2 errors")["says"]  # type: ignore[index]
    assert analysis.interaction({"a": [2.0] * 6}, [2.0] * 6) is None


@pytest.mark.parametrize("says", ["no difference", "undecided: too few rounds", "undecided: 3 errors"])
def test_of_no_gain_there_is_no_share(says: str) -> None:
    assert analysis.share({"value": 1.5, "says": "faster"}, {"value": 1.001, "says": says}) is None


def measured(seconds: dict[str, list[float | None]]) -> list[dict[str, Any]]:
    """Records of 1,000 tokens a round in these seconds; None: the request failed."""
    lines = []
    for name, rounds in seconds.items():
        for number, took in enumerate(rounds):
            one = (
                Sample("turn 2", 0.0, took, took, [], 1000, 0, 1)
                if took
                else Sample("turn 2", error="HTTP 500")
            )
            lines.append(
                records.line(name, "two_turn", Point(1), number, 0, "", Round([[one]], took or 1.0), {})
            )
    return lines


def test_an_interaction_within_the_noise_is_not_seen() -> None:
    """Rounds in which `none` was slow make every single look fast, and their product faster still: 1.5 of it is noise."""
    planned = arms(setup(), only=["graphs", "cache"], flags=EVERY_FLAG)
    cache = "3, 4 and 5 the cache"
    seconds: dict[str, list[float | None]] = {
        STOCK: [2.0] * 6,
        NONE: [2.0, 1.0, 2.0, 1.0, 2.0, 1.0],
        "2 prefill graphs": [1.0] * 6,
        cache: [1.0] * 6,
        ALL: [1.0, 0.8, 1.0, 0.8, 1.0, 0.8],
    }
    for metric in ("input_tokens_per_s", "e2e"):
        found = analysis.analyse(planned, measured(seconds), metric, "turn 2")["interaction"]
        # By hand: (2/1)/(2/1)² = 1/2 in three rounds, (1/0.8)/1 = 1.25 in three.
        assert found["value"] == pytest.approx((0.5**3 * 1.25**3) ** (1 / 6), abs=1e-3)
        assert found["low"] < 1 < found["high"]
        assert "no interaction is seen" in found["says"]
    few = measured({name: rounds[:5] for name, rounds in seconds.items()})
    says = analysis.analyse(planned, few, "input_tokens_per_s", "turn 2")["interaction"]["says"]
    assert "undecided: too few rounds" in says


def test_without_all_of_them_measured_there_is_neither_share_nor_interaction() -> None:
    planned = arms(setup(), only=["graphs", "cache"], flags=EVERY_FLAG)
    seconds: dict[str, list[float | None]] = {arm.name: [1.0] * 6 for arm in planned if arm.spec}
    seconds |= {NONE: [2.0] * 6, ALL: [None] * 6}
    found = analysis.analyse(planned, measured(seconds), "input_tokens_per_s", "turn 2")
    assert found["interaction"] is None
    assert {row["share"] for row in found["arms"]} == {None}
    assert found["answer"] == "all against stock SGLang: no pair of requests succeeded at both."


def test_the_result_says_each_arms_speedup_share_and_hits() -> None:
    """Rounds of 1,000 tokens in 2 s (stock), 2 s (none), 1 s (graphs), 0.5 s (cache), 0.25 s (all)."""
    planned = arms(setup(), only=["graphs", "cache"], flags=EVERY_FLAG)
    seconds = dict(zip([arm.name for arm in planned if arm.spec], (2.0, 2.0, 1.0, 0.5, 0.25), strict=True))
    lines = []
    for number in range(6):
        for name, took in seconds.items():
            cached = 900 if took <= 0.5 else 0
            samples = [[Sample("turn 2", 0.0, took, took, [], 1000, cached, 1)]]
            lines.append(records.line(name, "two_turn", Point(1), number, 0, "", Round(samples, took), {}))
    found = analysis.analyse(planned, lines, "input_tokens_per_s", "turn 2")
    rows = {row["name"]: row for row in found["arms"]}
    assert rows[ALL]["speedup"]["value"] == pytest.approx(8.0, rel=1e-3)
    assert rows[NONE]["speedup"]["says"] == "no difference"
    assert rows["2 prefill graphs"]["share"] == pytest.approx(math.log(2) / math.log(8), abs=1e-3)
    assert rows["3, 4 and 5 the cache"]["share"] == pytest.approx(2 / 3, abs=1e-3)
    assert rows["3, 4 and 5 the cache"]["cached_share"] == 0.9
    assert rows["1 MegaMoE"]["speedup"] is None
    assert rows["1 MegaMoE"]["article"].startswith("cold prefill +59 %")
    assert found["interaction"]["value"] == pytest.approx(1.0, abs=1e-3)
    assert "all against stock SGLang: input tokens/s 8.000× (faster)" in found["answer"]
    assert "ablation, 1 MegaMoE: left out by --changes" in found["not_measured"]


def test_an_arm_with_errors_is_not_called_faster() -> None:
    planned = arms(setup(), only=["cache"], flags=EVERY_FLAG)
    lines = []
    for number in range(6):
        for name, took in ((STOCK, 2.0), (NONE, 2.0), ("3, 4 and 5 the cache", 1.0)):
            bad = [Sample("turn 2", error="HTTP 500")] if took == 1.0 else []
            samples = [[Sample("turn 2", 0.0, took, took, [], 1000, 0, 1)], bad]
            lines.append(records.line(name, "two_turn", Point(1), number, 0, "", Round(samples, took), {}))
    found = analysis.analyse(planned, lines, "input_tokens_per_s", "turn 2")
    assert found["answer"].endswith("2.000× (undecided: 6 errors).")
    assert {row["share"] for row in found["arms"]} == {None}


def test_the_plan_is_shown_without_starting_anything() -> None:
    argv = [sys.executable, "-m", "benchmarks.ablation", "--model", "/m", "--platform", "cpu", "--plan"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "stock SGLang: measured" in done.stdout
    assert "python -m sglang.launch_server --model-path /m" in done.stdout


def test_fan_in_names_every_prefill_to_the_router() -> None:
    spec = decode_fanin.pair("/m", "--tp 1", "--tp 2", ["0", "1"], "3")
    assert list(spec.processes) == ["prefill0", "prefill1", "decode", "router"]
    for i in range(2):
        assert f"--prefill {{url:prefill{i}}} {{port:boot{i}}}" in spec.processes["router"]
        assert spec.processes[f"prefill{i}"].startswith(f"env CUDA_VISIBLE_DEVICES={i} ")
        assert f"--disaggregation-bootstrap-port {{port:boot{i}}}" in spec.processes[f"prefill{i}"]
    assert "--tp 2" in spec.processes["decode"]
    assert spec.flush == ("prefill0", "prefill1", "decode")
    alone = decode_fanin.direct("/m", "", ["", ""])
    assert "--worker-urls {url:server0} {url:server1}" in alone.processes["router"]
    assert "disaggregation" not in " ".join(alone.processes.values())


def test_what_survives_with_errors_is_said_to_be_undecided() -> None:
    def row(prefills: int, says: str) -> dict[str, Any]:
        return {"prefills": prefills, "survives": {"value": 0.9, "says": says}}

    rows = [row(1, "slower"), row(2, "undecided: 3 errors"), {"prefills": 3, "survives": None}]
    assert decode_fanin.survivors(rows) == (
        "1: 0.90, 2: 0.90 (undecided: 3 errors), 3: no pair of requests succeeded at both"
    )


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("sessions", [1, 4])
def test_every_server_of_a_fan_in_is_warm_before_the_first_round(
    count: int, sessions: int, tmp_path: Path
) -> None:
    """Servers are asked in turn, so twice as many requests as servers reach each of them twice, as many at
    once as the round sends.
    """
    args = decode_fanin.parser().parse_args(["--model", "/m", "--bytes-per-token", "4"])
    bench = decode_fanin.Bench(args)
    work = {"sessions": sessions * count, "prompt": 64, "answer": 1, "rounds": 1}
    point = Point(concurrency=args.concurrency * count)
    plan = bench.plan(count, [point], work, tmp_path / "x.jsonl", 4.0)
    for spec in bench.specs(count):
        assert "round_robin" in spec.processes["router"]
        asked: list[int] = []
        comparison = Comparison(plan, [endpoint := Endpoint(replace(spec, flush=None))], quiet=True)
        comparison._client = lambda _, asked=asked: InTurn(count, asked)  # type: ignore[method-assign, assignment]
        comparison._warm(endpoint, point, 0)
        assert sorted(asked) == sorted([*range(count)] * 2)


class InTurn:
    """A client of a router that gives its servers requests in turn; notes which server got one."""

    def __init__(self, servers: int, asked: list[int]) -> None:
        self.servers, self.asked = servers, asked

    async def __aenter__(self) -> InTurn:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def encode(self, turn: Any) -> bytes:
        return b""

    async def ask(self, turn: Any, body: bytes | None = None) -> Sample:
        self.asked.append(len(self.asked) % self.servers)
        return Sample(turn.label)


def test_the_routers_know_their_flags() -> None:
    from sglang_router.router_args import RouterArgs

    for spec in (decode_fanin.pair("/m", "", "", ["", ""], None), decode_fanin.direct("/m", "", ["", ""])):
        words = Ports().argv("router", spec.processes["router"])
        flags = argparse.ArgumentParser()
        RouterArgs.add_cli_args(flags, use_router_prefix=False)
        found = RouterArgs.from_cli_args(flags.parse_args(words[3:]), use_router_prefix=False)
        assert "round_robin" in (found.prefill_policy, found.policy)


def test_streams_carried_are_the_most_within_the_limit_without_errors() -> None:
    def row(streams: int, ms: float, errors: int = 0) -> dict[str, Any]:
        return {"streams": streams, "itl_ms": {"median": {"value": ms}}, "errors": errors}

    rows = [row(1, 5.0), row(4, 20.0), row(16, 90.0), row(32, 80.0, errors=1), row(64, 300.0)]
    assert decode_fanin.carried(rows, 100.0) == 16
    assert decode_fanin.carried(rows, 10.0) == 1
    assert decode_fanin.carried(rows, 1.0) is None
