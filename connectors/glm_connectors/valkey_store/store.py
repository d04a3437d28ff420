"""Valkey as the tiers see it: named values on nodes, a breaker for each node and direction, failures by name.

A cluster's nodes are its shards, by the primaries that it had at the start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, NoReturn

from glm_connectors.valkey_store import health
from glm_connectors.valkey_store.breaker import CLOSED, Breaker
from glm_connectors.valkey_store.clients import Clients
from glm_connectors.valkey_store.cluster import SLOTS, ClusterShards, owners
from glm_connectors.valkey_store.failures import PASSING, kind_of, remedy
from glm_connectors.valkey_store.glide import GlideClients
from glm_connectors.valkey_store.shards import Shards
from glm_connectors.valkey_store.sockets import LONGEST, SocketClients
from glm_connectors.valkey_store.start import check_at_start
from glm_connectors.valkey_store.url import Node, StoreUrl

logger = logging.getLogger(__name__)

Way = Literal["get", "put"]
WAYS: tuple[Way, ...] = ("get", "put")


class StoreDownError(RuntimeError):
    """The node's breaker is open: nothing was sent."""


class StoreFailedError(RuntimeError):
    """The node failed. `kind`: a word from `failures.KINDS`. `taken`: of a put, which values it took."""

    def __init__(self, kind: str, text: str, taken: Sequence[bool] = ()) -> None:
        super().__init__(text)
        self.kind, self.taken = kind, taken

    @property
    def passing(self) -> bool:
        """Whether the same operation may well succeed later."""
        return self.kind in PASSING


def uses_glide(url: StoreUrl) -> bool:
    """Whether values go over `valkey-glide-sync`, whose import takes half a second; else over our own sockets."""
    return url.cluster or url.tls


