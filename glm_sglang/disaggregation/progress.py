"""Threads that spin upstream, made to yield where prefill, decode and router share a few cores.

On a GPU node a spinning thread costs a core of many and buys microseconds. On the reference platform it takes the core
that computes the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

#: Pause of NIXL's progress thread between two looks, in µs; also the most it adds to a transfer's start or end.
PROGRESS_PAUSE_US = 500
#: Pause of a scheduler that has requests in transfer but no batch to run, in seconds.
WAITING_PAUSE_S = 0.001


def agent_init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Around nixl_agent.__init__. UPSTREAM: it sets pthrDelay to 0: a thread that spins."""
    import nixl_cu13._bindings as bindings

    native = bindings.nixlAgentConfig

    class PausingConfig(native):  # type: ignore[misc, valid-type]
        """The native agent configuration, with a floor under the progress thread's pause."""

        @property
        def pthrDelay(self) -> int:
            return int(native.pthrDelay.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, value: int) -> None:
            native.pthrDelay.__set__(self, max(value, PROGRESS_PAUSE_US))

    bindings.nixlAgentConfig = PausingConfig
    try:
        original(self, *args, **kwargs)
    finally:
        bindings.nixlAgentConfig = native


def pause_while_waiting(result: None, scheduler: Any) -> None:
    """After Scheduler.on_idle. UPSTREAM: with requests in transfer it returns at once, and the event loop spins."""
    if not scheduler.is_fully_idle():
        time.sleep(WAITING_PAUSE_S)
