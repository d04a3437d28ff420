"""`benchmarks/eight_gpus.sh` without a GPU: commands parse, fit their time and resume; the launcher accepts the flags."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from glm_kernels.mega_moe.limits import Arch, check_shape
from node_series import series
from packaging.requirements import Requirement

from benchmarks import _idle_steps, _moe_servers, _node, _turns, moe_layer, moe_server
from benchmarks._gpu_trace import Interval, Step
from benchmarks.report import node as report_node
from benchmarks.roofline import Model, kv_bytes
from glm_sglang import command_line, launch_defaults, own_flags
from glm_sglang.moe import choice
from glm_sglang.prefill_graph import buckets, options
from glm_sglang.tiny_model.shape import hf_config

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "benchmarks" / "eight_gpus.sh"
COMMAND_S = 600  # the longest that one command may run on a lent machine
LEASE_S = 1800  # and the longest that such a machine is held, with
STAGING_S = 150  # to hand the stack over and assemble it
SIZES = (8, 4, 2)


def script(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *words],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@dataclass
class Stage:
    """As the dry run prints it."""

    limit_s: int
    estimate_s: int
    commands: list[tuple[int, list[str]]] = field(
        default_factory=list
    )  # one after another, with their limits
    beside: list[tuple[int, list[str]]] = field(default_factory=list)


def stages(gpus: int) -> dict[str, Stage]:
    done = script("--dry-run", GPUS=str(gpus), SCRATCH="/nowhere", PYTHON="python3")
    assert done.returncode == 0, done.stderr
    found: dict[str, Stage] = {}
    for line in done.stdout.splitlines():
        if match := re.fullmatch(r"stage (\w): .*; estimated (\d+) s, at most (\d+) s", line):
            found[match[1]] = current = Stage(int(match[3]), int(match[2]))
        elif line.startswith("  + "):
            words = shlex.split(line.removeprefix("  + "))
            background = words[-1] == "&"
            head, limit, argv = words[:3], int(words[3]), words[4 : len(words) - background]
            assert head == ["timeout", "-k", "20"]
            (current.beside if background else current.commands).append((limit, argv))
    return found


@pytest.fixture(scope="module")
def dry() -> dict[int, dict[str, Stage]]:
    return {gpus: stages(gpus) for gpus in SIZES}


def after(argv: list[str], module: str) -> list[str]:
    """What follows `-m module`."""
    at = argv.index(module)
    assert argv[at - 1] == "-m"
    return argv[at + 1 :]


def servers(stage: Stage) -> list[Namespace]:
    found = []
    for _, argv in [*stage.commands, *stage.beside]:
        if "benchmarks.moe_server" in argv:
            found.append(moe_server.parse(after(argv, "benchmarks.moe_server")))
    return found


@pytest.mark.parametrize("gpus", SIZES)
def test_stages_fit_a_command_and_all_of_them_a_lease(dry: dict[int, dict[str, Stage]], gpus: int) -> None:
    found = dry[gpus]
    assert list(found) == ["a", "b", "c", "d"]
    for stage in found.values():
        assert stage.estimate_s <= stage.limit_s <= COMMAND_S - 30
        own = [limit for limit, argv in stage.commands if "benchmarks.report.node" not in argv]
        assert sum(own) <= stage.limit_s
        assert all(limit <= stage.limit_s for limit, _ in stage.beside)
        for limit, argv in stage.commands:
            if "--deadline" in argv:  # it ends itself, with what it has, before it is ended
                assert float(argv[argv.index("--deadline") + 1]) <= limit - 20
    assert sum(stage.limit_s for stage in found.values()) + STAGING_S <= LEASE_S


@pytest.mark.parametrize("gpus", SIZES)
def test_every_command_parses(dry: dict[int, dict[str, Stage]], gpus: int) -> None:
    from torch.distributed.run import get_args_parser

    seen = set()
    for stage in dry[gpus].values():
        for _, argv in [*stage.commands, *stage.beside]:
            assert argv[:2] == ["python3", "-m"]
            module, words = argv[2], argv[3:]
            if module == "torch.distributed.run":
                launched = get_args_parser().parse_args(words)
                assert launched.module
                module, words = launched.training_script, launched.training_script_args
                layer = moe_layer.parser().parse_args(words)
                ranks = int(launched.nproc_per_node)
                seen.add(f"layer{ranks}")
                check_shape(
                    Arch.SM90,
                    hidden=layer.hidden,
                    intermediate=layer.intermediate,
                    experts=layer.experts_per_rank * ranks,
                    top_k=layer.top_k,
                    ranks=ranks,
                )
                # The targets' size, and the rows of a server's chunk, from which the report takes MegaMoE's inside.
                assert {moe_layer.HEADLINE, _moe_servers.ROWS} <= set(layer.tokens)
                assert layer.json
            elif module == "benchmarks.moe_server":
                args = moe_server.parse(words)
                assert args.ranks == gpus
                assert args.experts == 32 * gpus
                seen.add(args.parts)
            elif module == "benchmarks.report.node":
                report_node.parser().parse_args(words)
            else:
                assert (module, words) == ("benchmarks._prewarm", [])
    layers = {f"layer{gpus}", f"layer{gpus // 2}"} - {"layer1"}
    assert seen == {*layers, "checkpoint", "node", "exposed", "same"}


@pytest.mark.parametrize("gpus", SIZES)
def test_what_the_servers_hold_fits(dry: dict[int, dict[str, Stage]], gpus: int) -> None:
    """Five servers on GPUs of 139 GiB leave each 8 GiB for contexts, buffers and graphs; the disk holds one model."""
    (args,) = servers(dry[gpus]["b"])[-1:]
    model = Model.from_config(hf_config(_node.wide(args), "fp8"))
    expert = 3 * model.hidden * model.expert_width  # bytes: E4M3
    replicated = (
        model.active_weights - model.moe_layers * expert * model.top_k
    )  # attention, shared expert, dense
    weights = replicated + model.moe_layers * expert * model.experts / gpus
    # BF16 rows of 576, the most that a pool takes; the index keys as they are.
    kv = _moe_servers.node_tokens(args) * (model.layers * 2 * 576 + kv_bytes(model)["index"])
    arms = len(_moe_servers.NODE_ARMS)
    assert arms * (weights + kv + 8 * 2**30) < 139 * 2**30
    disk = {8: 235, 4: 235, 2: 128}[gpus] * 2**30
    assert model.moe_layers * expert * model.experts + replicated < 0.8 * disk
    assert max(args.lengths) + _moe_servers.GPU.turn < _node.POSITIONS


@pytest.mark.parametrize("gpus", SIZES)
def test_the_servers_flags_are_accepted(
    dry: dict[int, dict[str, Stage]], gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the launcher judges them before SGLang is imported: flags, MoE path, cache, graphs."""
    monkeypatch.setattr(choice, "capability", lambda platform: (9, 0))
    for stage in ("b", "c", "d"):
        args = servers(dry[gpus][stage])[-1]
        shape = moe_server.PRESETS["gpu"] if args.parts == "same" else _node.wide(args)
        (tmp_path / "config.json").write_bytes(orjson.dumps(hf_config(shape, "fp8")))
        arms = _moe_servers.arms_of(args.parts, args)
        assert list(arms) == ["stock", "megamoe", "graphs", "cache", "all"]
        for name, arm in arms.items():
            request = command_line.parse(["--model-path", str(tmp_path), *arm["flags"]])
            with monkeypatch.context() as environment:
                values: dict[str, str] = dict(arm["env"])
                own_flags.hand_down(request.given, values)
                for key, value in values.items():
                    environment.setenv(key, value)
                moe = choice.decide(request, "cuda")
                filled = {one.field for one in launch_defaults.fill(request, "cuda", moe)}
                graphs = options.read()
            on = _moe_servers.NODE_ARMS[name]
            assert moe.path == ("megamoe" if "megamoe" in on else "stock"), moe
            assert ("enable_unified_cache_external_linker" in filled) == ("cache" in on)
            # Under prefill CP `auto` captures nothing.
            assert graphs.mode == ("strict" if "graphs" in on else "off")
            sizes = (
                request.given["tp_size"],
                request.given["ep_size"],
                request.given["attn_cp_size"],
            )
            assert sizes == (str(gpus),) * 3
            assert request.given["enable_prefill_cp"]
            assert request.given["cp_strategy"] == "interleave"
            chunk = int(request.given["chunked_prefill_size"])
            assert chunk == 2048 * gpus
            if graphs.buckets:
                assert max(graphs.buckets) == chunk
                assert all(bucket % buckets.unit(gpus) == 0 for bucket in graphs.buckets)
                steps = [*(min(length, chunk) for length in args.lengths), _moe_servers.GPU.turn + 64]
                assert all(any(step <= b <= 1.5 * step for b in graphs.buckets) for step in steps)


