"""Turns of a measurement on arms that are up together: each turn every arm is asked the same, another one first.

Arms are compared turn by turn. An arm that dies or hangs is lost alone, and has the turns that it answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks._moe_servers import Arm, Report
from benchmarks.ab.statistics import FEWEST_ROUNDS, ratio

LONGER = 1.3  # a further turn is begun where there is time for one so much longer than any before

Ask = Callable[[Arm], Any]


def turning(names: Sequence[str], turn: int) -> list[str]:
    """Who is asked when: another one is first at every turn."""
    at = turn % max(1, len(names))
    return [*names[at:], *names[:at]]


def one_turn(
    running: dict[str, Arm], names: Sequence[str], turn: int, report: Report, asks: Ask
) -> dict[str, Any] | None:
    """What each of these arms that runs answers in a turn; those that die or hang are lost. None where time ran out."""
    found = {}
    for name in turning([name for name in names if name in running], turn):
        if not report.left():
            return None
        try:
            found[name] = asks(running[name])
        except httpx.HTTPError as error:
            lose(running, name, error, report)
    return found


@dataclass
class Series:
    """The turns of one measurement at one length: what each arm answered, turn by turn, and the longest turn's seconds.

    asks: a turn's question to an arm. of: the arms that are asked, all without a name.
    """

    asks: Callable[[int], Ask]
    of: Sequence[str] = ()
    turns: list[dict[str, Any]] = field(default_factory=list)
    longest_s: float = 0.0

    def go_on(self, running: dict[str, Arm], report: Report) -> bool:
        """One turn more; False where time ran out."""
        began = time.monotonic()
        turn = len(self.turns)
        found = one_turn(running, self.of or list(running), turn, report, self.asks(turn))
        if found is None:
            return False
        self.turns.append(found)
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        return True

    def answers(self, least: int, discard: int = 0) -> dict[str, list[Any]]:
        """By arm, the turns that it answered, after those to discard; not of those lost before the least number."""
        # Who is lost stays lost: it has the first turns, with none missing between.
        names = [name for turn in self.turns[:1] for name in turn]
        found = {name: [turn[name] for turn in self.turns if name in turn] for name in names}
        return {name: values[discard:] for name, values in found.items() if len(values) >= least}


def more(series: Sequence[Series], running: dict[str, Arm], report: Report) -> Iterator[Series]:
    """Further turns while there is time, the first series' first; yields each that has one more."""
    for one in series:
        while len(one.turns) < FEWEST_ROUNDS and report.left() > LONGER * one.longest_s:
            if not one.go_on(running, report):
                return
            yield one


def lose(running: dict[str, Arm], name: str, error: httpx.HTTPError, report: Report) -> None:
    """An arm that died or hangs is ended and named; what the others have been asked, and will be, still counts."""
    arm = running.pop(name)
    report.say(f"{name} is lost: {error!r}")
    report.put(**{f"node_{name}_failed": [f"lost while it was measured: {error!r}"[:300]]})
    arm.server.stop()


def compared(stock: Sequence[float], own: Sequence[float]) -> dict[str, Any]:
    """How many times as fast, turn by turn as far as both go, of values of which more is faster: the mean ratio and its
    interval (None with fewer than FEWEST_ROUNDS turns).
    """
    found = ratio([[b / a] for a, b in zip(stock, own, strict=False)])
    if found is None:
        return {}
    between = None if found.low is None or found.high is None else [round(found.low, 4), round(found.high, 4)]
    return {"speedup": round(found.value, 4), "speedup_interval": between}
