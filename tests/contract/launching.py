"""Runs launchers as a user would, with a fault or a guard on PYTHONPATH, and sees what they leave behind."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FAULT_SITE = HERE / "fault_site"
GUARD_SITE = HERE / "guard_site"
RIVAL_SITE = HERE / "rival_site"
# What the launcher says of a start that is all right.
SAID = ("filled in", " platform: ", "MoE layers run ")
_GONE_S = 5.0


@dataclass(frozen=True)
class Ended:
    """A launcher that ended: exit code, both streams, and the processes of its session that outlived it
    by five seconds."""

    code: int
    out: str
    err: str
    left: list[int]

    @property
    def messages(self) -> list[str]:
        """The fork's messages: from a line that starts with its name, with the indented lines below."""
        found: list[str] = []
        for line in self.err.splitlines():
            if line.startswith("glm-sglang: ") and not any(said in line for said in SAID):
                found.append(line)
            elif found and line.startswith("  ") and found[-1].count("\n") < 3:
                found[-1] += "\n" + line
        return found


def session_members(session: int) -> list[int]:
    """Live processes (zombies apart) of a session."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(entry))
    return found


def environment(*sites: Path, **more: str) -> dict[str, str]:
    """This environment with fixture folders on the path, one thread a process, of the fork's settings the platform."""
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("GLM_SGLANG_", "SGLANG_"))
    }
    path = [*map(str, sites), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ |= {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "GLM_SGLANG_PLATFORM": "reference",
    }
    return {**environ, **more}


def fault(name: str, where: str = "everywhere", **more: str) -> dict[str, str]:
    """An environment with one fault in it."""
    return environment(FAULT_SITE, CONTRACT_FAULT=json.dumps({"fault": name, "where": where}), **more)


def run(
    module: str, *argv: str, env: dict[str, str], timeout_s: float = 240.0, cwd: Path | None = None
) -> Ended:
    """Run `python -m module argv` in a session of its own until it ends by itself."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *argv],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, err = process.communicate()
        pytest.fail(f"{module} did not end within {timeout_s} s\n{err[-4000:]}")
    # Who was killed, or sees its parent's pipe end (multiprocessing's resource tracker), is gone a moment later.
    ends = time.monotonic() + _GONE_S
    while (left := session_members(process.pid)) and time.monotonic() < ends:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, 9)
    return Ended(process.returncode, out, err, left)
