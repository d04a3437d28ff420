"""A TCP proxy between a client and a real Valkey that delays, cuts, changes or answers by itself.

It knows as little of RESP as it needs: a request is what one read of the client's socket brought (glide sends
a GET in one piece), and a reply to a page's GET is longer than any handshake's.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

What = Literal["stall", "trickle", "reset", "fin", "answer", "flip", "refuse"]
Where = Literal["connect", "request", "reply"]
_LONG = 1000  # bytes: a page, not a handshake


@dataclass
class Fault:
    """What happens to every `every`-th matching event, starting with the first.

    stall: wait `seconds` (for ever where infinite) before the bytes go on; in a reply, in its middle. trickle: a reply
    goes on in pieces of `piece` bytes, `seconds` after each. reset, fin: close the connection in the middle of a reply,
    with RST or FIN; reset at a request: with RST, instead of passing it on. answer: `text` instead of what the
    server says. flip: invert bit `bit` of the reply's value. refuse: accept and close at once.
    """

    what: What
    where: Where
    seconds: float = 0.0
    every: int = 1
    text: bytes = b""
    bit: int = 0
    piece: int = 1
    match: bytes = b""  # of the request: b"GET", b"SET"
    hits: int = 0
    _seen: int = field(default=0, repr=False)

    def strikes(self) -> bool:
        self._seen += 1
        strikes = (self._seen - 1) % self.every == 0
        self.hits += strikes
        return strikes


class Proxy:
    """Listens on a free loopback port. `fault` may be set and unset at any time, from any thread."""

    def __init__(
        self, port: int, tls: ssl.SSLContext | None = None, delay: Callable[[], float] | None = None
    ) -> None:
        """delay: seconds that each reply waits, for a proxy that is slow all the time."""
        self.fault: Fault | None = None
        self.connections = 0
        self._target, self._tls, self._delay = port, tls, delay
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: Any = None
        self.port = 0
        self.listen()

    def listen(self) -> None:
        """Listens (again), at the same port."""

        async def start() -> None:
            self._server = await asyncio.start_server(
                self._serve, "127.0.0.1", self.port, ssl=self._tls, limit=1 << 22
            )
            self.port = self._server.sockets[0].getsockname()[1]

        asyncio.run_coroutine_threadsafe(start(), self._loop).result(10)

    def lead_to(self, port: int) -> None:
        """Where new connections go: a name that leads to another node now. Those that are there stay."""
        self._target = port

    def vanish(self) -> None:
        """Stops listening and resets every connection: a node that was killed."""

        async def stop() -> None:
            self._server.close()
            for writer in list(self._writers):
                _reset(writer)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(10)

    def close(self) -> None:
        self.vanish()

        async def cancel() -> None:
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _struck(self, where: Where, what: tuple[What, ...], data: bytes = b"") -> Fault | None:
        fault = self.fault
        if fault is None or fault.where != where or fault.what not in what or fault.match not in data:
            return None
        return fault if fault.strikes() else None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            if self._struck("connect", ("refuse",)):
                _reset(writer)
                return
            if fault := self._struck("connect", ("stall",)):
                await _wait(fault.seconds)
            there_reader, there = await asyncio.open_connection("127.0.0.1", self._target, limit=1 << 22)
            self._writers.add(there)
            await asyncio.wait(
                {
                    asyncio.create_task(self._requests(reader, there, writer)),
                    asyncio.create_task(self._replies(there_reader, writer)),
                },
                return_when=asyncio.FIRST_COMPLETED,
            )
            _reset(there)
            writer.close()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)

    async def _requests(self, reader: asyncio.StreamReader, there: Any, back: Any) -> None:
        try:
            while data := await reader.read(1 << 22):
                if (fault := self._struck("request", ("answer",), data)) and len(data) < _LONG:
                    back.write(fault.text)
                    await back.drain()
                    continue
                if self._struck("request", ("reset",), data):
                    _reset(back)
                    return
                if fault := self._struck("request", ("stall",), data):
                    half = len(data) // 2
                    there.write(data[:half])
                    await _wait(fault.seconds)
                    data = data[half:]
                there.write(data)
                await there.drain()
        except OSError:
            return

    async def _replies(self, reader: asyncio.StreamReader, writer: Any) -> None:
        flip: int | None = None  # bits until the one to be inverted
        try:
            while data := await reader.read(1 << 22):
                if self._delay is not None:
                    await asyncio.sleep(self._delay())
                if fault := self._struck("reply", ("answer",), data):
                    data = fault.text
                if (
                    data[:1] == b"$"
                    and len(data) > _LONG
                    and (fault := self._struck("reply", ("flip",), data))
                ):
                    flip = 8 * (data.index(b"\r\n") + 2) + fault.bit
                if flip is not None:
                    if flip < 8 * len(data):
                        data, flip = _flipped(data, flip), None
                    else:
                        flip -= 8 * len(data)
                if len(data) > _LONG and (fault := self._struck("reply", ("trickle",), data)):
                    for start in range(0, len(data), fault.piece):
                        writer.write(data[start : start + fault.piece])
                        await writer.drain()
                        await _wait(fault.seconds)
                    continue
                if len(data) > _LONG and (fault := self._struck("reply", ("stall", "reset", "fin"), data)):
                    half = len(data) // 2
                    writer.write(data[:half])
                    await writer.drain()
                    data = data[half:]
                    if fault.what == "stall":
                        await _wait(fault.seconds)
                    if fault.what == "reset":
                        _reset(writer)
                        return
                    if fault.what == "fin":
                        return
                writer.write(data)
                await writer.drain()
        except OSError:
            return


async def _wait(seconds: float) -> None:
    await (asyncio.Event().wait() if seconds == float("inf") else asyncio.sleep(seconds))


def _flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _reset(writer: asyncio.StreamWriter) -> None:
    """RST instead of FIN."""
    import socket

    connection = writer.get_extra_info("socket")
    if connection is not None and not writer.is_closing():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
