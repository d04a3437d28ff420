"""A changed symbol, a missing one, a hook that throws, a wrong version …: each ends the server with one clear message."""

import re
import socket
from pathlib import Path

import pytest
from conftest import RIVAL_SITE, Ended, environment, fault, run

LAUNCHER = "glm_sglang.launch_server"

# fault -> (what the message must name, what must be in "found", what must be in "to mend")
EXPECTED = {
    "changed symbol": (r"upstream symbol fault_upstream\.greet.* has changed", r"sha256 [0-9a-f]{16}", r"reinstall"),
    "missing symbol": (r"upstream symbol fault_upstream\.gone.* is missing", r"'gone' is not defined", r"reinstall"),
    "unrecorded symbol": (r"no fingerprint is recorded.*fault_upstream\.greet", r"none", r"upstream\.record"),
    "throwing hook": (r"fault_changes_broken:around can't be imported", r"RuntimeError: the hook's own", r"doctor"),
    "hook that is not applied": (r"hook on fault_upstream\.Greeter .* not in place", r"class .*Greeter", r"doctor"),
    "stale copy": (r"fault_upstream\.Greeter\.kept still holds fault_upstream\.greet_copied", r"copy", r"hook "),
    "wrong version": (r"distribution lmcache is not the version", r"lmcache 0\.0\.1", r"lmcache==0\.5\.6"),
}
# The launcher sees these before it imports SGLang; the others show themselves when the hooks go in.
EARLY = ("changed symbol", "missing symbol", "unrecorded symbol", "wrong version")


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def assert_one_message(ended: Ended, name: str) -> None:
    what, found, mend = EXPECTED[name]
    assert len(ended.messages) == 1, ended.err[-4000:]
    first, expected_line, found_line, mend_line = ended.messages[0].splitlines()
    assert re.search(what, first), first
    assert expected_line.startswith("  expected: ")
    assert found_line.startswith("  found:    ") and re.search(found, found_line), found_line
    assert mend_line.startswith("  to mend:  ") and re.search(mend, mend_line), mend_line
    assert "Traceback" not in ended.err
    assert ended.left == []


@pytest.mark.parametrize("name", EARLY)
def test_fault_is_met_by_the_launcher_before_sglang_is_imported(name: str, checkpoint: Path) -> None:
    ended = run(LAUNCHER, "--model-path", str(checkpoint), "--port", free_port(), env=fault(name), timeout_s=30)
    assert ended.code == 1
    assert_one_message(ended, name)


@pytest.mark.parametrize("name", ["throwing hook", "hook that is not applied", "stale copy"])
def test_fault_is_met_by_the_launcher_when_hooks_go_in(name: str, checkpoint: Path) -> None:
    ended = run(LAUNCHER, "--model-path", str(checkpoint), "--port", free_port(), env=fault(name))
    assert ended.code == 1
    if name == "hook that is not applied":
        # SGLang logs its own exception; the point is that it would have served on.
        ended = Ended(ended.code, ended.out, ended.err.replace("Traceback", "logged"), ended.left)
    assert_one_message(ended, name)


@pytest.mark.parametrize("name", ["changed symbol", "missing symbol", "throwing hook", "wrong version"])
def test_fault_in_the_scheduler_alone_ends_the_launcher_with_the_same_message(name: str, checkpoint: Path) -> None:
    env = fault(name, "run_scheduler_process")
    ended = run(LAUNCHER, "--model-path", str(checkpoint), "--port", free_port(), env=env)
    assert ended.code == 1
    assert_one_message(ended, name)


def test_fault_in_the_detokenizer_alone_ends_the_launcher(checkpoint: Path) -> None:
    env = fault("changed symbol", "run_detokenizer_process")
    ended = run(LAUNCHER, "--model-path", str(checkpoint), "--port", free_port(), env=env)
    assert ended.code == 1
    assert_one_message(ended, "changed symbol")


def test_a_changed_symbol_alone_can_be_allowed(checkpoint: Path) -> None:
    env = fault("changed symbol", GLM_SGLANG_ALLOW_UNTESTED="1")
    ended = run(LAUNCHER, "--model-path", str(checkpoint), "--glm-print-config", env=env)
    assert ended.code == 0, ended.err[-4000:]
    assert '"untested":["fault_upstream.greet"]' in ended.out
    assert "fault_upstream.greet is not what this fork was tested on" in ended.err


@pytest.mark.parametrize("name", ["missing symbol", "wrong version"])
def test_nothing_but_a_changed_symbol_can_be_allowed(name: str, checkpoint: Path) -> None:
    env = fault(name, GLM_SGLANG_ALLOW_UNTESTED="1")
    ended = run(LAUNCHER, "--model-path", str(checkpoint), "--port", free_port(), env=env, timeout_s=30)
    assert ended.code == 1
    assert_one_message(ended, name)


def test_a_stock_launcher_with_this_package_installed_stops_as_well(checkpoint: Path) -> None:
    argv = ("--model-path", str(checkpoint), "--device", "cpu", "--port", free_port())
    ended = run("sglang.launch_server", *argv, env=fault("changed symbol", GLM_SGLANG_PLATFORM="reference"))
    assert ended.code == 1
    assert_one_message(ended, "changed symbol")


def test_a_stock_launcher_whose_scheduler_alone_fails_is_ended_by_sglangs_own_signal(checkpoint: Path) -> None:
    argv = ("--model-path", str(checkpoint), "--device", "cpu", "--port", free_port(), "--page-size", "64")
    env = fault("changed symbol", "run_scheduler_process", GLM_SGLANG_PLATFORM="reference")
    ended = run("sglang.launch_server", *argv, env=env)
    assert ended.code == -9  # UPSTREAM: launch_phase_sigquit_handler kills its own process tree
    assert_one_message(ended, "changed symbol")


def test_another_plugin_on_the_same_symbols_is_refused(checkpoint: Path) -> None:
    env = environment(RIVAL_SITE)
    ended = run(LAUNCHER, "--model-path", str(checkpoint), "--port", free_port(), env=env)
    assert ended.code == 1
    assert len(ended.messages) == 1, ended.err[-4000:]
    assert "sglang.srt.utils.common.add_prometheus_middleware" in ended.messages[0]
    assert "plugin rival of rival" in ended.messages[0]
    assert "SGLANG_PLUGINS=glm_sglang" in ended.messages[0]
    assert ended.left == []


@pytest.mark.parametrize(
    ("variable", "value"), [("SGLANG_PLUGINS", "smg-servicer"), ("SGLANG_PLATFORM", "another_platform")]
)
def test_settings_that_keep_the_plugin_out_are_refused(variable: str, value: str, checkpoint: Path) -> None:
    env = environment(**{variable: value})
    ended = run(LAUNCHER, "--model-path", str(checkpoint), "--port", free_port(), env=env, timeout_s=30)
    assert ended.code == 2
    assert len(ended.messages) == 1
    assert variable in ended.messages[0] and value in ended.messages[0]
