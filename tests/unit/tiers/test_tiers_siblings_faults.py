"""Siblings that are slow, silent, ignorant, or can't be siblings at all: every page comes, and from Valkey no more often
than need be. The ranks are those of `test_tiers_siblings`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from glm_connectors.tiers import Place, Share, Siblings
from glm_connectors.tiers import borrowing as borrowing_module
from glm_connectors.tiers import gets as gets_module
from glm_connectors.tiers import remote as remote_module
from glm_connectors.tiers.siblings import Address, Ending, copy_from, family, memory, wire
from glm_connectors.tiers.siblings import place as place_module
from glm_connectors.valkey_store import EmbeddedServer
from ranks import Rank, keys, until
from test_tiers_siblings import (
    FIRST,
    PAGES,
    Make,
    family_of,
    fetch_at_once,
    hits_at_valkey,
    places,
    saved,
    small_groups,
    usable,
)
from valkey_proxy import Proxy

__all__ = ["small_groups"]
ANSWER_S = 0.6  # who is asked answers after half of it
SLOW_S = 0.4  # of an answer of Valkey's: longer than that half
FEW = 40  # pages from there


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[wire.Message]:
    """What ranks say to each other, in order."""
    messages: list[wire.Message] = []
    send = wire.send

    def record(writer: asyncio.StreamWriter, message: wire.Message) -> None:
        messages.append(message)
        send(writer, message)

    monkeypatch.setattr(wire, "send", record)
    return messages


@pytest.fixture
def slow(server: EmbeddedServer) -> Iterator[str]:
    """The server, where each get takes longer than an answer of a sibling may."""
    between = Proxy(server.port, delay=lambda: SLOW_S)
    yield f"valkey://127.0.0.1:{between.port}"
    between.close()


@contextlib.contextmanager
def standing_still(one: Rank) -> Iterator[None]:
    """Its event loop does."""
    go_on = threading.Event()
    one.store._remote._loop.call_soon_threadsafe(go_on.wait, 60)  # type: ignore[union-attr]
    try:
        yield
    finally:
        go_on.set()


def warnings(caplog: pytest.LogCaptureFixture, text: str = "") -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [message for message in found if text in message]


# Slow


def test_pages_that_take_longer_than_an_answer_come_from_valkey_once(
    server: EmbeddedServer, client: Any, rank: Make, slow: str, said: list[wire.Message]
) -> None:
    chain = keys(FEW, "slow")
    with saved(rank, server.url, chain):
        ranks = family_of(rank, slow, 2, answer_s=ANSWER_S, request_timeout=5.0, connect_timeout=10.0)
        before = hits_at_valkey(client)
        assert fetch_at_once(ranks, chain) == ["complete"] * 2
        coming = [m for m in said if isinstance(m, wire.Loan) and Ending.COMING in m.places]
        assert coming
        assert hits_at_valkey(client) - before == FIRST * 2 + FEW - FIRST
        for one in ranks:
            theirs = sum(not one.store.share.holds(key) for key in chain[FIRST:])
            assert one.metrics["cache_sibling_pages", "copied"] == theirs
            assert usable(one) == 1
            assert one.hits(chain) == FEW
        until(lambda: all(one.idle() for one in ranks))


def test_a_fetch_waits_for_its_sibling_only_so_long(
    server: EmbeddedServer, rank: Make, slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then its pages come from Valkey."""
    monkeypatch.setattr(borrowing_module, "_LONGEST_S", 0.0)
    chain = keys(FEW, "so long")
    with saved(rank, server.url, chain):
        ranks = family_of(rank, slow, 2, answer_s=ANSWER_S, request_timeout=5.0, connect_timeout=10.0)
        assert fetch_at_once(ranks, chain) == ["complete"] * 2
        assert sum(one.metrics["cache_sibling_pages", "absent"] for one in ranks) > 0
        assert [one.hits(chain) for one in ranks] == [FEW] * 2
        until(lambda: all(one.idle() for one in ranks))


