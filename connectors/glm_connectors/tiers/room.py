"""Whose pages may be in the pool before their requests run: claims on a share of its slots.

A request that waits holds its pages until it runs or is gone, so all of them together must fit: a claim that does not
waits for its turn, and takes nothing from those before it. A page that several want is one slot.

Turns. A request that the scheduler could run now comes before one that it could not (a PD prefill server's that waits
for its decode server, perhaps for minutes), in the order in which the scheduler first asked; the others follow as they
came. The first in turn that finds no room takes it from claims behind it whose pages have come: the last in turn first.
So it waits for gets at most, which end, and never for another request to run.

Ranks are asked in the same order, so their first in turn is the same request: it gets its pages on each of them and
runs, whatever else each rank has let in. No two requests can wait for each other across ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar


class Claimant(Protocol):
    """A request's prefetch."""

    claim: Sequence[bytes]  # keys of the pages that it is to hold
    number: int  # as it came
    turn: int | None  # when the scheduler first asked for it
    short: str  # why it claims less than it would, or ""

    @property
    def done(self) -> bool:
        """Nothing comes for it any more: what it holds can be taken."""


def place(one: Claimant) -> tuple[bool, int]:
    """Smaller is earlier in turn."""
    return (one.turn is None, one.number if one.turn is None else one.turn)


C = TypeVar("C", bound=Claimant)


class Room(Generic[C]):
    """Claims on slots. One thread. slots: how many there are, which may become fewer (`CpuPool.slots`)."""

    def __init__(self, slots: Callable[[], int]) -> None:
        self._slots = slots
        self._waiting: list[C] = []
        self._within: list[C] = []
        self._users: dict[bytes, int] = {}  # claims within, by key

    @property
    def taken(self) -> int:
        """Slots that are claimed."""
        return len(self._users)

    def enter(self, one: C) -> None:
        """It waits for its turn."""
        self._waiting.append(one)

    def next(self) -> tuple[C, list[C]] | None:
        """The first in turn, who is within now, and those who have lost their place to it; None where it has no room."""
        if not self._waiting:
            return None
        one = min(self._waiting, key=place)
        if len(one.claim) > (most := self._slots()):  # it would wait for ever
            one.claim, one.short = one.claim[:most], one.short or "share"
        lost = self._make_room(one)
        if lost is None:
            return None
        self._waiting.remove(one)
        self._let_in(one)
        return one, lost

    def shrink(self, one: C, count: int) -> None:
        """It needs no more than the first `count` of its keys."""
        if one in self._within:
            self._uncount(one.claim[count:])
            one.claim = one.claim[:count]

    def leave(self, one: C) -> None:
        """It is gone, from wherever it is."""
        if one in self._waiting:
            self._waiting.remove(one)
        elif one in self._within:
            self._put_out(one)

    def _fits(self, one: C) -> bool:
        return len(self._users) + sum(key not in self._users for key in one.claim) <= self._slots()

    def _make_room(self, one: C) -> list[C] | None:
        """Who has to go for it; None where all that may go would not suffice."""
        lost: list[C] = []
        if self._fits(one):
            return lost
        if one.turn is None:
            return None
        behind = [other for other in self._within if other.done and place(other) > place(one)]
        for other in sorted(behind, key=place, reverse=True):
            self._put_out(other)
            lost.append(other)
            if self._fits(one):
                return lost
        for other in lost:
            self._let_in(other)
        return None

    def _let_in(self, one: C) -> None:
        self._within.append(one)
        for key in one.claim:
            self._users[key] = self._users.get(key, 0) + 1

    def _put_out(self, one: C) -> None:
        self._within.remove(one)
        self._uncount(one.claim)

    def _uncount(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
