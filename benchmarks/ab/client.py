"""Streams one request from an OpenAI endpoint and notes when what arrived (aiohttp and orjson)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from benchmarks.workloads import Turn

#: Seconds without a byte after which a request counts as failed.
SILENCE_S = 600.0
_BUFFER = 1 << 18


@dataclass(slots=True)
class Sample:
    """What one request gave. Times in seconds on time.perf_counter(); `itls` one a token after the first, or one an event
    where events do not say how many tokens they hold: then it has fewer, each at least as long.

    `text` is the answer without the `reasoning` that the endpoint sends apart from it; `finish` its finish_reason, ""
    where none came. `error` is "" when all went well; times and counts
    then are complete, and with `ignore_eos` there are as many tokens as were asked for.
    """

    label: str
    sent: float = 0.0
    ttft: float = 0.0
    e2e: float = 0.0
    itls: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    text: str = ""
    error: str = ""
    reasoning: str = ""
    finish: str = ""

    @property
    def tpot(self) -> float | None:
        """Mean seconds a token after the first; None with fewer than two."""
        if self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)


class Client:
    """Sends to one endpoint. Use as `async with`; no limit on connections, which are kept alive."""

    def __init__(
        self, url: str, model: str, *, continuous_usage: bool = True, silence_s: float = SILENCE_S
    ) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self.continuous_usage = continuous_usage
        self.silence_s = silence_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=self.silence_s, sock_connect=30),
            read_bufsize=_BUFFER,
            headers={"content-type": "application/json"},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    def encode(self, turn: Turn) -> bytes:
        """The request's body. Done before a round, so that the clock doesn't see it."""
        options = {"include_usage": True, "continuous_usage_stats": self.continuous_usage}
        return orjson.dumps({"model": self.model, "stream": True, "stream_options": options, **turn.body})

    async def ask(self, turn: Turn, body: bytes | None = None) -> Sample:
        """Sends one request and reads its stream to the end. Never raises for what the endpoint does."""
        if self._session is None:
            raise RuntimeError("Client is used outside of its `async with`")
        body = self.encode(turn) if body is None else body
        sample = Sample(turn.label, sent=time.perf_counter())
        try:
            async with self._session.post(self.url + turn.path, data=body) as response:
                if response.status == 200:
                    await _read(
                        response, sample, turn.body["max_tokens"] if turn.body.get("ignore_eos") else None
                    )
                else:
                    sample.error = f"HTTP {response.status}: {(await response.text())[:300]}"
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
            sample.error = f"{type(error).__name__}: {error}"[:300]
        sample.e2e = time.perf_counter() - sample.sent
        return sample


class _Reading:
    """Takes the events of one stream and fills in its sample. Several tokens in one event share the time since the
    last; those that end an answer without text have the event that ends it.
    """

    def __init__(self, sample: Sample, wanted: int | None) -> None:
        self.sample = sample
        self.wanted = wanted  # tokens; None: as many as the model likes
        self.aborted = False
        self.pieces: list[str] = []
        self.thoughts: list[str] = []
        self.usage: dict[str, Any] = {}
        self.last = 0.0
        self.ended = 0.0  # when the choice ended
        self.tokens = 0
        self.counted = False  # events with tokens say how many there are so far
        self.done = False

    def take(self, data: bytes) -> None:
        """One event's data. Raises ValueError for what is no JSON."""
        if data == b"[DONE]":
            self.done = True
            return
        event = orjson.loads(data)
        if error := event.get("error"):
            self.sample.error = self.sample.error or f"in the stream: {error}"[:300]
        piece, thought = "", ""
        choices = event.get("choices") or ()
        for choice in choices:
            delta = choice.get("delta") or {}
            piece += delta.get("content") or choice.get("text") or ""
            thought += delta.get("reasoning_content") or delta.get("reasoning") or ""  # SGLang's name, vLLM's
            if finish := choice.get("finish_reason"):
                # UPSTREAM: SGLang ends a request that was aborted without an error as it ends any other.
                self.aborted |= finish == "abort"
                self.sample.finish = str(finish)
                self.ended = time.perf_counter()
        tokens = self.tokens
        if usage := event.get("usage"):
            # The endpoint's count, which sees tokens without text too.
            self.usage = usage
            self.counted |= bool(choices)
            tokens = int(usage.get("completion_tokens") or 0)
        elif piece or thought:
            tokens += 1
        if choices and tokens > self.tokens:
            self._arrived(tokens - self.tokens, time.perf_counter())
        if piece:
            self.pieces.append(piece)
        if thought:
            self.thoughts.append(thought)

    def _arrived(self, new: int, now: float) -> None:
        self.tokens += new
        if not self.last:
            self.sample.ttft = now - self.sample.sent
            self.sample.itls += [0.0] * (new - 1)
        else:
            self.sample.itls += [(now - self.last) / new] * new
        self.last = now

    def finish(self) -> None:
        """What is known only at the end."""
        sample, usage = self.sample, self.usage
        # UPSTREAM: SGLang sends no event for tokens without text (special ones, say). Where an answer ends in them, their
        # number is known from the usage after it alone, and the event that ends the choice is the last one's time.
        # Without counts in the events they may as well have come together with others, at any time: SGLang's router
        # (0.3.2) knows `include_usage` only, drops `continuous_usage_stats`, and a busy server sends two in one event.
        silent = int(usage.get("completion_tokens") or 0) - self.tokens
        if self.ended and silent > 0 and (self.counted or (not self.tokens and silent == 1)):
            self._arrived(silent, self.ended)
        sample.text, sample.reasoning = "".join(self.pieces), "".join(self.thoughts)
        sample.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        sample.output_tokens = int(usage.get("completion_tokens") or self.tokens)
        details = usage.get("prompt_tokens_details")
        sample.cached_tokens = None if details is None else int(details.get("cached_tokens") or 0)
        if sample.error:
            return
        if not self.done:
            sample.error = "the stream ended without [DONE]"
        elif self.aborted:
            sample.error = f"the endpoint aborted the request after {sample.output_tokens} tokens"
        elif not self.tokens:
            sample.error = "no token came"
        elif not usage:
            sample.error = "no usage came: the endpoint ignores stream_options.include_usage"
        elif self.wanted not in (None, sample.output_tokens):
            sample.error = (
                f"{sample.output_tokens} tokens came instead of {self.wanted}, in spite of ignore_eos"
            )


async def _read(response: aiohttp.ClientResponse, sample: Sample, wanted: int | None) -> None:
    """Reads server-sent events to the end of the stream, wherever the network cuts it."""
    reading, rest = _Reading(sample, wanted), b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                reading.take(line[5:].strip())
    if rest.startswith(b"data:"):
        reading.take(rest[5:].strip())
    reading.finish()
