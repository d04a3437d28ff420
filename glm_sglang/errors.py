"""The two ways in which this fork says no, each with a message that names what to change."""

from dataclasses import dataclass


@dataclass(eq=False)
class ContractError(Exception):
    """Upstream is not what this fork was built on, or a change could not be put in place.

    The process that meets it ends (`glm_sglang.failure`); a server never goes on without one of its changes.

    what      one clause: what is wrong, naming the symbol, distribution or hook.
    expected  what the pins say.
    found     what is there.
    mend      the command or change that puts it right.
    """

    what: str
    expected: str
    found: str
    mend: str

    def __str__(self) -> str:
        return f"{self.what}\n  expected: {self.expected}\n  found:    {self.found}\n  to mend:  {self.mend}"


class UsageError(Exception):
    """A flag, variable, file or port that the user must change. One line; the launcher exits with code 2."""
