"""Our own data path: against a real Valkey, and against scripted answers cut wherever TCP may cut them."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import valkey as valkey_client
from glm_connectors.valkey_store import EmbeddedServer, parse, uses_glide
from glm_connectors.valkey_store.clients import ABSENT, MISFIT
from glm_connectors.valkey_store.connection import OutOfStepError, RefusedError
from glm_connectors.valkey_store.failures import PASSING, kind_of
from glm_connectors.valkey_store.glide import GlideClients
from glm_connectors.valkey_store.sockets import LONGEST, SocketClients
from valkey_proxy import Fault, Proxy

Make = Callable[..., SocketClients]


@pytest.fixture
def connect() -> Iterator[Make]:
    made: list[SocketClients] = []

    def make(
        url: str, request_timeout: float = 10.0, ttl: int = 0, connect_timeout: float = 5.0
    ) -> SocketClients:
        made.append(SocketClients(parse(url), request_timeout, connect_timeout, ttl))
        return made[-1]

    yield make
    for one in made:
        one.close()


def url_of(proxy: Proxy) -> str:
    return f"valkey://127.0.0.1:{proxy.port}"


def room(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


def connections(client: Any) -> list[str]:
    return [one["id"] for one in client.client_list() if one["name"] == "glm_connectors"]


def test_values_of_every_size_come_back_as_they_were(
    server: EmbeddedServer, connect: Make, client: Any
) -> None:
    data = connect(server.url)
    sizes = [0, 1, 4085, 4086, 4087, 4096, 70_000, 3_500_000]
    values = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    names = [f"name {size}" for size in sizes]
    assert data.write(0, names, [memoryview(value) for value in values]) == [None] * len(sizes)
    assert [client.get(name) for name in names] == values
    buffers = room(*sizes)
    assert data.read(0, names, buffers) == sizes
    assert [bytes(buffer) for buffer in buffers] == values
    for name, value in zip(names, values, strict=True):
        (buffer,) = room(len(value) + 10)
        assert data.read(0, [name], [buffer]) == [len(value)]
        assert bytes(buffer) == value + bytes(10)
    assert data.delete(0, [*names[:3], "none"]) == 3
    assert data.read(0, names[:4], room(*sizes[:4])) == [ABSENT] * 3 + [sizes[3]]
    assert len(connections(client)) == 1


def test_a_value_lives_as_long_as_was_said(server: EmbeddedServer, connect: Make, client: Any) -> None:
    connect(server.url, ttl=1000).write(0, ["a", "b"], [memoryview(b"1"), memoryview(b"2")])
    assert 990 < client.ttl("a") <= 1000
    assert 990 < client.ttl("b") <= 1000
    connect(server.url).write(0, ["c"], [memoryview(b"3")])
    assert client.ttl("c") == -1


def test_what_does_not_fit_costs_its_own_get_only(server: EmbeddedServer, connect: Make, client: Any) -> None:
    client.set("large", bytes(3_000_000))
    client.set("fits", b"0123456789")
    client.lpush("list", "of something")
    data = connect(server.url)
    (small, fits, other) = room(10, 10, 10)
    assert data.read(0, ["large", "fits"], [small, fits]) == [MISFIT, 10]
    assert bytes(fits) == b"0123456789"
    assert data.read(0, ["list"], [other]) == [MISFIT]
    assert data.read(0, ["large"], [other]) == [MISFIT]
    assert data.read(0, ["fits"], [other]) == [10]
    assert len(connections(client)) == 1


def test_refused_puts_are_told_apart_and_keep_the_connection(
    server: EmbeddedServer, connect: Make, client: Any
) -> None:
    client.execute_command("ACL", "SETUSER", "some", "on", ">word", "~mine:*", "+@all")
    try:
        data = connect(server.url.replace("//", "//some:word@"))
        taken, refused, last = data.write(0, ["mine:1", "other", "mine:2"], [memoryview(b"v")] * 3)
        assert (taken, last) == (None, None)
        assert isinstance(refused, RefusedError)
        assert kind_of(refused) == "auth"
        assert data.read(0, ["mine:2"], room(1)) == [1]
        with pytest.raises(RefusedError, match="NOPERM"):
            data.read(0, ["other"], room(1))
        assert data.read(0, ["mine:1"], room(1)) == [1]
    finally:
        client.execute_command("ACL", "DELUSER", "some")


def test_a_connection_that_the_server_closed_meanwhile_costs_nothing(
    server: EmbeddedServer, connect: Make, client: Any
) -> None:
    data = connect(server.url)
    data.write(0, ["a"], [memoryview(b"1")])
    (number,) = connections(client)
    client.client_kill_filter(_id=number)
    assert data.read(0, ["a"], room(1)) == [1]
    assert connections(client) not in ([], [number])


@pytest.mark.parametrize("command", ["SET", "GET", "DEL"])
def test_a_reset_after_a_silence_costs_nothing(
    command: str, server: EmbeddedServer, connect: Make, client: Any, proxy: Proxy
) -> None:
    """What stands between has forgotten the connection, and says so when it is used again."""
    data = connect(url_of(proxy))
    data.write(0, ["a"], [memoryview(b"before")])
    proxy.fault = Fault("reset", "request", every=1000, match=command.encode())
    (buffer,) = room(6)
    if command == "SET":
        assert data.write(0, ["a", "b"], [memoryview(b"after")] * 2) == [None, None]
        assert client.mget("a", "b") == [b"after", b"after"]
    elif command == "GET":
        assert data.read(0, ["a"], [buffer]) == [6]
        assert bytes(buffer) == b"before"
    else:
        assert data.delete(0, ["a"]) == 1
    assert (proxy.fault.hits, proxy.connections) == (1, 2)


def test_a_reset_of_a_new_connection_is_a_failure(
    server: EmbeddedServer, connect: Make, proxy: Proxy
) -> None:
    """Once is enough: whoever resets every connection is not asked for ever."""
    data = connect(url_of(proxy))
    data.write(0, ["a"], [memoryview(b"1")])
    proxy.fault = Fault("reset", "request", match=b"GET")
    for resets in (2, 3):  # of the old connection and a new one; of one that is new in any case
        with pytest.raises(ConnectionError):
            data.read(0, ["a"], room(1))
        assert proxy.fault.hits == resets


def test_a_silent_connection_is_kept_alive_where_it_would_be_forgotten(
    server: EmbeddedServer, connect: Make, client: Any
) -> None:
    """The kernel says when it asks next: within 30 s, and not in two hours."""
    connect(server.url).read(0, ["a"], room(1))
    (port,) = [
        int(one["addr"].rpartition(":")[2]) for one in client.client_list() if one["name"] == "glm_connectors"
    ]
    with open("/proc/net/tcp") as lines:
        (timer,) = [
            line.split()[5]
            for line in lines
            if line.split()[1].endswith(f":{port:04X}") and line.split()[2].endswith(f":{server.port:04X}")
        ]
    which, ticks = timer.split(":")
    assert which == "02"  # keepalive
    assert 0 < int(ticks, 16) <= 31 * 100


@pytest.mark.parametrize("path", [SocketClients, GlideClients])
def test_a_primary_that_became_a_replica_is_left_by_every_thread(
    path: type[SocketClients] | type[GlideClients],
) -> None:
    """A planned failover: the name leads to the new primary, the old one keeps its clients and refuses their puts."""
    with EmbeddedServer() as old, EmbeddedServer() as new, ThreadPoolExecutor(1) as other:
        between = Proxy(old.port)
        data = path(parse(url_of(between)), 10.0, 5.0, 0)
        with valkey_client.Valkey(port=old.port) as one, valkey_client.Valkey(port=new.port) as two:
            try:
                value = [memoryview(b"v")]
                assert data.write(0, ["a"], value) == [None]
                assert other.submit(data.write, 0, ["b"], value).result(30) == [None]
                one.execute_command("REPLICAOF", "127.0.0.1", str(new.port))
                between.lead_to(new.port)
                refused = None
                try:
                    (refused,) = data.write(0, ["c"], value)  # our sockets hand it over
                except Exception as error:  # glide raises it
                    refused = error
                assert refused is not None
                assert kind_of(refused) == "failover"
                assert data.write(0, ["c"], value) == [None]
                assert other.submit(data.write, 0, ["d"], value).result(30) == [None]
                assert two.mget("c", "d") == [b"v", b"v"]
            finally:
                data.close()
                between.close()


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("NOPERM User x has no permissions to run the 'ping' command", "auth"),
        ("WRONGPASS invalid username-password pair or user is disabled.", "auth"),
        ("NOAUTH Authentication required.", "auth"),
        ("LOADING Valkey is loading the dataset in memory", "loading"),
        ("READONLY You can't write against a read only replica.", "failover"),
        (
            "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
            "failover",
        ),
        ("NOREPLICAS Not enough good replicas to write.", "failover"),
        ("CLUSTERDOWN The cluster is down", "failover"),
        ("TRYAGAIN Multiple keys request during rehashing of slot", "failover"),
        ("OOM command not allowed when used memory > 'maxmemory'.", "oom"),
        ("MOVED 3999 127.0.0.1:1", "moved"),
        ("ERR unknown command", "refused"),
    ],
)
def test_an_error_has_one_kind_whichever_client_got_it(said: str, kind: str) -> None:
    """The `valkey` client cuts the code off its error."""
    assert kind_of(RefusedError(said)) == kind
    assert kind_of(valkey_client._parsers.BaseParser.parse_error(said)) == kind
    assert (kind in PASSING) == (kind in ("loading", "failover"))


def test_who_has_not_signed_in_is_told_so(server: EmbeddedServer, connect: Make) -> None:
    """Not that the connection has ended: a value is longer than the server reads from strangers."""
    with valkey_client.Valkey(port=server.port) as admin:
        admin.config_set("requirepass", "word")
        try:
            with pytest.raises(RefusedError, match="NOAUTH") as caught:
                connect(server.url).write(0, ["a"], [memoryview(bytearray(3_000_000))])
            assert kind_of(caught.value) == "auth"
        finally:
            admin.config_set("requirepass", "")


def test_a_host_s_dead_address_leaves_the_next_one_its_time(
    server: EmbeddedServer, connect: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address that swallows what is sent to it, before the one where the server listens."""
    ask = socket.getaddrinfo

    def both(host: str, port: int, *rest: Any, **more: Any) -> Any:
        if host != "cache.test":
            return ask(host, port, *rest, **more)
        return [*ask("127.0.0.2", port, *rest, **more)[:1], *ask("127.0.0.1", port, *rest, **more)[:1]]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with contextlib.ExitStack() as stack:
        dead = stack.enter_context(socket.socket())
        dead.bind(("127.0.0.2", server.port))
        dead.listen(0)
        for _ in range(3):  # its queue is full
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.2", server.port))
        data = connect(f"valkey://cache.test:{server.port}", connect_timeout=0.5)
        assert data.read(0, ["a"], room(1)) == [ABSENT]


