"""Bad input gets a clear error that says what to change, no traceback, and the servers go on serving."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.conftest import CONTEXT, Pair, generate

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


def test_an_unknown_bootstrap_room_ends_with_an_error(pair: Pair) -> None:
    """A request with a room that no prefill knows ends at the limit of decode; decode goes on serving."""
    decode, prefill = pair.decodes[0], pair.prefills[0]
    body = {
        "input_ids": [65] * 8,
        "sampling_params": {"max_new_tokens": 2},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": 424242424242,
    }
    response = httpx.post(f"{decode.url}/generate", json=body, timeout=120, trust_env=False)
    assert response.status_code >= 400
    assert "Traceback" not in response.text
    assert httpx.get(f"{decode.url}/health", timeout=10, trust_env=False).status_code == 200
    generate(pair.router().url, [65, 66, 67], tokens=2)
