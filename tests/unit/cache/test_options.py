"""The cache's flags: what they become for SGLang, and what they refuse, by name."""

from __future__ import annotations

import json

import pytest

from glm_sglang import launch_defaults, own_flags, settings
from glm_sglang.cache import options
from glm_sglang.command_line import parse
from glm_sglang.errors import UsageError

URL = ("--glm-cache-url", "valkey://u:secret@10.0.0.9:6379")


def filled(*argv: str) -> dict[str, object]:
    request = parse(argv)
    own_flags.hand_down(request.given)
    return {f.field: f.value for f in launch_defaults.fill(request, "cuda")}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `hand_down` writes is taken back."""
    for flag in own_flags.CACHE:
        assert flag.variable is not None
        monkeypatch.setenv(flag.variable.name, "")


def test_without_a_url_nothing_is_set() -> None:
    assert filled() == {}
    assert filled("--glm-cache-url", "none", "--enable-hierarchical-cache") == {}
    assert not options.read({}).on


@pytest.mark.parametrize("more", [(), ("--glm-no-defaults",)])
def test_a_url_turns_sglangs_linker_on(more: tuple[str, ...]) -> None:
    values = filled(*URL, *more)
    config = json.loads(str(values.pop("unified_cache_external_linker_config")))
    assert values == {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
    }
    assert config == {"linker": "GlmCacheLinker", "linker_module_path": "glm_sglang.cache.linker"}


def test_options_reach_a_scheduler_by_the_environment() -> None:
    filled(*URL, "--glm-cache-wait", "250", "--glm-cache-pool-gb", "1.5", "--glm-cache-ttl-s", "60")
    assert options.read() == options.CacheOptions(URL[1], 0.25, 3 << 29, 60)


def test_defaults() -> None:
    assert options.read({}) == options.CacheOptions("none", 2.0, 8 << 30, 86400)


@pytest.mark.parametrize(("text", "seconds"), [("never", 0.0), ("complete", None), ("0", 0.0), ("2000", 2.0)])
def test_waits(text: str, seconds: float | None) -> None:
    assert options.read({"GLM_SGLANG_CACHE_WAIT": text}).wait_s == seconds


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--glm-cache-url", "redis://x"), "--glm-cache-url: expected none or embedded://"),
        (("--glm-cache-url", "valkey://u:secret@h:99999"), "--glm-cache-url: expected host or host:port"),
        (
            (*URL, "--glm-cache-wait", "soon"),
            "--glm-cache-wait is 'soon'; allowed: never, complete, or milli",
        ),
        ((*URL, "--glm-cache-wait", "-1"), "--glm-cache-wait is '-1'"),
        ((*URL, "--glm-cache-wait", "nan"), "--glm-cache-wait is 'nan'"),
        ((*URL, "--glm-cache-pool-gb", "0"), "--glm-cache-pool-gb is '0'; expected GiB"),
        ((*URL, "--glm-cache-ttl-s", "1.5"), "--glm-cache-ttl-s is '1.5'; expected whole seconds"),
        ((*URL, "--enable-lmcache"), "--enable-lmcache and --glm-cache-url exclude each other"),
        ((*URL, "--enable-hierarchical-cache"), "--enable-hierarchical-cache and --glm-cache-url exclude"),
        ((*URL, "--disable-radix-cache"), "--disable-radix-cache and --glm-cache-url exclude each other"),
        ((*URL, "--pp-size", "2"), "--pp-size is 2; with --glm-cache-url it must be 1"),
        ((*URL, "--page-size", "128"), "--page-size is 128; with --glm-cache-url it must be 64"),
        (
            ("--glm-cache-url", "embedded://", "--nnodes", "2"),
            "--glm-cache-url is embedded://, a server of one",
        ),
        ((*URL, "--disaggregation-mode", "decode"), "--glm-cache-url does nothing on a decode server"),
        (
            (*URL, "--unified-cache-external-linker-backend", "mooncake"),
            "--unified-cache-external-linker-backend names another linker",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        filled(*argv)
    assert str(raised.value).startswith(message)
    assert "secret" not in str(raised.value)


def test_a_limit_that_is_no_number_is_refused_before_anything_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM_SGLANG_CACHE_STALL_LOG_MS", "5ms")
    with pytest.raises(UsageError, match="GLM_SGLANG_CACHE_STALL_LOG_MS is '5ms'; expected milliseconds"):
        filled(*URL)


def test_no_password_is_printed() -> None:
    request = parse(URL)
    assert own_flags.shown(own_flags.CACHE[0], request.given) == "valkey://u:***@10.0.0.9:6379"
    assert settings.shown(settings.CACHE_URL, URL[1]) == "valkey://u:***@10.0.0.9:6379"
    assert "secret" not in json.dumps(filled(*URL))


def test_a_pool_too_small_for_a_prompt_is_named() -> None:
    """8 GiB of which half, 1,245 pages, may be one prompt's; one of 131,072 tokens has 2,048."""
    from glm_sglang.cache.build import small_pool

    assert small_pool(8 << 30, 2048, 64, 131_072) is None
    warning = small_pool(8 << 30, 1245, 64, 131_072)
    assert warning is not None
    assert "79680 tokens" in warning
    assert "--glm-cache-pool-gb 13.2" in warning  # 8 · 2048 / 1245 = 13.16
