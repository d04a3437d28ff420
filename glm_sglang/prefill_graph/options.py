"""What the user asked of prefill graphs, read once a process from the variables that the launcher sets."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from glm_sglang import settings
from glm_sglang.errors import UsageError
from glm_sglang.prefill_graph import buckets

logger = logging.getLogger(__name__)

Mode = Literal["auto", "strict", "off"]


@dataclass(frozen=True, slots=True)
class Options:
    """`mode` off: SGLang's graphs as they are. `buckets` None: planned. `verify`: compare graphs with eager."""

    mode: Mode = "off"
    buckets: tuple[int, ...] | None = None
    verify: bool = False

    @property
    def ours(self) -> bool:
        """Whether this fork's graphs are wanted."""
        return self.mode != "off"

    @property
    def strict(self) -> bool:
        """Whether a graph that cannot be captured ends the server."""
        return self.mode == "strict"


def read(environ: Mapping[str, str] = os.environ) -> Options:
    """Raises UsageError for a value that is not allowed."""
    return Options(
        mode=settings.read(settings.PREFILL_GRAPH, environ),  # type: ignore[arg-type]  # `allowed` says which
        buckets=buckets.parse(settings.read(settings.PREFILL_GRAPH_BUCKETS, environ)),
        verify=settings.read(settings.VERIFY_GRAPHS, environ) == "1",
    )


def judge(platform: str, environ: Mapping[str, str] = os.environ) -> Options:
    """What the launcher was told, before anything heavy is imported.

    Raises UsageError for a value that is not allowed, for graphs that must be where none can be, and for a
    verification of none.
    """
    asked = read(environ)
    if platform != "cuda" and (asked.strict or asked.verify):
        flag = "--glm-verify-graphs" if asked.verify else "--glm-prefill-graph strict"
        raise UsageError(f"{flag} needs a GPU, and this is the {platform} platform; leave it out")
    if asked.verify and not asked.ours:
        raise UsageError(
            "--glm-verify-graphs compares this fork's graphs with the eager model, and --glm-prefill-graph is off; "
            "give auto or strict, or leave --glm-verify-graphs out"
        )
    if asked.buckets is not None and not asked.ours:
        logger.warning("prefill graph: --glm-prefill-graph-buckets is not used: --glm-prefill-graph is off")
    return asked


@functools.cache
def current() -> Options:
    """This process's options."""
    return read()
