"""The circuit breaker, by the clock that it is given."""

from __future__ import annotations

import pytest
from glm_connectors.valkey_store.breaker import CLOSED, HALF_OPEN, OPEN, Breaker
from hypothesis import given
from hypothesis import strategies as st


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def fail(breaker: Breaker, times: int) -> list[bool]:
    opened = []
    for _ in range(times):
        assert breaker.admits()
        opened.append(breaker.failed())
    return opened


def test_five_failures_in_a_row_open_it(clock: Clock) -> None:
    breaker = Breaker(clock=clock)
    assert fail(breaker, 4) == [False] * 4
    assert breaker.admits()
    breaker.succeeded()
    assert fail(breaker, 5) == [False] * 4 + [True]
    assert breaker.state == OPEN
    assert not breaker.admits()
    assert breaker.due() == 0.25


def test_a_probe_and_then_one_trial_close_it(clock: Clock) -> None:
    breaker = Breaker(clock=clock)
    fail(breaker, 5)
    clock.now = 0.25
    assert breaker.due() == 0
    assert not breaker.admits()  # time alone does not
    breaker.probed(True)
    assert breaker.state == HALF_OPEN
    assert breaker.due() is None
    assert breaker.admits()
    assert not breaker.admits()  # one at a time
    breaker.succeeded()
    assert breaker.state == CLOSED
    assert breaker.admits()


def test_delays_double_and_stay_below_thirty_seconds(clock: Clock) -> None:
    """LMCache 4368: a stall may last as long as it wants; the next look is never far away."""
    breaker = Breaker(clock=clock)
    fail(breaker, 5)
    delays = []
    for _ in range(12):
        due = breaker.due()
        assert due is not None
        delays.append(due)
        clock.now += due
        breaker.probed(False)
    assert delays == [0.25, 0.5, 1, 2, 4, 8, 15, 15, 15, 15, 15, 15]


def test_a_failed_trial_opens_it_for_longer(clock: Clock) -> None:
    breaker = Breaker(clock=clock)
    fail(breaker, 5)
    clock.now = 1.0
    breaker.probed(True)
    assert breaker.admits()
    assert breaker.failed()
    assert (breaker.state, breaker.due()) == (OPEN, 0.5)


def test_answers_from_before_do_not_close_it(clock: Clock) -> None:
    breaker = Breaker(clock=clock)
    fail(breaker, 5)
    breaker.succeeded()
    assert breaker.state == OPEN
    assert not breaker.failed()
    breaker.trip()
    assert breaker.state == OPEN


@given(st.lists(st.sampled_from(["admit", "good", "bad", "alive", "dead", "wait"]), max_size=200))
def test_whatever_happens_it_can_be_closed_again(events: list[str]) -> None:
    clock = Clock()
    breaker = Breaker(clock=clock)
    for event in events:
        match event:
            case "admit":
                breaker.admits()
            case "good":
                breaker.succeeded()
            case "bad":
                breaker.failed()
            case "wait":
                clock.now += 3
            case _:
                breaker.probed(event == "alive")
        due = breaker.due()
        assert (due is None) == (breaker.state != OPEN)
        assert due is None or due <= 15
    if breaker.state == OPEN:
        breaker.probed(True)
    breaker.succeeded()
    assert breaker.state == CLOSED
    assert breaker.admits()
