"""Clusters of several primaries: a shard that is down costs its own keys and no others'."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from clusters import Cluster, running
from glm_connectors.tiers.envelope import Envelope
from glm_connectors.valkey_store import Node, ValkeyStore, parse
from glm_connectors.valkey_store.breaker import CLOSED, OPEN
from glm_connectors.valkey_store.cluster import SLOTS, ClusterShards
from ranks import NAMESPACE, Rank, keys, until
from strangers import stranger
from tls_files import issuer
from valkey_proxy import Proxy

Make = Callable[..., Rank]
DEAD = 1


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running(3) as three:
        yield three


def shards(rank: Rank, cluster: Cluster, chain: Sequence[bytes]) -> list[list[bytes]]:
    """The keys of each of the cluster's primaries."""
    valkey = rank.store._remote.valkey  # type: ignore[union-attr]
    numbers = {node.port: number for number, node in enumerate(valkey.nodes)}
    return [
        [key for key in chain if valkey.shards.place(key) == numbers[port]]
        for port in cluster.ports
        if port in numbers
    ]


def state(rank: Rank, cluster: Cluster, number: int, way: str) -> int:
    valkey = rank.store._remote.valkey  # type: ignore[union-attr]
    (index,) = (i for i, node in enumerate(valkey.nodes) if node.port == cluster.ports[number])
    return int(valkey.breakers[index, way].state)


def test_a_key_is_placed_where_the_cluster_has_it(cluster: Cluster, rank: Make) -> None:
    """As each server counts its own, and as one of them says of each name."""
    writer = rank(cluster.url(), request_timeout=2.0)
    chain = keys(60)
    theirs = shards(writer, cluster, chain)
    assert writer.save(chain) == 60
    assert [client.dbsize() for client in cluster.clients] == [len(some) for some in theirs]
    assert min(map(len, theirs)) > 5
    name = Envelope(NAMESPACE).name
    for number, some in enumerate(theirs):
        first, last, *_ = sorted(cluster.clients[0].execute_command("CLUSTER SLOTS"))[number]
        for key in some:
            assert first <= cluster.clients[0].execute_command("CLUSTER KEYSLOT", name(key)) <= last
    reader = rank(cluster.url(), writer=False, request_timeout=2.0)
    assert reader.fetch(chain) == "complete"
    assert reader.hits(chain) == 60


def test_a_dead_primary_costs_its_own_keys(cluster: Cluster, rank: Make) -> None:
    writer = rank(cluster.url(), request_timeout=2.0, save_patience=120.0)
    reader = rank(cluster.url(), writer=False, request_timeout=2.0)
    chain = keys(60)
    assert writer.save(chain) == 60
    assert reader.fetch(keys(3, "nothing")) == "miss"  # connected
    theirs = shards(writer, cluster, chain)
    dead, live = theirs[DEAD], [key for n, some in enumerate(theirs) if n != DEAD for key in some]
    cluster.kill(DEAD)

    # Gets: five failures, and its keys are down at once; all others come.
    ends: list[str] = []
    until(lambda: ends.append(reader.fetch(dead[:1])) or ends[-1] == "down")  # type: ignore[func-returns-value]
    assert sum(reader.metrics.snapshot()["cache_store_failures"].values()) >= 5
    assert [reader.fetch([key]) for key in live] == ["complete"] * len(live)
    assert [reader.hits([key]) for key in live] == [1] * len(live)
    assert [state(reader, cluster, n, "get") for n in range(3)] == [CLOSED, OPEN, CLOSED]
    assert reader.metrics["cache_breaker_state", "get"] == OPEN

    # Puts: its own wait, and those of the others pass them.
    theirs = shards(writer, cluster, keys(60, "second"))
    before = writer.metrics["cache_saved_pages"]
    writer.commit(theirs[DEAD])
    until(lambda: state(writer, cluster, DEAD, "put") == OPEN)
    others = [key for n, some in enumerate(theirs) if n != DEAD for key in some]
    writer.commit(others)
    until(lambda: writer.metrics["cache_saved_pages"] - before == len(others))
    assert writer.metrics["cache_save_queue_pages"] == len(theirs[DEAD])
    assert [state(writer, cluster, n, "put") for n in range(3)] == [CLOSED, OPEN, CLOSED]

    # It is back, empty: what had waited is saved, and its keys come again.
    cluster.start(DEAD)
    until(lambda: writer.metrics["cache_save_queue_pages"] == 0, seconds=60)
    assert writer.metrics["cache_saved_pages"] - before == 60
    until(lambda: reader.fetch(theirs[DEAD]) == "complete", seconds=60)
    assert reader.hits(theirs[DEAD]) == len(theirs[DEAD])
    assert state(reader, cluster, DEAD, "get") == CLOSED


