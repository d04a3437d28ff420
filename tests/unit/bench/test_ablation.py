"""Arms and arithmetic of the ablation and of the decode fan-in; no server runs."""

from __future__ import annotations

import argparse
import math
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import decode_fanin
from benchmarks.ab import records
from benchmarks.ab.client import Sample
from benchmarks.ab.comparison import Comparison, Outcome
from benchmarks.ab.endpoints import Ports, SpecError
from benchmarks.ab.load import Point, Round
from benchmarks.ab.running import Endpoint
from benchmarks.ablation import analysis
from benchmarks.ablation.__main__ import cases, maker, packages, parser, result
from benchmarks.ablation.__main__ import setup as make_setup
from benchmarks.ablation.arms import ALL, CHANGES, NONE, STOCK, Arm, Setup, arms, known_flags

ROOT = Path(__file__).resolve().parents[3]
EVERY_FLAG = frozenset(word for change in CHANGES for word in change.on if word.startswith("--"))


def setup(platform: str = "gpu", **more: Any) -> Setup:
    flags = more.pop("flags", "--tp 2")
    values = {"cache": "embedded://"}
    return Setup(model="/m", layout="pair", platform=platform, flags=flags, values=values, **more)


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
    for name in ("3 executor", "4 async save", "5 fast lookup"):
        assert found[name].state.startswith("no switch of its own")
        module = found[name].state.rpartition("measured apart by ")[2].rstrip(")")
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
    assert found[ALL].state == "the same as 3, 4 and 5 the cache"
    assert found[ALL].spec is None


def test_a_build_without_a_flag_says_so_and_never_passes_it() -> None:
    found = arms(setup(), flags=EVERY_FLAG - {"--glm-prefill-graph"})
    graphs = next(arm for arm in found if arm.name == "2 prefill graphs")
    assert graphs.state == "not built: this build has no --glm-prefill-graph"
    assert all("--glm-prefill-graph" not in command(found, arm.name) for arm in found if arm.spec)
    chosen = arms(setup(), only=["cache"], flags=EVERY_FLAG)
    assert next(arm for arm in chosen if arm.name == "1 MegaMoE").state == "left out by --changes"


@pytest.mark.parametrize(
    ("flags", "gpus"),
    [("", 1), ("--tp 1 --chunked-prefill-size 4", 1), ("--tp-size=2", 2), ("--tp 8 --tp-size 2 --ep 2", 2)],
)
def test_an_arm_that_needs_more_gpus_than_prefill_has_says_so(flags: str, gpus: int) -> None:
    found = {arm.name: arm for arm in arms(setup(flags=flags), flags=EVERY_FLAG)}
    megamoe = found["1 MegaMoE"]
    if gpus == 2:
        assert megamoe.spec is not None
    else:
        assert megamoe.state == 'needs 2 GPUs or more (--flags "--tp 2 …"), prefill has 1'
        assert found[ALL].changes == ("graphs", "cache")
        assert "--glm-moe stock" in command(list(found.values()), ALL)


def test_arms_that_are_not_named_are_left_out_and_stock_never_is() -> None:
    found = {arm.name: arm for arm in arms(setup(), flags=EVERY_FLAG, named=["graphs", "all"])}
    assert [name for name, arm in found.items() if arm.spec] == [STOCK, "2 prefill graphs", ALL]
    assert found[ALL].changes == ("megamoe", "graphs", "cache")
    assert found[NONE].state == found["1 MegaMoE"].state == "left out by --arms"
    assert "no switch" in found["3 executor"].state
    both = arms(setup(), flags=EVERY_FLAG, named=["none"], also=[["megamoe", "cache"]])
    assert [arm.name for arm in both if arm.spec] == [STOCK, NONE, "megamoe + cache"]


def test_graphs_are_asked_for_as_told_and_only_where_they_are_on() -> None:
    found = arms(setup(graphs="strict"), flags=EVERY_FLAG)
    for arm in found:
        if arm.spec and arm.name != STOCK:
            words = command(found, arm.name).split()
            mode = words[words.index("--glm-prefill-graph") + 1]
            assert mode == ("strict" if "graphs" in arm.changes else "off")


