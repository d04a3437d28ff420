"""What waiting requests hold: their pages are there when they run, others are not fetched in their place, and when they
are gone nothing is held.

Oracles: a page's bytes follow from its key; the pool's count of holds and slots.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from glm_connectors.tiers.pool import OWNERS
from glm_connectors.tiers.room import Room, place
from glm_connectors.valkey_store import EmbeddedServer
from hypothesis import given
from hypothesis import strategies as st
from ranks import PATIENCE, Rank, keys, until
from valkey_proxy import Fault, Proxy

Make = Callable[..., Rank]
PROMPTS = [keys(8, f"{number}") for number in range(5)]


def url_of(proxy: Proxy) -> str:
    return f"valkey://127.0.0.1:{proxy.port}"


@pytest.fixture
def filled(server: EmbeddedServer, rank: Make) -> EmbeddedServer:
    """A Valkey that has every prompt."""
    writer = rank(server.url)
    for chain in PROMPTS:
        assert writer.save(chain) == 8
    return server


def arrive(reader: Rank) -> list[Any]:
    """All five at once."""
    return [reader.store.prefetch(f"{number}", chain) for number, chain in enumerate(PROMPTS)]


def runs(reader: Rank, number: int) -> int:
    """As a linker does: pinned for the load, then admitted; how many pages it has."""
    pages = reader.store.pin(PROMPTS[number])
    reader.store.cancel(f"{number}")
    assert reader.hits(PROMPTS[number]) == len(pages)
    reader.store.release(pages)
    return len(pages)


def test_requests_that_wait_find_their_pages_in_the_order_in_which_they_came(
    filled: EmbeddedServer, rank: Make
) -> None:
    """Forty pages for a pool of twenty, of which waiting requests may hold ten."""
    reader = rank(filled.url, writer=False, pages=20)
    tickets = arrive(reader)
    for number, ticket in enumerate(tickets):
        assert ticket.wait(PATIENCE)
        assert ticket.end == "complete"
        assert not any(later.done for later in tickets[number + 1 :])  # for lack of room, and it takes none
        assert reader.pool.held("wait") == 8
        assert runs(reader, number) == 8
    until(reader.idle)
    assert reader.metrics["cache_hit_pages", "valkey"] == 40
    assert reader.metrics["cache_lost_pages"] == 0


def test_the_event_loop_is_woken_for_whom_it_has_to_let_in_and_for_nobody_else(
    filled: EmbeddedServer, rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wake-up lets go of the interpreter on the scheduler's thread, once a request and for nothing."""
    reader = rank(filled.url, writer=False, pages=20)
    tickets = arrive(reader)
    assert tickets[0].wait(PATIENCE)
    prefetcher: Any = reader.store._remote.prefetcher  # type: ignore[attr-defined]
    woken: list[Any] = []
    wake = prefetcher._loop.call_soon_threadsafe
    monkeypatch.setattr(
        prefetcher._loop, "call_soon_threadsafe", lambda *call: (woken.append(call[0]), wake(*call))
    )
    reader.store.urge("0", 0)
    reader.store.urge("unknown", 1)
    assert (tickets[0].turn, woken) == (0, [])
    reader.store.urge("1", 2)  # it waits for room
    assert woken == [prefetcher._admit]


def test_saves_evict_no_page_that_a_request_waits_for(filled: EmbeddedServer, rank: Make) -> None:
    reader = rank(filled.url, pages=20)
    ticket = reader.store.prefetch("0", PROMPTS[0])
    assert ticket.wait(PATIENCE)
    for number in range(8):  # four times the pool
        reader.save(keys(10, f"saved {number}"))
    assert runs(reader, 0) == 8
    assert reader.metrics["cache_refused_reservations"] == 0


def test_pages_that_were_there_are_held_as_well(filled: EmbeddedServer, rank: Make) -> None:
    """Its beginning is in the pool: what comes is of no use without it."""
    reader = rank(filled.url, pages=20)
    reader.commit(PROMPTS[0][:3])
    tickets = [reader.store.prefetch("0", PROMPTS[0]), reader.store.prefetch("r", PROMPTS[0][:2])]
    assert [ticket.wait(PATIENCE) and ticket.end for ticket in tickets] == ["complete", "resident"]
    until(lambda: reader.pool.held("wait") == 10)  # one page more than once, and a slot once
    push_out(reader)
    assert runs(reader, 0) == 8
    reader.store.cancel("r")
    until(reader.idle)


