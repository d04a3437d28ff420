"""Intervals of slots against the set of what is offered: nothing twice, nothing lost, neighbours where there are."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from glm_connectors.tiers.places import _LANES, AHEAD, Places
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

# No class has more intervals than are looked at: eight of 2 or 3 slots with one between any two.
SLOTS = 24


def intervals(slots: set[int]) -> list[set[int]]:
    """The longest runs of neighbours."""
    runs = groupby(enumerate(sorted(slots)), lambda pair: pair[1] - pair[0])
    return [{slot for _, slot in run} for _, run in runs]


class Taken(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.places = Places(SLOTS)
        self.offered: set[int] = set()

    @rule(slots=st.lists(st.integers(0, SLOTS - 1)))
    def offer(self, slots: list[int]) -> None:
        self.places.offer(slots)
        self.offered |= set(slots)

    @rule(count=st.integers(1, SLOTS))
    def take(self, count: int) -> None:
        """From the shortest interval that is long enough; where none is, all of the longest."""
        found = intervals(self.offered)
        taken = self.places.take(count)
        if not found:
            assert taken is None
            return
        assert taken is not None
        (source,) = [one for one in found if set(taken) <= one]
        enough = [len(one) for one in found if len(one) >= count]
        if enough:
            assert len(taken) == count
            assert len(source) == min(enough)
        else:
            assert set(taken) == source
            assert len(source) == max(map(len, found))
        self.offered -= set(taken)

    @rule(count=st.integers(1, SLOTS), lane=st.sampled_from("ab"))
    def take_in_a_lane(self, count: int, lane: str) -> None:
        taken = self.places.take(count, lane)
        assert (taken is None) == (not self.offered)
        if taken is not None:
            assert 1 <= len(taken) <= count
            assert set(taken) <= self.offered
            self.offered -= set(taken)

    def teardown(self) -> None:
        while (taken := self.places.take(SLOTS)) is not None:
            assert set(taken) <= self.offered
            self.offered -= set(taken)
        assert not self.offered


TestTaken = Taken.TestCase
TestTaken.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("count", [1, 2, 13, 32])
@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_lanes_that_take_in_turn_do_not_come_between_each_other(count: int, lanes: int) -> None:
    places = Places(lanes * AHEAD * 2)
    places.offer(range(lanes * AHEAD * 2))
    taken: list[set[int]] = [set() for _ in range(lanes)]
    for _ in range(AHEAD // count):
        for lane in range(lanes):
            piece = places.take(count, lane)
            assert piece is not None
            taken[lane] |= set(piece)
    assert [len(intervals(one)) for one in taken] == [1] * lanes
    assert [len(one) for one in taken] == [AHEAD // count * count] * lanes


def test_a_lane_whose_next_slots_are_gone_goes_on_elsewhere() -> None:
    places = Places(8)
    places.offer(range(8))
    first = places.take(2, "lane")
    assert first == range(2)
    assert places.take(6) == range(2, 8)
    assert places.take(2, "lane") is None
    places.offer([5, 6, 7])
    assert places.take(2, "lane") == range(5, 7)
    assert places.take(2, "lane") == range(7, 8)


def test_lanes_are_forgotten_that_have_taken_nothing_for_longest() -> None:
    """Whoever goes on stays known, however many others have come and gone."""
    places = Places(3 * _LANES * AHEAD)
    places.offer(range(3 * _LANES * AHEAD))

    def take(lane: str | int) -> int:
        (slot,) = places.take(1, lane) or ()
        return slot

    gone, busy = take("gone"), take("busy")
    for other in range(_LANES - 2):
        take(other)
    assert take("busy") == busy + 1
    last = [take(name) for name in ("one too many", "two")]
    assert take("two") == last[1] + 1
    assert take("busy") == busy + 2
    assert take("gone") != gone + 1


def test_a_cut_is_from_an_intervals_end() -> None:
    """The beginning of a prompt lies first, and is to be evicted last."""
    places = Places(100)
    places.offer(range(100))
    found: list[Any] = [places.take(40), places.take(40), places.take(40)]
    assert found == [range(60, 100), range(20, 60), range(20)]