@pytest.mark.parametrize("layout", ["pair", "single"])
def test_the_runner_of_experts_is_the_same_wherever_megamoe_is_off(layout: Any) -> None:
    """Stock's best flags are given to ours too: a faster runner alone is no change of the five."""
    process = "prefill" if layout == "pair" else "server"
    chosen = replace(setup(moe_runner="deep_gemm"), layout=layout)
    for arm in arms(chosen, flags=EVERY_FLAG):
        if arm.spec:
            words = arm.spec.processes[process].split()
            assert ("--moe-runner-backend" in words) == ("megamoe" not in arm.changes), arm.name
            assert "--moe-runner-backend" not in arm.spec.processes.get("decode", "")
            if "megamoe" not in arm.changes:
                assert words[words.index("--moe-runner-backend") + 1] == "deep_gemm"
    without = [arm.spec for arm in arms(setup(), flags=EVERY_FLAG) if arm.spec]
    assert not [text for spec in without for text in spec.processes.values() if "--moe-runner" in text]


def test_stock_finds_its_own_packages_first_and_nobody_else_does() -> None:
    found = arms(setup(stock_env={"PYTHONPATH": "/older:/tree"}), flags=EVERY_FLAG)
    assert command(found, STOCK).startswith("env PYTHONPATH=/older:/tree python -m sglang.launch_server")
    others = [arm.spec for arm in found if arm.spec and arm.name != STOCK]
    assert not [text for spec in others for text in spec.processes.values() if "PYTHONPATH" in text]
    assert "PYTHONPATH" not in command(found, STOCK, "decode")
    single = arms(Setup("/m", "single", "gpu", stock_env={"PYTHONPATH": "/older"}), flags=EVERY_FLAG)
    assert {arm.name for arm in single if arm.spec and arm.spec.env} == {STOCK}


@pytest.mark.parametrize("share_decode", [False, True])
def test_cached_tokens_are_counted_where_the_usage_comes_from(share_decode: bool) -> None:
    """Whatever flags the arms are given: of a pair decode answers, with prefill's count; of one server that one."""
    for arm in arms(setup(share_decode=share_decode), flags=EVERY_FLAG):
        if arm.spec:
            commands = {**arm.spec.processes, **arm.spec.shared}
            assert "--enable-cache-report" in commands["prefill"].split()
            assert "--enable-cache-report" in commands["decode"].split()
    single = [arm.spec for arm in arms(Setup("/m", "single", "cpu"), flags=EVERY_FLAG) if arm.spec]
    assert all("--enable-cache-report" in spec.processes["server"].split() for spec in single)


def test_one_decode_serves_all_arms_where_it_is_shared() -> None:
    found = [arm.spec for arm in arms(setup(share_decode=True), flags=EVERY_FLAG) if arm.spec]
    assert {tuple(spec.processes) for spec in found} == {("prefill", "router")}
    assert len({spec.shared["decode"] for spec in found}) == 1
    assert all(spec.flush == ("prefill",) for spec in found)  # decode keeps no prefixes
    apart = [arm.spec for arm in arms(setup(), flags=EVERY_FLAG) if arm.spec]
    assert apart[0].processes["decode"] == found[0].shared["decode"]


def parsed(*words: str) -> argparse.Namespace:
    return parser().parse_args(["--model", "/m", "--platform", "gpu", *words])


def test_a_case_has_the_commands_flags_but_for_its_own() -> None:
    one = "cold: --workload long_context --lengths 4k,2k --concurrency 8 --label 4k"
    args = parsed("--rounds", "7", "--sessions", "5", "--case", one, "--case", "chat: --sessions 6")
    found = cases(args)
    assert list(found) == ["cold", "chat"]
    cold, chat = found["cold"], found["chat"]
    assert (cold.workload, cold.lengths, cold.sessions) == ("long_context", [4096, 2048], 5)
    assert (cold.concurrency, cold.rounds, cold.label) == (8, 7, "4k")
    assert (chat.workload, chat.sessions, chat.concurrency, chat.label) == ("two_turn", 6, 2, "all")
    assert cases(parsed()).keys() == {""}


@pytest.mark.parametrize("texts", [["cold"], ["a b: --rounds 3"], [": --rounds 3"], ["a: --rounds 2", "a:"]])
def test_a_case_without_a_name_of_its_own_is_refused(texts: list[str]) -> None:
    with pytest.raises(SpecError, match=r'--case is .* it must be "NAME: FLAGS"'):
        cases(parsed(*(word for text in texts for word in ("--case", text))))