def test_the_arms_differ_in_the_changes_only() -> None:
    args = moe_server.parse(["--parts", "node", "--ranks", "8", "--lengths", "16384"])
    arms = {name: arm["flags"] for name, arm in _moe_servers.node_arms("node", args).items()}
    shared = arms["stock"].index("--glm-moe") + 1
    assert all(flags[:shared] == arms["stock"][:shared] for flags in arms.values())
    buckets_of = [
        "--glm-prefill-graph-buckets",
        "1536,16384",
    ]  # 1,024 + 64 tokens in whole tiles of eight ranks; the chunk
    pool = ["--glm-cache-pool-gb", "8"]
    assert {name: flags[shared:] for name, flags in arms.items()} == {
        "stock": ["stock", "--glm-prefill-graph", "off", "--glm-cache-url", "none"],
        "megamoe": ["megamoe", "--glm-prefill-graph", "off", "--glm-cache-url", "none"],
        "graphs": ["megamoe", "--glm-prefill-graph", "strict", "--glm-cache-url", "none", *buckets_of],
        "cache": ["megamoe", "--glm-prefill-graph", "off", "--glm-cache-url", "embedded://", *pool],
        "all": [
            "megamoe",
            "--glm-prefill-graph",
            "strict",
            "--glm-cache-url",
            "embedded://",
            *buckets_of,
            *pool,
        ],
    }
    here = moe_server.parse(["--parts", "node", "--reference", "--lengths", "576"])
    assert list(_moe_servers.node_arms("node", here)) == ["stock", "megamoe", "cache"]

    some = moe_server.parse(["--parts", "same", "--arms", "graphs"])
    assert list(_moe_servers.asked("same", some)) == ["stock", "graphs"]
    assert _moe_servers.asked("same", moe_server.parse(["--parts", "same"])) == _moe_servers.arms_of(
        "same", some
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--parts", "nodes"],
        ["--parts", "exposed", "--reference", "--lengths", "512"],
        ["--parts", "node", "--ranks", "8", "--lengths", "8192"],
        ["--parts", "same", "--arms", "graphs,graph"],
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        moe_server.parse(words)
    assert end.value.code == 2


@pytest.mark.parametrize(("words", "env"), [(("e",), {}), (("--dry-run",), {"GPUS": "3"})])
def test_a_name_or_a_machine_that_cannot_be(words: tuple[str, ...], env: dict[str, str]) -> None:
    done = script(*words, **env)
    assert done.returncode == 2
    assert "allowed:" in done.stderr


# Stands for Python: says yes to the machine, notes what it is asked to run, and answers with files of $ANSWERS.
STAND_IN = r"""#!/bin/bash
if [ "$1" = - ]; then
  case $2 in */dist) cat > /dev/null; exit 0 ;; *) exec "$REAL" "$@" ;; esac
fi
case "$*" in *benchmarks.report.node*) exec "$REAL" "$@" ;; esac
name=$(echo "$*" | sed -nE 's/.*--parts ([a-z]+).*/\1/p; s/.*nproc-per-node ([0-9]+).*/layer_ep\1/p')
echo "${name:-other}" >> "$ANSWERS/ran"
cat "$ANSWERS/$name.json" 2> /dev/null
[ ! -e "$ANSWERS/$name.fails" ]
"""


def test_a_failed_stage_is_named_and_only_it_is_measured_again(tmp_path: Path) -> None:
    answers = tmp_path / "answers"
    answers.mkdir()
    for name, result in series().items():
        (answers / f"{name}.json").write_text("a line before\n" + json.dumps(result) + "\n")
    (answers / "same.fails").touch()
    (answers / "exposed.json").rename(answers / "later.json")  # no result at all
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    out = tmp_path / "out"
    env = {
        "GPUS": "2",
        "MACHINE": "none",
        "PYTHON": str(stand_in),
        "REAL": sys.executable,
        "ANSWERS": str(answers),
        "SCRATCH": str(tmp_path / "scratch"),
        "OUT": str(out),
    }

    def ran() -> set[str]:
        names = set((answers / "ran").read_text().split())
        (answers / "ran").unlink()
        return names

    first = script(**env)
    assert first.returncode == 1
    assert "FAILED: exposed same" in first.stderr
    assert ran() == {"checkpoint", "layer_ep2", "other", "node", "exposed", "same"}
    kept = {path.name for path in (out / "eight_gpus").iterdir()}
    assert kept == {"layer_ep2.json", "node.json", "same.failed.json"}
    joined = json.loads((out / "eight_gpus.json").read_text())
    assert "eight_gpus, traced steps: no result" in joined["not_measured"]
    assert "eight_gpus, node, graphs: graphs ended with status 1" in joined["not_measured"]

    (answers / "later.json").rename(answers / "exposed.json")
    (answers / "same.fails").unlink()
    second = script("c", "d", **env)
    assert second.returncode == 0, second.stderr
    assert ran() == {"exposed", "same"}
    third = script(**env)
    assert third.returncode == 0, third.stderr
    assert not (answers / "ran").exists()
    again = script("--dry-run", **{**env, "SCRATCH": str(tmp_path / "fresh machine")})
    assert again.stderr.count("is there, skipped") == 4  # by what came back
    kept = {path.name for path in (out / "eight_gpus").iterdir()} - {"same.failed.json"}
    assert kept == {"layer_ep2.json", "node.json", "exposed.json", "same.json"}
    assert "exposed" in json.loads((out / "eight_gpus.json").read_text())


def test_the_metadata_for_a_bare_machine_is_the_installed_one(tmp_path: Path) -> None:
    """Without its pins no server starts. The scripts' own program, in a Python that sees no package."""
    program = SCRIPT.with_name("_gpu_script.sh").read_text().partition("<<'P'\n")[2].partition("\nP\n")[0]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-", str(tmp_path), "2", "the_script", "nixl"],
        cwd=ROOT,
        input=program,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "the_script: cannot be imported: torch (No module named 'torch')" in done.stderr
    assert "nixl (No module named 'nixl')" in done.stderr
    (written,) = importlib.metadata.distributions(path=[str(tmp_path)])
    installed = importlib.metadata.distribution("glm-sglang")
    assert set(map(Requirement, written.requires or [])) == set(map(Requirement, installed.requires or []))
    assert written.version == installed.version
    assert {(p.group, p.name, p.value) for p in written.entry_points} == {
        (p.group, p.name, p.value) for p in installed.entry_points
    }


class Ends:
    """Stands for a server: notes its end."""

    def __init__(self, name: str, ended: list[str]) -> None:
        self.name, self.ended = name, ended

    def stop(self) -> None:
        self.ended.append(self.name)


def answering(
    name: str, ended: list[str], asked: list[str], fails: Callable[[list[int]], bool] = lambda ids: False
) -> _moe_servers.Arm:
    """An arm that answers at once, but for prompts with which it dies."""

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(name)
        if fails(json.loads(request.content)["input_ids"]):
            raise httpx.ReadError(name)
        return httpx.Response(200, json={"meta_info": {"cached_tokens": 0}})

    client = httpx.Client(base_url="http://arm", transport=httpx.MockTransport(answer))
    return _moe_servers.Arm(name, Ends(name, ended), client, 0.0, Future())  # type: ignore[arg-type]


SMALL = Namespace(lengths=(300, 40), discard=0, repeat=2, ranks=2, reference=True)


def test_an_arm_that_dies_is_lost_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One dies at the second length, the other there in the queue; stock's figures and the first length stay, though
    stock goes on for six turns.
    """
    monkeypatch.setattr(_node, "PAUSE_S", 0.0)
    ended: list[str] = []
    first, queued = _moe_servers.tokens(40, 1000), _moe_servers.tokens(40, 2000)
    arms = [
        answering("stock", ended, []),
        answering("graphs", ended, [], lambda ids: ids == first),
        answering("all", ended, [], lambda ids: ids == queued),
    ]
    running = {one.name: one for one in arms}
    report = _moe_servers.Report(None, 60.0)
    assert _node.node(running, SMALL, report)
    rows = report.result["cold"]
    assert [list(row["arms"]) for row in rows] == [["stock", "graphs", "all"], ["stock"]]
    assert (list(running), ended) == (["stock"], ["graphs", "all"])
    assert {"node_graphs_failed", "node_all_failed"} <= report.result.keys()
    turns = {name: len(arm["turns_tokens_s"]) for name, arm in rows[0]["arms"].items()}
    assert turns == {"stock": 6, "graphs": 2, "all": 2}
    # What they share is compared; it is too little for an interval.
    assert rows[0]["arms"]["all"]["speedup"] > 0
    assert rows[0]["arms"]["all"]["speedup_interval"] is None


def test_who_is_first_changes_from_turn_to_turn() -> None:
    """A server that is always asked behind another one has that one's heat, clocks and caches before it."""
    asked: list[str] = []
    running = {name: answering(name, [], asked) for name in "abc"}
    one = _node.alone(40)
    assert all(one.go_on(running, _moe_servers.Report(None, 60.0)) for _ in range(4))
    assert "".join(asked) == "abcbcacababc"
    assert list(one.answers(4)) == list("abc")
    assert {len(values) for values in one.answers(4, 1).values()} == {3}


class Clock(_moe_servers.Report):
    """A stage whose time is what was asked: a second a prompt."""

    def __init__(self, asked: list[str], limit_s: float) -> None:
        super().__init__(None, 0.0)
        self.asked, self.limit_s = asked, limit_s

    def left(self, keep_s: float = 0.0) -> float:
        return max(0.0, self.limit_s - keep_s - len(self.asked))


def test_there_are_as_many_turns_as_fit_and_at_least_as_many_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_node, "PAUSE_S", 0.0)

    def turns(limit_s: float) -> tuple[bool, list[int], list[int], int]:
        asked: list[str] = []
        running = {name: answering(name, [], asked) for name in ("stock", "cache")}
        monkeypatch.setattr(_turns.time, "monotonic", lambda: float(len(asked)))
        report = Clock(asked, limit_s)
        done = _node.node(running, SMALL, report)
        cold, again = report.result["cold"], report.result.get("second_turn", ())
        return (
            done,
            [len(row["arms"]["cache"]["turns_tokens_s"]) for row in cold],
            [len(row["arms"]["cache"]["turns_ms"]) for row in again],
            len(asked),
        )

    done, queues, second, least_s = turns(10_000.0)
    assert (done, queues, second) == (True, [6, 6], [6, 6])
    # Two lone prompts and two queues at both lengths (3 and 25 prompts), three second turns of five: by two arms.
    least = 2 * (2 * 2 + 2 * (3 + 25) + 2 * 3 * (2 + _node.PUSHES))
    assert turns(least + 1.0) == (True, [2, 2], [3, 3], least)
    done, queues, second, took = turns(least + 9.0)
    assert (done, queues, second) == (True, [3, 2], [3, 3])  # 6 s more, the most important length's
    assert took <= least + 9
    assert least < took < least_s


