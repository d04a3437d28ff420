"""Valkey as a store of pages: URLs, health, the data path, circuit breakers, an embedded server.

    url = valkey_store.parse("valkey://user:password@10.0.0.5:6379,10.0.0.6:6379")
    findings = valkey_store.probe("valkeys://cache.example")  # for a doctor

A launcher turns `embedded://` into a server once and hands its address to the ranks, which all see the same
pages then:

    with valkey_store.EmbeddedServer(valkey_store.parse("embedded://")) as server:
        start_ranks(cache_url=server.url)

No LMCache and no torch here.
"""

from __future__ import annotations

from glm_connectors.valkey_store.embedded import EmbeddedServer
from glm_connectors.valkey_store.findings import Finding, probe
from glm_connectors.valkey_store.start import check_at_start
from glm_connectors.valkey_store.store import StoreDownError, StoreFailedError, ValkeyStore, uses_glide
from glm_connectors.valkey_store.url import CacheUrlError, Node, StoreUrl, parse

__all__ = [
    "CacheUrlError",
    "EmbeddedServer",
    "Finding",
    "Node",
    "StoreDownError",
    "StoreFailedError",
    "StoreUrl",
    "ValkeyStore",
    "check_at_start",
    "parse",
    "probe",
    "uses_glide",
]
