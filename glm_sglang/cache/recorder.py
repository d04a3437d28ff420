"""What this room counts: plain numbers, kept here and handed to an exporter as they come."""

from __future__ import annotations

import threading
from collections.abc import Callable

from glm_connectors.tiers import Metric, MetricTable, Sink

_SECONDS = (
    1e-5,
    3e-5,
    1e-4,
    3e-4,
    1e-3,
    1.5e-3,
    2e-3,
    3e-3,
    4e-3,
    5e-3,
    1e-2,
    3e-2,
    0.1,
    0.3,
    1.0,
    3.0,
    10.0,
)

# What became of a page of a save: copied into the pool; there already; not copied, because too many copies were waiting,
# the pool had no room to give, the copy failed, or the weights are no longer those that the server started with.
OFFLOAD_ENDS = ("saved", "resident", "queue_full", "pool_full", "failed", "weights_changed")

METRICS: tuple[Metric, ...] = (
    Metric("cache_offload_pages", "counter", "pages offered by the radix tree", {"end": OFFLOAD_ENDS}),
    Metric("cache_offload_queue_pages", "gauge", "pages that wait to be copied into the CPU pool"),
    Metric(
        "cache_load_pages", "counter", "pages copied from the CPU pool to the device: hits that were used"
    ),
    Metric(
        "cache_load_runs",
        "counter",
        "runs of neighbouring host pages that these were in, batch by batch: copies for each part and step of layers",
    ),
    Metric("cache_failed_loads", "counter", "loads whose copy failed; their requests were aborted"),
    Metric("cache_failed_prefetches", "counter", "requests whose prefetch could not be started"),
    Metric(
        "cache_expired_waits",
        "counter",
        "requests that were held back for their pages until their deadline",
    ),
    Metric(
        "cache_off", "gauge", "1 after weights were updated in place: nothing is saved or looked up any more"
    ),
    Metric(
        "cache_registered_bytes",
        "gauge",
        "bytes of the CPU pool pinned in the background so far; 0 where CUDA allocated it at once, or without a GPU",
    ),
    Metric("cache_waiting_requests", "gauge", "requests that have arrived and are not admitted yet"),
    Metric(
        "cache_wait_seconds",
        "histogram",
        "from when the request could first run until nothing held it back",
        buckets=_SECONDS,
    ),
    Metric(
        "cache_load_wait_seconds",
        "histogram",
        "what the scheduler's thread waited for a batch's loads while it launched the batch and right after: part of "
        "scheduler_stall_seconds",
        buckets=_SECONDS,
    ),
    Metric(
        "cache_hash_seconds",
        "histogram",
        "hashing a prompt's pages at its arrival, off the scheduler's thread",
        buckets=_SECONDS,
    ),
    Metric(
        "scheduler_stall_seconds",
        "histogram",
        "time that a scheduling step spent in the cache, waits of the forward's launch for loads and insertions into "
        "SGLang's tree among it, of steps that had work there",
        buckets=_SECONDS,
    ),
    Metric(
        "scheduler_hold_seconds",
        "histogram",
        "the same of steps that had no other work there than to ask whether requests that are held back may run",
        buckets=_SECONDS,
    ),
    Metric(
        "scheduler_stall_running_seconds",
        "histogram",
        "scheduler_stall_seconds without the time in which other threads had the cores; only with GLM_SGLANG_CACHE_AUDIT",
        buckets=_SECONDS,
    ),
    Metric(
        "scheduler_hold_running_seconds",
        "histogram",
        "scheduler_hold_seconds without the time in which other threads had the cores; only with GLM_SGLANG_CACHE_AUDIT",
        buckets=_SECONDS,
    ),
    Metric(
        "scheduler_stall_max_seconds",
        "gauge",
        "longest time that any step, an idle one too, spent in the cache",
    ),
)


class Recorder:
    """Numbers of one linker, and the exporter's turn once a second."""

    def __init__(
        self, sink: Sink | None = None, poll: Callable[[], None] | None = None, every_s: float = 1.0
    ) -> None:
        """sink: gets each event. poll: called every `every_s` seconds, for what is read rather than counted."""
        self.table = MetricTable(METRICS, sink)
        self._poll = poll
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, name: str, *child: str, amount: float = 1) -> None:
        """A counter grows."""
        self.table.add(name, *child, amount=amount)

    def observe(self, name: str, value: float) -> None:
        """A histogram gets a value."""
        self.table.observe(name, value=value)

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        """How a gauge is read; must not block."""
        self.table.read_from(name, read=read)

    def start(self) -> None:
        """Starts the exporter's turns, where there is one."""
        if self._poll is not None and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="glm-cache-metrics", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends them, after a last one."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        assert self._poll is not None
        while True:
            ended = self._ended.wait(self._every_s)
            self._poll()
            if ended:
                return