def test_stocks_packages_and_their_versions_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "sgl_deep_gemm-0.2.3.post2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sgl-deep-gemm\nVersion: 0.2.3.post2\n")
    assert packages(tmp_path) == {"sgl-deep-gemm": "0.2.3.post2"}
    monkeypatch.setenv("PYTHONPATH", "/tree")
    assert make_setup(parsed("--stock-path", str(tmp_path))).stock_env == {"PYTHONPATH": f"{tmp_path}:/tree"}
    monkeypatch.delenv("PYTHONPATH")
    assert make_setup(parsed("--stock-path", str(tmp_path))).stock_env == {"PYTHONPATH": str(tmp_path)}
    with pytest.raises(SpecError, match="must be a folder"):
        make_setup(parsed("--stock-path", str(tmp_path / "nowhere")))


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

    def says(value: float, words: str = "interval above 1") -> dict[str, Any]:
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


@pytest.mark.parametrize("says", ["interval holds 1", "undecided: too few rounds", "undecided: 3 errors"])
def test_of_no_gain_there_is_no_share(says: str) -> None:
    assert analysis.share({"value": 1.5, "says": "interval above 1"}, {"value": 1.001, "says": says}) is None


def test_an_interaction_is_judged_only_behind_a_difference() -> None:
    """The second verdict of a case follows the first: without that one both would be wrong in one run of ten."""
    planned = arms(setup(), only=["graphs", "cache"], flags=EVERY_FLAG)
    seconds: dict[str, list[float | None]] = {arm.name: [1.0] * 6 for arm in planned if arm.spec}
    seconds |= {"2 prefill graphs": [2.0] * 6}  # alone half as fast, together as fast as stock
    found = analysis.analyse(planned, measured(seconds), "input_tokens_per_s", "all")
    assert found["speedup"]["says"] == "no difference"
    assert "undecided: all together are no different from stock SGLang" in found["interaction"]["says"]


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
    assert rows[ALL]["speedup"]["says"] == "faster"  # the case's one verdict
    assert rows[NONE]["speedup"]["says"] == "interval holds 1"
    assert rows["2 prefill graphs"]["speedup"]["says"] == "interval above 1"
    assert rows["2 prefill graphs"]["share"] == pytest.approx(math.log(2) / math.log(8), abs=1e-3)
    assert rows["3, 4 and 5 the cache"]["share"] == pytest.approx(2 / 3, abs=1e-3)
    assert rows["3, 4 and 5 the cache"]["cached_share"] == 0.9
    assert rows["1 MegaMoE"]["speedup"] is None
    assert rows["1 MegaMoE"]["article"].startswith("cold prefill +59 %")
    assert found["interaction"]["value"] == pytest.approx(1.0, abs=1e-3)
    assert "all against stock SGLang: input tokens/s 8.000× (faster)" in found["answer"]
    assert "ablation, 1 MegaMoE: left out by --changes" in found["not_measured"]


def test_an_arm_that_was_left_out_has_its_reason_and_no_part_in_the_others() -> None:
    """Without the graphs' arm the singles' product is not all of them; the cache's figures stay."""
    seconds: dict[str, list[float | None]] = {
        STOCK: [2.0] * 6,
        NONE: [2.0] * 6,
        "3, 4 and 5 the cache": [1.0] * 6,
        ALL: [0.5] * 6,
    }
    planned = arms(setup(), only=["graphs", "cache"], flags=EVERY_FLAG)
    left = analysis.without(planned, {"2 prefill graphs": "it ended with status 1\n  last line"})
    found = analysis.analyse(left, measured(seconds), "input_tokens_per_s", "all")
    rows = {row["name"]: row for row in found["arms"]}
    assert rows["2 prefill graphs"]["state"].endswith("last line")
    assert "ablation, 2 prefill graphs: left out: it ended with status 1" in found["not_measured"]
    assert found["interaction"] is None
    assert rows["3, 4 and 5 the cache"]["share"] == pytest.approx(0.5, abs=1e-3)
    assert found["speedup"]["value"] == pytest.approx(4.0, rel=1e-3)
    for gone in (NONE, ALL):
        short = {name: rounds for name, rounds in seconds.items() if name != gone}
        left = analysis.without(planned, {"2 prefill graphs": "x", gone: "out of memory"})
        found = analysis.analyse(left, measured(short), "input_tokens_per_s", "all")
        assert (found["speedup"] is None) == (gone == ALL)
    assert found["answer"] == "All together could not be measured here: left out: out of memory"


