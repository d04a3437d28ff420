"""The tiers below a GPU's radix tree: pages of KV in a CPU pool and in Valkey.

    from glm_connectors import tiers

    layout = tiers.PageLayout(64, (("kv", 78 * 64 * 656), ("index", 21 * 64 * 132)))
    space = tiers.Namespace(model, revision, "fp8", layout, indexer, parallel="")
    store = tiers.TieredStore(tiers.TierConfig(url="embedded://"), space, writer=True)
    ticket = store.prefetch(rid, keys)         # when a request arrives; keys: 32-byte page hashes
    pages = store.pin(keys)                    # the prefix that is in the pool; then copy, then release
    store.cancel(rid)                          # it runs, or is gone
    pages = store.reserve(4)                   # fill them, then commit or abandon
    store.metrics.snapshot()                   # for whatever exports metrics

Nothing here knows SGLang. A process that builds a store has LMCache repaired by it
(`lmcache_repairs.install`).
"""

from __future__ import annotations

from glm_connectors.tiers.config import TierConfig
from glm_connectors.tiers.layout import Namespace, PageLayout
from glm_connectors.tiers.metrics import Histogram, Metric, MetricTable, Sink
from glm_connectors.tiers.pool import Page
from glm_connectors.tiers.share import Share
from glm_connectors.tiers.siblings import Place, Siblings
from glm_connectors.tiers.store import TieredStore
from glm_connectors.tiers.ticket import Ticket

__all__ = [
    "Histogram",
    "Metric",
    "MetricTable",
    "Namespace",
    "Page",
    "PageLayout",
    "Place",
    "Share",
    "Siblings",
    "Sink",
    "Ticket",
    "TierConfig",
    "TieredStore",
]
