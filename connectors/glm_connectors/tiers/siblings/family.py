"""The asking side: this rank's connections to its siblings, and whose a page is."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
from collections.abc import AsyncIterator, Sequence

from glm_connectors.tiers.siblings import wire
from glm_connectors.tiers.siblings.desk import Desk, Lender
from glm_connectors.tiers.siblings.memory import copy_from
from glm_connectors.tiers.siblings.place import Address, Place

logger = logging.getLogger(__name__)

# elsewhere: on another machine. refused: its memory can't be read. silent: asked, and nothing came from it, until
# something comes. gone: its connection ended.
STATES = ("usable", "connecting", "elsewhere", "refused", "silent", "gone")
# Seconds without a word from one who was asked: he answers after half of them, whatever he has by then.
ANSWER_S = 2.0
# So many parts of it are waited for one by one: who did not run himself meanwhile has waited for one.
_PARTS = 4


class Siblings:
    """Of one rank. Made before the event loop that it runs on; everything but `owner` and `count` is that loop's."""

    def __init__(self, place: Place, addresses: Sequence[Address], answer_s: float = ANSWER_S) -> None:
        """addresses: of all ranks of the share, this one's among them. ValueError where they are not that."""
        self._place = place
        if sorted(address.index for address in addresses) != list(range(place.share.of)):
            raise ValueError(f"addresses of {len(addresses)} ranks, expected one of each of {place.share.of}")
        self._links = {
            address.index: _Link(address, place.address.machine, answer_s)
            for address in addresses
            if address.index != place.share.index
        }
        self._desk: Desk | None = None
        self._server: asyncio.Server | None = None
        self._running: set[asyncio.Task[None]] = set()

    def owner(self, key: bytes) -> int | None:
        """The sibling whose page it is; None where it is our own, or that sibling lends none."""
        index = self._place.share.owner(key)
        link = self._links.get(index)
        return index if link is not None and link.state == "usable" else None

    def count(self, state: str) -> int:
        """How many siblings are in one of STATES."""
        return sum(link.state == state for link in self._links.values())

    def pid(self, index: int) -> int:
        """Its process, whose memory a loan is in."""
        return self._links[index].address.pid

    async def start(self, lender: Lender) -> None:
        """Lends from now on, and connects to all."""
        self._desk = Desk(lender)
        if self._place.listener is not None:
            self._server = await asyncio.start_unix_server(self._desk.serve, sock=self._place.listener)
        for link in self._links.values():
            task = asyncio.get_running_loop().create_task(link.run())
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    @contextlib.asynccontextmanager
    async def borrow(self, index: int, keys: Sequence[bytes]) -> AsyncIterator[Sequence[int]]:
        """For each of the sibling's pages the address of its slot, within, or an `Ending`; nothing where it has not
        answered."""
        link = self._links[index]
        number = link.ask(keys)
        try:
            places = await link.answer(number)
            yield places if len(places) == len(keys) else []
        finally:
            link.end(number)

    def refuse(self, index: int, fault: str) -> None:
        """Its memory can't be read, for `fault`: it is not asked any more."""
        self._links[index].refuse(fault)

    def discard(self) -> None:
        """Where it is never started. Any thread."""
        self._place.close()

    async def close(self) -> None:
        """Nothing is lent or borrowed any more."""
        for link in self._links.values():
            link.close()
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        if self._server is not None:
            self._server.close()
        self._place.close()
        if self._desk is not None:
            await self._desk.close()


class _Link:
    """The connection to one sibling."""

    def __init__(self, address: Address, machine: str, answer_s: float) -> None:
        self.address = address
        self.state = "connecting" if machine and address.machine == machine else "elsewhere"
        self._answer_s = answer_s
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[list[int]]] = {}
        self._heard = 0  # messages

    async def run(self) -> None:
        """Until its end. There is no second connection: a rank that is gone takes its group with it."""
        if self.state == "elsewhere":
            return
        rank = self.address.index
        try:
            reader, self._writer = await asyncio.open_unix_connection("\0" + self.address.name)
            hello = await wire.receive(reader)
            if not isinstance(hello, wire.Hello):
                raise ValueError(f"expected Hello first, found {type(hello).__name__}")
            fault = self._probe(hello)
            self.state = "usable"
            if fault:
                self.refuse(fault)
            while (message := await wire.receive(reader)) is not None:
                if not isinstance(message, wire.Loan):
                    raise ValueError(f"a borrower does not expect {type(message).__name__}")
                self._heard += 1
                if self.state == "silent":
                    self.state = "usable"
                    logger.info("cache: rank %d answers again", rank)
                self._answered(message)
            logger.info("cache: rank %d lends no pages any more: its connection ended", rank)
        except (OSError, ValueError) as error:
            logger.warning("cache: rank %d lends no pages: %s", rank, error)
        finally:
            self.close()

    def _probe(self, hello: wire.Hello) -> str:
        """Why its memory can't be read, or ""."""
        found = ctypes.create_string_buffer(len(wire.PROBE))
        here = [ctypes.addressof(found)]
        try:
            if hello.sample:
                copy_from(self.address.pid, [hello.sample], here, 1)
            copy_from(self.address.pid, [hello.probe], here, len(wire.PROBE))
        except OSError as error:
            return str(error)
        return "" if found.raw == wire.PROBE else "other bytes than it has"

    def refuse(self, fault: str) -> None:
        """Its memory can't be read."""
        if self.state not in ("usable", "silent"):
            return
        self.state = "refused"
        self._answer_all()
        logger.warning(
            "cache: the memory of rank %d (process %d) can't be read: %s; every rank gets its pages from Valkey "
            "by itself. Where the system forbids it, allow process_vm_readv (kernel.yama.ptrace_scope of 0 or 1; "
            "in a container, --cap-add SYS_PTRACE or a seccomp profile that has it)",
            self.address.index,
            self.address.pid,
            fault,
        )

    def ask(self, keys: Sequence[bytes]) -> int:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        if self.state == "usable" and self._writer is not None and not self._writer.is_closing():
            wire.send(self._writer, wire.Ask(number, list(keys), self._answer_s / 2))
        else:
            self._waiting[number].set_result([])
        return number

    async def answer(self, number: int) -> list[int]:
        """[] where there is none: nothing at all has come from the sibling for so long, or it is gone."""
        future = self._waiting[number]
        heard, quiet = self._heard, 0
        while not future.done() and quiet < _PARTS:
            await asyncio.wait({future}, timeout=self._answer_s / _PARTS)
            quiet = quiet + 1 if heard == self._heard else 0
            heard = self._heard
        if not future.done():
            self._silence()
        return future.result()

    def _silence(self) -> None:
        if self.state == "usable":
            self.state = "silent"
            logger.warning(
                "cache: rank %d has not answered for %g s, its pages come from Valkey until it does",
                self.address.index,
                self._answer_s,
            )
        self._answer_all()

    def _answered(self, message: wire.Loan) -> None:
        if (future := self._waiting.get(message.number)) is not None and not future.done():
            future.set_result(message.places)

    def _answer_all(self) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_result([])

    def end(self, number: int) -> None:
        """Whether it was answered or not: what comes later is returned by this as well, for the owner reads in order."""
        del self._waiting[number]
        if self._writer is not None:
            wire.send(self._writer, wire.Return(number))

    def close(self) -> None:
        if self.state != "elsewhere":
            self.state = "gone"
        self._answer_all()
        if self._writer is not None:
            self._writer.close()
