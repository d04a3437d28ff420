"""What the lookup client owes its sleep to: it is quiet when no reply is on its way, and only then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from glm_connectors.lmcache_repairs.lookup_table import LookupTable, Rank
from glm_connectors.lmcache_repairs.lookup_wire import LookupReply


@pytest.fixture
def table() -> Iterator[LookupTable]:
    made = LookupTable([Rank(0, "")], timeout=60.0)
    with made.lock:
        yield made


def test_a_late_reply_and_a_probe_s_are_not_the_one_that_is_owed(table: LookupTable) -> None:
    """A rank comes back: it answers what it was asked before, the probe, and last what it is asked now."""
    before = table.open("before", now=0.0)
    table.mark_down(table.ranks[0], now=1.0)
    probe = table.probe_id()
    assert table.reply(LookupReply("before", 64, 0, before.attempt)) is False  # it still waits for it
    now = table.open("now", now=2.0)
    assert not table.quiet()
    table.reply(LookupReply(probe, 0, 0, 0))
    table.reply(LookupReply("before", 64, 0, before.attempt))
    assert not table.quiet()
    table.reply(LookupReply("now", 128, 0, now.attempt))
    assert table.quiet()
    assert now.tokens == 128


def test_a_repeated_request_is_owed_one_reply(table: LookupTable) -> None:
    """A rank answers a request that repeats a loading one with that load, so the first attempt gets no reply."""
    table.open("a", now=0.0)
    second = table.open("a", now=0.0)
    table.reply(LookupReply("a", 64, 0, second.attempt))
    assert table.quiet()
