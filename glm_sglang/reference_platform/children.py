"""SGLang's scheduler and detokenizer as copies of the launcher, not new interpreters.

A new interpreter imports some 6,400 modules: ten CPU seconds for each process of each server, on machines that have two
cores for all of them. The launcher has imported the same, and on this platform nothing in it forbids a fork: there is
no CUDA context, and no OpenMP team has been made yet. On a GPU SGLang's spawn stays.
"""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing import util
from typing import Any

from glm_sglang import failure, settings, stopping

# What the launcher answers to signals, and a new interpreter does not.
_LAUNCHER_ANSWERS = (signal.SIGQUIT, signal.SIGCHLD, signal.SIGUSR2)


def start_by_fork(result: Any, *_: Any) -> None:
    """After engine._set_envs_and_config, which has asked for spawn: fork, unless the user wants spawn."""
    if settings.read(settings.START_METHOD) == "spawn" or multiprocessing.parent_process() is not None:
        return
    multiprocessing.set_start_method("fork", force=True)
    # By multiprocessing's own hook, and not os.register_at_fork: only its children are SGLang's.
    util.register_after_fork(start_by_fork, _as_if_spawned)


def _as_if_spawned(_: Any) -> None:
    """In the child: what a new interpreter would have, and what the plugin does in one."""
    for number in _LAUNCHER_ANSWERS:
        signal.signal(number, signal.SIG_DFL)
    stopping.leave_to_launcher()
    # A data-parallel controller starts its schedulers from threads.
    multiprocessing.set_start_method("spawn", force=True)
    failure.die_with_parent()
