"""The data path to clusters and over TLS: values between Valkey and memory, through `valkey-glide-sync`.

Each thread has a connection of its own to each node (a cluster has one client a thread, whatever the shard), made at
first use.
One that breaks is made again by glide, in the background. One on which a call has timed out is thrown away:
replies come in order, so behind one that never comes there is nothing, and glide does not reconnect for it (a
firewall that forgot the connection looks like that). A single node that says that it is no longer the one to ask is
left by all threads; a cluster's new primary glide finds by itself. A value is read straight into the caller's buffer
and written straight from it: glide copies a command's arguments before it sends them and a reply after it is
complete, so when a call has returned, or raised, nobody uses the buffer any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from glm_connectors.valkey_store.clients import ABSENT, MISFIT, PerThread, raise_without_frames
from glm_connectors.valkey_store.failures import kind_of, wants_another
from glm_connectors.valkey_store.url import Node, StoreUrl

__all__ = ["ABSENT", "MISFIT", "GlideClients"]

_NOT_OURS = ("exceeds buffer capacity", "WRONGTYPE")  # glide's and Valkey's words for it


class GlideClients:
    """Connections of a pool of threads to the nodes of one URL; see `clients.Clients`.

    request_timeout: seconds for a whole call: what has come of a reply, glide does not say. connect_timeout: seconds.
    ttl: seconds that a value lives, 0 for ever.
    """

    def __init__(self, url: StoreUrl, request_timeout: float, connect_timeout: float, ttl: int) -> None:
        self._url = url
        self._request_ms = max(1, round(1000 * request_timeout))
        self._connect_ms = max(1, round(1000 * connect_timeout))
        self._ttl = ttl
        self._clients: PerThread[Any] = PerThread(self._connect_to)

    def read(self, node: int, names: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        """As `clients.Clients.read`. Raises glide's errors."""
        client = self._clients.of(self._of(node))
        try:
            if len(names) == 1:
                found = [client.get(names[0], buffer=buffers[0])]
            else:
                found = client.mget(list(names), buffers=list(buffers))
            return [ABSENT if length is None else int(length) for length in found]
        except Exception as error:
            if not any(sign in str(error) for sign in _NOT_OURS):
                self._fail(node, error)
        if len(names) == 1:
            return [MISFIT]
        # Which one it was, glide does not say.
        return [self.read(node, [name], [buffer])[0] for name, buffer in zip(names, buffers, strict=True)]

    def write(self, node: int, names: Sequence[str], values: Sequence[memoryview]) -> list[Exception | None]:
        """As `clients.Clients.write`. Raises glide's errors."""
        import glide_sync

        client = self._clients.of(self._of(node))
        expiry = glide_sync.ExpirySet(glide_sync.ExpiryType.SEC, self._ttl) if self._ttl else None
        try:
            if len(names) == 1:
                client.set(names[0], values[0], expiry=expiry)
                return [None]
            batch: Any = (glide_sync.ClusterBatch if self._url.cluster else glide_sync.Batch)(is_atomic=False)
            for name, value in zip(names, values, strict=True):
                batch.set(name, value, expiry=expiry)
            answers = client.exec(batch, raise_on_error=False)
        except Exception as error:
            self._fail(node, error)
        refusals = [answer if isinstance(answer, Exception) else None for answer in answers]
        for refusal in refusals:
            if refusal is not None and self._is_left_after(refusal):
                self._clients.leave(node)
                break
        return refusals

    def delete(self, node: int, names: Sequence[str]) -> int:
        """As `clients.Clients.delete`. Raises glide's errors."""
        client = self._clients.of(self._of(node))
        try:
            return int(client.delete(list(names)))
        except Exception as error:
            self._fail(node, error)

    def close(self) -> None:
        """As `clients.Clients.close`."""
        self._clients.close()

    def _fail(self, node: int, error: Exception) -> NoReturn:
        if kind_of(error) in ("timeout", "connection"):
            self._clients.drop(self._of(node))
        elif self._is_left_after(error):
            self._clients.leave(node)
        try:
            raise_without_frames(error)
        finally:
            del error  # as in raise_without_frames

    def _of(self, node: int) -> int:
        """Whose connection serves it: a cluster's client serves all shards."""
        return 0 if self._url.cluster else node

    def _is_left_after(self, error: Exception) -> bool:
        return not self._url.cluster and wants_another(error)

    def _connect_to(self, node: int) -> Any:
        return self._connect(self._url.nodes if self._url.cluster else self._url.nodes[node : node + 1])

    def _connect(self, nodes: Sequence[Node]) -> Any:
        import glide_sync

        # Every failure is raised, counted and named by us; glide would log each of them as well.
        # UPSTREAM: its library writes what refuses a command to standard error all the same ("Error executing command").
        # Its commands carry names and pages; it does not do so with what refuses a sign-in.
        glide_sync.Logger.set_logger_config(glide_sync.LogLevel.OFF)
        url = self._url
        tls = None
        if url.tls:
            tls = glide_sync.TlsAdvancedConfiguration(
                root_pem_cacerts=_bytes_of(url.ca) if url.ca else None,
                client_cert_pem=_bytes_of(url.cert) if url.cert else None,
                client_key_pem=_bytes_of(url.key) if url.key else None,
            )
        common: dict[str, Any] = {
            "addresses": [glide_sync.NodeAddress(node.host, node.port) for node in nodes],
            "use_tls": url.tls,
            "request_timeout": self._request_ms,
            # Retries within at most 100 ms·2^4, jittered, and for ever: glide's own reconnect in the background.
            "reconnect_strategy": glide_sync.BackoffStrategy(4, 100, 2),
            "client_name": "glm_connectors",
        }
        if url.password:
            common["credentials"] = glide_sync.ServerCredentials(url.password, url.username or None)
        if url.cluster:
            advanced = glide_sync.AdvancedGlideClusterClientConfiguration(self._connect_ms, tls)
            config = glide_sync.GlideClusterClientConfiguration(advanced_config=advanced, **common)
            return glide_sync.GlideClusterClient.create(config)
        advanced = glide_sync.AdvancedGlideClientConfiguration(self._connect_ms, tls)
        config = glide_sync.GlideClientConfiguration(
            advanced_config=advanced, database_id=url.database, **common
        )
        return glide_sync.GlideClient.create(config)


def _bytes_of(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
