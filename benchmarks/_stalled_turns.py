"""Two-turn conversations that arrive on their own schedule, a store that stops for a part of every period, and what the
turns met of that.

The load is open: a turn is sent at its moment, whether or not those before it have been answered, so that stalls
meet their share of turns. A second turn follows its first by a think time that is uniform over a whole period: its
moment within the period is uniform, too.
"""

from __future__ import annotations

import math
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Conversation:
    """When its turns arrive, in seconds from the run's start."""

    number: int
    first: float
    second: float


def schedule(
    turns: int, rate: float, together: int, think: float, period: float, seed: int
) -> list[Conversation]:
    """`turns` conversations, Poisson, `rate` a second on average, `together` of them at the same moment.

    The second turn comes `think` to `think + period` seconds after the first.
    """
    generator = random.Random(seed)
    found: list[Conversation] = []
    now = 0.0
    while len(found) < turns:
        now += generator.expovariate(rate / together)
        second = now + think + generator.uniform(0.0, period)
        for _ in range(min(together, turns - len(found))):
            found.append(Conversation(len(found), now, second))
    return found


class Stalls(threading.Thread):
    """Stops and continues a server that we started: the last `stall` seconds of every `period`; 0: never."""

    def __init__(self, pid: int, stall: float, period: float) -> None:
        super().__init__(daemon=True)
        self.pid, self.stall, self.period = pid, stall, period
        self.intervals: list[tuple[float, float]] = []  # time.monotonic()
        self._ended = threading.Event()

    def run(self) -> None:
        origin = time.monotonic()
        while self.stall:
            number = len(self.intervals) + 1
            if self._ended.wait(max(0.0, origin + number * self.period - self.stall - time.monotonic())):
                return
            began = time.monotonic()
            os.kill(self.pid, signal.SIGSTOP)
            try:
                self._ended.wait(max(0.0, origin + number * self.period - time.monotonic()))
            finally:
                os.kill(self.pid, signal.SIGCONT)
            self.intervals.append((began, time.monotonic()))

    def end(self) -> None:
        """The server goes on, for good."""
        self._ended.set()
        self.join()


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn as its client saw it. arrived: time.monotonic(); ttft, seconds: to the first and the last token."""

    arrived: float
    ttft: float
    seconds: float
    hit_tokens: int = 0
    answer: tuple[int, ...] = ()


def left_at(moment: float, intervals: Sequence[tuple[float, float]]) -> float:
    """How much longer the stall of that moment lasts; 0.0 outside of stalls."""
    return next((ended - moment for began, ended in intervals if began <= moment < ended), 0.0)


def met(turn: Turn, intervals: Sequence[tuple[float, float]]) -> bool:
    """Whether any of its time to the first token lay in a stall."""
    return any(began < turn.arrived + turn.ttft and turn.arrived < ended for began, ended in intervals)


def send(arrivals: Sequence[tuple[float, Callable[[], None]]]) -> None:
    """Calls each at its moment, in seconds from now; a call must return at once."""
    origin = time.monotonic()
    for moment, call in sorted(arrivals, key=lambda arrival: arrival[0]):
        time.sleep(max(0.0, origin + moment - time.monotonic()))
        call()


def figures(
    turns: Sequence[Turn], intervals: Sequence[tuple[float, float]], cacheable: int, deadline: float
) -> dict[str, Any]:
    """Hits and times of second turns, and apart of those that arrived during a stall.

    cacheable: tokens of a full hit. deadline: seconds that a turn may be held back. A turn that arrives with more than
    `deadline` left of a stall can't be a hit; `hit_rate_possible` is the share of the others.
    """
    turns = sorted(turns, key=lambda turn: turn.arrived)
    left = [left_at(turn.arrived, intervals) for turn in turns]
    inside = [turn for turn, rest in zip(turns, left, strict=True) if rest]
    outside = [turn for turn, rest in zip(turns, left, strict=True) if not rest]
    touched = [turn for turn in turns if met(turn, intervals)]
    return {
        "second_turns": len(turns),
        "hit_rate": _rate(turns, cacheable),
        "hit_rate_second_half": _rate(turns[len(turns) // 2 :], cacheable),
        "hit_rate_possible": _round(sum(rest <= deadline for rest in left) / len(left)) if left else None,
        "arrived_in_a_stall": len(inside),
        "hit_rate_arrived_in_a_stall": _rate(inside, cacheable),
        "hit_rate_arrived_outside": _rate(outside, cacheable),
        "met_a_stall": len(touched),
        "hit_rate_met_a_stall": _rate(touched, cacheable),
        "ttft_s": times(turns),
        "ttft_s_arrived_in_a_stall": times(inside),
        "ttft_s_arrived_outside": times(outside),
    }


def times(turns: Sequence[Turn]) -> dict[str, float]:
    """Mean, median, p90, p99 and largest time to the first token; {} of no turns."""
    if not turns:
        return {}
    found = sorted(turn.ttft for turn in turns)
    ranks = {name: found[math.ceil(share * len(found)) - 1] for name, share in _QUANTILES.items()}
    return {name: _round(value) for name, value in ({"mean": statistics.mean(found)} | ranks).items()}


_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def _rate(turns: Sequence[Turn], cacheable: int) -> float | None:
    if not turns:
        return None
    return _round(sum(turn.hit_tokens for turn in turns) / (len(turns) * cacheable))


def _round(value: float) -> float:
    return round(value, 4)
