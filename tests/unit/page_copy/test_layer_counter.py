"""The counter of a load's layers: who waits for a layer goes on when it is queued, or never will be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from glm_sglang.cache.cuda_layers import StreamLayerCounter

LAYERS = 4


class Events:
    """In the place of the copier: events are numbers, in the order in which they are marked."""

    def __init__(self) -> None:
        self.marked = 0
        self.waited: list[Any] = []
        self.settled: list[Any] = []

    def queued_layer(self) -> Any:
        self.marked += 1
        return self.marked

    def reader_waits(self, event: Any) -> None:
        self.waited.append(event)

    def settle(self, event: Any) -> None:
        self.settled.append(event)


@pytest.fixture
def events() -> Events:
    return Events()


def begun(events: Events) -> tuple[StreamLayerCounter, int]:
    counter = StreamLayerCounter(LAYERS, events)
    index = counter.update_producer()
    counter.set_consumer(index)
    return counter, index


def test_a_reader_goes_on_with_the_layer_it_reads(events: Events) -> None:
    counter, index = begun(events)
    reader = threading.Thread(target=counter.wait_until, args=(2,))
    reader.start()
    for layer in range(2):
        counter.complete(index, layer)
    assert events.waited == []
    counter.complete(index, 2)
    reader.join(10)
    assert not reader.is_alive()
    assert events.waited == [3]


@pytest.mark.parametrize("queued", [0, 2])
def test_a_failure_lets_everybody_go_on_and_is_told_at_the_end(events: Events, queued: int) -> None:
    """What was queued before it is still waited for: its slots may be given away after `finish`."""
    counter, index = begun(events)
    for layer in range(queued):
        counter.complete(index, layer)
    said: list[bool] = []
    waiting = [
        threading.Thread(target=counter.wait_until, args=(3,)),
        threading.Thread(target=lambda: said.append(counter.finish(index))),
    ]
    waiting[0].start()
    counter.fail(index, RuntimeError("copy engine"))
    waiting[0].join(10)
    waiting[1].start()
    waiting[1].join(10)
    assert said == [False]
    assert events.waited == []
    assert events.settled == [queued] * bool(queued)


def test_batches_do_not_wait_for_each_other(events: Events) -> None:
    counter, first = begun(events)
    second = counter.update_producer()
    for layer in range(LAYERS):
        counter.complete(second, layer)
    assert counter.finish(second)
    counter.set_consumer(second)
    counter.wait_until(0)  # it is over: there is nothing to wait for
    for layer in range(LAYERS):
        counter.complete(first, layer)
    assert counter.finish(first)
    assert counter.finish(first)
    assert events.settled == [LAYERS, 2 * LAYERS]


def test_without_a_load_nobody_waits(events: Events) -> None:
    counter = StreamLayerCounter(LAYERS, events)
    counter.wait_until(0)
    index = counter.update_producer()
    counter.set_consumer(index)
    counter.reset()
    counter.wait_until(0)
    counter.fail(index, RuntimeError("late"))
    assert (events.waited, events.settled) == ([], [])


def test_what_the_forwards_thread_waits_is_measured_and_nothing_else(events: Events) -> None:
    """The layer that it has to wait for is queued while it waits."""
    counter, index = begun(events)
    entered: list[int] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        entered.append(len(events.waited))
        counter.complete(index, 1)
        yield

    counter.waiting = waiting
    counter.complete(index, 0)
    counter.wait_until(0)
    counter.wait_until(1)
    counter.wait_until(1)
    assert entered == [1]
    assert events.waited == [1, 2, 2]


@pytest.mark.parametrize("read", [None, *range(LAYERS)])
def test_the_device_is_waited_for_unless_the_forward_has_read_the_last_layer(
    events: Events, read: int | None
) -> None:
    counter, index = begun(events)
    for layer in range(LAYERS):
        counter.complete(index, layer)
    if read is not None:
        counter.wait_until(read)
    assert counter.finish(index)
    assert events.settled == ([] if read == LAYERS - 1 else [LAYERS])