def test_answers_from_a_cache_that_had_no_hit_prove_nothing() -> None:
    def judge(cached: int, ranks: int = 8) -> dict[str, Any]:
        rows = [
            {"arm": "cache", "size": 1920 * ranks + more, "kl_mean": 1e-5, "tokens_equal": True}
            | {"again": again, "cached": [0, cached * again]}
            for again in (False, True)
            for more in (0, 1)
        ]
        found: dict[str, Any] = moe_server.verdicts("same", rows, _moe_servers.GPU, ranks)["same_verdict"]
        return found

    assert judge(64)["ok"]
    assert judge(64)["cache"]["cached_again"] == 128
    assert not judge(0)["ok"]
    # A rank's cap times the ranks parts below from above.
    assert (judge(64)["cache"]["kl_below_cap"], judge(64)["cache"]["kl_above_cap"]) == (1e-5, 1e-5)


def test_medians_and_speed_ups_of_a_length() -> None:
    """By hand: ratios turn by turn, and their geometric mean."""
    lone = {"stock": [0.4, 0.2, 0.3], "all": [0.1, 0.1, 0.1]}
    row = _node.cold_row(1000, lone, {"stock": [100.0, 200.0], "all": [150.0, 600.0]})
    assert row["arms"]["stock"]["ms"] == 300.0
    assert row["arms"]["stock"]["speedup"] == 1.0
    assert row["arms"]["all"]["speedup"] == pytest.approx((1.5 * 3.0) ** 0.5, abs=1e-4)
    assert row["arms"]["all"]["speedup_alone"] == pytest.approx((4.0 * 2.0 * 3.0) ** (1 / 3), abs=1e-4)
    assert row["arms"]["all"]["speedup_interval"] is None
    answers = {"stock": [(0.4, 0)] * 3, "cache": [(0.1, 960), (0.4, 960), (0.2, 960)]}
    turn = _node.turn_row(1000, 64, answers)["arms"]["cache"]
    assert (turn["ms"], turn["cached_share"], turn["speedup"]) == (200.0, 0.96, 2.0)
    six = _node.cold_row(1000, {"stock": [0.2] * 6, "all": [0.1] * 6}, {"stock": [1.0] * 6, "all": [2.0] * 6})
    assert (
        six["arms"]["all"]["speedup_interval"] == six["arms"]["all"]["speedup_alone_interval"] == [2.0, 2.0]
    )


