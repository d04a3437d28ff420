"""Bad input gets a clear error that says what to change, no traceback, and the servers go on serving."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from glm_sglang.cluster import Router
from glm_sglang.serving import Server, free_port
from tests.e2e.conftest import CONTEXT, generate
from tests.e2e.one_pair.conftest import PATIENCE_S, Pair
from tests.forwarder import Forwarder

CHAT = "/v1/chat/completions"


def post(url: str, body: Any = None, content: bytes | None = None) -> httpx.Response:
    headers = {"content-type": "application/json"} if content is not None else None
    return httpx.post(url, json=body, content=content, headers=headers, timeout=60, trust_env=False)


def message(**more: Any) -> dict[str, Any]:
    return {"model": "x", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, **more}


CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    # name: path, request, a word that the answer must have
    "empty prompt": ("/generate", {"json": {"text": "", "sampling_params": {"max_new_tokens": 4}}}, "empty"),
    "no tokens": (
        "/generate",
        {"json": {"input_ids": [], "sampling_params": {"max_new_tokens": 4}}},
        "empty",
    ),
    "prompt over the limit": ("/generate", {"json": {"input_ids": [65] * (CONTEXT + 9)}}, str(CONTEXT)),
    "malformed JSON": (CHAT, {"content": b'{"model": "x", "messages": ['}, "JSON"),
    "no messages": (CHAT, {"json": {"model": "x"}}, "messages"),
    "wrong type": (CHAT, {"json": message(max_tokens="many")}, "max_tokens"),
    "negative temperature": (CHAT, {"json": message(temperature=-1)}, "temperature"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_router_answers_with_a_clear_error(pair: Pair, case: str) -> None:
    path, request, word = CASES[case]
    router = pair.router()
    response = post(f"{router.url}{path}", body=request.get("json"), content=request.get("content"))
    assert 400 <= response.status_code < 500, response.text
    assert word.lower() in response.text.lower()
    assert "Traceback" not in response.text
    assert len(generate(router.url, [65, 66, 67], tokens=2)["output_ids"]) == 2  # type: ignore[arg-type]


ALONE: dict[str, tuple[str, dict[str, Any], str]] = {
    # name: server, fields of the request, words that the answer must have; the router adds all three fields
    "prefill without a router": ("prefill", {}, "no bootstrap_room"),
    "decode without a router": ("decode", {}, "no bootstrap_room"),
    "a room and no host": ("decode", {"bootstrap_room": 7}, "no bootstrap_host"),
    "room 0": (
        "decode",
        {"bootstrap_room": 0, "bootstrap_host": "127.0.0.1"},
        "bootstrap_room is 0, allowed: 1 to",
    ),
    "a negative room": ("prefill", {"bootstrap_room": -1}, "bootstrap_room is -1, allowed: 1 to"),
    "a room too large": ("prefill", {"bootstrap_room": 2**63}, "allowed: 1 to 9223372036854775807"),
    "no such port": (
        "decode",
        {"bootstrap_room": 7, "bootstrap_host": "127.0.0.1", "bootstrap_port": 70000},
        "bootstrap_port is 70000, allowed: 1 to 65535",
    ),
}


@pytest.mark.parametrize("path", ["/generate", CHAT])
@pytest.mark.parametrize("case", ALONE)
def test_a_request_that_pairs_with_nobody_is_refused_at_once(pair: Pair, case: str, path: str) -> None:
    """Some of these would end a scheduler; the others would wait for a half that cannot come."""
    role, fields, words = ALONE[case]
    server = pair.prefills[0] if role == "prefill" else pair.decodes[0]
    body = {"input_ids": [65] * 8, "sampling_params": {"max_new_tokens": 2}} if path != CHAT else message()
    response = post(f"{server.url}{path}", {**body, **fields})
    assert response.status_code == 400, response.text
    assert f"This is a {role} server and" in response.text
    assert words in response.text
    assert "router" in response.text
    assert "Traceback" not in response.text
    assert len(generate(pair.router().url, [65, 66, 67], tokens=2)["output_ids"]) == 2  # type: ignore[arg-type]


class Waits:
    """Requests whose other half never comes, all at once: some wait for a deadline."""

    ROOM = 424242424242

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.pool = ThreadPoolExecutor()
        here = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.prefills[0].bootstrap_port}
        self.nowhere = free_port()
        # No prefill server knows the room; no bootstrap server is at the port; no decode server asks prefill.
        self.unknown_room = self._alone(pair.decodes[0], **here, bootstrap_room=self.ROOM)
        self.no_prefill = self._alone(
            pair.decodes[0], **here | {"bootstrap_port": self.nowhere}, bootstrap_room=self.ROOM + 1
        )
        self.no_decode = self._alone(pair.prefills[0], **here, bootstrap_room=self.ROOM + 2)
        self.gone = self.pool.submit(self._decode_goes)

    def _alone(self, server: Server, **fields: Any) -> Future[httpx.Response]:
        body = {"input_ids": [65] * 300, "sampling_params": {"max_new_tokens": 2}, **fields}
        return self.pool.submit(httpx.post, f"{server.url}/generate", json=body, timeout=150, trust_env=False)

    def _decode_goes(self) -> tuple[httpx.Response, httpx.Response]:
        """Decode's machine disappears behind the router: answers to a request under way, and to one after it."""
        body = {"input_ids": [65] * 300, "sampling_params": {"max_new_tokens": 2}}
        pair = self.pair
        with Forwarder(pair.decodes[0].port) as decode, Router([pair.prefills[0]], [decode]) as router:
            generate(router.url, [65, 66, 67], tokens=2)
            decode.close()
            under_way = httpx.post(f"{router.url}/generate", json=body, timeout=150, trust_env=False)
            later = httpx.post(f"{router.url}/generate", json=body, timeout=5, trust_env=False)
        return under_way, later