def test_a_page_that_several_wait_for_is_one_slot(filled: EmbeddedServer, rank: Make) -> None:
    reader = rank(filled.url, writer=False, pages=20)
    tickets = [reader.store.prefetch(f"r{number}", PROMPTS[0]) for number in range(5)]
    assert all(ticket.wait(PATIENCE) for ticket in tickets)
    for number in range(5):
        assert reader.hits(PROMPTS[0]) == 8
        reader.store.cancel(f"r{number}")
    until(reader.idle)


@pytest.mark.parametrize("gone", [[0], [1], [0, 1, 2, 3], [4, 2, 0], [0, 1, 2, 3, 4]])
def test_whoever_goes_the_others_get_their_pages(gone: list[int], filled: EmbeddedServer, rank: Make) -> None:
    """Before, while and after their pages come."""
    reader = rank(filled.url, writer=False, pages=20)
    tickets = arrive(reader)
    for number in gone:
        reader.store.cancel(f"{number}")
    for number in sorted(set(range(5)) - set(gone)):
        assert tickets[number].wait(PATIENCE)
        assert runs(reader, number) == 8
    assert all(tickets[number].done for number in gone)
    until(reader.idle)
    prefetcher = reader.store._remote.prefetcher
    until(lambda: prefetcher._room.taken == 0)
    assert (prefetcher.running, prefetcher._waiting) == (0, 0)


def test_a_request_that_can_run_waits_for_none_that_cannot(filled: EmbeddedServer, rank: Make) -> None:
    """The first holds its pages and waits for a decode server that never takes it."""
    reader = rank(filled.url, writer=False, pages=20)
    tickets = arrive(reader)
    assert tickets[0].wait(PATIENCE)
    reader.store.urge("3", 0)
    assert tickets[3].wait(PATIENCE)
    assert runs(reader, 3) == 8
    assert tickets[0].lost
    assert reader.metrics["cache_lost_pages"] == 8
    assert tickets[1].wait(PATIENCE)  # and then as they came
    assert not tickets[2].done
    for number in range(5):
        reader.store.cancel(f"{number}")
    until(reader.idle)


def test_a_request_loses_nothing_to_one_behind_it(filled: EmbeddedServer, rank: Make) -> None:
    reader = rank(filled.url, writer=False, pages=20)
    tickets = arrive(reader)
    reader.store.urge("0", 0)
    assert tickets[0].wait(PATIENCE)
    reader.store.urge("3", 1)
    reader.store.urge("unknown", 2)
    assert runs(reader, 0) == 8
    assert tickets[3].wait(PATIENCE)  # before 1 and 2
    assert not tickets[1].done
    assert not tickets[2].done
    assert runs(reader, 3) == 8
    for number in (1, 2, 4):
        reader.store.cancel(f"{number}")
    until(reader.idle)


def test_ranks_that_let_in_different_requests_first_do_not_wait_for_each_other(
    filled: EmbeddedServer, rank: Make
) -> None:
    """Two ranks, one room each, and a request runs when both have it: one rank has let in A, the other B."""
    ranks = [rank(filled.url, writer=False, pages=20) for _ in range(2)]
    tickets: list[dict[int, Any]] = [{}, {}]
    for reader, mine, first in zip(ranks, tickets, (0, 1), strict=True):
        mine[first] = reader.store.prefetch(f"{first}", PROMPTS[first])
        assert mine[first].wait(PATIENCE)
        mine[1 - first] = reader.store.prefetch(f"{1 - first}", PROMPTS[1 - first])
    for reader in ranks:
        for number in (0, 1):
            reader.store.urge(f"{number}", number)
    assert all(mine[0].wait(PATIENCE) for mine in tickets)
    assert [runs(reader, 0) for reader in ranks] == [8, 8]
    assert all(mine[1].wait(PATIENCE) for mine in tickets)
    for reader in ranks:
        reader.store.cancel("1")
        until(reader.idle)