def test_a_slow_link_makes_a_slow_get(
    server: EmbeddedServer, connect: Make, client: Any, proxy: Proxy
) -> None:
    """Of more than its timeout, in which bytes come all the time."""
    value = bytes(range(256)) * 2000
    client.set("a", value)
    data = connect(url_of(proxy), request_timeout=1.0)
    proxy.fault = Fault("trickle", "reply", seconds=0.06, piece=len(value) // 20)
    (buffer,) = room(len(value))
    began = time.monotonic()
    assert data.read(0, ["a"], [buffer]) == [len(value)]
    assert time.monotonic() - began > 1.0
    assert bytes(buffer) == value
    assert proxy.connections == 1


def test_a_get_that_drips_ends_all_the_same(
    server: EmbeddedServer, connect: Make, client: Any, proxy: Proxy
) -> None:
    client.set("a", bytes(100_000))
    data = connect(url_of(proxy), request_timeout=0.4)
    data.read(0, ["none"], room(1))
    proxy.fault = Fault("trickle", "reply", seconds=0.02)
    began = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        data.read(0, ["a"], room(100_000))
    assert LONGEST * 0.4 <= time.monotonic() - began < 30
    assert kind_of(caught.value) == "timeout"


def test_a_slow_link_makes_a_slow_put(connect: Make) -> None:
    """The kernel takes all of it at once, and then nothing comes back until the server has it."""
    size = 1_500_000

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"+OK\r\n")
            while sum(heard) < size:
                heard.append(len(connection.recv(50_000)))
                time.sleep(0.04)
            connection.sendall(b"+OK\r\n")
            connection.recv(1)

    heard: list[int] = []
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = threading.Thread(target=serve)
        server.start()
        data = connect(f"valkey://127.0.0.1:{listener.getsockname()[1]}", request_timeout=1.0)
        began = time.monotonic()
        assert data.write(0, ["a"], [memoryview(bytearray(size))]) == [None]
        assert time.monotonic() - began > 1.0
        data.close()
        server.join()


