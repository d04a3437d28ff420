"""A changed or missing symbol, a hook that throws, a wrong version: each ends the server with one message."""

import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.contract.launching import RIVAL_SITE, Ended, environment, fault, run

LAUNCHER = "glm_sglang.launch_server"

# fault -> (what the message must name, what must be in "found", what must be in "to mend")
EXPECTED = {
    "changed symbol": (
        r"upstream symbol fault_upstream\.greet.* has changed",
        r"sha256 [0-9a-f]{16}",
        r"reinstall",
    ),
    "missing symbol": (
        r"upstream symbol fault_upstream\.gone.* is missing",
        r"'gone' is not defined",
        r"reinstall",
    ),
    "unrecorded symbol": (r"no fingerprint is recorded.*fault_upstream\.greet", r"none", r"upstream\.record"),
    "throwing hook": (
        r"fault_changes_broken:around can't be imported",
        r"RuntimeError: the hook's own",
        r"doctor",
    ),
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
    assert found_line.startswith("  found:    ")
    assert re.search(found, found_line), found_line
    assert mend_line.startswith("  to mend:  ")
    assert re.search(mend, mend_line), mend_line
    assert "Traceback" not in ended.err
    assert ended.left == []


@pytest.mark.parametrize("name", EARLY)
def test_fault_is_met_by_the_launcher_before_sglang_is_imported(name: str, tiny: Path) -> None:
    ended = run(LAUNCHER, "--model-path", str(tiny), "--port", free_port(), env=fault(name), timeout_s=30)
    assert ended.code == 1
    assert_one_message(ended, name)


# Launches that get as far as importing SGLang take long, so they run two at a time while the tests wait for
# theirs.
LONG: dict[str, tuple[str, str, str]] = {
    "launcher, throwing hook": (LAUNCHER, "throwing hook", "everywhere"),
    "scheduler, changed symbol": (LAUNCHER, "changed symbol", "run_scheduler_process"),
    "scheduler, missing symbol": (LAUNCHER, "missing symbol", "run_scheduler_process"),
    "scheduler, throwing hook": (LAUNCHER, "throwing hook", "run_scheduler_process"),
    "scheduler, wrong version": (LAUNCHER, "wrong version", "run_scheduler_process"),
    "detokenizer, changed symbol": (LAUNCHER, "changed symbol", "run_detokenizer_process"),
    "stock scheduler, changed symbol": ("sglang.launch_server", "changed symbol", "run_scheduler_process"),
}


@pytest.fixture(scope="module")
def launches(tiny: Path) -> Iterator[dict[str, Future[Ended]]]:
    def launch(module: str, name: str, where: str) -> Ended:
        argv = ["--model-path", str(tiny), "--port", free_port(), "--page-size", "64", "--device", "cpu"]
        # A process that imports anew, as on a GPU, is the one that can find something else than its launcher did.
        more = {"GLM_SGLANG_PLATFORM": "reference", "GLM_SGLANG_START_METHOD": "spawn"}
        return run(module, *argv, env=fault(name, where, **more), timeout_s=480)

    with ThreadPoolExecutor(max_workers=2) as pool:
        futures = {case: pool.submit(launch, *arguments) for case, arguments in LONG.items()}
        yield futures
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", LONG)
def test_fault_in_one_process_ends_them_all_with_its_message(
    case: str, launches: dict[str, Future[Ended]]
) -> None:
    ended = launches[case].result()
    # UPSTREAM: under a stock launcher, launch_phase_sigquit_handler kills its own process tree.
    assert ended.code == (-9 if case.startswith("stock") else 1)
    assert_one_message(ended, LONG[case][1])


def test_a_changed_symbol_alone_can_be_allowed(tiny: Path) -> None:
    env = fault("changed symbol", GLM_SGLANG_ALLOW_UNTESTED="1")
    ended = run(LAUNCHER, "--model-path", str(tiny), "--glm-print-config", env=env)
    assert ended.code == 0, ended.err[-4000:]
    assert json.loads(ended.out)["untested"] == ["fault_upstream.greet"]
    assert "fault_upstream.greet is not what this fork was tested on" in ended.err


@pytest.mark.parametrize("name", ["missing symbol", "wrong version"])
def test_nothing_but_a_changed_symbol_can_be_allowed(name: str, tiny: Path) -> None:
    env = fault(name, GLM_SGLANG_ALLOW_UNTESTED="1")
    ended = run(LAUNCHER, "--model-path", str(tiny), "--port", free_port(), env=env, timeout_s=30)
    assert ended.code == 1
    assert_one_message(ended, name)


def test_a_stock_launcher_with_this_package_installed_stops_as_well(tiny: Path) -> None:
    argv = ("--model-path", str(tiny), "--device", "cpu", "--port", free_port())
    ended = run("sglang.launch_server", *argv, env=fault("changed symbol", GLM_SGLANG_PLATFORM="reference"))
    assert ended.code == 1
    assert_one_message(ended, "changed symbol")


def test_another_plugin_on_the_same_symbols_is_refused(tiny: Path) -> None:
    env = environment(RIVAL_SITE)
    ended = run(LAUNCHER, "--model-path", str(tiny), "--port", free_port(), env=env)
    assert ended.code == 1
    assert len(ended.messages) == 1, ended.err[-4000:]
    assert "sglang.srt.utils.common.add_prometheus_middleware" in ended.messages[0]
    assert "plugin rival of rival" in ended.messages[0]
    assert "SGLANG_PLUGINS=glm_sglang" in ended.messages[0]
    assert ended.left == []


@pytest.mark.parametrize(
    ("variable", "value"), [("SGLANG_PLUGINS", "smg-servicer"), ("SGLANG_PLATFORM", "another_platform")]
)
def test_settings_that_keep_the_plugin_out_are_refused(variable: str, value: str, tiny: Path) -> None:
    env = environment(**{variable: value})
    ended = run(LAUNCHER, "--model-path", str(tiny), "--port", free_port(), env=env, timeout_s=30)
    assert ended.code == 2
    assert len(ended.messages) == 1
    assert variable in ended.messages[0]
    assert value in ended.messages[0]