@pytest.mark.parametrize(
    ("rates", "measured", "reached"),
    [
        ([90_000.0] * 6, "1.8× [1.8, 1.8]", True),
        ([90_000.0] * 2, "1.8× (undecided: fewer than 6 turns)", None),
        ([60_000.0] * 6, "1.2× [1.2, 1.2]", False),
        ([75_000.0, 80_000.0, 85_000.0, 90_000.0, 95_000.0, 100_000.0], None, None),  # some above, some below
    ],
)
def test_a_target_is_reached_where_the_whole_interval_does(
    rates: list[float], measured: str | None, reached: bool | None
) -> None:
    results = series(8)
    stock = [50_000.0] * len(rates)
    row = _node.cold_row(131_072, {"stock": [2.0], "all": [1.0]}, {"stock": stock, "all": rates})
    results["node"]["cold"] = [row]
    found = {words: row for words, *row in report_node.targets(report_node.join(results))}
    said, _, judged, _ = found["cold prefill of 131\u202f072 tokens, all against stock"]
    assert judged is reached
    assert measured in (None, said)
    section = report_node.section(report_node.join(results))
    cells = {row[0]: row[3] for row in section.blocks[0].rows}  # type: ignore[union-attr]
    words = {True: "yes", False: "no", None: "undecided"}
    assert cells["cold prefill of 131\u202f072 tokens, all against stock"] == words[reached]


