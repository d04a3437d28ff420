"""Ranks of one machine get each page from Valkey once; whatever becomes of a sibling, every page comes, the right one.

The ranks are stores of one process over one real Valkey: sockets and process_vm_readv are the real ones. That memory of
another process can be read is `test_another_process_s_memory_is_read`'s.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from glm_connectors.tiers import Place, Share, Siblings
from glm_connectors.tiers import remote as remote_module
from glm_connectors.tiers.siblings import Address, copy_from, desk, family
from glm_connectors.valkey_store import EmbeddedServer
from ranks import Rank, keys, until

Make = Callable[..., Rank]
GROUP = 2  # pages of a get
FIRST = GROUP  # pages that every rank gets by itself: of the first get
PAGES = 200


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "_GROUP", GROUP)


def places(of: int) -> list[Place]:
    return [Place(Share(index, of)) for index in range(of)]


def family_of(
    make: Make,
    url: str,
    of: int,
    *,
    connected: bool = True,
    answer_s: float = family.ANSWER_S,
    **more: Any,
) -> list[Rank]:
    """Ranks that know each other, and are patient with Valkey: nothing here is about a slow one."""
    more = {"request_timeout": 10.0} | more
    found = places(of)
    addresses = [place.address for place in found]
    ranks = [
        make(url, share=place.share, siblings=Siblings(place, addresses, answer_s), pages=3 * PAGES, **more)
        for place in found
    ]
    if connected:
        until(lambda: all(usable(one) == of - 1 for one in ranks))
    return ranks


def usable(one: Rank) -> int:
    return int(one.metrics["cache_siblings", "usable"])


def fetch_at_once(ranks: Sequence[Rank], chain: list[bytes]) -> list[str]:
    """One request on all of them: how each prefetch ended."""
    tickets = [one.store.prefetch("r", chain) for one in ranks]
    assert all(ticket.wait(30) for ticket in tickets)
    for one in ranks:
        one.store.cancel("r")
    return [ticket.end for ticket in tickets]


def hits_at_valkey(client: Any) -> int:
    return int(client.info("stats")["keyspace_hits"])


@contextlib.contextmanager
def saved(make: Make, url: str, chain: list[bytes]) -> Iterator[None]:
    one = make(url, pages=3 * PAGES)
    assert one.save(chain) == len(chain)
    yield


@pytest.mark.parametrize("of", [2, 4])
def test_a_page_comes_from_valkey_once(server: EmbeddedServer, client: Any, rank: Make, of: int) -> None:
    """But for the first ones. Bytes from Valkey = pages × (page + header), by its own count of hits too."""
    chain = keys(PAGES, f"once {of}")
    with saved(rank, server.url, chain):
        ranks = family_of(rank, server.url, of)
        before = hits_at_valkey(client)
        assert fetch_at_once(ranks, chain) == ["complete"] * of
        got = FIRST * of + PAGES - FIRST
        assert hits_at_valkey(client) - before == got
        assert sum(one.metrics["cache_loaded_bytes"] for one in ranks) == got * (128 + ranks[0].size)
        for one in ranks:
            theirs = sum(not one.store.share.holds(key) for key in chain[FIRST:])
            assert one.metrics["cache_sibling_pages", "copied"] == theirs
            assert one.metrics["cache_hit_pages", "valkey"] == PAGES
            assert one.hits(chain) == PAGES
        until(lambda: all(one.idle() for one in ranks))


def test_a_prompt_ends_where_valkey_s_pages_end(server: EmbeddedServer, client: Any, rank: Make) -> None:
    chain = keys(PAGES, "ends")
    there = chain[: PAGES // 2]
    with saved(rank, server.url, there):
        ranks = family_of(rank, server.url, 3)
        assert fetch_at_once(ranks, chain) == ["miss"] * 3
        for one in ranks:
            assert one.hits(chain) == len(there)
        until(lambda: all(one.idle() for one in ranks))


def test_a_new_prompt_asks_no_sibling(server: EmbeddedServer, rank: Make) -> None:
    ranks = family_of(rank, server.url, 2)
    assert fetch_at_once(ranks, keys(PAGES, "new")) == ["miss"] * 2
    assert all(
        one.metrics["cache_sibling_pages", outcome] == 0
        for one in ranks
        for outcome in ("copied", "absent", "unusable")
    )


def test_who_has_not_heard_of_the_request_lends_nothing(
    server: EmbeddedServer, client: Any, rank: Make
) -> None:
    """The others' pages come from Valkey, after a moment."""
    chain = keys(PAGES, "alone")
    with saved(rank, server.url, chain):
        first, second = family_of(rank, server.url, 2)
        before = hits_at_valkey(client)
        assert first.fetch(chain) == "complete"
        assert hits_at_valkey(client) - before == PAGES
        assert first.hits(chain) == PAGES
        theirs = sum(second.store.share.holds(key) for key in chain[FIRST:])
        assert first.metrics["cache_sibling_pages", "absent"] == theirs
        assert second.pool.resident == 0


