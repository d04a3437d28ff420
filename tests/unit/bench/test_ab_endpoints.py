"""Endpoints from YAML and URLs, and the harness as a process against null servers: order, resuming, pausing, errors."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from benchmarks.ab import endpoints
from benchmarks.ab.endpoints import Ports, Spec, SpecError

ROOT = Path(__file__).resolve().parents[3]
NULL = "python -m benchmarks.ab.null_server --port {port}"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_commands_ports_and_values_are_filled_in(tmp_path: Path) -> None:
    file = write(
        tmp_path / "e.yaml",
        """
endpoints:
  pair:
    processes:
      prefill: python -m p --model {model} --port {port} --boot {port:boot}
      router: r --port {port} --prefill {url:prefill} {port:boot}
    env: {A: "{model}"}
    flush: [prefill]
  far: {url: "http://h:1/", flush: false}
""",
    )
    (pair, far), absent = endpoints.load(file, {"model": "/m x".replace(" ", "")})
    assert absent == []
    assert pair.env == {"A": "/mx"}
    assert (pair.flush, far.flush, far.url) == (("prefill",), None, "http://h:1")
    ports = Ports()
    prefill = ports.argv("prefill", pair.processes["prefill"])
    router = ports.argv("router", pair.processes["router"])
    own, boot = str(ports.of("prefill")), str(ports.of("boot"))
    assert prefill == [sys.executable, "-m", "p", "--model", "/mx", "--port", own, "--boot", boot]
    assert router == ["r", "--port", str(ports.of("router")), "--prefill", f"http://127.0.0.1:{own}", boot]
    assert len(set(ports.ports.values())) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("endpoints: []", "no mapping `endpoints`"),
        ("endpoints: {a: {cmd: x}}", r"endpoint a has \['cmd'\]; allowed: command"),
        ("endpoints: {a: {command: x, url: y}}", "must have one of command, processes, url"),
        ("endpoints: {a: {command: 'x {nope}'}}", "--set nope="),
        ("a: [", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_with_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        endpoints.load(write(tmp_path / "e.yaml", text), {})


def test_what_a_machine_lacks_is_named_not_silently_left_out(tmp_path: Path) -> None:
    text = "endpoints: {a: {command: x}, b: {command: y, requires: '{venv}/bin/vllm'}}"
    found, absent = endpoints.load(write(tmp_path / "e.yaml", text), {"venv": "/nowhere"})
    assert [spec.name for spec in found] == ["a"]
    assert absent == ["b: not measured, /nowhere/bin/vllm is not on this machine"]


def test_urls_have_names() -> None:
    assert endpoints.parse_url("ours=http://h:1/") == Spec("ours", url="http://h:1")
    assert endpoints.parse_url("http://h:1?a=b").name == "http://h:1?a=b"
    with pytest.raises(SpecError, match="NAME=http"):
        endpoints.parse_url("ours=h:1")


def harness(folder: Path, *flags: str, rounds: int = 2) -> subprocess.CompletedProcess[str]:
    """`python -m benchmarks.ab` over two null servers of a file."""
    file = folder / "e.yaml"
    if not file.exists():
        common = "ready: /v1/models, flush: false"
        write(
            file,
            f"endpoints:\n  a: {{command: '{NULL} --ttft-ms 3', {common}}}\n  b: {{command: '{NULL}', {common}}}\n",
        )
    small = "--sessions 2 --prompt-tokens 64 --added-tokens 8 --answer-tokens 2 --warm-up 1"
    argv = [
        sys.executable,
        "-m",
        "benchmarks.ab",
        "--config",
        str(file),
        "-o",
        str(folder / "o.jsonl"),
        "--json",
    ]
    words = [*argv, "--rounds", str(rounds), *shlex.split(small), *flags]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_rounds_interleave_and_a_second_run_goes_on(tmp_path: Path) -> None:
    first = harness(tmp_path)
    assert first.returncode == 0, first.stderr
    lines = [json.loads(row) for row in (tmp_path / "o.jsonl").read_bytes().splitlines()]
    # Each is first in one of two rounds; every round asks both the same.
    assert [r["glm_ab"]["round"] for r in lines] == [0, 0, 1, 1]
    assert "".join(r["tag"] for r in lines) in ("abba", "baab")
    assert lines[0]["input_lens"] == lines[1]["input_lens"]
    texts = [r["glm_ab"]["texts"] for r in lines]  # other texts may be as long by chance
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert [r["completed"] for r in lines] == [4] * 4
    # Another round more: the four lines are not asked again.
    second = harness(tmp_path, rounds=3)
    assert second.returncode == 0, second.stderr
    assert "4 of 6 rounds of this run are in" in second.stderr
    again = [json.loads(row) for row in (tmp_path / "o.jsonl").read_bytes().splitlines()]
    assert again[:4] == lines
    assert len(again) == 6
    result = orjson.loads(second.stdout.splitlines()[-1])
    assert result["baseline"] == "a"
    assert result["points"][0]["rounds"] == 3
    assert result["points"][0]["endpoints"]["b"]["requests"] == 12
    assert "SIGSTOP" in result["discipline"]["idle_endpoints"]
    assert "no way to" in result["discipline"]["flush"]["b"]
    # All is there: nothing is started, and the same is said.
    third = harness(tmp_path, "--bytes-per-token", "4.0", rounds=3)
    assert third.returncode == 0, third.stderr
    assert "starting" not in third.stderr
    again = orjson.loads(third.stdout.splitlines()[-1])
    assert again["points"] == result["points"]
    assert again["endpoints"] == result["endpoints"]
    # One round at b is missing: a is not started for it.
    lines = (tmp_path / "o.jsonl").read_bytes().splitlines(keepends=True)
    kept = [
        line for line in lines if json.loads(line)["tag"] == "a" or json.loads(line)["glm_ab"]["round"] < 2
    ]
    (tmp_path / "o.jsonl").write_bytes(b"".join(kept))
    fourth = harness(tmp_path, "--bytes-per-token", "4.0", rounds=3)
    assert fourth.returncode == 0, fourth.stderr
    assert "starting b" in fourth.stderr
    assert "starting a" not in fourth.stderr


def test_flags_that_contradict_are_refused(tmp_path: Path) -> None:
    wrong = harness(tmp_path, "--rate", "1", "--concurrency", "2")
    assert (wrong.returncode, wrong.stderr.strip()) == (2, "--rate and --concurrency exclude each other")
    wrong = harness(tmp_path, "--workload", "mooncake")
    needed = "--trace is not given; --workload mooncake needs a trace's file"
    assert (wrong.returncode, wrong.stderr.strip()) == (2, needed)
    wrong = harness(tmp_path, "--baseline", "c")
    assert (wrong.returncode, wrong.stderr.strip()) == (2, "--baseline is c; allowed: a, b")


def test_an_endpoint_that_cannot_be_flushed_is_refused(tmp_path: Path) -> None:
    write(
        tmp_path / "e.yaml",
        f"endpoints:\n  a: {{command: '{NULL}', ready: /v1/models}}\n"
        f"  b: {{command: '{NULL}', ready: /v1/models, flush: [nobody]}}\n",
    )
    found = harness(tmp_path)
    assert found.returncode == 1
    assert "`flush` names nobody; allowed: server" in found.stderr


def test_ended_endpoints_are_started_for_each_block_alone(tmp_path: Path) -> None:
    done = harness(tmp_path, "--between", "ended", "--block", "2", "--logs", str(tmp_path / "logs"), rounds=4)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(row) for row in (tmp_path / "o.jsonl").read_bytes().splitlines()]
    assert [(r["tag"], r["glm_ab"]["round"]) for r in lines] == [
        *(("a", 0), ("a", 1), ("b", 0), ("b", 1)),
        *(("b", 2), ("b", 3), ("a", 2), ("a", 3)),
    ]
    assert all(r["completed"] == 4 for r in lines)


OURS = "python -m glm_sglang.launch_server --port {port}"


@pytest.mark.parametrize(
    ("a", "b", "environ", "refused"),
    [
        ("--glm-cache-url valkey://h:1", "--glm-cache-url valkey://h:1", {}, True),
        ("--glm-cache-url=valkey://h", "--glm-cache-url valkey://user:pw@h:6379/0", {}, True),
        ("--glm-cache-url valkey-cluster://g,h", "--glm-cache-url valkey-cluster://h", {}, True),
        ("", "", {"GLM_SGLANG_CACHE_URL": "valkey://h"}, True),
        ("", "--glm-cache-url none", {"GLM_SGLANG_CACHE_URL": "valkey://h"}, False),
        # argparse's rule: the last one counts.
        ("--glm-cache-url valkey://h --glm-cache-url none", "--glm-cache-url valkey://h", {}, False),
        ("--glm-cache-url valkey://h/0", "--glm-cache-url valkey://h/1", {}, False),
        ("--glm-cache-url embedded://", "--glm-cache-url embedded://", {}, False),
        ("--glm-cache-url none", "", {}, False),
    ],
)
def test_two_endpoints_with_one_valkey_are_refused(
    a: str, b: str, environ: dict[str, str], refused: bool
) -> None:
    """The second of them would find the pages of the first."""
    specs = [Spec(name, processes={"server": f"{OURS} {flags}"}) for name, flags in (("a", a), ("b", b))]
    if refused:
        with pytest.raises(SpecError, match="endpoints a and b would share a Valkey") as error:
            endpoints.refuse_shared_caches(specs, environ)
        assert "pw" not in str(error.value)
    else:
        endpoints.refuse_shared_caches(specs, environ)


def test_the_servers_of_one_endpoint_may_share_a_valkey() -> None:
    command = f"{OURS} --glm-cache-url valkey://h"
    pair = Spec("pair", processes={"one": command, "two": command})
    endpoints.refuse_shared_caches(
        [pair, Spec("stock", processes={"s": "python -m sglang.launch_server"})], {}
    )


@pytest.mark.parametrize(
    "words",
    [
        "benchmarks.ablation --platform gpu --cache-url valkey://10.0.0.1:1 --bytes-per-token 1",
        "benchmarks.decode_fanin --flags='--glm-cache-url valkey://10.0.0.1:1' --prefills 1 --bytes-per-token 1",
    ],
)
def test_ablation_and_fan_in_refuse_it_before_anything_starts(words: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            *shlex.split(words),
            "--model",
            str(tmp_path),
            "-o",
            str(tmp_path / "x.jsonl"),
        ],
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "would share a Valkey" in done.stderr
    assert list(tmp_path.iterdir()) == []