def test_what_ends_early_keeps_its_beginning_and_gives_the_rest_up(
    filled: EmbeddedServer, client: Any, rank: Make
) -> None:
    from glm_connectors.tiers.envelope import Envelope
    from ranks import NAMESPACE

    client.delete(Envelope(NAMESPACE).name(PROMPTS[0][3]))
    reader = rank(filled.url, writer=False, pages=20)
    tickets = arrive(reader)
    assert tickets[0].wait(PATIENCE)
    assert tickets[0].end == "miss"
    until(lambda: reader.pool.held("wait") + reader.pool.held("get") == 3)
    assert not tickets[1].done  # 3 and 8 are more than 10
    for number in range(5):
        reader.store.cancel(f"{number}")
    until(reader.idle)


def test_a_cancel_while_its_get_is_under_way_leaves_no_hold(
    filled: EmbeddedServer, proxy: Proxy, rank: Make
) -> None:
    reader = rank(url_of(proxy), writer=False, pages=20, get_workers=1, request_timeout=5.0)
    proxy.fault = Fault("stall", "reply", 0.1)
    tickets = arrive(reader)
    until(lambda: reader.pool.held("get") > 0)
    reader.store.cancel("0")
    assert tickets[1].wait(PATIENCE)
    assert runs(reader, 1) == 8
    for number in range(2, 5):
        reader.store.cancel(f"{number}")
    until(reader.idle)