def test_the_most_changes_that_go_together_speak_for_all_where_all_do_not() -> None:
    some = "megamoe + cache"
    planned = arms(setup(), flags=EVERY_FLAG, also=[["megamoe", "cache"]])
    words = command(planned, some).split()
    flags = ("--glm-moe", "--glm-prefill-graph", "--glm-cache-url")
    assert [words[words.index(flag) + 1] for flag in flags] == ["megamoe", "off", "embedded://"]
    seconds: dict[str, list[float | None]] = {arm.name: [1.0] * 6 for arm in planned if arm.spec}
    seconds |= {STOCK: [4.0] * 6, some: [2.0] * 6}
    found = analysis.analyse(planned, measured(seconds), "input_tokens_per_s", "all")
    assert (found["speedup"]["arm"], found["speedup"]["value"]) == (ALL, pytest.approx(4.0, rel=1e-3))
    left = analysis.without(planned, {ALL: "no graph", "2 prefill graphs": "no graph"})
    found = analysis.analyse(left, measured(seconds), "input_tokens_per_s", "all")
    assert (found["speedup"]["arm"], found["speedup"]["value"]) == (some, pytest.approx(2.0, rel=1e-3))
    alone = arms(setup(flags="--tp 1"), flags=EVERY_FLAG, also=[["megamoe", "cache"]])
    assert next(a for a in alone if a.name == some).state == "without megamoe, which is not measured"


def test_no_round_is_no_figure() -> None:
    planned = arms(setup(), flags=EVERY_FLAG)
    found = analysis.analyse(planned, [], "input_tokens_per_s", "all")
    assert (found["speedup"], found["rounds_measured"]) == (None, 0)
    assert found["answer"] == "No round was measured."
    assert {row["speedup"] for row in found["arms"]} == {None}


@pytest.mark.parametrize(("rounds", "says"), [(6, "faster"), (5, "undecided: too few rounds (6 at least)")])
def test_each_cases_speedup_is_at_the_top_with_its_verdict(rounds: int, says: str, tmp_path: Path) -> None:
    words = (
        "--case",
        "cold: --workload long_context",
        "--case",
        "chat: --label 'turn 2'",
        "--changes",
        "cache",
    )
    args = parsed(*words, "-o", str(tmp_path / "x.jsonl"))
    planned = arms(make_setup(args), args.changes, EVERY_FLAG)
    endpoints = [Endpoint(arm.spec) for arm in planned if arm.spec]
    seconds: dict[str, list[float | None]] = {STOCK: [2.0] * rounds, NONE: [2.0] * rounds}
    lines = measured(seconds | {"3, 4 and 5 the cache": [1.0] * rounds})
    wanted = cases(args)
    plans = {name: maker(args, own)(4.0) for name, own in wanted.items()}
    outcome = Outcome(plans, {"cold": [], "chat": lines})
    found = result(args, wanted, planned, endpoints, outcome)
    assert found["speedup_chat"] == pytest.approx(2.0, rel=1e-3)
    assert found["speedup_chat_says"] == says
    assert found["speedup_chat_interval"] == ([2.0, 2.0] if rounds == 6 else [None, None])
    assert (found["speedup_cold"], found["speedup_cold_says"]) == (None, "not measured")
    assert found["cases"]["chat"]["rounds_measured"] == rounds
    assert "ablation, cold: 0 of 6 rounds in the time" in found["not_measured"]


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
    plan = bench.plan(count, point, work, tmp_path / "x.jsonl", 4.0)
    for spec in bench.specs(count):
        assert "round_robin" in spec.processes["router"]
        asked: list[int] = []
        comparison = Comparison(plan, [endpoint := Endpoint(replace(spec, flush=None))], quiet=True)
        comparison._client = lambda _, asked=asked: InTurn(count, asked)  # type: ignore[method-assign, assignment]
        comparison.warm(endpoint, point, 0)
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


def streams_row(streams: int, p99: float, errors: int = 0, median: float = 1.0) -> dict[str, Any]:
    itl = {"median": {"value": median}, "p99": {"value": p99}}
    return {"streams": streams, "decoding": streams / 2, "itl_ms": itl, "errors": errors}


