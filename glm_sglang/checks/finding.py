"""What a check found."""

import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

from glm_sglang.failure import PREFIX

# "not needed": absent or off, and rightly so on the platform that serves here.
State = Literal["right", "wrong", "not needed"]

RECREATE = "make setup in the checkout (on a GPU: make setup-gpu) installs what the lock names"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the doctor's table.

    subject  what was looked at.
    state    whether it is as it must be.
    found    what is there.
    mend     the command or setting that puts it right; "" unless wrong.

    Raises ValueError for a wrong one without it.
    """

    subject: str
    state: State
    found: str
    mend: str = ""

    def __post_init__(self) -> None:
        if bool(self.mend.strip()) != (self.state == "wrong"):
            raise ValueError(f"{self.subject}: state {self.state!r} with mend {self.mend!r}")


def right(subject: str, found: str) -> Finding:
    """A finding that is as it must be."""
    return Finding(subject, "right", found)


def wrong(subject: str, found: str, mend: str) -> Finding:
    """A finding that must be mended."""
    return Finding(subject, "wrong", found, mend)


def not_needed(subject: str, found: str) -> Finding:
    """A finding that this platform does without."""
    return Finding(subject, "not needed", found)


def run_python(program: str, timeout_s: float, environ: dict[str, str] | None = None) -> tuple[bool, str]:
    """Run a small program in a fresh interpreter, so that a crash in a native library is an answer as well.

    Returns (whether it exited with 0, its last line of output). On a failure the line is from stderr, or our
    own message.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=environ,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {timeout_s:.0f} s"
    text = done.stdout if done.returncode == 0 else done.stderr or done.stdout
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [index for index, line in enumerate(lines) if line.startswith(PREFIX)]
    if done.returncode != 0 and ours:
        return False, "; ".join(lines[ours[0] : ours[0] + 4])
    return done.returncode == 0, lines[-1] if lines else f"exit code {done.returncode}, no output"
