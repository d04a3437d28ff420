"""What the fork assumes about SGLang, held against the real one."""

import json
from typing import Any

import pytest

from glm_sglang import launch_server, offline
from glm_sglang.upstream import flags
from tests.contract.launching import FAULT_SITE, HERE, environment, run


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    env = environment(FAULT_SITE, HERE, **{offline.HOST_IP: "10.9.8.7"})
    ended = run("probe_sglang", env=env)
    assert ended.code == 0, ended.err[-4000:]
    return json.loads(ended.out.splitlines()[-1])  # type: ignore[no-any-return]


def test_flags_read_from_the_source_are_the_parsers(answers: dict[str, Any]) -> None:
    read = {(*sorted(flag.options),): (flag.dest, flag.nargs) for flag in flags.flags()}
    real = {(*action["options"],): (action["dest"], action["nargs"]) for action in answers["flags"]}
    assert len(real) > 400
    assert read == real


def test_defaults_that_the_launcher_checks_ports_with(answers: dict[str, Any]) -> None:
    defaults = {action["dest"]: action["default"] for action in answers["flags"]}
    assert defaults["host"] == repr(launch_server.DEFAULT_HOST)
    assert defaults["port"] == repr(launch_server.DEFAULT_PORT)
    assert defaults["disaggregation_bootstrap_port"] == repr(launch_server.DEFAULT_BOOTSTRAP_PORT)


def test_the_address_of_the_control_sockets_is_the_variables(answers: dict[str, Any]) -> None:
    assert answers["address"] == "10.9.8.7"


def test_every_declared_hook_goes_in(answers: dict[str, Any]) -> None:
    assert answers["installed"] == answers["declared"]
    assert len(answers["installed"]) >= 2


def test_a_hook_is_in_place_or_the_reason_is_said(answers: dict[str, Any]) -> None:
    assert answers["put in"] == ""
    # HookRegistry refuses to wrap a class, logs that, and goes on.
    assert "hook on fault_upstream.Greeter was registered and is not in place" in answers["class"]
    assert "fault_upstream.Greeter.kept still holds fault_upstream.greet_copied" in answers["stale"]
    assert "fault_upstream.greet was replaced before this fork was installed" in answers["tampered"]


def test_a_plugin_that_loads_later_cannot_change_what_ours_rest_on(answers: dict[str, Any]) -> None:
    for name in ("later, ours", "later, the class of ours"):
        assert answers[name].startswith("glm-sglang: another SGLang plugin changes sglang.srt."), answers[
            name
        ]
        assert "a hook by plugin late of rival" in answers[name]
    assert answers["later, elsewhere"] == ""
