"""The flags of this fork: few, declared in one table, all starting with --glm-.

A flag that a child process must know names a variable of `glm_sglang.settings`; the launcher writes the value
there, so that a spawned process reads what the launcher was told. An explicit flag wins over the variable in
the environment.
"""

import argparse
import contextlib
import os
import re
from collections.abc import Container, Iterator, Mapping, MutableMapping
from dataclasses import dataclass

from glm_sglang import settings
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

MOE = OwnFlag(
    option="--glm-moe",
    text="how MoE layers run: auto (MegaMoE where its kernel is measured: SM90, FP8 blocks, --ep-size above 1), "
    "megamoe, or stock (SGLang's own expert parallelism)",
    metavar="PATH",
    variable=settings.MOE,
)

CACHE: tuple[OwnFlag, ...] = (
    OwnFlag(
        option="--glm-cache-url",
        text="keep pages of KV in a CPU pool and in Valkey: embedded:// (a server of our own), "
        "valkey://HOST:PORT, valkeys:// (TLS), valkey-cluster://, or none (default)",
        metavar="URL",
        variable=settings.CACHE_URL,
    ),
    OwnFlag(
        option="--glm-cache-wait",
        text="how long a request may be held back for its pages from Valkey, counted from when it could "
        "first run: never, milliseconds (default 2000), or complete",
        metavar="WAIT",
        variable=settings.CACHE_WAIT,
    ),
    OwnFlag(
        option="--glm-cache-pool-gb",
        text="GiB of host memory for each rank's CPU pool (default 8)",
        metavar="GIB",
        variable=settings.CACHE_POOL_GB,
    ),
    OwnFlag(
        option="--glm-cache-ttl-s",
        text="seconds that Valkey keeps a page (default 86400); 0: as long as it has room",
        metavar="SECONDS",
        variable=settings.CACHE_TTL_S,
    ),
)

PREFILL_GRAPH: tuple[OwnFlag, ...] = (
    OwnFlag(
        option="--glm-prefill-graph",
        text="CUDA graphs of prefill steps: auto (this fork's, where they can be captured), strict (the server ends "
        "where one cannot), or off (SGLang's own, as they are)",
        metavar="MODE",
        variable=settings.PREFILL_GRAPH,
    ),
    OwnFlag(
        option="--glm-prefill-graph-buckets",
        text="token counts to capture, separated by commas, instead of those planned up to --chunked-prefill-size",
        metavar="TOKENS",
        variable=settings.PREFILL_GRAPH_BUCKETS,
    ),
    OwnFlag(
        option="--glm-verify-graphs",
        text="compare every captured graph with the eager model on random input before the server is ready",
        variable=settings.VERIFY_GRAPHS,
    ),
)

FLAGS: tuple[OwnFlag, ...] = (PRINT_CONFIG, NO_DEFAULTS, MOE, *CACHE, *PREFILL_GRAPH)


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
        value = _as_text(values[flag.dest], takes_value=bool(flag.metavar))
        if flag.variable.allowed and value not in flag.variable.allowed:
            raise UsageError(f"{flag.option} is {value!r}, allowed: {', '.join(flag.variable.allowed)}")
        environ[flag.variable.name] = value


def check_values() -> None:
    """Raise UsageError for a value that the variables' owners refuse, whether a flag or the environment said it."""
    from glm_sglang.cache import options as cache_options
    from glm_sglang.prefill_graph import options as graph_options

    cache_options.read()
    graph_options.read()


@contextlib.contextmanager
def as_written(given: Container[str] = (), environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """A UsageError from within names the variable, not the flag, where the user has set that and not given the flag.

    given: the flags that were given, by dest.
    """
    variables = {
        flag.option: flag.variable.name
        for flag in FLAGS
        if flag.variable and environ.get(flag.variable.name) and flag.dest not in given
    }
    try:
        yield
    except UsageError as error:
        text = re.sub(rf"{PREFIX}[a-z-]*[a-z]", lambda found: variables.get(found[0], found[0]), str(error))
        raise UsageError(text) from error


def _as_text(given: object, takes_value: bool) -> str:
    """What was given, as it would stand on the command line. A YAML file says off and on of booleans, and has lists."""
    if isinstance(given, bool):
        no, yes = ("off", "on") if takes_value else ("0", "1")
        return yes if given else no
    if isinstance(given, list):
        return ",".join(map(str, given))
    return str(given)


def shown(flag: OwnFlag, values: Mapping[str, object]) -> object:
    """What was given for a flag, fit for a log; False where it was not given."""
    value = values.get(flag.dest, False)
    if flag.variable is None or not isinstance(value, str):
        return value
    return settings.shown(flag.variable, value)
