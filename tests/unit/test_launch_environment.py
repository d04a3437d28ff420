"""What the launcher sets for the processes that it starts."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from glm_sglang import command_line, launch_server, offline, platform_choice, startup


def test_other_families_models_are_not_imported() -> None:
    environ: dict[str, str] = {}
    added = startup.only_glm_models(environ)
    assert environ == added
    left_out = set(environ[startup.DISABLED_MODELS].split(","))
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "srt" / "models"
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert modules - left_out == startup.GLM_MODELS
    assert "llama" in left_out


def test_a_choice_of_models_is_the_users() -> None:
    environ = {startup.DISABLED_MODELS: "llama"}
    assert startup.only_glm_models(environ) == {}
    assert environ == {startup.DISABLED_MODELS: "llama"}


def test_transfers_stay_on_loopback_where_asked() -> None:
    without: dict[str, str] = {}
    offline.stay_on_loopback(without)
    assert without == {"SGLANG_HOST_IP": "127.0.0.1"}
    environ = {"UCX_NET_DEVICES": "mlx5_0:1"}
    offline.stay_on_loopback(environ, transfers=True)
    assert environ == {
        "SGLANG_HOST_IP": "127.0.0.1",
        "UCX_NET_DEVICES": "mlx5_0:1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1"])
def test_the_address_that_others_reach_is_advertised(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """In the launcher's environment; that SGLang takes it from there: contract/test_sglang_as_assumed.py."""
    monkeypatch.setenv("SGLANG_HOST_IP", "")
    monkeypatch.delenv("SGLANG_HOST_IP")
    monkeypatch.delenv("HOST_IP", raising=False)
    for name in (*offline.TELEMETRY, *startup.LOOKS, *offline.HUB, startup.DISABLED_MODELS):
        monkeypatch.setenv(name, "x")
    request = command_line.parse(["--model-path", "model", "--host", host])
    cuda = platform_choice.Choice("cuda", "")
    added = launch_server._set_environment(request, cuda, Path("/run/x"), known=False)
    assert added == {"SGLANG_HOST_IP": host}
    assert os.environ["SGLANG_HOST_IP"] == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.0.0.1", "127.0.1.1", "::1", "node1", "localhost"])
def test_other_hosts_say_nothing_of_an_address(host: str) -> None:
    assert offline.advertise(host, {}) == {}


@pytest.mark.parametrize("name", ["SGLANG_HOST_IP", "HOST_IP"])
def test_an_address_that_the_user_gave_stays(name: str) -> None:
    environ = {name: "10.0.0.5"}
    assert offline.advertise("10.0.0.1", environ) == {}
    assert environ == {name: "10.0.0.5"}


def test_ranks_meet_in_the_launchers_folder() -> None:
    environ: dict[str, str] = {}
    assert offline.meet_in_a_file(Path("/run/x"), environ) == environ
    assert environ == {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": "file:///run/x/ranks"}


def test_collections_are_deferred_and_come_back() -> None:
    import gc

    before = gc.get_threshold()
    try:
        startup.defer_collections()
        assert gc.get_threshold()[0] > before[0]
        startup.usual_collections()
        assert gc.get_threshold() == before
        gc.set_threshold(123, 4, 5)
        startup.usual_collections()
        assert gc.get_threshold()[0] == 123
    finally:
        gc.set_threshold(*before)