class Script:
    """A server of one answer a connection: what a get is answered with, in pieces of `piece` bytes."""

    def __init__(self, answers: list[bytes], piece: int = 1 << 20) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"valkey://127.0.0.1:{self._listener.getsockname()[1]}"
        self._answers, self._piece = answers, piece
        self._connections: list[socket.socket] = []
        self.late = threading.Event()  # an empty answer comes when this is set
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        for answer in self._answers:
            connection, _ = self._listener.accept()
            self._connections.append(connection)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked = b""
            while b"SETNAME" not in asked or not asked.endswith(b"connectors\r\n"):
                asked += connection.recv(1 << 16)
            connection.sendall(b"+OK\r\n")
            connection.recv(1 << 16)
            if not answer:
                threading.Thread(target=self._answer_late, args=(connection,), daemon=True).start()
            for start in range(0, len(answer), self._piece):
                connection.sendall(answer[start : start + self._piece])

    def _answer_late(self, connection: socket.socket) -> None:
        self.late.wait(30)
        with contextlib.suppress(OSError):
            connection.sendall(b"$4\r\nlate\r\n")

    def close(self) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.close()


@pytest.fixture
def script() -> Iterator[Callable[..., Script]]:
    made: list[Script] = []

    def make(*answers: bytes, piece: int = 1 << 20) -> Script:
        made.append(Script(list(answers), piece))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("piece", [1, 2, 3, 7])
