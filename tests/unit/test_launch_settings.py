"""Environment variables: read strictly, defaults that never override a user, nothing that phones home."""

import pytest

from glm_sglang import offline, own_flags, scope, settings, startup
from glm_sglang.errors import UsageError
from glm_sglang.own_flags import OwnFlag


def test_defaults_and_allowed_values() -> None:
    assert settings.read(settings.PLATFORM, {}) == "auto"
    assert settings.read(settings.PLATFORM, {"GLM_SGLANG_PLATFORM": ""}) == "auto"
    assert settings.read(settings.PLATFORM, {"GLM_SGLANG_PLATFORM": "cuda"}) == "cuda"
    with pytest.raises(UsageError, match=r"^GLM_SGLANG_PLATFORM is 'gpu', allowed: auto, reference, cuda$"):
        settings.read(settings.PLATFORM, {"GLM_SGLANG_PLATFORM": "gpu"})


def test_a_misspelt_variable_is_an_error() -> None:
    with pytest.raises(
        UsageError,
        match=r"unknown environment variable GLM_SGLANG_PLATFROM; did you mean GLM_SGLANG_PLATFORM\?",
    ):
        settings.check_names({"GLM_SGLANG_PLATFROM": "cuda", "PATH": "/bin"})
    with pytest.raises(UsageError, match="GLM_SGLANG_ALLOW_UNTESTED is 'yes', allowed: 0, 1"):
        settings.check_names({"GLM_SGLANG_ALLOW_UNTESTED": "yes"})
    settings.check_names({variable.name: variable.default for variable in settings.VARIABLES})


def test_telemetry_is_off_unless_the_user_says_otherwise() -> None:
    environ = {"LMCACHE_TRACK_USAGE": "true", "DO_NOT_TRACK": "0"}
    added = offline.set_defaults(environ)
    assert environ["LMCACHE_TRACK_USAGE"] == "true"
    assert environ["DO_NOT_TRACK"] == "0"
    assert "LMCACHE_TRACK_USAGE" not in added
    assert environ["HF_HUB_DISABLE_TELEMETRY"] == "1"


def test_an_answer_about_the_hub_is_the_users() -> None:
    environ = {"HF_HUB_OFFLINE": "0"}
    assert offline.keep_off_the_hub(environ) == {}
    assert environ == {"HF_HUB_OFFLINE": "0"}
    environ = {}
    offline.keep_off_the_hub(environ)
    assert environ == {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def test_how_often_a_server_looks_for_its_clients_is_the_users() -> None:
    environ = {"SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "9"}
    assert startup.see_who_leaves(environ) == {}
    assert startup.see_who_leaves({}) == {"SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1"}


@pytest.mark.parametrize("name", ["SGLANG_HOST_IP", "HOST_IP"])
def test_an_address_that_the_user_gave_is_advertised(name: str) -> None:
    environ = {name: "10.0.0.5"}
    assert offline.stay_on_loopback(environ) == {}
    assert environ == {name: "10.0.0.5"}


def test_our_flags_reach_child_processes_as_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    flag = OwnFlag(option="--glm-index-keys", text="…", metavar="HOW", variable=settings.INDEX_KEYS)
    monkeypatch.setattr(own_flags, "FLAGS", (*own_flags.FLAGS, flag))
    environ: dict[str, str] = {"GLM_SGLANG_INDEX_KEYS": "exact"}
    own_flags.hand_down({}, environ)
    assert environ == {"GLM_SGLANG_INDEX_KEYS": "exact"}
    own_flags.hand_down({"glm_index_keys": "fp8"}, environ)
    assert environ == {"GLM_SGLANG_INDEX_KEYS": "fp8"}
    with pytest.raises(UsageError, match="--glm-index-keys is 'int4', allowed: exact, fp8"):
        own_flags.hand_down({"glm_index_keys": "int4"}, environ)


def test_scope_is_the_process_tree_of_our_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLM_SGLANG_LAUNCHER", raising=False)
    assert scope.current() == "installed"
    assert not scope.in_launcher_child()
    monkeypatch.setenv("GLM_SGLANG_LAUNCHER", "1:/run/folder")
    assert scope.current() == "launcher"
    assert scope.in_launcher_child()


def test_every_variable_is_in_the_table() -> None:
    """One that is missing there would be refused as unknown in every server that it is set for."""
    named = {value for value in vars(settings).values() if isinstance(value, settings.Variable)}
    assert named == set(settings.VARIABLES)