def test_what_a_sibling_has_in_its_pool_is_lent_without_a_get(
    server: EmbeddedServer, client: Any, rank: Make
) -> None:
    chain = keys(PAGES, "resident")
    with saved(rank, server.url, chain):
        first, second = family_of(rank, server.url, 2)
        assert first.fetch(chain) == "complete"
        before = hits_at_valkey(client)
        assert second.fetch(chain) == "complete"
        theirs = sum(first.store.share.holds(key) for key in chain[FIRST:])
        assert second.metrics["cache_sibling_pages", "copied"] == theirs
        assert hits_at_valkey(client) - before == PAGES - theirs
        assert second.hits(chain) == PAGES


def test_wrong_bytes_of_a_sibling_are_no_page(server: EmbeddedServer, rank: Make) -> None:
    """Its memory is damaged, or was written while it was read: the page comes from Valkey."""
    chain = keys(PAGES, "damaged")
    with saved(rank, server.url, chain):
        first, second = family_of(rank, server.url, 2)
        assert first.fetch(chain) == "complete"
        held = first.store.pin(chain)
        for page in held:
            page.view[17] ^= 1
        first.store.release(held)
        assert second.fetch(chain) == "complete"
        theirs = sum(first.store.share.holds(key) for key in chain[FIRST:])
        assert second.metrics["cache_sibling_pages", "unusable"] == theirs
        assert second.metrics["cache_sibling_pages", "copied"] == 0
        assert second.hits(chain) == PAGES


