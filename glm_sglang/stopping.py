"""Ctrl-C, SIGTERM and a closed terminal: how the launcher ends before it serves, and what its exit code is.

SGLang answers signals once it serves: SIGTERM drains, Ctrl-C closes the HTTP server. Until then a signal would meet an
import, the loading of weights or a first compilation (minutes on a GPU), and the answer would be a traceback from every
process, or none before the warm-up is over. Here it is one line, with every process gone and exit code 128 + signal.
"""

import logging
import os
import signal
import sys
from typing import Any

from glm_sglang import failure

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_LOOKS_A_LINE = 50  # a line of log every 5 seconds
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_listener: failure.Listener | None = None
_launcher = 0  # process id


def end_at_signals(listener: failure.Listener) -> None:
    """Answer signals from now on; `listener` ends the process. One that is ignored (nohup, a background job) stays so.

    UPSTREAM: uvicorn.Server.capture_signals and TokenizerManager.auto_create_handle_loop take SIGINT and SIGTERM over
    when HTTP starts; the hooks below keep the answer the same until the server is up.
    """
    global _listener, _launcher
    _listener, _launcher = listener, os.getpid()
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _answer)


def ignore_signals() -> None:
    """For the last steps of a launcher, which end by themselves."""
    global _listener
    _listener = None
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def leave_to_launcher() -> None:
    """In a child: a terminal sends Ctrl-C to the whole group, and it is the launcher that answers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def end_before_it_serves(server: Any, number: int, *_: Any) -> None:
    """Before uvicorn.server.Server.handle_exit, which waits for open connections, and so for the warm-up's."""
    if not _serving():
        _end(number)


def end_before_it_drains(handler: Any, *_: Any) -> None:
    """Before SGLang's SignalHandler.sigterm_handler, which waits for requests, and so for the warm-up's."""
    if not _serving():
        _end(signal.SIGTERM)


async def drain_at_once(original: Any, manager: Any) -> None:
    """Around TokenizerManager.sigterm_watchdog, which looks every 5 seconds: for the signal, and then for what is left.

    Its own steps follow when nothing is left to wait for: an idle server ends within a second, and one that drains when
    its last request has ended.
    """
    import asyncio

    from sglang.srt.utils import get_bool_env_var

    while not manager.gracefully_exit:  # noqa: ASYNC110 (SGLang sets a plain attribute)
        await asyncio.sleep(_LOOK_S)
    looks = 0
    while manager.rid_to_state and manager.server_status.name != "UnHealthy":
        if get_bool_env_var("SGL_FORCE_SHUTDOWN"):
            break
        if looks % _LOOKS_A_LINE == 0:
            logger.info("SIGTERM: %d requests are still to be answered", len(manager.rid_to_state))
        looks += 1
        await asyncio.sleep(_LOOK_S)
    await original(manager)


def _answer(number: int, _: Any) -> None:
    if _listener is None:  # the last steps have begun
        return
    if number != signal.SIGHUP and _serving():
        # uvicorn has served, stopped because of this signal, and raises it again.
        raise SystemExit(128 + number)
    _end(number)


def _serving() -> bool:
    """Whether the warm-up is over. Imports nothing: it is asked in the midst of anything."""
    http = sys.modules.get("sglang.srt.entrypoints.http_server")
    ask = getattr(http, "get_global_state", None)  # not there yet where the signal meets that module's import
    state = None if ask is None else ask()
    manager = getattr(state, "tokenizer_manager", None)
    return manager is not None and manager.server_status.name != "Starting"


def _end(number: int) -> None:
    if _listener is not None and _launcher == os.getpid():
        when = "" if _serving() else " before the server was ready"
        _listener.end(f"{failure.PREFIX}{signal.Signals(number).name}: stopped{when}", 128 + number)
