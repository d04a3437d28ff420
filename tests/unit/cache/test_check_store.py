"""The launcher asks the store: what must change ends it, what may mend itself is a warning. And what is found later."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from glm_connectors.valkey_store import EmbeddedServer

from glm_sglang import settings
from glm_sglang.cache import build, launch
from glm_sglang.errors import UsageError


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as one:
        yield one


def check(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.CACHE_URL.name, url)
    launch.check_store()


def test_a_wrong_password_is_the_users_to_change(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"^--glm-cache-url: .* refuses the credentials") as caught:
        check(server.url.replace("//", "//joe:hunter2@"), monkeypatch)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_store_that_is_down_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check("valkey://joe:hunter2@127.0.0.1:1", monkeypatch)
    (line,) = capsys.readouterr().err.splitlines()
    assert "127.0.0.1:1 of --glm-cache-url does not answer (connection); the server starts without it" in line
    assert "hunter2" not in line


@pytest.mark.parametrize("url", ["none", "the server's"])
def test_nothing_is_said_of_a_store_that_is_right(
    url: str, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(server.url if url != "none" else url, monkeypatch)
    assert capsys.readouterr().err == ""


def test_the_server_of_our_own_is_asked_once_it_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(settings.CACHE_URL.name, "embedded://")
    with launch.embedded_valkey():
        launch.check_store()
        (line,) = capsys.readouterr().err.splitlines()
        assert "a Valkey of our own" in line


def test_what_a_scheduler_finds_out_later_is_one_message() -> None:
    """In a process without a launcher, which `end_process` ends by SystemExit."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    with pytest.raises(SystemExit, match=r"^glm-sglang: --glm-cache-url serves GLM-5\.x's .* has MAMBA$"):
        build.parts(None, [ComponentType.MAMBA])