def test_a_result_from_before_turns_were_kept_is_undecided() -> None:
    results = series(8)
    for row in results["node"]["cold"]:
        for arm in row["arms"].values():
            for key in ("turns_tokens_s", "speedup_interval", "speedup_alone_interval"):
                arm.pop(key, None)
    for row in results["node"]["roof"]:
        del row["share_intervals"]
    found = {words: row for words, *row in report_node.targets(report_node.join(results))}
    judged = [row[2] for words, row in found.items() if "cold prefill" in words or "roof" in words]
    assert judged == [None, None]
    table = report_node.section(report_node.join(results)).blocks[1]
    assert {row[4] for row in table.rows} == {"1 (undecided)", "1.8 (undecided)"}  # type: ignore[union-attr]


def test_a_traced_row_is_the_ranks_median_and_worst() -> None:
    """Ranks that are exposed for 10, 20 and 60 of 100 us."""
    steps = [
        Step([Interval(0, wait, "ncclDevKernel"), Interval(wait, 100, "gemm")]) for wait in (10.0, 20.0, 60.0)
    ]
    row = _node.trace_row(steps, [0.1, 0.3, 0.2])
    assert (row["exposed_share"], row["exposed_share_worst"], row["idle_share_queue"]) == (0.2, 0.6, 0.2)
    assert row["idle_share"] == 0.0
    assert [rank["exposed_share"] for rank in row["ranks"]] == [0.1, 0.2, 0.6]


