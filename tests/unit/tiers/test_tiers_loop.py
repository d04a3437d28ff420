"""The tiers' event loop: how often it asks the kernel, and that nobody waits for ever for that."""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from glm_connectors.tiers import loop as loops


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Timeouts with which the kernel was asked."""
    asked: list[Any] = []
    original = selectors.DefaultSelector.select

    def select(self: Any, timeout: Any = None) -> Any:
        asked.append(timeout)
        return original(self, timeout)

    monkeypatch.setattr(selectors.DefaultSelector, "select", select)
    return asked


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = loops.new()
    yield loop
    loop.close()


async def rounds(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_rounds_of_callbacks_do_not_ask_the_kernel(loop: asyncio.AbstractEventLoop, asked: list[Any]) -> None:
    """Plain asyncio asks once a round; here every 65th time."""
    loop.run_until_complete(rounds(650))
    assert 9 <= len(asked) <= 11
    asked.clear()
    plain = asyncio.SelectorEventLoop()
    plain.run_until_complete(rounds(650))
    plain.close()
    assert len(asked) >= 650


def test_a_coroutine_that_never_waits_does_not_shut_other_threads_out(
    loop: asyncio.AbstractEventLoop,
) -> None:
    """Its callback calls itself for ever; the one that ends it comes from another thread."""
    ended: list[bool] = []

    def busy() -> None:
        loop.call_soon(busy)

    def end() -> None:
        ended.append(True)
        loop.stop()

    thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(end))
    loop.call_soon(busy)
    loop.call_soon(thread.start)
    loop.run_forever()
    thread.join()
    assert ended


def test_a_timer_and_another_thread_wake_it(loop: asyncio.AbstractEventLoop) -> None:
    async def both() -> str:
        await asyncio.sleep(0.01)
        return await asyncio.wait_for(loop.run_in_executor(None, lambda: "done"), 30)

    assert loop.run_until_complete(both()) == "done"


class Pipe:
    """The end of a loop's pipe into which wake-ups are written, with a count of them."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.sent = inner, 0

    def send(self, data: bytes) -> int:
        self.sent += 1
        return self._inner.send(data)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_callbacks_that_come_together_are_one_wake_up_and_none_is_lost(
    loop: asyncio.AbstractEventLoop,
) -> None:
    """A thousand before the loop looks: one. Then one after the other, each when the one before has run: none is lost."""
    loop._csock = pipe = Pipe(loop._csock)  # type: ignore[attr-defined]
    ran = 0

    def run() -> None:
        nonlocal ran
        ran += 1
        done.set()

    done = threading.Event()
    for _ in range(1000):
        loop.call_soon_threadsafe(run)
    assert pipe.sent == 1
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    while ran < 1000:
        assert done.wait(30)
    for number in range(5000):
        done.clear()
        loop.call_soon_threadsafe(run)
        assert done.wait(30), number
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    assert not thread.is_alive()
    assert ran == 6000


def test_no_wake_up_of_several_threads_is_lost(loop: asyncio.AbstractEventLoop) -> None:
    """Each thread goes on when its own callback has run, at the moments when the others wake the loop, too."""
    running = threading.Thread(target=loop.run_forever)
    running.start()
    stuck: list[int] = []

    def work(number: int) -> None:
        for turn in range(2000):
            done = threading.Event()
            loop.call_soon_threadsafe(done.set)
            if not done.wait(30):
                stuck.append(number * 10_000 + turn)
                return

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loop.call_soon_threadsafe(loop.stop)
    running.join(30)
    assert not running.is_alive()
    assert not stuck
