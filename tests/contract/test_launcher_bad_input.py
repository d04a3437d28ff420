"""What the user must change is said in one line, with exit code 2, before anything heavy is loaded."""

import re
import socket
import sys
import time
from pathlib import Path

import pytest

from glm_sglang import command_line, launch_server
from glm_sglang.errors import UsageError
from tests.contract.launching import Ended, environment, run

LAUNCHER = "glm_sglang.launch_server"


def refused(*argv: str, **variables: str) -> Ended:
    ended = run(LAUNCHER, *argv, env=environment(**variables), timeout_s=60)
    assert ended.code == 2, ended.err
    assert ended.out == ""
    lines = ended.err.splitlines()
    assert len(lines) == 1, ended.err
    assert lines[0].startswith("glm-sglang: ")
    assert ended.left == []
    return ended


def test_help_answers_within_five_seconds(tmp_path: Path) -> None:
    # The target on an idle machine; the best of three, since this one may be busy with other tests.
    times = []
    for _ in range(3):
        before = time.monotonic()
        ended = run(LAUNCHER, "--help", env=environment(), cwd=tmp_path, timeout_s=60)
        times.append(time.monotonic() - before)
        assert ended.code == 0
        assert ended.out.index("--glm-print-config") < ended.out.index("--model-path MODEL_PATH")
    assert min(times) < 5.0


def test_unknown_flag(tiny: Path) -> None:
    ended = refused("--model-path", str(tiny), "--pagesize", "64")
    assert "unknown flag --pagesize; did you mean --page-size?" in ended.err


@pytest.mark.parametrize("flag", ["--port", "--disaggregation-bootstrap-port"])
def test_taken_port(flag: str, tiny: Path) -> None:
    with socket.socket() as holder, socket.socket() as other:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        other.bind(("127.0.0.1", 0))
        taken, free = (str(s.getsockname()[1]) for s in (holder, other))
        other.close()
        ports = {"--port": free, "--disaggregation-bootstrap-port": free, flag: taken}
        argv = [word for pair in ports.items() for word in pair]
        ended = refused("--model-path", str(tiny), "--disaggregation-mode", "prefill", *argv)
    assert f"{flag} {taken} on 127.0.0.1: Address already in use" in ended.err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--port", "http"], "--port is 'http', expected a whole number"),
        (["--port", "70000"], "--port is 70000, allowed: 1 to 65535"),
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid: no such address"),
        # An address for documentation (RFC 5737), which no machine has.
        (
            ["--host", "203.0.113.1"],
            "--host 203.0.113.1: this machine has no such address; give one of its own",
        ),
        (["--tokenizer-worker-num", "2"], "--tokenizer-worker-num is 2, allowed: 1"),
        (["--use-ray"], "--use-ray is not supported"),
        (["--grpc-mode"], "--grpc-mode is not supported"),
        (["--smg-grpc"], "--smg-grpc-mode is not supported"),
    ],
)
def test_values_that_cannot_work(argv: list[str], said: str, tiny: Path) -> None:
    assert said in refused("--model-path", str(tiny), *argv).err


def test_a_missing_checkpoint_and_another_model(tmp_path: Path) -> None:
    assert "no such folder" in refused("--model-path", str(tmp_path / "none")).err
    assert "--model-path is missing" in refused().err
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert "this server is for GlmMoeDsaForCausalLM" in refused("--model-path", str(tmp_path)).err


def test_a_grammar_backend_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Python 3.13; in this process, because this one has the package."""
    request = command_line.parse(["--model-path", "model", "--grammar-backend", "outlines"])
    if sys.version_info < (3, 13):
        launch_server._refuse_absent_grammar(request)
    monkeypatch.setattr("importlib.util.find_spec", {"xgrammar": True}.get)
    with pytest.raises(UsageError, match=r"run with Python 3\.11 or 3\.12"):
        launch_server._refuse_absent_grammar(request)
    launch_server._refuse_absent_grammar(
        command_line.parse(["--model-path", "model", "--grammar-backend", "xgrammar"])
    )


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SGLANG_RUST_SERVER": "True"}, "SGLANG_RUST_SERVER is 'True'; unset it"),
        ({"GLM_SGLANG_PLATFORM": "gpu"}, "GLM_SGLANG_PLATFORM is 'gpu', allowed: auto, reference, cuda"),
        ({"GLM_SGLANG_PLATFROM": "cuda"}, "unknown environment variable GLM_SGLANG_PLATFROM"),
        (
            {"GLM_SGLANG_PLATFORM": "cuda", "CUDA_VISIBLE_DEVICES": ""},
            "GLM_SGLANG_PLATFORM=cuda needs a CUDA device",
        ),
    ],
)
def test_variables(variables: dict[str, str], said: str, tiny: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    assert said in refused("--model-path", str(tiny), "--port", port, **variables).err


def test_what_only_sglang_can_judge_is_one_line_too(tiny: Path) -> None:
    """A value outside SGLang's choices needs SGLang's parser: slower, and the same one line at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ended = run(LAUNCHER, "--model-path", str(tiny), "--port", port, "--dtype", "int3", env=environment())
    assert ended.code == 2
    assert "Traceback" not in ended.err
    last = ended.err.splitlines()[-1]
    assert re.match(r"glm-sglang: argument --dtype: invalid choice: 'int3' \(choose from .*bfloat16", last), (
        last
    )
    assert ended.left == []