def test_a_trace_is_waited_for_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank's file comes while the first one's has long stopped to grow."""

    class Arm:
        name = "two ranks"

        def post(self, path: str, body: dict[str, Any]) -> None:
            if path == "/stop_profile":
                (tmp_path / "1-TP-0.trace.json.gz").write_bytes(b"whole")

    looks = 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 4:
            (tmp_path / "1-TP-1.trace.json.gz").write_bytes(b"whole")

    monkeypatch.setattr(_idle_steps.time, "sleep", sleep)
    files = _idle_steps.traced(Arm(), tmp_path, lambda: None, 2)  # type: ignore[arg-type]
    assert [file.name for file in files] == ["1-TP-0.trace.json.gz", "1-TP-1.trace.json.gz"]


def test_the_targets_by_hand() -> None:
    joined = report_node.join(series(8))
    found = {words: (measured, reached) for words, measured, _, reached, _ in report_node.targets(joined)}
    # 4 % in the trace, and a twentieth of MegaMoE's fifth: 5 %.
    assert found["exposed communication of a step, 131\u202f072 tokens"] == (
        "5.0\u202f% (stock 35.0\u202f%)",
        True,
    )
    assert found["GPU idle, one prompt of 16\u202f384 tokens"] == ("1.5\u202f% (in a queue 0.2\u202f%)", True)
    assert found["cold prefill of 131\u202f072 tokens, all against stock"] == ("1.8× [1.8, 1.8]", True)
    layer = "MoE layer at EP8, 8\u202f192 tokens a rank: MegaMoE over all-gather, GEMMs, RS"
    assert found[layer] == ("1.6×", True)
    # The roof of eight layers of 78: ten times the node's, roughly; 90k tokens/s is a twelfth or so of it.
    words = next(word for word in found if word.startswith("share of the roof"))
    model = Model.from_config(hf_config(_node.wide(Namespace(layers=8, experts=256)), "fp8"))
    per_token = 2 * model.active_weights / 1.979e15 + 2 * 8 * 64 * 2048 * 1088 / 0.9895e15
    per_token += 2 * 2 * 32 * 128 * 65_536 / 1.979e15
    assert float(found[words][0].split("\u202f")[0]) == pytest.approx(100 * 90_000 * per_token / 8, rel=0.02)
    assert found[words][1] is False


def test_without_the_layers_measurement_exposed_communication_is_not_judged() -> None:
    results = series(8)
    del results["layer_ep8"]
    joined = report_node.join(results)
    (row,) = [target for target in report_node.targets(joined) if "exposed" in target[0]]
    assert "without what MegaMoE's kernel exposes inside" in row[0]
    assert row[1].startswith("4.0\u202f%")
    assert row[3] is None


def same_target(verdict: dict[str, Any], complete: bool | None) -> tuple[str, str, bool | None]:
    """What the series says of the answers when that stage found this."""
    results = series(8)
    results["same"]["same_verdict"] = verdict
    del results["same"]["same_complete"]
    if complete is not None:
        results["same"]["same_complete"] = complete
    (row,) = [row for row in report_node.targets(report_node.join(results)) if "KL" in row[0]]
    return row[0], row[1], row[3]


FINE = {"kl_below_cap": 1e-4, "kl_above_cap": 2e-4, "answers": 16, "greedy_equal": 16, "kl_undefined": 0}


@pytest.mark.parametrize(
    ("arms", "ok", "complete", "reached"),
    [
        ({"megamoe": FINE, "all": FINE}, True, True, True),
        ({"megamoe": FINE}, True, True, None),  # the arm with all changes never answered
        ({"megamoe": FINE, "all": FINE}, True, False, None),  # an arm failed, or answered in part
        ({"megamoe": FINE, "all": FINE}, True, None, None),  # cut off before it could say
        ({"megamoe": FINE, "all": FINE}, False, False, False),
        ({"all": {**FINE, "kl_above_cap": None, "kl_undefined": 1}}, False, True, False),
    ],
)
def test_answers_are_as_good_only_where_every_arm_gave_them(
    arms: dict[str, Any], ok: bool, complete: bool | None, reached: bool | None
) -> None:
    words, _, found = same_target({"kl_bound": 0.0025, **arms, "ok": ok}, complete)
    assert found is reached
    assert ("not all arms answered all" in words) is (not complete)


def test_a_kl_that_is_no_number_is_not_dropped_from_the_worst() -> None:
    """Through JSON, as the stage's file is written: a distribution without one of stock's tokens."""
    rows = [
        {"arm": "all", "size": size, "kl_mean": kl, "tokens_equal": True, "again": True, "cached": [0, 64]}
        for size, kl in ((64, 1e-5), (100_000, math.nan))
    ]
    verdict = moe_server.verdicts("same", rows, _moe_servers.GPU, 8)["same_verdict"]
    told = orjson.loads(orjson.dumps(verdict))
    assert told["all"]["kl_above_cap"] is None
    _, measured, reached = same_target(told, True)
    assert (measured, reached) == ("undefined for 1 answers", False)


def test_what_a_stage_had_when_its_limit_came_counts_and_is_named() -> None:
    results = series(8)
    cut = {
        key: value
        for key, value in results["node"].items()
        if key in ("ranks", "layers", "chunk", "cold", "roof")
    }
    joined = report_node.join({**results, "node": cut})
    assert joined["cold"] == results["node"]["cold"]
    assert "eight_gpus, node: ended by its limit, what it had until then is in" in joined["not_measured"]
    assert "eight_gpus, second turns: no result" in joined["not_measured"]
    assert any("cold prefill" in words for words, *_ in report_node.targets(joined))
    with pytest.raises(report_node.StageError, match="none of them ended by itself"):
        report_node.join({"node": cut})


def test_stages_of_two_machines_are_not_joined() -> None:
    results = series(8)
    results["same"]["machine"] = {"gpu": "SYNTHETIC", "gpus": 4}
    with pytest.raises(report_node.StageError, match="different machines"):
        report_node.join(results)


def test_the_section_stands_beside_the_articles_figures() -> None:
    section = report_node.section(report_node.join(series(8)))
    table = section.blocks[0]
    assert table.kind == "table"
    assert table.head[-1] == "the article's figure"  # type: ignore[union-attr]
    figures = [row[-1] for row in table.rows]  # type: ignore[union-attr]
    assert "35 % → 5 to 8 %" in figures
    assert "53k → ~94k tokens/s (1.77×), projected" in figures
    assert section.lead == "5 of the 6 targets that could be judged are reached."
    assert section.title == "The article's node on 8 GPUs: all five changes"
    small = series(2)
    small["node"] |= {"reference": True, "layers": 5}
    assert "2 ranks on a CPU" in report_node.section(report_node.join({"node": small["node"]})).title
    fewer = report_node.section(report_node.join(series(4)))
    assert {row[3] for row in fewer.blocks[0].rows} == {"not judged on 4"}  # type: ignore[union-attr]


@pytest.mark.slow
def test_stage_d_in_miniature(tmp_path: Path) -> None:
    """On two ranks of the reference platform, without graphs: the same answers, and from Valkey the second time."""
    words = (
        "-m benchmarks.moe_server --reference --parts same --prompts 1 --lengths 576 --deadline 560 --json"
    )
    done = subprocess.run(
        [sys.executable, *words.split(), "--logs", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    verdict = json.loads(done.stdout.splitlines()[-1])["same_verdict"]
    assert {"megamoe", "cache"} < verdict.keys()
    # In fp32, far below the bound of a GPU. Pages are cached up to the positions whose logprobs are asked for.
    assert max(verdict["cache"]["kl_below_cap"], verdict["cache"]["kl_above_cap"]) < 1e-6
    assert verdict["cache"]["cached_again"] >= 64
