"""How much of the fork a process gets: all of it under our launcher, only the reference platform otherwise.

The launcher marks its process tree with one variable, `<process id>:<run folder>`; spawned processes inherit
it. The run folder also holds the channel on which a child tells the launcher why it ended
(`glm_sglang.failure`).
"""

import os
from dataclasses import dataclass
from pathlib import Path

from glm_sglang import settings
from glm_sglang.upstream.hooks import Scope


@dataclass(frozen=True, slots=True)
class Launcher:
    """The launcher that a process belongs to."""

    pid: int
    run_folder: Path


def launcher() -> Launcher | None:
    """The launcher of this process's tree, or None under a stock launcher."""
    pid, _, folder = settings.read(settings.LAUNCHER).partition(":")
    if not (pid.isdecimal() and folder):
        return None
    return Launcher(int(pid), Path(folder))


def enter(run_folder: Path) -> Launcher:
    """Mark this process and every process it starts as belonging to our launcher."""
    os.environ[settings.LAUNCHER.name] = f"{os.getpid()}:{run_folder}"
    return Launcher(os.getpid(), run_folder)


def current() -> Scope:
    """ "launcher" under `python -m glm_sglang.launch_server`, "installed" under a stock launcher."""
    return "installed" if launcher() is None else "launcher"


def in_launcher_child() -> bool:
    """Whether this is a process that our launcher started, directly or not."""
    owner = launcher()
    return owner is not None and owner.pid != os.getpid()
