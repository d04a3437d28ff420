"""The cache's numbers as Prometheus metrics beside SGLang's: `glm_sglang:cache_…`, `glm_sglang:lmcache_…`.

Every child is there from the start. The label `rank` is SGLang's tp_rank: each rank has a pool of its own, so a sum
over ranks counts a page once a rank.
"""

from __future__ import annotations

import os
from typing import Any

from glm_connectors.tiers import Metric, MetricTable
from glm_connectors.tiers.metrics import Child

PREFIX = "glm_sglang:"
_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


class Exporter:
    """A `Sink` of one rank's tables: histograms as they grow, counters and gauges when `poll` is called.

    Does nothing where SGLang's metrics are off (--enable-metrics).
    """

    def __init__(self, rank: str) -> None:
        self._rank = rank
        self._on = bool(os.environ.get(_VARIABLE))
        self._tables: list[MetricTable] = []
        self._children: dict[tuple[str, Child], Any] = {}
        self._exported: dict[tuple[str, Child], float] = {}

    def watch(self, *tables: MetricTable) -> None:
        """Exports these from now on. ValueError for a name that two of them have."""
        if not self._on:
            return
        for table in tables:
            for metric in table.metrics.values():
                self._declare(metric)
            self._tables.append(table)
        self.poll()

    def add(self, name: str, child: Child, amount: float) -> None:
        """Counters are read by `poll`: some of them are kept elsewhere and never pass here."""

    def observe(self, name: str, child: Child, value: float) -> None:
        """A histogram got a value. Any thread."""
        if found := self._children.get((name, child)):
            found.observe(value)

    def poll(self) -> None:
        """Brings counters and gauges up to date; one thread at a time."""
        for table in self._tables:
            for name, metric in table.metrics.items():
                if metric.kind == "histogram":
                    continue
                for child in metric.children():
                    value = float(table[(name, *child)])
                    if metric.kind == "gauge":
                        self._children[name, child].set(value)
                        continue
                    before = self._exported.get((name, child), 0.0)
                    self._children[name, child].inc(max(0.0, value - before))
                    self._exported[name, child] = value

    def _declare(self, metric: Metric) -> None:
        # prometheus_client decides for its multi-process mode when it is imported; SGLang has set it up by now.
        from prometheus_client import Counter, Gauge, Histogram

        name, labels = PREFIX + metric.name, ("rank", *metric.labels)
        made: Any
        if metric.kind == "counter":
            made = Counter(name, metric.help, labels)
        elif metric.kind == "gauge":
            made = Gauge(name, metric.help, labels, multiprocess_mode="sum")
        else:
            made = Histogram(name, metric.help, labels, buckets=metric.buckets)
        for child in metric.children():
            if (metric.name, child) in self._children:
                raise ValueError(f"two tables have a metric called {metric.name}")
            self._children[metric.name, child] = made.labels(self._rank, *child)
