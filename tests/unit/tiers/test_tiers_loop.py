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