@pytest.mark.parametrize(
    ("rows", "limit_ms", "streams"),
    [
        ([streams_row(1, 5.0), streams_row(4, 20.0), streams_row(16, 100.0)], 100.0, 16),
        ([streams_row(16, 90.0), streams_row(1, 5.0), streams_row(4, 20.0)], 19.0, 1),  # in any order
        # A median within the limit is not enough, nor is a larger number that passes behind one that does not.
        ([streams_row(1, 30.0), streams_row(4, 241.0, median=78.0)], 100.0, 1),
        ([streams_row(1, 30.0), streams_row(4, 50.0, errors=7), streams_row(16, 90.0)], 100.0, 1),
        ([streams_row(1, 300.0), streams_row(4, 50.0)], 100.0, None),
        ([{**streams_row(1, 1.0), "itl_ms": {"median": None, "p99": None}}], 100.0, None),
    ],
)
def test_decode_carries_the_streams_up_to_the_first_number_that_is_late(
    rows: list[dict[str, Any]], limit_ms: float, streams: int | None
) -> None:
    best = decode_fanin.carried(rows, limit_ms)
    assert (best and best["streams"]) == streams
    words = decode_fanin.carried_words(rows, limit_ms)
    if best is None:
        assert "not even 1, the smallest number tried" in words
    else:
        assert f"{streams} at once, {best['decoding']:.1f} of them decoding on average" in words


def test_those_that_decode_are_counted_by_littles_law() -> None:
    """Two rounds of 10 s; four streams of 5 s between first and last token, whatever they waited before: 20 s of 20 s."""

    def one(wait: float) -> Sample:
        return Sample("t", 0.0, wait, wait + 5.0, [2.0, 3.0], 10, 0, 3)

    lines = [
        records.line("p", "fan_in", Point(2), n, 0, "", Round([[one(0.1)], [one(4.0)]], 10.0), {})
        for n in range(2)
    ]
    assert decode_fanin.decoding(lines) == pytest.approx(1.0)


def test_every_number_of_streams_has_waves_of_its_own(tmp_path: Path) -> None:
    """One wave at the largest number was a quarter of a wave, or sixteen, at the others."""
    args = decode_fanin.parser().parse_args(["--model", "/m", "--bytes-per-token", "4"])
    args.output, args.streams, args.stream_waves = tmp_path / "x.jsonl", [1, 4, 16], 3
    bench = decode_fanin.Bench(args)
    asked: dict[Point, dict[str, int]] = {}

    def compare(count: int, specs: Any, works: dict[Point, dict[str, int]], output: Path) -> Any:
        asked.update(works)
        sample = Sample("t", 0.0, 0.1, 0.3, [0.1, 0.1], 10, 0, 3)
        lines = {}
        for point, work in works.items():
            plan = bench.plan(count, point, work, output, 4.0)
            load = plan.workload.round(0)
            lines[str(point)] = [
                records.line(
                    decode_fanin.PAIR,
                    "fan_in",
                    point,
                    0,
                    0,
                    "",
                    Round([[sample]] * len(load.sessions), 1.0),
                    {},
                )
            ]
        return Outcome({}, lines)

    bench.compare = compare  # type: ignore[method-assign]
    rows = bench.streams(1)
    assert {point.concurrency: work["sessions"] for point, work in asked.items()} == {1: 3, 4: 12, 16: 48}
    assert [(row["streams"], row["requests"]) for row in rows] == [(1, 3), (4, 12), (16, 48)]
    assert [row["decoding"] for row in rows] == pytest.approx([0.6, 2.4, 9.6])
    # Three tokens each, two gaps; all were seen.
    assert [row["gaps"] for row in rows] == [{"seen": n, "of": n} for n in (6, 24, 96)]


def test_arms_that_want_the_same_devices_are_not_up_together() -> None:
    def chosen(*words: str) -> str:
        return decode_fanin.between(decode_fanin.parser().parse_args(["--model", "/m", *words]))

    assert chosen() == "paused"
    assert chosen("--prefill-devices", "0,1") == chosen("--decode-devices", "3") == "ended"
    assert chosen("--prefill-devices", "0,1", "--between", "running") == "running"
    example = str(decode_fanin.__doc__).partition("python -m benchmarks.decode_fanin")[2].partition("\n\n")[0]
    args = decode_fanin.parser().parse_args(shlex.split(example.replace("\\\n", " ")))
    assert (args.prefill_devices, decode_fanin.between(args), args.block) == ("0,1,2", "ended", 3)