@pytest.fixture(scope="module")
def waits(pair: Pair) -> Iterator[Waits]:
    waits = Waits(pair)
    yield waits
    waits.pool.shutdown()


def assert_told(pair: Pair, waiting: Future[httpx.Response], *words: str) -> None:
    """The answer is an error with these words, and the pair serves on."""
    response = waiting.result()
    assert response.status_code == 500, response.text
    for word in words:
        assert word in response.text
    assert "Traceback" not in response.text
    for server in (pair.prefills[0], pair.decodes[0]):
        assert httpx.get(f"{server.url}/health", timeout=10, trust_env=False).status_code == 200
    generate(pair.router().url, [65, 66, 67], tokens=2)


def test_an_unknown_bootstrap_room_ends_with_what_to_change(pair: Pair, waits: Waits) -> None:
    address = f"127.0.0.1:{pair.prefills[0].bootstrap_port}"
    assert_told(pair, waits.unknown_room, f"bootstrap_room {Waits.ROOM}:", address, "router")


def test_a_prefill_server_that_is_not_there_is_named(pair: Pair, waits: Waits) -> None:
    address = f"127.0.0.1:{waits.nowhere}"
    assert_told(pair, waits.no_prefill, address, "nobody listens", "--disaggregation-bootstrap-port")


def test_a_decode_server_that_never_asks_ends_with_what_to_change(pair: Pair, waits: Waits) -> None:
    room, limit = f"bootstrap_room {Waits.ROOM + 2}", f"within {PATIENCE_S} s"
    assert_told(pair, waits.no_decode, room, limit, "router", "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT")


def test_a_decode_that_is_gone_ends_the_request_with_an_error(pair: Pair, waits: Waits) -> None:
    """A request under way ends when prefill has waited long enough; soon the router answers at once; prefill goes on
    for others.
    """
    under_way, later = waits.gone.result()
    for response in (under_way, later):
        assert response.status_code >= 500
        assert "Traceback" not in response.text
    assert "decode" in later.text.lower()
    generate(pair.router().url, [65, 66, 67], tokens=2)
