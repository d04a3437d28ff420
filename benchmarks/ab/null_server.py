"""An OpenAI endpoint that computes nothing: for proving that the client is not what is measured.

    python -m benchmarks.ab.null_server --port 8000 --ttft-ms 20 --itl-ms 2 --spread 0.3 --seed 1

Streams `max_tokens` tokens to every POST. Times are log-normal around the given medians, drawn by the seed
and the request's number; with 0 the whole answer is one write. Prompt tokens are counted as the bytes of the
prompt over four. `--stop-after N` ends every answer after N tokens, as a server that aborts does.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import httptools
import orjson
import uvloop

BYTES_PER_TOKEN = 4
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
_END = b"0\r\n\r\n"


@dataclass(frozen=True)
class Times:
    """Medians in seconds, `spread` the sigma of their logarithm."""

    ttft: float = 0.0
    itl: float = 0.0
    spread: float = 0.0
    seed: int = 0

    def draw(self, number: int, tokens: int) -> list[float]:
        """Seconds before each token of request `number`."""
        rng = random.Random(f"{self.seed}:{number}")
        medians = [self.ttft] + [self.itl] * (tokens - 1)
        return [median * rng.lognormvariate(0, self.spread) for median in medians]


def chunked(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(chat: bool, index: int, usage: dict[str, Any]) -> bytes:
    """One token's event."""
    piece: dict[str, Any] = {"delta": {"content": "x"}} if chat else {"text": "x"}
    return b"data: " + orjson.dumps({"choices": [{"index": 0, **piece}], "usage": usage}) + b"\n\n"


def prompt_bytes(body: dict[str, Any]) -> int:
    """Size of what the model would read."""
    if "prompt" in body:
        return len(body["prompt"].encode())
    return sum(len(message["content"].encode()) for message in body["messages"])


class Connection(asyncio.Protocol):
    """One kept-alive connection; requests on it are answered in turn."""

    def __init__(self, times: Times, numbers: count[int], most: int | None) -> None:
        self.times = times
        self.most = most
        self.numbers = numbers
        self.parser = httptools.HttpRequestParser(self)
        self.parts: list[bytes] = []
        self.path = b""
        self.tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        for task in self.tasks:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.path += url

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)

    def on_message_complete(self) -> None:
        path, body = self.path, b"".join(self.parts)
        self.path, self.parts = b"", []
        if not path.endswith(b"/completions"):
            listing = {"object": "list", "data": [{"id": "null", "object": "model"}]}
            self._answer(listing)
            return
        request = orjson.loads(body)
        chat, tokens = path.endswith(b"/chat/completions"), int(request.get("max_tokens") or 1)
        tokens = min(tokens, self.most or tokens)
        usage: dict[str, Any] = {"prompt_tokens": prompt_bytes(request) // BYTES_PER_TOKEN}
        usage["prompt_tokens_details"] = {"cached_tokens": 0}
        if not request.get("stream"):
            choice = {"message": {"content": "x" * tokens}} if chat else {"text": "x" * tokens}
            self._answer({"choices": [choice], "usage": {**usage, "completion_tokens": tokens}})
            return
        events = [event(chat, i, {**usage, "completion_tokens": i + 1}) for i in range(tokens)]
        last = b"data: [DONE]\n\n"
        if not self.times.ttft and not self.times.itl:
            self.transport.write(_HEAD + chunked(b"".join(events) + last) + _END)
            return
        waits = self.times.draw(next(self.numbers), tokens)
        task = asyncio.get_running_loop().create_task(self._stream(events, waits, last))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _answer(self, whole: dict[str, Any]) -> None:
        answer = orjson.dumps(whole)
        self.transport.write(_PLAIN % (len(answer), answer))

    async def _stream(self, events: list[bytes], waits: list[float], last: bytes) -> None:
        self.transport.write(_HEAD)
        for data, wait in zip(events, waits, strict=True):
            await asyncio.sleep(wait)
            self.transport.write(chunked(data))
        self.transport.write(chunked(last) + _END)


async def serve(host: str, port: int, times: Times, most: int | None = None) -> None:
    """Serves until SIGTERM or SIGINT; no answer has more than `most` tokens."""
    loop = asyncio.get_running_loop()
    numbers = count()
    server = await loop.create_server(lambda: Connection(times, numbers, most), host, port)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    await ended.wait()
    server.close()


def main() -> None:
    """Parses the flags and serves."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, required=True)
    p.add_argument("--ttft-ms", type=float, default=0.0)
    p.add_argument("--itl-ms", type=float, default=0.0)
    p.add_argument("--spread", type=float, default=0.0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--stop-after", type=int)
    args = p.parse_args()
    times = Times(args.ttft_ms / 1e3, args.itl_ms / 1e3, args.spread, args.seed)
    uvloop.run(serve(args.host, args.port, times, args.stop_after))


if __name__ == "__main__":
    main()