class ValkeyStore:
    """Gets, puts and deletes of named values. Blocking; for worker threads, except where said.

    on_failure(way, kind) is told each failed operation, from the thread that had it.
    """

    def __init__(
        self,
        url: StoreUrl,
        *,
        request_timeout: float = 2.0,
        connect_timeout: float = 2.0,
        ttl: int = 0,
        name_of: Callable[[bytes], str] = bytes.hex,
        on_failure: Callable[[Way, str], None] = lambda way, kind: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """CacheUrlError as `start.check_at_start`. A node that is down opens its breakers, with a warning.

        name_of: what a key is called in Valkey, by which a cluster places it. A cluster of which nobody answers is one
        node, with one breaker a way, until the next start.
        """
        self.url = url
        self._timeout = connect_timeout
        # Seconds that a call takes at most: connect, sign in, move values.
        self.longest_call = 2 * connect_timeout + LONGEST * request_timeout
        self._on_failure = on_failure
        down = check_at_start(url, connect_timeout)
        self.shards: Shards | ClusterShards = Shards(url.nodes)
        self.nodes: tuple[Node, ...] = url.nodes
        if url.cluster:
            there = [node for node in url.nodes if node not in down]
            slots = owners(url, there, connect_timeout)
            if slots is None or not any(slots):
                slots = [(there or url.nodes)[0]] * SLOTS
            self.shards = ClusterShards(slots, name_of)
            self.nodes = self.shards.nodes
        self.breakers: dict[tuple[int, Way], Breaker] = {
            (number, way): Breaker(clock=clock) for number in range(len(self.nodes)) for way in WAYS
        }
        path = GlideClients if uses_glide(url) else SocketClients
        self._clients: Clients = path(url, request_timeout, connect_timeout, ttl)
        self._opened = threading.Event()
        self._closing = False
        for number, node in enumerate(self.nodes):
            if node in down:
                logger.warning("%s does not answer (%s): misses until it does", node, down[node])
                for way in WAYS:
                    self.breakers[number, way].trip()
                self._opened.set()
        self._watcher = threading.Thread(target=self._watch, name="glm-valkey-health", daemon=True)
        self._watcher.start()

    @property
    def batches_reads(self) -> bool:
        """Whether several values may be read in one command (a cluster's keys lie in different slots)."""
        return not self.url.cluster

    def state(self, way: Way) -> int:
        """The worst state over all nodes: 0 closed, 1 half-open, 2 open. Any thread, never blocks."""
        return max(self.breakers[number, way].state for number in range(len(self.nodes)))

    def usable(self, way: Way) -> bool:
        """Whether any node would take an operation or a trial now. Any thread, never blocks."""
        return any(self.breakers[number, way].due() is None for number in range(len(self.nodes)))

    def get(self, node: int, names: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        """Values into buffers: bytes read, clients.ABSENT or clients.MISFIT each. StoreDownError, StoreFailedError."""
        breaker = self._admit(node, "get")
        try:
            found = self._clients.read(node, names, buffers)
        except Exception as error:
            self._failed(node, "get", breaker, error)
        breaker.succeeded()
        return found

    def put(self, node: int, names: Sequence[str], values: Sequence[memoryview]) -> None:
        """Stores values. StoreDownError, StoreFailedError: then those that it says were taken all the same."""
        breaker = self._admit(node, "put")
        try:
            answers = self._clients.write(node, names, values)
        except Exception as error:
            self._failed(node, "put", breaker, error)
        refusals = [answer for answer in answers if answer is not None]
        if refusals:
            self._failed(node, "put", breaker, refusals[0], [answer is None for answer in answers])
        breaker.succeeded()

    def delete(self, node: int, names: Sequence[str]) -> bool:
        """Deletes values, as well as it can: a wrong value that stays is found wrong again."""
        try:
            self._clients.delete(node, names)
        except Exception as error:
            self._on_failure("put", kind_of(error))
            return False
        return True

    def stop_waiting(self) -> None:
        """Nodes that are down are not asked any more."""
        self._closing = True
        self._opened.set()

    def close(self) -> None:
        """Closes the connections; no thread may be in a call any more."""
        self.stop_waiting()
        self._watcher.join(2 * self._timeout + 1)
        self._clients.close()

    def _admit(self, node: int, way: Way) -> Breaker:
        breaker = self.breakers[node, way]
        if not breaker.admits():
            raise StoreDownError(f"{self.nodes[node]} is left alone for now")
        return breaker

    def _failed(
        self, node: int, way: Way, breaker: Breaker, error: Exception, taken: Sequence[bool] = ()
    ) -> NoReturn:
        kind = kind_of(error)
        if kind == "moved" and self.url.cluster:
            kind = (
                "failover"  # UPSTREAM: glide asks any node where it does not reach the one that has the slot
            )
        self._on_failure(way, kind)
        if breaker.failed():
            text = health.said(self.url, error) + remedy(error)
            logger.warning("%ss of %s: breaker opens (%s): %s", way, self.nodes[node], kind, text)
            self._opened.set()
        raise StoreFailedError(kind, f"{way} at {self.nodes[node]}: {kind}", taken) from None

    def _watch(self) -> None:
        """Asks nodes whose breaker is open, when they are due, until they answer."""
        while not self._closing:
            waits = self.probe_due()
            if waits is None:
                self._opened.wait()
                self._opened.clear()
            else:
                self._opened.wait(waits)
                self._opened.clear()

    def probe_due(self) -> float | None:
        """Asks each node that is due once. Seconds until the next is due, None where no breaker is open."""
        answers: dict[int, bool] = {}
        for (number, way), breaker in self.breakers.items():
            if breaker.due() == 0 and not self._closing:
                if number not in answers:
                    answers[number] = self._answers(number)
                breaker.probed(answers[number])
                if answers[number]:
                    logger.warning("%s answers again: %ss are tried", self.nodes[number], way)
        waits = [wait for breaker in self.breakers.values() if (wait := breaker.due()) is not None]
        return min(waits) if waits else None

    def _answers(self, number: int) -> bool:
        if isinstance(self.shards, ClusterShards):
            return self.shards.answers(number, self.url, self._timeout, lambda: self._closing)
        return health.alive(self.url, self.nodes[number], self._timeout) is None


__all__ = ["CLOSED", "WAYS", "StoreDownError", "StoreFailedError", "ValkeyStore", "Way"]