def test_answers_are_the_same_wherever_they_are_cut(
    piece: int, script: Callable[..., Script], connect: Make
) -> None:
    """Of several the last is asked for first."""
    answer = b"*4\r\n$12\r\nhello, world\r\n$5\r\n\r\n$1\r\r\n$-1\r\n$0\r\n\r\n"
    data = connect(script(answer, piece=piece).url)
    buffers = room(5, 5, 5, 20)
    assert data.read(0, list("abcd"), buffers) == [5, ABSENT, 0, 12]
    assert [bytes(buffer) for buffer in buffers] == [
        b"\r\n$1\r", bytes(5), bytes(5), b"hello, world" + bytes(8),
    ]  # fmt: skip


@pytest.mark.parametrize("piece", [1, 3, 1 << 20])
@pytest.mark.parametrize(
    ("others", "found", "bytes_of"),
    [
        (b"$3\r\nabc\r\n$3\r\n$-1\r\n$3\r\n\r\n$\r\n", [3, 3, 3], [b"abc", b"$-1", b"\r\n$"]),
        (b"$-1\r\n$3\r\ndef\r\n$3\r\nghi\r\n", [ABSENT, 3, 3], [None, b"def", b"ghi"]),
        (b"$3\r\nabc\r\n$3\r\ndef\r\n$-1\r\n", [3, 3, ABSENT], [b"abc", b"def", None]),
        (b"$-1\r\n$-1\r\n$-1\r\n", [ABSENT] * 3, [None] * 3),
        (b"$3\r\nabc\r\n$2\r\nde\r\n$3\r\nghi\r\n", [3, 2, 3], [b"abc", b"de", b"ghi"]),
        (b"$3\r\nabc\r\n$12\r\nhello, world\r\n$3\r\nghi\r\n", [3, MISFIT, 3], [b"abc", None, b"ghi"]),
        (b"$0\r\n\r\n$3\r\ndef\r\n$4\r\nfour\r\n", [0, 3, MISFIT], [b"", b"def", None]),
    ],
    ids=["all fit", "first absent", "last absent", "none", "shorter", "longer", "both"],
)
def test_values_that_are_not_what_the_last_one_promised(
    piece: int,
    others: bytes,
    found: list[int],
    bytes_of: list[bytes | None],
    script: Callable[..., Script],
    connect: Make,
) -> None:
    """The last one fills its buffer, so the others are received as if they did. The connection stays in step."""
    data = connect(script(b"*4\r\n$3\r\nxyz\r\n" + others, piece=piece).url)
    buffers = room(3, 3, 3, 3)
    assert data.read(0, list("abcd"), buffers) == [*found, 3]
    for buffer, length, expected in zip(buffers, found, bytes_of, strict=False):
        assert expected is None or bytes(buffer[:length]) == expected
    assert bytes(buffers[3]) == b"xyz"
    assert data._connections.of(0).idle()  # nothing is left of the answer


