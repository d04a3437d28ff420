"""An event loop that lets go of the interpreter when it has nothing to do, not once for each of its turns.

asyncio asks the kernel for events between any two rounds of callbacks, also where the next ones are ready; each question
lets go of the interpreter, and beside a thread that computes in Python each costs that thread a switch. A job of
LMCache's executor takes some ten rounds. On this loop nothing comes from the kernel but other threads' wake-ups, which
can wait for a few rounds.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selectors import SelectorKey

ROUNDS = (
    64  # without a question to the kernel, at most: a callback that goes on for ever must not shut others out
)


class _Busy(selectors.DefaultSelector):
    """Where its caller would not wait, it has nothing new to say for `ROUNDS` rounds."""

    def __init__(self) -> None:
        super().__init__()
        self._rounds = 0

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if timeout == 0 and self._rounds < ROUNDS:
            self._rounds += 1
            return []
        self._rounds = 0
        return super().select(timeout)


def new() -> asyncio.AbstractEventLoop:
    """For a thread of its own."""
    return asyncio.SelectorEventLoop(_Busy())
