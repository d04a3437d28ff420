"""An event loop that lets go of the interpreter when it has nothing to do, not once for each of its turns.

asyncio asks the kernel for events between any two rounds of callbacks, also where the next ones are ready; each question
lets go of the interpreter, and beside a thread that computes in Python each costs that thread a switch. A job of
LMCache's executor takes some ten rounds. What comes from the kernel on this loop can wait for a few rounds: other
threads' wake-ups, and what siblings say on their sockets, which a busy loop sees up to `ROUNDS` rounds late. And of the
wake-ups one is enough at a time, which one call of the kernel takes: asyncio sends one for each callback of another
thread, and asks twice for what was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
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


class _Loop(asyncio.SelectorEventLoop):
    """UPSTREAM: asyncio's `_write_to_self`, `_read_from_self`, `_ssock` (Python 3.11 to 3.14)."""

    def __init__(self) -> None:
        self._woken = False  # a wake-up is on its way: what is added before it is seen, is seen with it
        super().__init__(_Busy())

    def _write_to_self(self) -> None:
        if not self._woken:
            self._woken = True
            super()._write_to_self()  # type: ignore[misc]

    def _read_from_self(self) -> None:
        with contextlib.suppress(BlockingIOError, InterruptedError):
            self._ssock.recv(4096)  # type: ignore[attr-defined]
        # Only now: none is sent in between, which the call would have taken with it. What was added until now is seen
        # before the loop waits again.
        self._woken = False


def new() -> asyncio.AbstractEventLoop:
    """For a thread of its own."""
    return _Loop()