def test_a_shard_whose_replica_takes_over_is_asked_again(cluster: Cluster, rank: Make) -> None:
    reader = rank(cluster.url(), writer=False, request_timeout=2.0)
    writer = rank(cluster.url(), request_timeout=2.0)
    chain = keys(60)
    dead = shards(reader, cluster, chain)[DEAD]
    replica = cluster.replica(DEAD)
    assert writer.save(chain) == 60
    until(lambda: cluster.clients[replica].dbsize() == len(dead))
    cluster.kill(DEAD)
    until(lambda: reader.fetch(dead[:1]) == "down")
    cluster.clients[replica].execute_command("CLUSTER FAILOVER", "TAKEOVER")
    until(lambda: reader.fetch(dead) == "complete", seconds=60)
    assert reader.hits(dead) == len(dead)
    assert writer.save(keys(60, "after")) == 60


def test_a_cluster_that_is_down_at_the_start_serves_once_it_is_there(cluster: Cluster, rank: Make) -> None:
    """As one: which shards it has was not to be found out."""
    for number in range(3):
        cluster.kill(number)
    writer = rank(cluster.url(), request_timeout=2.0, save_patience=120.0)
    assert writer.metrics["cache_breaker_state", "get"] == OPEN
    writer.commit(keys(30))
    for number in range(3):
        cluster.start(number)
    until(lambda: writer.metrics["cache_save_queue_pages"] == 0, seconds=60)
    assert writer.metrics["cache_saved_pages"] == 30
    reader = rank(cluster.url(), writer=False, request_timeout=2.0)
    assert reader.fetch(keys(30)) == "complete"


def test_a_store_that_closes_asks_no_further_node() -> None:
    """Three of which each hangs up: all are asked at the start, one by the probe, which the store's end meets there."""
    asked = 0
    made = threading.Event()
    stores: list[ValkeyStore] = []

    def serve(connection: socket.socket) -> None:
        nonlocal asked
        with connection:
            asked += 1
            if asked == 4:
                assert made.wait(30)
                stores[0].stop_waiting()

    with ExitStack() as stack:
        ports = [stack.enter_context(stranger(serve)) for _ in range(3)]
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        stores.append(ValkeyStore(parse(f"valkey-cluster://{hosts}"), connect_timeout=10.0))
        made.set()
        watcher = stores[0]._watcher
        watcher.join(60)
        assert not watcher.is_alive()
        stores[0].close()
        assert asked == 4


def test_nor_the_node_that_has_the_slots_now(cluster: Cluster) -> None:
    """The store closes while it is told who that is."""
    nodes = [Node("127.0.0.1", port) for port in cluster.ports]
    shards = ClusterShards([nodes[0]] * SLOTS, bytes.hex)
    url = parse(cluster.url())
    assert shards.answers(0, url, 10.0, lambda: False)
    looks = iter([False])
    assert not shards.answers(0, url, 10.0, lambda: next(looks, True))


def test_tls_to_a_cluster(cluster: Cluster, rank: Make, tmp_path: Path) -> None:
    """Each node says that it is to be reached at its proxy, which ends TLS."""
    ca, crt, key = issuer(tmp_path, "ours")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(crt, key)
    proxies = [Proxy(port, tls=context) for port in cluster.ports]
    try:
        for client, proxy in zip(cluster.clients, proxies, strict=True):
            client.config_set("cluster-announce-port", proxy.port)
        wanted = sorted(proxy.port for proxy in proxies)

        def announced(client: object) -> bool:
            ranges = client.execute_command("CLUSTER SLOTS")  # type: ignore[attr-defined]
            return sorted(row[2][1] for row in ranges) == wanted

        until(lambda: all(map(announced, cluster.clients)))
        url = f"valkeys-cluster://127.0.0.1:{proxies[0].port}?ca={ca}"
        bounds = {"request_timeout": 5.0, "connect_timeout": 5.0}
        chain = keys(30)
        assert rank(url, **bounds).save(chain) == 30
        assert min(client.dbsize() for client in cluster.clients) > 0
        reader = rank(url, writer=False, **bounds)
        assert len(reader.store._remote.valkey.nodes) == 3  # type: ignore[union-attr]
        assert reader.fetch(chain) == "complete"
        assert reader.hits(chain) == 30
    finally:
        for proxy in proxies:
            proxy.close()
