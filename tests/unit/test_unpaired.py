"""Requests whose other half cannot come are refused; those whose other half did not come are told what to change."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from glm_sglang.disaggregation import unpaired


@pytest.mark.parametrize(
    ("mode", "host", "port", "room", "said"),
    [
        ("prefill", "10.0.0.1", 8998, 1, ""),
        ("prefill", None, None, 2**63 - 1, ""),
        ("decode", "10.0.0.1", None, 7, ""),
        ("prefill", "10.0.0.1", 8998, None, "no bootstrap_room"),
        ("decode", None, None, None, "no bootstrap_room"),
        ("decode", None, 8998, 7, "no bootstrap_host"),
        ("decode", "", 8998, 7, "no bootstrap_host"),
        ("decode", "10.0.0.1", 0, 7, "bootstrap_port is 0, allowed: 1 to 65535"),
        ("decode", "10.0.0.1", 65536, 7, "bootstrap_port is 65536"),
        ("decode", "10.0.0.1", 8998, 0, "bootstrap_room is 0, allowed: 1 to 9223372036854775807"),
        ("prefill", "10.0.0.1", 8998, -1, "bootstrap_room is -1"),
        ("prefill", "10.0.0.1", 8998, 2**63, "bootstrap_room is 9223372036854775808"),
        ("decode", "10.0.0.1", 8998, [7], "bootstrap_room is [7], allowed: 1 to"),
        ("decode", "10.0.0.1", [8998], 7, "bootstrap_port is [8998], allowed: 1 to"),
        ("prefill", ["10.0.0.1"], 8998, 7, "bootstrap_host is ['10.0.0.1'], allowed: one host"),
    ],
)
def test_fields_that_pair_with_nobody(mode: str, host: Any, port: Any, room: Any, said: str) -> None:
    complaint = unpaired.wrong(mode, host, port, room)
    assert said in complaint
    assert bool(complaint) is bool(said)


def request(host: Any, room: Any) -> Any:
    return SimpleNamespace(bootstrap_host=host, bootstrap_port=None, bootstrap_room=room)


@pytest.fixture
def serve_as(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`serve_as("decode")`: what the server's configuration says of it."""
    from sglang.srt import runtime_context

    def serve(mode: str, backend: str = "nixl") -> None:
        config = SimpleNamespace(disaggregation_mode=mode, disaggregation_transfer_backend=backend)
        monkeypatch.setattr(runtime_context, "get_disagg", lambda: config)

    return serve


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_what_upstream_sends_to_nobody_is_let_through(serve_as: Callable[..., None], mode: str) -> None:
    """Health checks and warm-ups (host and room are upstream's), embeddings, a server that pairs with nobody."""
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    serve_as(mode)
    unpaired.refuse(None, request(FAKE_BOOTSTRAP_HOST, 0))
    unpaired.refuse(None, SimpleNamespace())
    with pytest.raises(ValueError, match=f"This is a {mode} server and the request has no bootstrap_room"):
        unpaired.refuse(None, request(None, None))
    serve_as(mode, "fake")
    unpaired.refuse(None, request(None, None))
    serve_as("null")
    unpaired.refuse(None, request(None, None))


def test_each_prompt_of_a_list_is_judged_by_its_own_room(serve_as: Callable[..., None]) -> None:
    """As SGLang takes the list apart, with a room for all of them and with a list of rooms."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    serve_as("decode")
    for rooms in (7, [7, 8]):
        both = GenerateReqInput(text=["a", "b"], bootstrap_host="10.0.0.1", bootstrap_room=rooms)
        both.normalize_batch_and_arguments()
        for i in range(2):
            unpaired.refuse(None, both[i])
    last = GenerateReqInput(text=["a", "b"], bootstrap_host="10.0.0.1", bootstrap_room=[7, 0])
    last.normalize_batch_and_arguments()
    unpaired.refuse(None, last[0])
    with pytest.raises(ValueError, match="bootstrap_room is 0"):
        unpaired.refuse(None, last[1])


class Half:
    """A receiver or a sender, and what is recorded for its room."""

    bootstrap_room = 42
    bootstrap_addr = "10.0.0.1:8998"

    def __init__(self) -> None:
        self.recorded: dict[int, str] = {}
        self.kv_mgr = SimpleNamespace(
            waiting_timeout=300, bootstrap_timeout=200, record_failure=self.recorded.__setitem__
        )


@pytest.mark.parametrize(
    ("told", "limit", "variable"),
    [
        (unpaired.prefill_never_sent, "within 300 s", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"),
        (unpaired.decode_never_asked, "within 200 s", "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"),
    ],
)
def test_a_deadline_that_passed_names_the_room_the_limit_and_the_ways_out(
    told: Any, limit: str, variable: str
) -> None:
    half = Half()
    assert told(None, half) is None  # not yet
    assert half.recorded == {}
    assert told("failed", half) is None  # None keeps upstream's result
    text = half.recorded[42]
    for part in ("bootstrap_room 42", limit, variable, "router"):
        assert part in text


def test_only_requests_that_upstream_gave_up_are_told_that_nobody_is_there() -> None:
    lost, found, again = (SimpleNamespace(kv_receiver=Half()) for _ in range(3))
    cleaned = SimpleNamespace(kv_receiver=None)
    waiting = {"a:1": [lost, cleaned], "b:2": [found], "c:3": [again]}
    answer = ({"b:2": [found]}, [again])
    assert unpaired.prefill_not_found(lambda *_: answer, None, waiting) == answer
    assert "bootstrap_host:bootstrap_port a:1" in lost.kv_receiver.recorded[42]
    assert "--disaggregation-bootstrap-port" in lost.kv_receiver.recorded[42]
    assert found.kv_receiver.recorded == again.kv_receiver.recorded == {}
