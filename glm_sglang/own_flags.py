"""The flags of this fork: few, declared in one table, all starting with --glm-.

A flag that a child process must know names a variable of `glm_sglang.settings`; the launcher writes the value
there, so that a spawned process reads what the launcher was told. An explicit flag wins over the variable in
the environment.
"""

import argparse
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from glm_sglang.errors import UsageError
from glm_sglang.settings import Variable

PREFIX = "--glm-"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFlag:
    """One flag. Without `metavar` it is a switch.

    variable  where its value goes for child processes, None where only the launcher reads it. Its allowed
              values are the flag's.
    """

    option: str
    text: str
    metavar: str = ""
    variable: Variable | None = None

    @property
    def dest(self) -> str:
        """Its name in a parsed namespace and in a --config file."""
        return self.option.lstrip("-").replace("-", "_")


PRINT_CONFIG = OwnFlag(
    option="--glm-print-config",
    text="print the resolved configuration as one JSON object on stdout and exit; nothing is loaded or bound",
)
NO_DEFAULTS = OwnFlag(
    option="--glm-no-defaults",
    text="fill in nothing: run with exactly the flags given and SGLang's own defaults",
)

FLAGS: tuple[OwnFlag, ...] = (PRINT_CONFIG, NO_DEFAULTS)


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add every own flag to a parser. An absent flag leaves no attribute behind."""
    for flag in FLAGS:
        if flag.metavar:
            parser.add_argument(flag.option, dest=flag.dest, metavar=flag.metavar, default=argparse.SUPPRESS)
        else:
            parser.add_argument(flag.option, dest=flag.dest, action="store_true", default=argparse.SUPPRESS)


def hand_down(values: Mapping[str, object], environ: MutableMapping[str, str] = os.environ) -> None:
    """Write the values given for flags with a variable into the environment.

    Raises UsageError for a value not allowed.
    """
    for flag in FLAGS:
        if flag.variable is None or flag.dest not in values:
            continue
        given = values[flag.dest]
        value = "1" if given is True else "0" if given is False else str(given)
        if flag.variable.allowed and value not in flag.variable.allowed:
            raise UsageError(f"{flag.option} is {value!r}, allowed: {', '.join(flag.variable.allowed)}")
        environ[flag.variable.name] = value
