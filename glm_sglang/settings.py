"""The environment variables of this fork: one table, read strictly.

A variable that starts with `GLM_SGLANG_` and is not in the table is an error where a server starts: a
misspelt setting must not be ignored in silence.
"""

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from glm_sglang.errors import UsageError

PREFIX = "GLM_SGLANG_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One environment variable.

    allowed   the values accepted; () accepts any text.
    default   what an unset or empty variable means.
    internal  set by this fork for its own child processes, not by a user.
    secret    may hold a password: printed without it.
    """

    name: str
    meaning: str
    default: str = ""
    allowed: tuple[str, ...] = ()
    internal: bool = False
    secret: bool = False


PLATFORM = Variable(
    name="GLM_SGLANG_PLATFORM",
    meaning="which device code runs: chosen by the hardware, the PyTorch reference, or CUDA",
    default="auto",
    allowed=("auto", "reference", "cuda"),
)
ALLOW_UNTESTED = Variable(
    name="GLM_SGLANG_ALLOW_UNTESTED",
    meaning="1: an upstream symbol whose source has changed is a warning and a metric instead of the end",
    default="0",
    allowed=("0", "1"),
)
INDEX_KEYS = Variable(
    name="GLM_SGLANG_INDEX_KEYS",
    meaning="how the reference platform stores index keys: exactly, or as a GPU does (FP8 and a scale)",
    default="exact",
    allowed=("exact", "fp8"),
)
START_METHOD = Variable(
    name="GLM_SGLANG_START_METHOD",
    meaning="how the reference platform starts processes: auto copies the launcher, spawn imports anew, as on a GPU",
    default="auto",
    allowed=("auto", "spawn"),
)
MOE = Variable(
    name="GLM_SGLANG_MOE",
    meaning="how MoE layers run: MegaMoE where its kernel is measured, MegaMoE, or SGLang's own expert parallelism",
    default="auto",
    allowed=("auto", "megamoe", "stock"),
)
MOE_REASON = Variable(
    name="GLM_SGLANG_MOE_REASON",
    meaning="why the launcher chose the path in GLM_SGLANG_MOE",
    default="not started by this fork's launcher",
    internal=True,
)
CACHE_URL = Variable(
    name="GLM_SGLANG_CACHE_URL",
    meaning="where pages of KV are kept besides the CPU pool (--glm-cache-url); none: no cache",
    default="none",
    secret=True,
)
CACHE_WAIT = Variable(
    name="GLM_SGLANG_CACHE_WAIT",
    meaning="how long a request may be held back for its pages from Valkey: never, milliseconds, or complete",
    default="2000",
)
CACHE_POOL_GB = Variable(
    name="GLM_SGLANG_CACHE_POOL_GB", meaning="size of the CPU pool of each rank, in GiB", default="8"
)
CACHE_TTL_S = Variable(
    name="GLM_SGLANG_CACHE_TTL_S",
    meaning="how long Valkey keeps a page, in seconds; 0: as long as it has room",
    default="86400",
)
CACHE_AUDIT = Variable(
    name="GLM_SGLANG_CACHE_AUDIT",
    meaning="a folder: every page's digest is written there when it is saved and when it is loaded (tests)",
    internal=True,
)
CACHE_STALL_LOG_MS = Variable(
    name="GLM_SGLANG_CACHE_STALL_LOG_MS",
    meaning="a log line with the parts of each scheduling step that the cache kept for longer, in ms; 0: none",
    default="0",
)
PREFILL_GRAPH = Variable(
    name="GLM_SGLANG_PREFILL_GRAPH",
    meaning="CUDA graphs of prefill steps: this fork's where they can be, required, or SGLang's own as they are",
    default="off",
    allowed=("auto", "strict", "off"),
)
PREFILL_GRAPH_BUCKETS = Variable(
    name="GLM_SGLANG_PREFILL_GRAPH_BUCKETS",
    meaning="token counts to capture instead of the planned ones, separated by commas; auto: planned",
    default="auto",
)
VERIFY_GRAPHS = Variable(
    name="GLM_SGLANG_VERIFY_GRAPHS",
    meaning="1: every captured bucket is compared with the eager model before the server is ready",
    default="0",
    allowed=("0", "1"),
)
VENV = Variable(name="GLM_SGLANG_VENV", meaning="where `make` keeps its virtual environment", default=".venv")
COMMIT = Variable(
    name="GLM_SGLANG_COMMIT",
    meaning="what benchmarks name as their commit where the tree is an archive, no checkout",
    default="unknown",
)
LAUNCHER = Variable(
    name="GLM_SGLANG_LAUNCHER",
    meaning="process id and run folder of the glm_sglang.launch_server that this process belongs to",
    internal=True,
)

VARIABLES: tuple[Variable, ...] = (
    PLATFORM,
    ALLOW_UNTESTED,
    INDEX_KEYS,
    START_METHOD,
    MOE,
    MOE_REASON,
    PREFILL_GRAPH,
    PREFILL_GRAPH_BUCKETS,
    VERIFY_GRAPHS,
    CACHE_URL,
    CACHE_WAIT,
    CACHE_POOL_GB,
    CACHE_TTL_S,
    CACHE_AUDIT,
    CACHE_STALL_LOG_MS,
    VENV,
    COMMIT,
    LAUNCHER,
)


def read(variable: Variable, environ: Mapping[str, str] = os.environ) -> str:
    """The variable's value, or its default where it is unset or empty.

    Raises UsageError for a value that is not allowed.
    """
    value = environ.get(variable.name) or variable.default
    if variable.allowed and value not in variable.allowed:
        raise UsageError(f"{variable.name} is {value!r}, allowed: {', '.join(variable.allowed)}")
    return value


def shown(variable: Variable, value: str) -> str:
    """A value fit for a log: of a URL with a password, everything but the password."""
    if not variable.secret:
        return value
    return re.sub(r"(://[^/@]*:)[^/]*@", r"\1***@", value)


def allow_untested(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a changed upstream symbol is only warned about."""
    return read(ALLOW_UNTESTED, environ) == "1"


def check_names(environ: Mapping[str, str] = os.environ) -> None:
    """Raise UsageError for a `GLM_SGLANG_` variable that does not exist or has a value not allowed."""
    known = {variable.name: variable for variable in VARIABLES}
    for name in sorted(environ):
        if not name.startswith(PREFIX):
            continue
        if name not in known:
            near = difflib.get_close_matches(name, [v.name for v in VARIABLES if not v.internal], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"unknown environment variable {name}{hint}")
        read(known[name], environ)
