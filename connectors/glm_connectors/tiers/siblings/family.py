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
from glm_connectors.tiers.siblings.wire import Ending

logger = logging.getLogger(__name__)

# elsewhere: on another machine. refused: its memory may not be read. gone: its connection ended.
STATES = ("usable", "connecting", "elsewhere", "refused", "gone")
# An answer that takes longer is not waited for: Valkey has the pages as well.
ANSWER_S = 2.0


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
        self._server = await asyncio.start_unix_server(self._desk.serve, sock=self._place.listener)
        for link in self._links.values():
            task = asyncio.get_running_loop().create_task(link.run())
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    @contextlib.asynccontextmanager
    async def borrow(self, index: int, keys: Sequence[bytes]) -> AsyncIterator[Sequence[int]]:
        """For each of the sibling's pages the address of its slot, within, or an `Ending`."""
        link = self._links[index]
        number = link.ask(keys)
        try:
            yield await link.answer(number, len(keys))
        finally:
            link.end(number)

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
        if self._desk is not None:
            await self._desk.close()


class _Link:
    """The connection to one sibling."""

    def __init__(self, address: Address, machine: str, answer_s: float) -> None:
        self.address = address
        self.state = "connecting" if address.machine == machine else "elsewhere"
        self._answer_s = answer_s
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[list[int]]] = {}

    async def run(self) -> None:
        """Until its end. There is no second connection: a rank that is gone takes its group with it."""
        if self.state == "elsewhere":
            return
        state = "gone"
        try:
            reader, self._writer = await asyncio.open_unix_connection("\0" + self.address.name)
            hello = await wire.receive(reader)
            if not isinstance(hello, wire.Hello):
                raise ValueError(f"expected Hello first, found {type(hello).__name__}")
            if fault := self._probe(hello.probe):
                state = "refused"
                logger.warning(
                    "cache: the memory of rank %d (process %d) can't be read: %s; every rank gets its pages from Valkey "
                    "by itself. Where the system forbids it, allow process_vm_readv (kernel.yama.ptrace_scope of 0 or 1; "
                    "in a container, --cap-add SYS_PTRACE or a seccomp profile that has it)",
                    self.address.index,
                    self.address.pid,
                    fault,
                )
                return
            self.state = "usable"
            while (message := await wire.receive(reader)) is not None:
                if not isinstance(message, wire.Loan):
                    raise ValueError(f"a borrower does not expect {type(message).__name__}")
                self._answered(message)
            logger.warning("cache: rank %d lends no pages any more: its connection ended", self.address.index)
        except (OSError, ValueError) as error:
            logger.warning("cache: rank %d lends no pages: %s", self.address.index, error)
        finally:
            self.state = state
            self.close()

    def _probe(self, address: int) -> str:
        """Why its memory can't be read, or ""."""
        found = ctypes.create_string_buffer(len(wire.PROBE))
        try:
            copy_from(self.address.pid, [address], [ctypes.addressof(found)], len(wire.PROBE))
        except OSError as error:
            return str(error)
        return "" if found.raw == wire.PROBE else "other bytes than it has"

    def ask(self, keys: Sequence[bytes]) -> int:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        if self.state == "usable" and self._writer is not None:
            wire.send(self._writer, wire.Ask(number, list(keys)))
        else:
            self._waiting[number].set_result([])
        return number

    async def answer(self, number: int, count: int) -> Sequence[int]:
        try:
            places = await asyncio.wait_for(asyncio.shield(self._waiting[number]), self._answer_s)
        except TimeoutError:
            places = []
        return places if len(places) == count else [Ending.ABSENT] * count

    def _answered(self, message: wire.Loan) -> None:
        if (future := self._waiting.get(message.number)) is not None and not future.done():
            future.set_result(message.places)

    def end(self, number: int) -> None:
        """Whether it was answered or not: what comes later is returned by this as well, for the owner reads in order."""
        del self._waiting[number]
        if self.state == "usable" and self._writer is not None:
            wire.send(self._writer, wire.Return(number))

    def close(self) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_result([])
        if self._writer is not None:
            self._writer.close()