def test_who_leaves_while_pages_are_coming_leaves_nothing_lent(
    server: EmbeddedServer, rank: Make, slow: str, said: list[wire.Message]
) -> None:
    """Between two questions, and within one; every number that was asked is returned."""
    chain = keys(PAGES, "leaves")
    with saved(rank, server.url, chain):
        first, second = family_of(rank, slow, 2, answer_s=ANSWER_S, request_timeout=5.0, connect_timeout=10.0)
        for wait in (0.6, 0.75, 0.9):
            second.store.prefetch("r", chain)
            first.store.prefetch("r", chain)
            time.sleep(wait)
            first.store.cancel("r")
            second.store.cancel("r")
            until(lambda: first.idle() and second.idle())
            first.store.clear()
            second.store.clear()
        asked = sum(isinstance(message, wire.Ask) for message in said)
        until(lambda: sum(isinstance(message, wire.Return) for message in said) == asked)
        assert asked > 0


# Silent


def test_who_says_nothing_is_not_asked_until_he_says_something(
    server: EmbeddedServer,
    rank: Make,
    said: list[wire.Message],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    before, meanwhile, after = (keys(PAGES, f"silent {number}") for number in range(3))
    with contextlib.ExitStack() as stack:
        for chain in (before, meanwhile, after):
            stack.enter_context(saved(rank, server.url, chain))
        first, second = family_of(rank, server.url, 2, answer_s=ANSWER_S)
        with standing_still(second):
            assert first.fetch(before) == "complete"
            assert first.hits(before) == PAGES
            assert first.metrics["cache_siblings", "silent"] == 1
            asked = sum(isinstance(message, wire.Ask) for message in said)
            assert first.fetch(meanwhile) == "complete"
            assert sum(isinstance(message, wire.Ask) for message in said) == asked
        until(lambda: usable(first) == 1)
        assert fetch_at_once([first, second], after) == ["complete"] * 2
        theirs = sum(second.store.share.holds(key) for key in after[FIRST:])
        assert first.metrics["cache_sibling_pages", "copied"] == theirs
        until(lambda: first.idle() and second.idle())
    assert len(warnings(caplog, "has not answered")) == 1
    assert sum("answers again" in record.getMessage() for record in caplog.records) == 1


# Ignorant


def test_who_has_said_that_he_gets_nothing_is_not_asked_again(
    server: EmbeddedServer, rank: Make, said: list[wire.Message]
) -> None:
    """For this prompt."""
    chain, next_ = keys(PAGES, "once asked"), keys(PAGES, "next")
    with saved(rank, server.url, chain), saved(rank, server.url, next_):
        first, second = family_of(rank, server.url, 2)
        assert first.fetch(chain) == "complete"
        answered = next(n for n, message in enumerate(said) if isinstance(message, wire.Loan))
        assert not any(isinstance(message, wire.Ask) for message in said[answered:])
        theirs = sum(second.store.share.holds(key) for key in chain[FIRST:])
        assert first.metrics["cache_sibling_pages", "absent"] == theirs
        assert fetch_at_once([first, second], next_) == ["complete"] * 2
        theirs = sum(second.store.share.holds(key) for key in next_[FIRST:])
        assert first.metrics["cache_sibling_pages", "copied"] == theirs


@pytest.mark.parametrize("whose", ["both's", "its own"])
def test_each_page_counts_once_in_the_rate(
    server: EmbeddedServer, rank: Make, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """The pages that a rank's gets stand for are those that it has."""
    stood: dict[int, float] = {}
    from_valkey = gets_module.Getter.from_valkey

    def record(self: Any, node: int, fetch: Any, wanted: Any) -> list[str]:
        stood[id(self)] = stood.get(id(self), 0.0) + fetch.stands_for * len(wanted)
        return from_valkey(self, node, fetch, wanted)

    chain = keys(2 * PAGES, "rate")
    chain = chain[:PAGES] if whose == "both's" else [k for k in chain if Share(0, 2).owner(k) == 0][:PAGES]
    with saved(rank, server.url, chain):
        ranks = family_of(rank, server.url, 2)
        monkeypatch.setattr(gets_module.Getter, "from_valkey", record)
        assert fetch_at_once(ranks if whose == "both's" else ranks[:1], chain)[0] == "complete"
        getter: Any = ranks[0].store._remote.prefetcher._getter  # type: ignore[union-attr]
        assert stood[id(getter)] == pytest.approx(len(chain))


# No sibling at all


class Unbound(socket.socket):
    def bind(self, address: object) -> None:
        raise PermissionError(errno.EPERM, "bind")


class Deaf(socket.socket):
    def listen(self, backlog: int = 0) -> None:
        raise PermissionError(errno.EPERM, "listen")


BROKEN: dict[str, tuple[object, str, object]] = {
    "no boot id": (place_module, "_BOOT", "/nowhere"),
    "no name spaces": (place_module, "_NAME_SPACES", "/nowhere"),
    "no address": (socket, "socket", Unbound),
    "no listening": (socket, "socket", Deaf),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_who_can_t_be_reached_is_elsewhere(
    server: EmbeddedServer,
    rank: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: str,
) -> None:
    """For everybody, others of his kind among them."""
    with monkeypatch.context() as patch:
        patch.setattr(*BROKEN[broken])
        lame = [Place(Share(index, 3)) for index in (0, 1)]
    assert len(warnings(caplog)) == len(lame)
    found = [*lame, Place(Share(2, 3))]
    addresses = [place.address for place in found]
    chain = keys(PAGES, broken)
    with saved(rank, server.url, chain):
        ranks = [
            rank(server.url, share=p.share, siblings=Siblings(p, addresses), pages=3 * PAGES) for p in found
        ]
        assert [one.metrics["cache_siblings", "elsewhere"] for one in ranks] == [2, 2, 2]
        assert fetch_at_once(ranks, chain) == ["complete"] * 3
        assert [one.hits(chain) for one in ranks] == [PAGES] * 3


async def _fails(self: object, lender: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def _hangs(self: object, lender: object) -> None:
    await asyncio.sleep(3600)


@pytest.mark.parametrize("start", [_fails, _hangs])
def test_a_store_starts_without_siblings(
    server: EmbeddedServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    start: Callable[..., Any],
) -> None:
    monkeypatch.setattr(remote_module, "_START_S", 0.05)
    monkeypatch.setattr(Siblings, "start", start)
    first, second = places(2)
    threads = set(threading.enumerate())
    one = Rank(
        server.url,
        share=first.share,
        siblings=Siblings(first, [first.address, second.address]),
        pages=3 * PAGES,
    )
    chain = keys(PAGES, "alone")
    assert len(warnings(caplog, "no pages from or for other ranks")) == 1
    assert one.save(chain) == sum(first.share.holds(key) for key in chain)
    assert one.hits(chain) == PAGES
    assert usable(one) == 0
    one.close()
    second.close()
    assert first.listener is not None
    assert first.listener.fileno() == -1
    until(lambda: not [t for t in set(threading.enumerate()) - threads if t.name.startswith("glm")])


def test_without_valkey_nobody_listens() -> None:
    first, second = places(2)
    one = Rank("none", share=first.share, siblings=Siblings(first, [first.address, second.address]))
    assert first.listener is not None
    assert first.listener.fileno() == -1
    second.close()
    one.close()


def test_a_system_without_the_call_is_an_error_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda *args, **more: object())
    memory._function.cache_clear()
    memory._readv.cache_clear()
    with pytest.raises(OSError, match="process_vm_readv: Function not implemented") as error:
        copy_from(os.getpid(), [1], [1], 1)
    assert error.value.errno == errno.ENOSYS
    with pytest.raises(OSError, match="prctl"):
        memory.let_siblings_read()


def failing(number: int) -> Callable[..., None]:
    """A copy of pages that ends with this errno."""

    def fails(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    return fails


@pytest.mark.parametrize("number", [errno.EFAULT, errno.ESRCH, errno.ENOMEM])
def test_a_copy_that_fails_for_once_is_no_refusal(
    server: EmbeddedServer,
    rank: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    """Of a rank that is ending, or while the kernel has no memory for it: nothing that an operator has to allow."""
    real = gets_module.copy_from

    chain, next_ = keys(PAGES, f"once {number}"), keys(PAGES, f"again {number}")
    with saved(rank, server.url, chain), saved(rank, server.url, next_):
        ranks = family_of(rank, server.url, 2)
        monkeypatch.setattr(gets_module, "copy_from", failing(number))
        assert fetch_at_once(ranks, chain) == ["complete"] * 2
        monkeypatch.setattr(gets_module, "copy_from", real)
        assert fetch_at_once(ranks, next_) == ["complete"] * 2
        assert [one.hits(chain) for one in ranks] == [PAGES] * 2
        assert [one.metrics["cache_siblings", "usable"] for one in ranks] == [1, 1]
        assert all(one.metrics["cache_sibling_pages", "unusable"] > 0 for one in ranks)
        assert all(one.metrics["cache_sibling_pages", "copied"] > 0 for one in ranks)
    assert warnings(caplog) == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_memory_that_can_t_be_read_is_said_once(
    server: EmbeddedServer,
    rank: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    """Though the probe could be."""

    monkeypatch.setattr(gets_module, "copy_from", failing(number))
    chain, next_ = keys(PAGES, "unreadable"), keys(PAGES, "unreadable too")
    with saved(rank, server.url, chain), saved(rank, server.url, next_):
        ranks = family_of(rank, server.url, 2)
        assert fetch_at_once(ranks, chain) == ["complete"] * 2
        before = [one.metrics["cache_sibling_pages", "unusable"] for one in ranks]
        assert fetch_at_once(ranks, next_) == ["complete"] * 2
        assert [one.metrics["cache_sibling_pages", "unusable"] for one in ranks] == before
        assert [one.metrics["cache_siblings", "refused"] for one in ranks] == [1, 1]
        assert [one.hits(chain) for one in ranks] == [PAGES] * 2
        until(lambda: all(one.idle() for one in ranks))
    assert len(warnings(caplog)) == len(warnings(caplog, "can't be read")) == 2


def test_the_memory_of_pages_is_probed(
    server: EmbeddedServer, rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a device may be of a kind that can't be read though the rest of the process can."""
    probed: list[int] = []

    def not_pages(pid: int, theirs: list[int], ours: list[int], size: int) -> None:
        if size == 1:
            probed.extend(theirs)
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        copy_from(pid, theirs, ours, size)

    monkeypatch.setattr(family, "copy_from", not_pages)
    ranks = family_of(rank, server.url, 2, connected=False)
    until(lambda: all(one.metrics["cache_siblings", "refused"] == 1 for one in ranks))
    slots = set()
    for one in ranks:
        pages = one.store.reserve(one.pool.slots)
        assert pages is not None
        slots |= {page.address - 128 for page in pages}
        one.store.abandon(pages)
    assert len(probed) == 2
    assert set(probed) <= slots


# The end


def test_ranks_that_stop_are_no_news(
    server: EmbeddedServer, rank: Make, slow: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is warned of, whatever is under way."""
    caplog.set_level(logging.INFO)
    chain = keys(PAGES, "stop")
    with saved(rank, server.url, chain):
        ranks = family_of(rank, slow, 3, request_timeout=5.0, connect_timeout=10.0)
        for number in range(3):
            for one in ranks:
                one.store.prefetch(f"r{number}", chain[: PAGES - number])
        time.sleep(0.9)
        for one in ranks:
            one.close()
    assert warnings(caplog) == []
    assert any("lends no pages any more" in record.getMessage() for record in caplog.records)


def test_nothing_is_said_into_a_connection_that_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        here, there = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=here)
        there.close()
        writer.close()
        for number in range(10):
            wire.send(writer, wire.Return(number))
        await asyncio.sleep(0)

    asyncio.run(run())
    assert warnings(caplog) == []


def test_a_connection_is_gone_before_it_is_closed() -> None:
    link: Any = family._Link(Address(1, "here", os.getpid(), "nobody"), "here", 1.0)
    link.state = "usable"
    states: list[str] = []

    class Writer:
        def close(self) -> None:
            states.append(link.state)

    link._writer = Writer()
    link.close()
    assert states == ["gone"]
