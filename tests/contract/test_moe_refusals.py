"""What MegaMoE cannot do is refused before weights load: by the launcher where the flags say it, else once resolved."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from tests.contract.launching import Ended, environment, run

LAUNCHER = "glm_sglang.launch_server"


def launched(tiny: Path, *argv: str) -> Ended:
    return run(LAUNCHER, "--model-path", str(tiny), *argv, env=environment(), timeout_s=120)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--glm-moe", "sometimes"], "--glm-moe is 'sometimes', allowed: auto, megamoe, stock"),
        (["--glm-moe", "megamoe"], "--tp-size is 1"),
        (["--glm-moe", "megamoe", "--tp", "2", "--enable-eplb"], "--enable-eplb"),
        (["--glm-moe", "megamoe", "--tp", "2", "--enable-two-batch-overlap"], "--enable-two-batch-overlap"),
        (["--glm-moe", "stock", "--tp", "2", "--moe-a2a-backend", "megamoe"], "--glm-moe megamoe"),
        (["--moe-a2a-backend", "megamoe", "--tp", "3"], "multiple of --tp-size"),
        (
            ["--glm-moe", "megamoe", "--tp", "2", "--load-format", "sharded_state"],
            "--load-format is sharded_state",
        ),
    ],
)
def test_by_the_launcher_in_one_line(tiny: Path, argv: list[str], message: str) -> None:
    ended = launched(tiny, *argv)
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 1
    assert message in ended.err
    assert ended.left == []


def test_once_sglang_has_resolved_its_arguments(tiny: Path) -> None:
    """What config.json says is not what is served: the launcher cannot see it, the resolved configuration does."""
    override = ("--json-model-override-args", '{"n_routed_experts": 7}')
    ended = launched(tiny, "--glm-moe", "megamoe", "--tp", "2", *override, "--glm-print-config")
    assert ended.code == 2, ended.err
    assert "MegaMoE cannot run here: n_routed_experts is 7" in ended.err
    assert ended.out == ""


def test_the_decision_is_in_the_printed_configuration(tiny: Path) -> None:
    ended = launched(tiny, "--glm-moe", "megamoe", "--tp", "2", "--glm-print-config")
    assert ended.code == 0, ended.err
    config = orjson.loads(ended.out)
    assert config["moe"] == {"path": "megamoe", "reason": "asked for; the exact reference over gloo"}
    resolved = config["server_args"]
    assert (resolved["moe_a2a_backend"], resolved["ep_size"]) == ("megamoe", 2)
    assert ended.err.count("MoE layers run megamoe: ") == 1


def test_what_would_end_the_first_pass_ends_the_start(tiny: Path) -> None:
    """The variable that keeps each DP rank's token count to itself, beside attention DP in its deprecated spelling."""
    argv = ("--glm-moe", "megamoe", "--tp", "2", "--enable-dp-attention", "--dp-size", "2")
    environ = environment() | {"SGLANG_SCHEDULER_SKIP_ALL_GATHER": "1"}
    ended = run(LAUNCHER, "--model-path", str(tiny), *argv, env=environ, timeout_s=120)
    assert ended.code == 2
    assert "SGLANG_SCHEDULER_SKIP_ALL_GATHER is 1 and --dp-size is 2" in ended.err
