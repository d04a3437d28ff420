"""Calls that end when their client is done with the bytes, and hand-overs between threads that lose nothing.

A glide worker thread, an S3 transfer or a native client goes on reading or writing a buffer after the
coroutine that awaits it was cancelled. `outlast` makes the coroutine stay until the client is done, and
turns the cancellation into an ordinary error, so that the `except Exception` around it in LMCache's
connectors returns the buffers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

from glm_connectors.lmcache_repairs.buffers import dispose

T = TypeVar("T")


class CallAbandonedError(RuntimeError):
    """The call was cancelled; it has ended, and its client no longer uses the buffers."""


def end_of(call: asyncio.Future[Any]) -> asyncio.Future[None]:
    """Awaits the end of `call`, whatever it is, and leaves it alone when cancelled: `asyncio.wait({call})` at a third of
    its cost."""
    waiter: asyncio.Future[None] = call.get_loop().create_future()

    def end(_call: asyncio.Future[Any]) -> None:
        if not waiter.done():
            waiter.set_result(None)

    call.add_done_callback(end)
    return waiter


async def outlast(call: asyncio.Future[T], withdraw: Callable[[], object] | None = None) -> T:
    """Waits until `call` is done even when cancelled, then raises CallAbandonedError.

    `withdraw` is tried once at cancellation: it may end a call that has not started. A result that comes
    after a cancellation is disposed of.
    """
    abandoned = False
    while not call.done():
        try:
            await end_of(call)
        except asyncio.CancelledError:
            if not abandoned and withdraw is not None:
                withdraw()
            abandoned = True
    if call.cancelled():
        raise CallAbandonedError("the client cancelled the call")
    if abandoned:
        if call.exception() is None:
            dispose(call.result())
        raise CallAbandonedError("cancelled while the client was at work")
    try:
        return call.result()
    finally:
        del call  # or an error, its traceback, this frame and the future would hold each other


class _Outlasting:
    """Awaitable over a client thread's future.

    Awaited in the job's own task: a cancellation can't slip past it.
    """

    def __init__(self, call: concurrent.futures.Future[Any]) -> None:
        self.future = asyncio.wrap_future(call)
        self.withdraw = call.cancel

    def __await__(self) -> Generator[Any, None, Any]:
        return outlast(self.future, self.withdraw).__await__()


async def gather(*calls: Awaitable[Any], return_exceptions: bool = False) -> list[Any]:
    """Like `asyncio.gather`, but returns only when every part has ended, however it ends.

    When a part fails (or the whole is cancelled) and exceptions are not asked for, the others' results are
    disposed of and the first failure in order is raised (CallAbandonedError for a cancellation).
    """
    parts = [call.future if isinstance(call, _Outlasting) else asyncio.ensure_future(call) for call in calls]
    waiting = set(parts)
    abandoned = False
    while waiting:
        try:
            _, waiting = await asyncio.wait(waiting)
        except asyncio.CancelledError:
            waiting = {part for part in waiting if not part.done()}
            if abandoned:
                continue
            abandoned = True
            for call, part in zip(calls, parts, strict=True):
                if isinstance(call, _Outlasting):
                    call.withdraw()
                else:
                    part.cancel()
    outcomes = [_outcome(part) for part in parts]
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if abandoned and not failures:
        failures = [CallAbandonedError("cancelled while the client was at work")]
    if return_exceptions or not failures:
        return outcomes
    dispose([outcome for outcome in outcomes if not isinstance(outcome, BaseException)])
    try:
        raise failures[0]
    finally:
        del calls, parts, outcomes, failures  # as in `outlast`


def _outcome(part: asyncio.Future[Any]) -> Any:
    if part.cancelled():
        return CallAbandonedError("cancelled while the client was at work")
    error = part.exception()
    return part.result() if error is None else error


class SettlingAsyncio:
    """A connector module's global `asyncio`: the real one, but `gather` and `wrap_future` settle."""

    gather = staticmethod(gather)
    wrap_future = staticmethod(_Outlasting)

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)


def hand_over(
    coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop
) -> concurrent.futures.Future[T]:
    """Runs `coroutine` on `loop` for a waiting thread; cancelling the returned future either fails or wins.

    `asyncio.run_coroutine_threadsafe` loses a result that arrives while its future is being cancelled. Here
    `cancel()` returns False once a result is on its way (take it), and a result that comes after a
    cancellation is disposed of.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    async def run() -> None:
        try:
            result = await coroutine
        except asyncio.CancelledError:
            # Not our caller's doing: to it this is an error like others.
            if future.set_running_or_notify_cancel():
                future.set_exception(CallAbandonedError("the call was cancelled"))
            raise
        except BaseException as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        if future.set_running_or_notify_cancel():
            future.set_result(result)
        else:
            dispose(result)

    def ended(task: asyncio.Task[None]) -> None:
        _RUNNING.discard(task)
        coroutine.close()  # no-op unless the task was cancelled before its first step

    def start() -> None:
        if future.cancelled():
            coroutine.close()
            return
        task = loop.create_task(run())
        _RUNNING.add(task)
        task.add_done_callback(ended)
        future.add_done_callback(lambda f: loop.call_soon_threadsafe(task.cancel) if f.cancelled() else None)

    try:
        loop.call_soon_threadsafe(start)
    except RuntimeError:  # the loop is closed
        coroutine.close()
        raise
    return future


_RUNNING: set[asyncio.Task[None]] = set()  # a loop keeps only weak references to its tasks
