"""Requests that have reached this server's HTTP side and are not yet in its table of requests.

A long chat is read, parsed, templated and tokenized for up to a second on the event loop, one after the other: during
a burst a request may have been here for seconds before anything knows its bootstrap_room. Arrivals are numbered, so that
somebody who asks twice can tell whether all that had come before the first question was known by the second.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

#: Numbers start again with the process; this says which process.
EPOCH = uuid.uuid4().hex
_next = 1
_open: set[int] = set()
_current: ContextVar[int] = ContextVar("glm_sglang_arrival", default=0)


class Arrivals:
    """ASGI middleware; to be the outermost. Owned by the HTTP process's event loop, as all of this module."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        global _next
        number = _next
        _next += 1
        _open.add(number)
        _current.set(number)
        try:
            await self._app(scope, receive, send)
        finally:
            _open.discard(number)


def entered(_: Any, *__: Any) -> None:
    """After TokenizerManager._init_req_state: this task's request is in the table now."""
    _open.discard(_current.get())


def bounds() -> tuple[int, int]:
    """(the oldest arrival that is not in the table, the number of the next arrival); equal where there is none."""
    return min(_open, default=_next), _next
