"""What the person who waits sees: rounds and requests done, time left, each endpoint's figures so far; on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from benchmarks.ab.client import Sample


class Board:
    """Counts samples by endpoint and draws them; without a terminal it prints a line a round; `quiet`: nothing."""

    def __init__(self, endpoints: list[str], rounds: int, quiet: bool = False) -> None:
        self.console = Console(stderr=True)
        self.lines = not quiet and not self.console.is_terminal
        self.drawn = not quiet and self.console.is_terminal
        self.samples: dict[str, list[Sample]] = {name: [] for name in endpoints}
        self.rates: dict[str, list[float]] = {name: [] for name in endpoints}
        self.status = ""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self.bars = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console)
        self.rounds = self.bars.add_task("rounds", total=rounds)
        self.requests = self.bars.add_task("requests of this one", total=None)

    @contextmanager
    def shown(self) -> Iterator[Board]:
        """Draws while the block runs."""
        if not self.drawn:
            yield self
            return
        with Live(self, console=self.console, refresh_per_second=4):
            yield self

    def __rich__(self) -> Group:
        table = Table(box=None, padding=(0, 2))
        for name in (
            "endpoint",
            "requests",
            "errors",
            "TTFT p50 ms",
            "ITL p50 ms",
            "input tokens/s",
            "cached",
        ):
            table.add_column(name, justify="left" if name == "endpoint" else "right")
        for name, samples in self.samples.items():
            table.add_row(name, *self._row(name, samples))
        return Group(self.bars, table, Text(self.status, "dim"))

    def _row(self, name: str, samples: list[Sample]) -> list[str]:
        good = [s for s in samples if not s.error]
        gaps = [gap for s in good[-200:] for gap in s.itls]
        prompts = sum(s.prompt_tokens for s in good)
        return [
            str(len(samples)),
            str(len(samples) - len(good)),
            f"{np.median([s.ttft for s in good]) * 1e3:.1f}" if good else "",
            f"{np.median(gaps) * 1e3:.1f}" if gaps else "",
            f"{np.median(self.rates[name]):.0f}" if self.rates[name] else "",
            f"{sum(s.cached_tokens or 0 for s in good) / prompts:.0%}" if prompts else "",
        ]

    def begin(self, endpoint: str, what: str, requests: int) -> None:
        """A round at an endpoint starts."""
        self.say(f"{what}, {endpoint}")
        self.bars.reset(self.requests, total=requests, description=f"requests: {endpoint}")

    def sample(self, endpoint: str, sample: Sample) -> None:
        """One request ended."""
        self.samples[endpoint].append(sample)
        self.bars.advance(self.requests)

    def end(self, endpoint: str, input_rate: float | None) -> None:
        """The round ended, or was done in an earlier run (no rate)."""
        self.bars.advance(self.rounds)
        if input_rate is not None:
            self.rates[endpoint].append(input_rate)
            if self.lines:
                row = self._row(endpoint, self.samples[endpoint])
                text = f"  {endpoint}: {row[0]} requests, {row[1]} errors, TTFT p50 {row[2]} ms, {row[4]} tokens/s"
                print(f"{text}, {row[5]} cached", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """What happens now."""
        self.status = text
        if self.lines:
            print(text, file=sys.stderr, flush=True)
