"""The tiers' metrics as a plain table: an exporter needs no more than names, kinds, labels and numbers.

Every child (each combination of label values) is there from the start, at 0. Counters and histograms only
grow. Nothing here knows Prometheus: `glm_sglang` exports the table beside SGLang's metrics.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, Protocol

Kind = Literal["counter", "gauge", "histogram"]
Child = tuple[str, ...]  # label values, in the order of the metric's labels


@dataclass(frozen=True)
class Metric:
    """One metric. labels: label name to all of its values. buckets: upper bounds of a histogram, seconds."""

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()

    def children(self) -> Iterable[Child]:
        """Every combination of label values; one empty tuple for a metric without labels."""
        return product(*self.labels.values())


@dataclass
class Histogram:
    """Counts a bucket (not cumulative; the last one is beyond the last bound), and the sum of all values."""

    counts: list[int]
    total: float = 0.0


class Sink(Protocol):
    """Whoever wants each event as it happens (a client of Prometheus in multi-process mode). Any thread.

    Counters that are read from elsewhere (`read_from`) are not events: an exporter takes the difference of
    two snapshots.
    """

    def add(self, name: str, child: Child, amount: float) -> None:
        """A counter grew."""

    def observe(self, name: str, child: Child, value: float) -> None:
        """A histogram got a value."""


class MetricTable:
    """The numbers of one `TieredStore`. Written from any thread."""

    def __init__(self, metrics: Iterable[Metric], sink: Sink | None = None) -> None:
        self.metrics: dict[str, Metric] = {metric.name: metric for metric in metrics}
        self._sink = sink
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, Child], float] = {}
        self._histograms: dict[tuple[str, Child], Histogram] = {}
        self._readers: dict[tuple[str, Child], Callable[[], float]] = {}
        for metric in self.metrics.values():
            for child in metric.children():
                if metric.kind == "counter":
                    self._counters[metric.name, child] = 0
                elif metric.kind == "histogram":
                    self._histograms[metric.name, child] = Histogram([0] * (len(metric.buckets) + 1))

    def add(self, name: str, *child: str, amount: float = 1) -> None:
        """Adds to a counter. KeyError for a metric or child that is not in the table."""
        with self._lock:
            self._counters[name, child] += amount
        if self._sink is not None:
            self._sink.add(name, child, amount)

    def observe(self, name: str, *child: str, value: float) -> None:
        """Adds a value to a histogram. KeyError as for `add`."""
        bounds = self.metrics[name].buckets
        with self._lock:
            histogram = self._histograms[name, child]
            histogram.counts[bisect_left(bounds, value)] += 1
            histogram.total += value
        if self._sink is not None:
            self._sink.observe(name, child, value)

    def read_from(self, name: str, *child: str, read: Callable[[], float]) -> None:
        """Says how a gauge, or a counter that someone else keeps, is read. `read` must not block."""
        if child not in set(self.metrics[name].children()):
            raise KeyError((name, child))
        self._readers[name, child] = read

    def __getitem__(self, key: str | tuple[str, ...]) -> float:
        """One counter or gauge: `table["dropped_saves", "full"]`."""
        name, child = (key, ()) if isinstance(key, str) else (key[0], key[1:])
        reader = self._readers.get((name, child))
        if reader is not None:
            return reader()
        with self._lock:
            return self._counters[name, child] if self.metrics[name].kind == "counter" else 0.0

    def snapshot(self) -> dict[str, dict[Child, float | Histogram]]:
        """{metric: {label values: number, or Histogram}}; every child of every metric."""
        values: dict[str, dict[Child, float | Histogram]] = {name: {} for name in self.metrics}
        with self._lock:
            for (name, child), histogram in self._histograms.items():
                values[name][child] = Histogram(list(histogram.counts), histogram.total)
        for name, metric in self.metrics.items():
            if metric.kind != "histogram":
                for child in metric.children():
                    values[name][child] = self[(name, *child)]
        return values
