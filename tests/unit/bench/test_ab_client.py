"""The streaming client against a server whose every byte and delay is written here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.ab.client import Client, Sample
from benchmarks.ab.prove import null_server
from benchmarks.workloads import Turn
from benchmarks.workloads.model import COMPLETIONS, chat

ASK = chat([{"role": "user", "content": "x"}], 3, "turn 1", 1)


def data(**event: object) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"


def delta(text: str, tokens: int | None = None) -> bytes:
    usage = {} if tokens is None else {"usage": {"prompt_tokens": 7, "completion_tokens": tokens}}
    return data(choices=[{"index": 0, "delta": {"content": text}}], **usage)


USAGE = data(
    choices=[],
    usage={"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
)
DONE = b"data: [DONE]\n\n"
USED_2 = data(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 2})


async def ask(pieces: Sequence[bytes | float], status: int = 200, turn: Turn = ASK) -> Sample:
    """What the client makes of these writes (bytes) and waits (seconds)."""
    seen: list[dict[str, object]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(orjson.loads(await request.read()))
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for piece in pieces:
            if isinstance(piece, bytes):
                await response.write(piece)
            else:
                await asyncio.sleep(piece)
        return response

    app = web.Application()
    app.router.add_post(turn.path, handler)
    async with TestServer(app) as server, Client(str(server.make_url("")), "m", silence_s=0.5) as client:
        sample = await client.ask(turn)
    assert seen[0]["model"] == "m"
    assert seen[0]["stream"] is True
    assert seen[0]["max_tokens"] == turn.body["max_tokens"]
    return sample


async def test_counts_text_and_cache_come_from_the_stream() -> None:
    sample = await ask([delta("a"), delta("b"), delta("c"), USAGE, DONE])
    assert (sample.error, sample.text) == ("", "abc")
    assert (sample.prompt_tokens, sample.cached_tokens, sample.output_tokens) == (7, 4, 3)
    assert len(sample.itls) == 2
    assert sample.label == "turn 1"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])  # SGLang's, vLLM's
async def test_reasoning_and_the_end_are_kept_apart_from_the_text(field: str) -> None:
    thought = data(choices=[{"index": 0, "delta": {field: "why"}}])
    end = data(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])
    sample = await ask([thought, thought, delta("a"), end, USAGE, DONE])
    assert (sample.error, sample.text, sample.reasoning, sample.finish) == ("", "a", "whywhy", "length")


async def test_the_stream_may_be_cut_anywhere() -> None:
    whole = delta("ä") + delta("b") + delta("c") + USAGE + DONE
    for size in (1, 7, 64):
        sample = await ask([whole[i : i + size] for i in range(0, len(whole), size)])
        assert (sample.error, sample.text, sample.output_tokens) == ("", "äbc", 3)


async def test_times_sum_up() -> None:
    """TTFT and the gaps add up to the last token's time, which no later than the end; waits show where they were."""
    sample = await ask([0.05, delta("a"), 0.1, delta("b"), delta("c"), USAGE, DONE])
    assert sample.ttft >= 0.05
    assert sample.itls[0] >= 0.09
    assert sample.ttft + sum(sample.itls) <= sample.e2e
    assert sample.tpot == pytest.approx((sample.e2e - sample.ttft) / 2)


async def test_several_tokens_in_one_event_share_its_gap() -> None:
    """With counts in every event a token without text counts too, and two tokens at once are two."""
    sample = await ask([delta("", 1), 0.06, delta("bc", 3), USAGE, DONE])
    assert len(sample.itls) == 2
    assert sample.itls[0] == sample.itls[1] >= 0.025
    assert sample.output_tokens == 3


END = data(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])


async def test_tokens_without_text_at_the_end_have_their_gaps() -> None:
    """As SGLang streams an answer that ends in special tokens: no event for them, then the end, then the usage."""
    sample = await ask([delta("a", 1), 0.06, END, 0.1, USAGE, DONE])
    assert (sample.error, sample.output_tokens) == ("", 3)
    assert len(sample.itls) == 2
    assert 0.025 <= sample.itls[0] == sample.itls[1]
    assert sample.ttft + sum(sample.itls) <= sample.e2e
    only = chat([{"role": "user", "content": "x"}], 1, "t", 1)
    one = data(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 1})
    sample = await ask([data(choices=[{"delta": {"role": "assistant"}}]), 0.05, END, one, DONE], turn=only)
    assert (sample.error, sample.itls) == ("", [])
    assert 0.05 <= sample.ttft <= sample.e2e


@pytest.mark.parametrize("pieces", [[delta("abc")], [delta("a"), delta("bc")]])
async def test_where_events_are_not_counted_nobody_knows_when_the_rest_came(pieces: list[bytes]) -> None:
    """As SGLang's router hands them on: tokens came in an event with others, and no gap is made up for them."""
    sample = await ask([*pieces, 0.06, END, USAGE, DONE])
    assert (sample.error, sample.output_tokens, len(sample.itls)) == ("", 3, len(pieces) - 1)


async def test_completions_stream_text() -> None:
    turn = Turn(COMPLETIONS, {"prompt": "x", "max_tokens": 9}, "t", 1)
    sample = await ask([data(choices=[{"text": "q"}]), USAGE, DONE], turn=turn)
    # Without ignore_eos an answer may be shorter.
    assert (sample.text, sample.error) == ("q", "")


async def test_a_server_that_stops_early_is_no_fast_server() -> None:
    """Its answers end as any other: a token, usage, [DONE]."""
    with null_server(stop_after=1) as url:
        async with Client(url, "null") as client:
            short = await client.ask(chat([{"role": "user", "content": "x"}], 8, "t", 1))
            whole = await client.ask(chat([{"role": "user", "content": "x"}], 1, "t", 1))
    assert (short.error, short.output_tokens) == ("1 tokens came instead of 8, in spite of ignore_eos", 1)
    assert whole.error == ""


@pytest.mark.parametrize(
    ("pieces", "status", "error"),
    [
        ([b"no such model"], 404, "HTTP 404: no such model"),
        ([delta("a"), USAGE], 200, "the stream ended without [DONE]"),
        ([USAGE, DONE], 200, "no token came"),
        ([delta("a"), DONE], 200, "no usage came"),
        ([delta("a"), data(error={"message": "boom"})], 200, "in the stream: {'message': 'boom'}"),
        ([b"data: {nonsense\n\n"], 200, "JSONDecodeError"),
        ([delta("a"), 2.0], 200, "SocketTimeoutError"),
        ([delta("a", 1), delta("b", 2), USED_2, DONE], 200, "2 tokens came instead of 3"),
        (
            [delta("a", 1), data(choices=[{"delta": {}, "finish_reason": "abort"}]), USED_2, DONE],
            200,
            "aborted",
        ),
    ],
)
async def test_what_went_wrong_is_said(pieces: list[bytes | float], status: int, error: str) -> None:
    sample = await ask(pieces, status)
    assert error in sample.error
    assert sample.e2e > 0


async def test_a_refused_connection_is_an_error_of_the_sample() -> None:
    async with Client("http://127.0.0.1:9", "m") as client:
        assert "ClientConnectorError" in (await client.ask(ASK)).error