def test_where_memory_may_not_be_read_everything_comes_from_valkey(
    server: EmbeddedServer,
    client: Any,
    rank: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def forbidden(*args: object) -> None:
        raise PermissionError(errno.EPERM, "process_vm_readv: Operation not permitted")

    monkeypatch.setattr(family, "copy_from", forbidden)
    chain = keys(PAGES, "forbidden")
    with saved(rank, server.url, chain):
        ranks = family_of(rank, server.url, 2, connected=False)
        until(lambda: all(one.metrics["cache_siblings", "refused"] == 1 for one in ranks))
        assert "kernel.yama.ptrace_scope" in caplog.text
        before = hits_at_valkey(client)
        assert fetch_at_once(ranks, chain) == ["complete"] * 2
        assert hits_at_valkey(client) - before == 2 * PAGES
        assert [one.hits(chain) for one in ranks] == [PAGES] * 2


def test_a_sibling_that_ends_takes_no_page_with_it(server: EmbeddedServer, rank: Make) -> None:
    """While it is asked, wherever that is."""
    with contextlib.ExitStack() as stack:
        for round_ in range(8):
            chain = keys(PAGES, f"gone {round_}")
            stack.enter_context(saved(rank, server.url, chain))
            first, second = family_of(rank, server.url, 2)
            ticket = first.store.prefetch("r", chain)
            second.store.prefetch("r", chain)
            time.sleep(0.004 * round_)
            second.store.close()
            assert ticket.wait(30)
            first.store.cancel("r")
            assert ticket.end == "complete"
            assert first.hits(chain) == PAGES
            until(lambda first=first: first.metrics["cache_siblings", "gone"] == 1)  # type: ignore[misc]
            until(first.idle)


def test_who_leaves_while_a_sibling_looks_leaves_nothing_lent(server: EmbeddedServer, rank: Make) -> None:
    chain = keys(PAGES, "leaves")
    with saved(rank, server.url, chain):
        first, second = family_of(rank, server.url, 2)
        for wait in (0.0, 0.005, 0.02, 0.05):
            first.store.prefetch("r", chain)
            time.sleep(wait)
            first.store.cancel("r")
            until(lambda: first.idle() and second.idle())
            first.store.clear()
        assert fetch_at_once([first, second], chain) == ["complete"] * 2
        until(lambda: first.idle() and second.idle())


def test_what_is_not_returned_is_lent_for_a_while_only(
    server: EmbeddedServer, rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "_LONGEST", 0.05)
    monkeypatch.setattr(desk.Desk.__init__, "__defaults__", (0.05,))
    monkeypatch.setattr(desk._Counter, "close", lambda self: None)
    chain = keys(PAGES, "kept")
    with saved(rank, server.url, chain):
        first, second = family_of(rank, server.url, 2)
        assert second.fetch(chain) == "complete"
        monkeypatch.setattr(family._Link, "end", lambda self, number: None)
        assert first.fetch(chain) == "complete"
        assert second.pool.held("sibling") > 0
        until(second.idle)


def test_a_stranger_gets_nothing_and_breaks_nothing(server: EmbeddedServer, rank: Make) -> None:
    chain = keys(PAGES, "strangers")
    found = places(2)
    addresses = [place.address for place in found]
    with saved(rank, server.url, chain):
        ranks = [
            rank(server.url, share=place.share, siblings=Siblings(place, addresses), pages=3 * PAGES)
            for place in found
        ]
        until(lambda: all(usable(one) == 1 for one in ranks))
        for message in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\x7f", b"\x03\0\0\0abc"):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect("\0" + addresses[0].name)
                stranger.sendall(message)
        assert fetch_at_once(ranks, chain) == ["complete"] * 2
        assert [usable(one) for one in ranks] == [1, 1]
        assert all(one.metrics["cache_sibling_pages", "copied"] > 0 for one in ranks)


def test_another_user_s_process_gets_nothing(
    server: EmbeddedServer, rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk.wire, "user_of", lambda writer: 65534)
    ranks = family_of(rank, server.url, 2, connected=False)
    until(lambda: all(one.metrics["cache_siblings", "gone"] == 1 for one in ranks))


def test_ranks_of_other_machines_are_not_asked(server: EmbeddedServer, rank: Make) -> None:
    mine, theirs = places(2)
    far = Address(1, "another boot", theirs.address.pid, theirs.address.name)
    one = rank(server.url, share=mine.share, siblings=Siblings(mine, [mine.address, far]))
    theirs.close()
    assert one.metrics["cache_siblings", "elsewhere"] == 1
    assert usable(one) == 0


def test_addresses_are_those_of_all_ranks() -> None:
    first, second = places(2)
    try:
        with pytest.raises(ValueError, match="addresses of 1 ranks, expected one of each of 2"):
            Siblings(first, [first.address])
    finally:
        first.close()
        second.close()


HOLDER = """
import ctypes, sys
from glm_connectors.tiers.siblings import memory
memory.let_siblings_read()
kept = ctypes.create_string_buffer(bytes(range(256)) * 8, 2048)
print(ctypes.addressof(kept), flush=True)
sys.stdin.read()
"""
READER = """
import ctypes, os, sys
from glm_connectors.tiers.siblings import copy_from
pid, address = map(int, sys.argv[1:])
into = ctypes.create_string_buffer(2048)
copy_from(pid, [address + 1024, address], [ctypes.addressof(into), ctypes.addressof(into) + 1024], 1024)
sys.stdout.buffer.write(into.raw)
"""


def test_another_process_s_memory_is_read() -> None:
    """As ranks do it: of a process with the same parent."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        address = holder.stdout.readline().strip()
        found = subprocess.run(
            [sys.executable, "-c", READER, str(holder.pid), address], capture_output=True, check=False
        )
        holder.stdin.close()
    assert found.stdout == bytes(range(256)) * 8, found.stderr.decode()


def test_a_process_that_is_gone_can_t_be_read() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    into = ctypes.create_string_buffer(8)
    with pytest.raises(ProcessLookupError):
        copy_from(gone.pid, [ctypes.addressof(into)], [ctypes.addressof(into)], 8)


def test_memory_that_is_not_there_is_an_error() -> None:
    import os

    into = ctypes.create_string_buffer(8)
    with pytest.raises(OSError, match="Bad address"):
        copy_from(os.getpid(), [16], [ctypes.addressof(into)], 8)
