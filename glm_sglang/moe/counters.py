"""What the MoE layers did, on /metrics: glm_sglang:moe_{calls,tokens,chunks,rows}_total{path=…}.

calls   MoE layers run, on every rank.
tokens  tokens of the passes times MoE layers, counted on one rank of each group that shares a batch: padding and
        copies count nothing, so the sum over ranks is exact.
chunks  kernel calls, on every rank; of `stock`, none.
rows    rows handed to the kernel, on every rank: padding and copies included; of `stock`, none.
path    megamoe, or stock; `megamoe-graph` where a captured graph ran and Python did not: what its capture counted.

Counts are kept as plain numbers and written once a pass: a metric costs microseconds, a pass has 75 layers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

PATHS = ("megamoe", "megamoe-graph", "stock")
NAMES = {
    "calls": "MoE layers run",
    "tokens": "Tokens times MoE layers",
    "chunks": "Kernel calls of MoE layers",
    "rows": "Rows handed to the kernels of MoE layers, padding included",
}


@dataclass(slots=True)
class Count:
    """What one pass did."""

    calls: int = 0
    tokens: int = 0
    chunks: int = 0
    rows: int = 0

    def add(self, other: Count) -> None:
        """Adds another pass."""
        for name in NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def as_dict(self) -> dict[str, int]:
        """By name."""
        return {name: getattr(self, name) for name in NAMES}


@dataclass(slots=True)
class Counters:
    """This process's counts: `open` of the pass under way (`replayed`: from a graph), `totals` by path."""

    open: Count = field(default_factory=Count)
    replayed: bool = False
    totals: dict[str, Count] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)

    def layer(self, rows: int, chunks: int) -> None:
        """One layer ran, eagerly or into a graph that is being captured."""
        self.open.calls += 1
        self.open.rows += rows
        self.open.chunks += chunks

    def replay(self, captured: Count) -> None:
        """A graph ran whose capture counted this."""
        self.open.add(captured)
        self.replayed = True

    def discard(self) -> Count:
        """Forgets the open pass, and returns it: a capture or a warm-up computed nothing for anybody."""
        done, self.open, self.replayed = self.open, Count(), False
        return done

    def close(self, *, path: str, layers: int, tokens: int) -> None:
        """A pass of `tokens` tokens through `layers` MoE layers ended."""
        replayed, done = self.replayed, self.discard()
        if path == "megamoe" and (replayed or not done.calls):
            path = "megamoe-graph"
        done.calls = done.calls or layers
        done.tokens = tokens * layers
        self.totals.setdefault(path, Count()).add(done)
        if self.metrics:
            self._write(path, done)

    def publish(self) -> None:
        """Makes the metrics, every path at 0, where SGLang's are on: called once, before the first pass."""
        if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            return
        from prometheus_client import Counter

        self.metrics = {
            name: Counter(f"glm_sglang:moe_{name}", text, ("path",)) for name, text in NAMES.items()
        }
        for path in PATHS:
            self._write(path, Count())

    def _write(self, path: str, done: Count) -> None:
        for name, value in done.as_dict().items():
            self.metrics[name].labels(path=path).inc(value)

    def report(self) -> dict[str, dict[str, int]]:
        """Totals by path, for /server_info."""
        return {path: count.as_dict() for path, count in self.totals.items()}