class Counted:
    """A socket whose calls of the kernel for bytes are counted."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.calls = inner, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        if name in ("sendmsg", "recv_into", "recvmsg_into"):
            self.calls[name] += 1
        return getattr(self._inner, name)


def test_calls_of_the_kernel_do_not_grow_with_the_values(server: EmbeddedServer, connect: Make) -> None:
    """Each costs a thread that computes in Python a turn: 60 values of 4 KiB go and come with as many as 6."""
    data = connect(server.url)
    made: dict[int, Counter[str]] = {}
    for count in (6, 60):
        names, values = [f"{number}" for number in range(count)], [bytes([n]) * 4096 for n in range(count)]
        data.write(0, names, [memoryview(value) for value in values])
        connection = data._connections.of(0)
        connection._socket = counted = Counted(connection._socket)  # type: ignore[assignment]
        data.write(0, names, [memoryview(value) for value in values])
        buffers = room(*[4096] * count)
        assert data.read(0, names, buffers) == [4096] * count
        assert [bytes(buffer) for buffer in buffers] == values
        connection._socket = counted._inner
        made[count] = counted.calls
    assert made[60] == made[6]
    assert made[6]["sendmsg"] == 2
    assert made[6]["recv_into"] == 2  # the answers to the SETs, the head of the array
    assert made[6]["recvmsg_into"] <= 2  # the rest of the last value, all others


def test_a_hole_costs_one_get_its_glance_and_not_the_next(server: EmbeddedServer, connect: Make) -> None:
    """A get that expects all and meets a hole waits for bytes that never come: for a while after, none expects."""
    data = connect(server.url)
    names, values = [f"{number}" for number in range(6)], [bytes([n]) * 4096 for n in range(6)]
    data.write(0, names, [memoryview(value) for value in values])
    asked = [*names[:2], "hole", *names[3:]]
    found = [4096, 4096, ABSENT, 4096, 4096, 4096]
    connection = data._connections.of(0)
    expected: list[int] = []
    all_fit = connection._all_fit
    connection._all_fit = lambda buffers, deadline: (
        expected.append(len(buffers)),
        all_fit(buffers, deadline),
    )[1]  # type: ignore[method-assign]
    for _ in range(3):
        buffers = room(*[4096] * 6)
        assert data.read(0, asked, buffers) == found
        assert [bytes(b) for b, n in zip(buffers, found, strict=True) if n == 4096] == [
            value for number, value in enumerate(values) if number != 2
        ]
    assert expected == [5]
    connection._hole = float("-inf")  # a while later
    assert data.read(0, names, room(*[4096] * 6)) == [4096] * 6
    assert expected == [5, 5]


@pytest.mark.parametrize(
    "answer",
    [
        b"+OK\r\n",
        b":5\r\n",
        b"$x\r\n",
        b"$4\r\n12345\r\n",
        b"*1\r\n$1\r\na\r\n",
        b"\x00" * 5000,
    ],
    ids=["status", "number", "no length", "longer", "array", "no line"],
)
def test_an_answer_to_something_else_ends_the_connection(
    answer: bytes, script: Callable[..., Script], connect: Make
) -> None:
    data = connect(script(answer, b"$2\r\nok\r\n").url)
    with pytest.raises(OutOfStepError) as caught:
        data.read(0, ["a"], room(10))
    assert kind_of(caught.value) == "connection"
    assert data.read(0, ["b"], room(2)) == [2]  # on another


def test_an_error_in_the_place_of_a_value_ends_the_connection(
    script: Callable[..., Script], connect: Make
) -> None:
    """As proxies before several servers answer an MGET. What comes behind it must be nobody's next reply."""
    data = connect(script(b"*2\r\n-ERR no upstream\r\n$4\r\nlate\r\n", b"$4\r\ntrue\r\n").url)
    with pytest.raises(OutOfStepError, match="ERR no upstream"):
        data.read(0, ["a", "b"], room(4, 4))
    (buffer,) = room(4)
    assert data.read(0, ["c"], [buffer]) == [4]
    assert bytes(buffer) == b"true"


