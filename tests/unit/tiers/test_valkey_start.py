"""What is asked of a store before anything is loaded: who will never serve pages is told from who is down."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from glm_connectors.valkey_store import (
    CacheUrlError,
    EmbeddedServer,
    StoreFailedError,
    StoreUrl,
    ValkeyStore,
    check_at_start,
    health,
    parse,
    start,
)
from glm_connectors.valkey_store.breaker import CLOSED
from ranks import until
from strangers import stranger
from tls_files import issuer
from valkey_proxy import Fault, Proxy

SECRET = "hunter2"


# Seconds. What must time out has less: nothing else depends on how fast this machine is.
TIMEOUT = 10.0


def refusal(url: str, timeout: float = TIMEOUT) -> str:
    """The one message; never with the password in it."""
    with pytest.raises(CacheUrlError) as caught:
        check_at_start(parse(url), timeout, thorough=True)
    message = str(caught.value)
    assert message.startswith("--glm-cache-url: ")
    assert SECRET not in message
    assert "\n" not in message
    return message


def down(url: str, timeout: float = TIMEOUT) -> list[str]:
    return list(check_at_start(parse(url), timeout, thorough=True).values())


@pytest.fixture
def some(server: EmbeddedServer, client: Any) -> Iterator[str]:
    """The URL of a user who may what the README says, and nothing else."""
    rights = ("~glm:*", "+get", "+mget", "+set", "+del")
    client.execute_command("ACL", "SETUSER", "some", "on", f">{SECRET}", *rights)
    yield server.url.replace("//", f"//some:{SECRET}@")
    client.execute_command("ACL", "DELUSER", "some")


def test_a_store_that_serves_pages(server: EmbeddedServer, client: Any, some: str) -> None:
    """To ask it changes nothing, whatever is there."""
    names = [b"glm:", b"glm:check:", b"other"]
    client.mset(dict.fromkeys(names, "kept"))
    for url in (server.url, some):
        assert down(url) == []
    assert sorted(client.keys()) == names
    assert client.mget(names) == [b"kept"] * 3


def test_no_key_is_asked_for_that_somebody_could_have(server: EmbeddedServer, client: Any, some: str) -> None:
    """Each time it is another, within the rights of a user of pages."""
    client.config_set("slowlog-log-slower-than", 0)
    try:
        seen = []
        for _ in range(2):
            client.slowlog_reset()
            assert down(some) == []
            asked = [entry["command"].split() for entry in client.slowlog_get(128)]
            keys = {words[1] for words in asked if words[0] in (b"GET", b"SET", b"DEL", b"MGET")}
            assert len(keys) == 1
            seen += keys
        assert all(key.startswith(b"glm:") for key in seen)
        assert seen[0] != seen[1]
    finally:
        client.config_set("slowlog-log-slower-than", 10000)


@pytest.mark.parametrize("right", ["get", "mget", "set", "del"])
def test_each_right_that_pages_need_is_asked_for(right: str, client: Any, some: str) -> None:
    client.execute_command("ACL", "SETUSER", "some", f"-{right}")
    message = refusal(some)
    assert f"'{right}' command" in message
    assert "README" in message


def test_a_user_of_other_keys(client: Any, some: str) -> None:
    client.execute_command("ACL", "SETUSER", "some", "resetkeys", "~mine:*")
    assert "give it the rights" in refusal(some)


def test_a_user_who_may_only_read_is_for_readers(client: Any, some: str) -> None:
    """Whoever uses a store without a launcher has its gets."""
    client.execute_command("ACL", "SETUSER", "some", "-set")
    ValkeyStore(parse(some)).close()
    assert "'set' command" in refusal(some)


@pytest.mark.parametrize("user", ["some:wrong", "nobody:wrong", ":wrong", ""])
def test_wrong_credentials(user: str, server: EmbeddedServer, client: Any, some: str) -> None:
    client.config_set("requirepass", SECRET)
    try:
        assert "refuses the credentials" in refusal(server.url.replace("//", f"//{user}@" if user else "//"))
    finally:
        client.config_set("requirepass", "")


def test_a_password_that_the_server_repeats_is_not_passed_on() -> None:
    answer = b"-ERR unknown command 'AUTH', with args beginning with: 'joe' '%s'\r\n" % SECRET.encode()
    with stranger(answer) as port:
        assert "unknown command 'AUTH'" in refusal(f"valkey://joe:{SECRET}@127.0.0.1:{port}")


def test_nor_the_beginning_of_one_that_the_server_cuts() -> None:
    """A token is longer than the 128 bytes that Valkey repeats."""
    token = SECRET * 40
    answer = f"-ERR unknown command 'AUTH', with args beginning with: 'joe' '{token[:121]}\r\n".encode()
    with stranger(answer) as port:
        assert refusal(f"valkey://joe:{token}@127.0.0.1:{port}").endswith("'joe' '***")


@pytest.mark.parametrize(
    ("password", "repeated"),
    [
        ("one line\nanother line", "one line another line"),  # as Valkey does
        ("one line\nanother line", "one line\nanother line"),
        ("one line\nanother line", r"one line\nanother line"),  # a quoted one
        ("gemäß\x07", "gemäß\x07"),
        ("gemäß\x07", r"gemäß\x07"),
        ("gemäß\x07", r"gem\xe4\xdf\x07"),
        ("abc", "abc"),
    ],
)
def test_nor_one_that_comes_back_otherwise(password: str, repeated: str) -> None:
    url = StoreUrl("valkey", password=password)
    text = health.said(url, RuntimeError(f"ERR 'AUTH' 'joe' '{repeated}' is no command"))
    assert text.startswith("ERR 'AUTH' 'joe' '***")
    assert not [word for word in (*password.split(), *repeated.split()) if len(word) > 2 and word in text]


@pytest.mark.parametrize("verb", [b"AUTH", b"GET"])
def test_nor_does_a_breaker_that_opens_pass_it_on(
    verb: bytes, client: Any, some: str, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """It says what the server says, but the password."""
    store = ValkeyStore(parse(some.rpartition(":")[0] + f":{proxy.port}"), request_timeout=TIMEOUT)
    fails_without_the_password(store, proxy, verb, caplog)


def test_nor_over_glide(
    server: EmbeddedServer, client: Any, some: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client.execute_command("ACL", "SETUSER", "some", "+info", "+client|setname")
    ca, crt, key = issuer(tmp_path, "ours")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(crt, key)
    between = Proxy(server.port, tls=context)
    try:
        url = f"{some.replace('valkey', 'valkeys').rpartition(':')[0]}:{between.port}?ca={ca}"
        store = ValkeyStore(parse(url), request_timeout=TIMEOUT, connect_timeout=TIMEOUT)
        fails_without_the_password(store, between, b"GET", caplog)
    finally:
        between.close()


def fails_without_the_password(
    store: ValkeyStore, proxy: Proxy, verb: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"-ERR unknown command '{verb.decode()}', with args beginning with: 'joe' '{SECRET}'\r\n"
    proxy.fault = Fault("answer", "request", text=text.encode(), match=verb)
    try:
        while store.breakers[0, "get"].state == CLOSED:
            with pytest.raises(StoreFailedError) as caught:
                store.get(0, ["page"], [memoryview(bytearray(8))])
            assert SECRET not in str(caught.value)
    finally:
        proxy.fault = None
        store.close()
    (opens,) = [message for message in caplog.messages if "breaker opens" in message]
    assert f"unknown command '{verb.decode()}', with args beginning with: 'joe' '***'" in opens
    assert SECRET not in caplog.text


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n"])
@pytest.mark.parametrize("scheme", ["valkey", "valkey-cluster"])
def test_what_is_no_valkey(said: bytes, scheme: str) -> None:
    with stranger(said) as port:
        assert f"127.0.0.1:{port} is no Valkey" in refusal(f"{scheme}://joe:{SECRET}@127.0.0.1:{port}")


def test_an_echo_does_not_bring_the_password_back() -> None:
    with stranger(b"", echo=True) as port:
        refusal(f"valkey://:{SECRET}@127.0.0.1:{port}")


@pytest.mark.parametrize(("version", "fits"), [("5.0.14", False), ("6.0.20", False), ("6.2.0", True)])
def test_an_old_server(version: str, fits: bool, proxy: Proxy) -> None:
    info = f"redis_version:{version}\r\ncluster_enabled:0\r\n"
    text = f"${len(info)}\r\n{info}\r\n".encode()
    proxy.fault = Fault("answer", "request", text=text, match=b"INFO")
    url = f"valkey://127.0.0.1:{proxy.port}"
    if fits:
        assert down(url) == []
    else:
        assert "is of version " + version[:3] in refusal(url)


def test_a_database_that_is_not_there(server: EmbeddedServer) -> None:
    assert "DB index is out of range" in refusal(f"{server.url}/99")


def test_tls_where_there_is_none_and_none_where_it_is(server: EmbeddedServer, tmp_path: Path) -> None:
    ca, crt, key = issuer(tmp_path, "ours")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(crt, key)
    between = Proxy(server.port, tls=context)
    try:
        assert down(f"valkeys://127.0.0.1:{between.port}?ca={ca}") == []
        assert "?ca=FILE names the authority" in refusal(f"valkeys://127.0.0.1:{between.port}")
        assert "speaks TLS: use valkeys://" in refusal(f"valkey://:{SECRET}@127.0.0.1:{between.port}")
        assert "use valkeys-cluster://" in refusal(f"valkey-cluster://127.0.0.1:{between.port}")
        assert "speaks no TLS: use valkey://" in refusal(f"valkeys://127.0.0.1:{server.port}", 1.0)  # silence
    finally:
        between.close()


@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
def test_who_we_are_is_asked_for(version: str, tmp_path: Path) -> None:
    """In TLS 1.3 that is said after the handshake: it is heard, whatever we were about to write."""
    ca, crt, key = issuer(tmp_path, "ours")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(crt, key)
    context.load_verify_locations(ca)
    context.verify_mode, context.maximum_version = ssl.CERT_REQUIRED, ssl.TLSVersion[version]

    def accept(connection: socket.socket) -> None:
        with suppress(OSError), context.wrap_socket(connection, server_side=True) as one:
            one.recv(1)

    with stranger(accept) as port:
        for _ in range(5):
            assert "?cert=FILE&key=FILE who we are" in refusal(
                f"valkeys://joe:{SECRET}@127.0.0.1:{port}?ca={ca}"
            )


def test_an_encrypted_key_is_refused_and_no_terminal_asked(tmp_path: Path) -> None:
    """OpenSSL asks whoever is there, and the launcher waits for nobody."""
    from cryptography.hazmat.primitives import serialization as form

    ca, crt, key = issuer(tmp_path, "ours")
    plain = form.load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(
        plain.private_bytes(
            form.Encoding.PEM, form.PrivateFormat.PKCS8, form.BestAvailableEncryption(SECRET.encode())
        )
    )
    with stranger(b"") as port:
        assert "?cert=FILE&key=FILE" in refusal(f"valkeys://127.0.0.1:{port}?ca={ca}&cert={crt}&key={key}")


def test_who_is_down_is_no_refusal(server: EmbeddedServer, client: Any) -> None:
    """Nor one of several, nor one that is silent, loads its data, or has too many clients."""
    assert down("valkey://127.0.0.1:1") == ["connection"]
    assert down(f"valkey://127.0.0.1:{server.port},127.0.0.1:1") == ["connection"]
    assert down("valkey-cluster://127.0.0.1:1") == ["connection"]
    for answer, timeout, kinds in (
        (None, 0.2, {"timeout"}),
        (b"", TIMEOUT, {"connection"}),
        (b"-LOADING Valkey is loading the dataset in memory\r\n", TIMEOUT, {"loading"}),
        # A reset may be faster.
        (b"-ERR max number of clients reached\r\n", TIMEOUT, {"refused", "connection"}),
    ):
        with stranger(answer) as port:
            (kind,) = down(f"valkey://127.0.0.1:{port}", timeout)
            assert kind in kinds
    for silent, timeout in ((None, 0.2), (b"", TIMEOUT)):
        with stranger(silent) as port:
            assert len(down(f"valkeys://127.0.0.1:{port}", timeout)) == 1


@pytest.mark.parametrize("verb", [b"PING", b"INFO"])
@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("LOADING Valkey is loading the dataset in memory", "loading"),
        (
            "BUSY Valkey is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
            "loading",
        ),
        ("BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.", "loading"),
        ("TRYAGAIN Multiple keys request during rehashing of slot", "failover"),
        ("CLUSTERDOWN The cluster is down", "failover"),
        ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", "failover"),
        ("NOREPLICAS Not enough good replicas to write.", "failover"),
        ("READONLY You can't write against a read only replica.", "failover"),
        ("OOM command not allowed when used memory > 'maxmemory'.", "oom"),
    ],
)
def test_a_state_that_passes_is_no_refusal(said: str, kind: str, verb: bytes, proxy: Proxy) -> None:
    proxy.fault = Fault("answer", "request", text=f"-{said}\r\n".encode(), match=verb)
    assert down(f"valkey://127.0.0.1:{proxy.port}") == [kind]


@pytest.mark.parametrize("said", ["BUSYKEY Target key name already exists.", "BUSYGROUP Group exists"])
def test_another_error_that_begins_like_one_of_them(said: str, proxy: Proxy) -> None:
    proxy.fault = Fault("answer", "request", text=f"-{said}\r\n".encode(), match=b"PING")
    assert "refuses what the cache needs" in refusal(f"valkey://127.0.0.1:{proxy.port}")


def test_a_server_that_runs_a_script_is_no_refusal() -> None:
    """A real one, until the script is killed."""
    import valkey

    with EmbeddedServer() as busy, valkey.Valkey(port=busy.port) as one, valkey.Valkey(port=busy.port) as two:
        one.config_set("busy-reply-threshold", 1)

        def run() -> None:
            with suppress(valkey.ResponseError):
                one.eval("while true do end", 0)

        script = threading.Thread(target=run)
        script.start()

        def is_busy() -> bool:
            try:
                two.ping()
            except valkey.ResponseError as error:
                return str(error).startswith("BUSY ")
            return False

        until(is_busy)
        assert down(busy.url) == ["loading"]
        two.script_kill()
        script.join()
        assert down(busy.url) == []


def test_a_server_that_is_full_or_a_replica_is_no_refusal(server: EmbeddedServer, client: Any) -> None:
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", 1)
    try:
        assert down(server.url) == []
    finally:
        client.config_set("maxmemory", 1 << 30)
        client.config_set("maxmemory-policy", "allkeys-lru")
    with EmbeddedServer() as other:
        import valkey

        with valkey.Valkey(port=other.port) as full:  # its disk: it refuses PING as well then
            full.config_set("save", "3600 1")
            full.set("some", "thing")
            shutil.rmtree(full.config_get("dir")["dir"])
            full.bgsave()
            until(lambda: full.info("persistence")["rdb_last_bgsave_status"] == "err")
            with pytest.raises(valkey.ResponseError, match="MISCONF"):
                full.ping()
            assert down(other.url) == []
    with EmbeddedServer() as other, valkey.Valkey(port=other.port) as replica:
        replica.execute_command("REPLICAOF", "127.0.0.1", str(server.port))
        assert down(other.url) == []


def test_a_wrong_one_among_several_is_told_while_another_is_silent(
    server: EmbeddedServer, client: Any
) -> None:
    """All are asked at the same time."""
    with stranger(None) as silent, stranger(b"HTTP/1.1 400\r\n\r\n") as web:
        assert "is no Valkey" in refusal(
            f"valkey://127.0.0.1:{silent},127.0.0.1:{server.port},127.0.0.1:{web}", 2.0
        )


def test_what_a_node_is_asked_last_has_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails late, then is quiet under TLS, and speaks none. Of 2,250 s two are left after the failure, by a
    clock that stands still from then on: in half of them it is given up, in the others it answers."""
    now = 0.0
    ended: list[bytes] = []
    numbers = iter(range(3))

    def serve(connection: socket.socket) -> None:
        nonlocal now
        number = next(numbers)
        connection.settimeout(30)
        with connection, suppress(OSError):
            asked = connection.recv(4096)
            if number == 0:
                now = 2248.0
            elif number == 1:
                ended.append(connection.recv(4096))  # until we hang up
            elif asked == b"PING\r\n":
                connection.sendall(b"+PONG\r\n")

    monkeypatch.setattr(start, "time", SimpleNamespace(monotonic=lambda: now))
    with stranger(serve) as port:
        assert "speaks no TLS: use valkey://" in refusal(f"valkeys://127.0.0.1:{port}", 1000.0)
    assert ended == [b""]
