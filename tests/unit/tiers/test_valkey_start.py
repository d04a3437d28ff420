"""What is asked of a store before anything is loaded: who will never serve pages is told from who is down."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from glm_connectors.valkey_store import CacheUrlError, EmbeddedServer, ValkeyStore, check_at_start, parse
from ranks import until
from tls_files import issuer
from valkey_proxy import Fault, Proxy

SECRET = "hunter2"


def refusal(url: str) -> str:
    """The one message; never with the password in it."""
    with pytest.raises(CacheUrlError) as caught:
        check_at_start(parse(url), 1.0, thorough=True)
    message = str(caught.value)
    assert message.startswith("--glm-cache-url: ")
    assert SECRET not in message
    assert "\n" not in message
    return message


def down(url: str, timeout: float = 1.0) -> list[str]:
    return list(check_at_start(parse(url), timeout, thorough=True).values())


@contextmanager
def stranger(answer: bytes | Callable[[socket.socket], None] | None, *, echo: bool = False) -> Iterator[int]:
    """A port at which something answers each connection's first words, with the same if it is an echo; None: silence. Or
    does what it will with the connection."""
    held = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                if callable(answer):
                    answer(connection)
                    continue
                asked = connection.recv(4096)
                held.append(connection)
                if answer is not None:
                    connection.sendall(asked if echo else answer)
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    for connection in held:
        connection.close()


@pytest.fixture
def some(server: EmbeddedServer, client: Any) -> Iterator[str]:
    """The URL of a user who may what the README says, and nothing else."""
    rights = ("~glm:*", "+get", "+mget", "+set", "+del")
    client.execute_command("ACL", "SETUSER", "some", "on", f">{SECRET}", *rights)
    yield server.url.replace("//", f"//some:{SECRET}@")
    client.execute_command("ACL", "DELUSER", "some")


def test_a_store_that_serves_pages(server: EmbeddedServer, client: Any, some: str) -> None:
    """To ask it changes nothing, whatever is there."""
    client.set("glm:", "kept")
    client.set("other", "kept")
    client.delete("glm:")
    for url in (server.url, some):
        assert down(url) == []
    assert client.keys() == [b"other"]


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
        assert down(f"valkeys://127.0.0.1:{between.port}?ca={ca}", 5.0) == []
        assert "?ca=FILE names the authority" in refusal(f"valkeys://127.0.0.1:{between.port}")
        assert "speaks TLS: use valkeys://" in refusal(f"valkey://:{SECRET}@127.0.0.1:{between.port}")
        assert "use valkeys-cluster://" in refusal(f"valkey-cluster://127.0.0.1:{between.port}")
        assert "speaks no TLS: use valkey://" in refusal(f"valkeys://127.0.0.1:{server.port}")
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
    for answer, kinds in (
        (None, {"timeout"}),
        (b"", {"connection"}),
        (b"-LOADING Valkey is loading the dataset in memory\r\n", {"loading"}),
        (b"-ERR max number of clients reached\r\n", {"refused", "connection"}),  # a reset may be faster
    ):
        with stranger(answer) as port:
            (kind,) = down(f"valkey://127.0.0.1:{port}", 0.2)
            assert kind in kinds
    for silent in (None, b""):
        with stranger(silent) as port:
            assert len(down(f"valkeys://127.0.0.1:{port}", 0.2)) == 1


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
            f"valkey://127.0.0.1:{silent},127.0.0.1:{server.port},127.0.0.1:{web}"
        )