@pytest.mark.parametrize(
    ("credentials", "said"),
    [
        ("joe@", b"*3\r\n$4\r\nAUTH\r\n$3\r\njoe\r\n$0\r\n\r\n"),
        (":word@", b"*2\r\n$4\r\nAUTH\r\n$4\r\nword\r\n"),
        ("joe:word@", b"*3\r\n$4\r\nAUTH\r\n$3\r\njoe\r\n$4\r\nword\r\n"),
    ],
    ids=["user", "password", "both"],
)
def test_who_the_url_says_signs_in(credentials: str, said: bytes, connect: Make) -> None:
    """A user without a password, too: or the pages would be asked for as the default user."""
    heard = bytearray()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            while len(heard) < len(said):
                heard.extend(connection.recv(1 << 16))
            connection.sendall(b"-WRONGPASS not this one\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve)
        server.start()
        with pytest.raises(RefusedError, match="WRONGPASS"):
            connect(f"valkey://{credentials}127.0.0.1:{listener.getsockname()[1]}").read(0, ["a"], room(1))
        server.join()
    assert heard == said


def test_an_end_within_a_value_is_no_value(script: Callable[..., Script], connect: Make) -> None:
    one = script(b"$10\r\n12345")
    data = connect(one.url, request_timeout=30.0)
    threading.Timer(0.1, one.close).start()
    with pytest.raises(OSError) as caught:  # noqa: PT011 - which one, the kernel decides
        data.read(0, ["a"], room(10))
    assert kind_of(caught.value) == "connection"


def test_a_late_answer_reaches_nobody(script: Callable[..., Script], connect: Make) -> None:
    one = script(b"", b"$4\r\ntrue\r\n")
    data = connect(one.url, request_timeout=0.2)
    with pytest.raises(TimeoutError):
        data.read(0, ["a"], room(4))
    one.late.set()
    (buffer,) = room(4)
    assert data.read(0, ["b"], [buffer]) == [4]
    assert bytes(buffer) == b"true"


def test_a_node_that_reads_no_more_costs_a_put_its_timeout(
    script: Callable[..., Script], connect: Make
) -> None:
    data = connect(script(b"").url, request_timeout=0.2)
    with pytest.raises(TimeoutError) as caught:
        data.write(0, list("abc"), [memoryview(bytearray(30_000_000))] * 3)
    assert kind_of(caught.value) == "timeout"


def test_a_failed_call_keeps_nothing_over_the_caller_s_memory(
    script: Callable[..., Script], connect: Make
) -> None:
    """A pool gives its memory back only when nothing is exported over it."""
    memory = bytearray(10)
    view = memoryview(memory)
    data = connect(script(b"$10\r\n12345").url, request_timeout=0.1)
    with pytest.raises(TimeoutError) as caught:
        data.read(0, ["a"], [view])
    assert caught.value
    view.release()
    memory.append(0)  # BufferError while a view is left


def test_a_failed_call_leaves_nothing_to_the_collector(script: Callable[..., Script], connect: Make) -> None:
    """Else its views stay until the next collection."""
    view = memoryview(bytearray(10))
    gone = weakref.ref(view)
    data = connect(script(b"$10\r\n12345").url, request_timeout=0.1)
    gc.disable()
    try:
        with contextlib.suppress(TimeoutError):
            data.read(0, ["a"], [view])
        del view
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("url", "glide"),
    [("valkey://a", False), ("valkey://a,b", False), ("valkeys://a", True), ("valkey-cluster://a", True)],
)
def test_clusters_and_tls_are_glide_s(url: str, glide: bool) -> None:
    assert uses_glide(parse(url)) == glide