def test_who_leaves_waits_for_no_worker_that_takes_slots(
    filled: EmbeddedServer, rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's thread cancels while a worker is somewhere in the pool, and may have lost the interpreter there."""
    reader = rank(filled.url, writer=False, pages=20)
    inside, go_on = threading.Event(), threading.Event()
    take = reader.pool.take

    def slow(count: int, owner: str, lane: object = None) -> Any:
        inside.set()
        assert go_on.wait(PATIENCE)
        return take(count, owner, lane)  # type: ignore[arg-type]

    monkeypatch.setattr(reader.pool, "take", slow)
    ticket = reader.store.prefetch("r", PROMPTS[0])
    assert inside.wait(PATIENCE)
    leaving = threading.Thread(target=reader.store.cancel, args=("r",), daemon=True)
    leaving.start()
    leaving.join(PATIENCE / 3)  # sooner than the worker gives up
    left = not leaving.is_alive()
    go_on.set()
    assert left
    assert ticket.end == "cancelled"
    until(reader.idle)


@pytest.mark.parametrize("how", ["clear", "close"])
def test_the_end_lets_go_of_everything(how: str, filled: EmbeddedServer, rank: Make) -> None:
    reader = rank(filled.url, writer=False, pages=20)
    tickets = arrive(reader)
    assert tickets[0].wait(PATIENCE)
    getattr(reader.store, how)()
    assert all(ticket.done for ticket in tickets)
    until(lambda: not any(map(reader.pool.held, OWNERS)))
    if how == "clear":
        until(lambda: reader.pool.free == 20)
        assert reader.fetch(PROMPTS[2]) == "complete"


def test_without_its_store_it_holds_what_there_is_and_waits_for_nothing_else(
    filled: EmbeddedServer, proxy: Proxy, rank: Make
) -> None:
    reader = rank(url_of(proxy), writer=False, pages=20)
    reader.commit(PROMPTS[1][:4])
    first = reader.store.prefetch("0", PROMPTS[0])
    assert first.wait(PATIENCE)
    proxy.fault = Fault("reset", "reply")
    until(lambda: reader.fetch(PROMPTS[4][:1]) == "down")
    second = reader.store.prefetch("1", PROMPTS[1])  # 8 and 4 are more than 10
    third = reader.store.prefetch("2", PROMPTS[2])
    assert third.done
    assert third.end == "down"
    assert runs(reader, 0) == 8
    assert second.wait(PATIENCE)
    assert second.end == "down"
    proxy.fault = None
    push_out(reader)
    assert runs(reader, 1) == 4
    reader.store.cancel("2")
    until(reader.idle)


def push_out(reader: Rank) -> None:
    """Saves more than the pool holds: what nobody holds is evicted."""
    for number in range(8):
        reader.save(keys(10, f"saved {number}"))


def queued(reader: Rank, count: int) -> None:
    """Until so many wait for room."""
    until(lambda: len(reader.store._remote.prefetcher._room._waiting) == count)


def evict(reader: Rank) -> None:
    """Whatever nobody holds."""
    for number in range(20):
        reader.commit(keys(2, f"evicts {number}"))


def test_what_was_there_when_it_arrived_is_there_when_it_runs(filled: EmbeddedServer, rank: Make) -> None:
    """There is no room to hold it, so it may be gone by then: it waits for its turn as what is missing does."""
    reader = rank(filled.url, writer=False, pages=20)
    assert reader.store.prefetch("0", PROMPTS[0]).wait(PATIENCE)
    reader.commit(PROMPTS[1])
    there = reader.store.prefetch("1", PROMPTS[1])
    queued(reader, 1)
    assert not there.done
    evict(reader)
    assert reader.store.resident(PROMPTS[1]) == 0
    assert runs(reader, 0) == 8
    assert there.wait(PATIENCE)
    assert there.end == "complete"
    evict(reader)
    assert runs(reader, 1) == 8
    until(reader.idle)


def test_pages_that_nobody_fetches_make_no_store_slow(filled: EmbeddedServer, rank: Make) -> None:
    """Loads at 1000 pages a second, recomputing at 200: behind 32 pages that are under way 8 are worth it, behind 33 not.
    A hundred and sixty wait for room. Whether it is worth it is also asked when there is room."""
    reader = rank(filled.url, writer=False, pages=20)
    assert reader.store.prefetch("0", PROMPTS[0]).wait(PATIENCE)
    worth = reader.store._worth

    def measured() -> None:
        for _ in range(256):
            worth.load.rate.note(80_000, 0.01)

    measured()
    reader.store.note_prefill(200 * 64, 1.0)
    assert (worth.fetch(8, 32), worth.fetch(8, 33)) == (True, False)
    tickets = [reader.store.prefetch(f"r{number}", keys(8, f"r{number}")) for number in range(20)]
    queued(reader, 20)
    assert [ticket.end for ticket in tickets] == [""] * 20
    measured()
    reader.store.note_prefill(10**9, 1.0)
    reader.store.cancel("0")
    assert all(ticket.wait(PATIENCE) for ticket in tickets)
    assert {ticket.end for ticket in tickets} == {"slow"}
    for ticket in tickets:
        reader.store.cancel(ticket.rid)
    until(reader.idle)


def test_nothing_is_fetched_that_could_not_be_held(filled: EmbeddedServer, rank: Make) -> None:
    """Prompts whose common beginning is in the pool and takes the room: their ends would be evicted by one another."""
    reader = rank(filled.url, writer=False, pages=20)
    beginning = [*PROMPTS[0], *keys(2)]
    reader.commit(beginning)
    tickets = [reader.store.prefetch(f"{number}", [*beginning, *PROMPTS[number]]) for number in range(1, 5)]
    assert [ticket.wait(PATIENCE) and ticket.end for ticket in tickets] == ["share"] * 4
    assert reader.metrics["cache_loaded_bytes"] == 0
    assert reader.pool.resident == 10
    assert reader.pool.held("wait") == 4 * 10
    for number in range(1, 5):
        reader.store.cancel(f"{number}")
    until(reader.idle)


def counted(reader: Rank) -> dict[str, int]:
    return {
        f"{tier} {what}": int(reader.metrics[f"cache_{what}_pages", tier])
        for tier in ("cpu", "valkey")
        for what in ("hit", "miss")
    }


def test_each_page_of_a_request_is_counted_once(filled: EmbeddedServer, rank: Make) -> None:
    """Of the first they come, go to the second's room, and come again; the third's are computed by another meanwhile."""
    reader = rank(filled.url, writer=False, pages=20)
    first = reader.store.prefetch("0", PROMPTS[0])
    assert first.wait(PATIENCE)
    second = reader.store.prefetch("1", PROMPTS[1])
    reader.store.urge("1", 0)
    assert second.wait(PATIENCE)
    assert first.lost
    again = reader.store.prefetch("0", PROMPTS[0])
    reader.store.urge("0", 1)
    assert runs(reader, 1) == 8
    assert again.wait(PATIENCE)
    third = reader.store.prefetch("2", PROMPTS[2])
    queued(reader, 1)
    reader.commit(PROMPTS[2])
    assert runs(reader, 0) == 8
    assert third.wait(PATIENCE)
    assert runs(reader, 2) == 8
    assert counted(reader) == {"cpu hit": 0, "cpu miss": 24, "valkey hit": 24, "valkey miss": 0}
    assert third.end == "resident"
    assert reader.metrics["cache_lost_pages"] == 8


def test_what_one_that_has_run_held_is_not_lost(filled: EmbeddedServer, rank: Make) -> None:
    """Another takes its room before the loop has let go of it."""
    reader = rank(filled.url, writer=False, pages=20)
    loop = reader.store._remote._loop
    tickets = arrive(reader)
    assert tickets[0].wait(PATIENCE)
    held, go = threading.Event(), threading.Event()
    loop.call_soon_threadsafe(lambda: (held.set(), go.wait(PATIENCE)))
    assert held.wait(PATIENCE)
    reader.store.urge("1", 0)
    assert runs(reader, 0) == 8
    go.set()
    assert tickets[1].wait(PATIENCE)
    assert tickets[0].lost  # to the second, which was let in first
    assert reader.metrics["cache_lost_pages"] == 0
    for number in range(1, 5):
        reader.store.cancel(f"{number}")
    until(reader.idle)


@dataclass(eq=False)
class Claim:
    """A claim on letters, for Room alone."""

    claim: list[bytes]
    number: int
    turn: int | None = None
    done: bool = False
    within: bool = field(default=False)
    short: str = ""


def test_a_room_that_becomes_smaller_lets_in_what_fits_of_a_claim() -> None:
    """Not all of the pool could be pinned: a claim on more than there is would wait for ever."""
    size = 8
    room: Room[Claim] = Room(lambda: size)
    first, second = Claim(LETTERS[:4], 0), Claim(LETTERS, 1)
    room.enter(first)
    room.enter(second)
    assert room.next() == (first, [])
    size = 3
    assert room.next() is None
    room.leave(first)
    assert room.next() == (second, [])
    assert (second.claim, second.short) == (LETTERS[:3], "share")
    assert room.taken == 3


LETTERS = [bytes([letter]) for letter in b"abcdefgh"]


@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from(LETTERS), min_size=1, max_size=4, unique=True), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 1 << 30),
)
def test_a_room_is_never_overfull_and_everybody_who_can_run_comes_in(
    wanted: list[tuple[list[bytes], bool]], seed: int
) -> None:
    """Claims that come, are asked for, end and go in any order. Of those that can run each gets in while only requests
    before it run: nobody waits for one behind it or for one that never runs."""
    room: Room[Claim] = Room(lambda: 4)
    rng = random.Random(seed)
    claims = [Claim(claim, number) for number, (claim, _) in enumerate(wanted)]
    can_run = [claim for claim, (_, asked) in zip(claims, wanted, strict=True) if asked]

    def admit() -> None:
        while (found := room.next()) is not None:
            one, lost = found
            one.within = True
            for other in lost:
                assert other.done
                assert place(other) > place(one)
                other.within = False
            used = {key for claim in claims if claim.within for key in claim.claim}
            assert room.taken == len(used) <= 4

    for claim in rng.sample(claims, len(claims)):
        room.enter(claim)
        admit()
        if rng.random() < 0.5 and claim.within:
            claim.done = True
    for turn, claim in enumerate(rng.sample(can_run, len(can_run))):
        claim.turn = turn
        admit()
    for claim in sorted(can_run, key=place):
        for other in claims:
            other.done = other.done or other.within  # gets end
        admit()
        assert claim.within or claim.done
        room.leave(claim)  # it runs
        claim.within = False
        admit()
    for claim in claims:
        room.leave(claim)
    assert room.taken == 0
