"""The tiers' metrics: name, kind, what it says, children. An exporter prefixes the names."""

from __future__ import annotations

from glm_connectors.lmcache_repairs.counters import GAUGES, HELP
from glm_connectors.tiers.envelope import FAULTS
from glm_connectors.tiers.metrics import Metric
from glm_connectors.tiers.pool import OWNERS
from glm_connectors.tiers.siblings import STATES
from glm_connectors.valkey_store.failures import KINDS
from glm_connectors.valkey_store.store import WAYS

TIERS = ("cpu", "valkey")
# How a prefetch ended. resident: nothing was missing. none: no remote tier. down: breaker open. slow: recomputing
# is estimated to be faster. complete: every page came. share: every page that one request may hold is there; the prompt
# goes on. miss: up to the first page that Valkey has not (or had wrong). failed: up to a get that failed. full: no room
# in the pool. cancelled: by its request, which ran or was gone, or by `close`.
PREFETCH_ENDS = (
    "resident",
    "none",
    "down",
    "slow",
    "complete",
    "share",
    "miss",
    "failed",
    "full",
    "cancelled",
)
# Why a put was given up. full: the queue, or its share of the pool. down: the store was, for all its patience.
# failed: three times. closing, cleared: by `close`, `clear`.
DROPS = ("full", "down", "failed", "closing", "cleared")

SIBLING_PAGES = ("copied", "absent", "unusable")

_LOOKUP = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2)
_WAIT = (1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

METRICS: tuple[Metric, ...] = (
    Metric(
        "cache_hit_pages",
        "counter",
        "pages in the pool when their request arrived; of those that were not, those that came before it ran",
        {"tier": TIERS},
    ),
    Metric(
        "cache_miss_pages",
        "counter",
        "pages not in the pool when their request arrived; of those that it may hold, those that did not come",
        {"tier": TIERS},
    ),
    Metric(
        "cache_lost_pages",
        "counter",
        "pages that a request no longer holds, for one that could run before it",
    ),
    Metric(
        "cache_lookup_seconds",
        "histogram",
        "time to look a prompt's pages up in the pool and pin them, on the scheduler's thread",
        buckets=_LOOKUP,
    ),
    Metric(
        "cache_prefetch_seconds", "histogram", "time from a request's arrival to its last page", buckets=_WAIT
    ),
    Metric("cache_prefetches", "counter", "prefetches by how they ended", {"end": PREFETCH_ENDS}),
    Metric("cache_loaded_bytes", "counter", "bytes of pages that came from Valkey"),
    Metric(
        "cache_sibling_pages",
        "counter",
        "pages that another rank of the machine gets for all: copied from it; absent there, or unusable: from Valkey",
        {"outcome": SIBLING_PAGES},
    ),
    Metric("cache_siblings", "gauge", "other ranks that hold the same pages", {"state": STATES}),
    Metric("cache_saved_pages", "counter", "pages that Valkey took"),
    Metric("cache_saved_bytes", "counter", "bytes of pages that Valkey took"),
    Metric("cache_dropped_saves", "counter", "pages that were not put into Valkey", {"reason": DROPS}),
    Metric("cache_save_queue_pages", "gauge", "pages that wait for their put or are being put"),
    Metric("cache_save_queue_bytes", "gauge", "bytes of those pages"),
    Metric("cache_pinned_bytes", "gauge", "bytes of the pool that may not be evicted", {"owner": OWNERS}),
    Metric("cache_pool_bytes", "gauge", "bytes of the CPU pool", {"state": ("total", "free", "resident")}),
    Metric("cache_evicted_pages", "counter", "pages that left the CPU pool for others"),
    Metric("cache_refused_reservations", "counter", "saves for which the pool had no room (stored 0 pages)"),
    Metric(
        "cache_bad_values", "counter", "values that were not the page: deleted, a miss", {"fault": FAULTS}
    ),
    Metric(
        "cache_store_failures", "counter", "failed operations at Valkey", {"operation": WAYS, "kind": KINDS}
    ),
    Metric(
        "cache_breaker_state", "gauge", "0 closed, 1 half-open, 2 open; the worst node", {"operation": WAYS}
    ),
    Metric("cache_load_bytes_per_second", "gauge", "measured rate of loads from Valkey, 0 while unknown"),
    Metric("cache_prefill_tokens_per_second", "gauge", "measured rate of prefill, 0 while unknown"),
    *(
        Metric(f"lmcache_{name}", "gauge" if name in GAUGES else "counter", text)
        for name, text in HELP.items()
    ),
)
