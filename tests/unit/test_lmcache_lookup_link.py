"""The lookup's connections: messages arrive whole and in order, whatever their size, and no sender waits."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest
from glm_connectors.lmcache_repairs import lookup_link
from glm_connectors.lmcache_repairs.lookup_link import Inlet, Link, address, framed
from glm_connectors.lmcache_repairs.lookup_server import RepairedLookupServer


@pytest.fixture
def path(tmp_path: Path) -> str:
    return address(str(tmp_path / "engine"))


def received(inlet: Inlet, count: int) -> list[bytes]:
    messages: list[bytes] = []
    while len(messages) < count:
        messages += [message for _, message in inlet.wait()]
    return messages


def test_messages_of_every_size_arrive_whole_and_in_order(path: str) -> None:
    """Up to some that the socket's buffer does not hold: they go on as the other end reads."""
    inlet = Inlet(path)
    link = Link.to(path)
    link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 100_000)  # some machines have several MB
    sizes = [0, 1, 65_531, 65_532, 65_533, 700_000, 5, 1_500_000, 3]
    sent = [os.urandom(size) for size in sizes]
    assert all(link.send(framed(message)) for message in sent)
    assert link.pressing
    got: list[bytes] = []
    while len(got) < len(sent):
        got += [message for _, message in inlet.wait()]
        link.flush()
    assert got == sent
    assert not link.pressing
    link.close()
    inlet.close()


def test_replies_go_back_to_who_asked(path: str) -> None:
    inlet = Inlet(path)
    links = [Link.to(path) for _ in range(3)]
    for number, link in enumerate(links):
        link.send(framed(b"%d" % number))
    asked: list[tuple[Link, bytes]] = []
    while len(asked) < 3:
        asked += inlet.wait()
    for link, message in asked:
        assert link.send(framed(b"to " + message))
    assert [link.receive(1000) for link in links] == [[b"to 0"], [b"to 1"], [b"to 2"]]
    assert links[0].receive(0) == links[0].receive(1) == []
    for link in links:
        link.close()
    inlet.close()


def test_what_finds_no_room_is_refused_whole(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_link, "ROOM", 1_000_000)
    inlet = Inlet(path)
    link = Link.to(path)
    message = os.urandom(100_000)
    count = 0
    while link.send(framed(message)):
        count += 1
    assert count >= 10
    assert link.send(framed(b"short"))  # there is room for that
    got: list[bytes] = []
    while len(got) <= count:
        got += [message for _, message in inlet.wait()]
        link.flush()
    assert got == [message] * count + [b"short"]
    link.close()
    inlet.close()


def test_an_end_is_told_by_both_ways(path: str) -> None:
    inlet = Inlet(path)
    link = Link.to(path)
    link.send(framed(b"hello"))
    assert received(inlet, 1) == [b"hello"]
    inlet.close()
    with pytest.raises(ConnectionError):
        link.receive(1000)
    with pytest.raises(ConnectionError):
        link.send(framed(b"anyone?"))
    link.close()
    with pytest.raises(ConnectionError):
        link.send(framed(b"this end?"))
    with pytest.raises(OSError, match="No such file"):
        Link.to(path)


def test_a_rank_whose_thread_ends_is_known_to_have_ended(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is left to accept with. Who has asked, and who asks, would wait for their deadline."""
    server = object.__new__(RepairedLookupServer)
    server.running, server._inlet = True, Inlet(path)
    link = Link.to(path)
    server._inlet.wait()  # the connection

    def none_left() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(server._inlet, "_accept", none_left)
    other = Link.to(path)
    with pytest.raises(OSError, match="open files"):
        server.process_requests_from_scheduler()
    for one in (link, other):
        with pytest.raises(ConnectionError):
            one.receive(1000)
        one.close()


def test_a_length_that_no_message_has_ends_the_connection(path: str) -> None:
    inlet = Inlet(path)
    link = Link.to(path)
    link.send(b"\xff" * 8)
    inlet.wait()  # the connection
    assert inlet.wait() == []
    with pytest.raises(ConnectionError):
        link.receive(1000)
    link.close()
    inlet.close()


def test_a_rank_takes_its_predecessor_s_place_and_leaves_its_successor_s(path: str) -> None:
    first = Inlet(path)
    second = Inlet(path)
    first.close()
    link = Link.to(path)
    link.send(framed(b"second?"))
    assert received(second, 1) == [b"second?"]
    link.close()
    second.close()
    assert not os.path.exists(path)


def test_an_address_fits_where_lmcache_s_own_shortest_does() -> None:
    folder = "/" + "d" * 77
    assert len(f"{folder}/lmcache_rpc_0123456789abcdef") == 107
    assert len(address(f"{folder}/lmcache_rpc_0123456789abcdef")) <= 107
    assert address(f"{folder}/a") != address(f"{folder}/b")
