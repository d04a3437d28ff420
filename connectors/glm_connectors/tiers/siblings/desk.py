"""The owner's side: what this rank lends to its siblings."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
from collections.abc import Sequence
from typing import Protocol

from glm_connectors.tiers.siblings import wire

logger = logging.getLogger(__name__)

# Seconds a page stays lent to one who does not return it: a copy takes milliseconds, and what is copied later is
# checked as any page is.
_LONGEST = 10.0


class Lender(Protocol):
    """`lending.Lending`."""

    async def lend(self, keys: Sequence[bytes], seconds: float) -> tuple[list[int], object]:
        """For each key the address of its slot, which stays as it is until `take_back` of the second value, or an
        `Ending`. Waits for pages that are on their way, for so many seconds."""

    def take_back(self, lent: object) -> None:
        """No longer lent."""

    def sample(self) -> int:
        """An address in the memory of its pages; 0 where none is known."""


class Desk:
    """Serves siblings on an event loop, which `serve` and `close` run on."""

    def __init__(self, lender: Lender, longest: float = _LONGEST) -> None:
        self._lender, self._longest = lender, longest
        self._probe = ctypes.create_string_buffer(wire.PROBE, len(wire.PROBE))
        self._sample = lender.sample()
        self._serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until its end."""
        task = asyncio.current_task()
        assert task is not None
        self._serving[task] = writer
        counter = _Counter(self._lender, writer, self._longest)
        try:
            if wire.user_of(writer) != os.getuid():
                logger.warning("cache: another user's process asked for pages, and got none")
                return
            wire.send(writer, wire.Hello(ctypes.addressof(self._probe), self._sample))
            while (message := await wire.receive(reader)) is not None:
                if isinstance(message, wire.Ask):
                    counter.ask(message)
                elif isinstance(message, wire.Return):
                    counter.take_back(message.number)
                else:
                    raise ValueError(f"an owner does not expect {type(message).__name__}")
        except ValueError as error:
            logger.warning("cache: a sibling's connection is closed: %s", error)
        finally:
            del self._serving[task]
            writer.close()
            counter.close()

    async def close(self) -> None:
        """Ends all connections; nothing is lent any more."""
        serving = dict(self._serving)
        for writer in serving.values():
            writer.transport.abort()  # to cancel the tasks is no end that asyncio's streams expect
        if serving:
            await asyncio.wait(serving)


class _Counter:
    """What is lent over one connection."""

    def __init__(self, lender: Lender, writer: asyncio.StreamWriter, longest: float) -> None:
        self._lender, self._writer, self._longest = lender, writer, longest
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._lent: dict[int, tuple[object, asyncio.TimerHandle]] = {}

    def ask(self, message: wire.Ask) -> None:
        self._asked[message.number] = asyncio.get_running_loop().create_task(self._answer(message))

    async def _answer(self, message: wire.Ask) -> None:
        number = message.number
        try:
            places, lent = await self._lender.lend(message.keys, message.seconds)
        except Exception:
            logger.exception("cache: pages can't be lent")
            self._say(number, [])
            return
        finally:
            self._asked.pop(number, None)
        timer = asyncio.get_running_loop().call_later(self._longest, self.take_back, number)
        self._lent[number] = lent, timer
        self._say(number, places)

    def _say(self, number: int, places: list[int]) -> None:
        with contextlib.suppress(ConnectionError):
            wire.send(self._writer, wire.Loan(number, places))

    def take_back(self, number: int) -> None:
        """Returned, or lent for long enough. One that is still waited for is no longer; it is answered all the same, so
        that the sibling hears from here whenever it has asked."""
        if (task := self._asked.pop(number, None)) is not None:
            task.cancel()
            self._say(number, [])
        elif (found := self._lent.pop(number, None)) is not None:
            lent, timer = found
            timer.cancel()
            self._lender.take_back(lent)

    def close(self) -> None:
        for number in [*self._asked, *self._lent]:
            self.take_back(number)
