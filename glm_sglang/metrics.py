"""The fork's own metrics, beside SGLang's on /metrics.

SGLang runs prometheus_client in its multi-process mode: each process writes files into
PROMETHEUS_MULTIPROC_DIR and the HTTP process adds them up. prometheus_client decides for that mode when it is
imported, so a process must not import it before the variable is set. Values recorded earlier wait here until
`publish()`.
"""

import os
from dataclasses import dataclass
from typing import Any

from glm_sglang import __version__

_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


@dataclass(frozen=True, slots=True)
class _Values:
    hooks: int
    untested: int
    platform: str


_waiting: _Values | None = None
_gauges: dict[str, Any] = {}


def record(*, hooks: int, untested: int, platform: str) -> None:
    """Note what this process carries; published at once where SGLang's metrics are set up."""
    global _waiting
    _waiting = _Values(hooks, untested, platform)
    if os.environ.get(_VARIABLE):
        publish()


def publish() -> None:
    """Write what was recorded, where metrics are on. Needs PROMETHEUS_MULTIPROC_DIR; else does nothing."""
    if _waiting is None or not os.environ.get(_VARIABLE):
        return
    _gauge("untested_upstream_symbols", "Hooked upstream symbols whose source differs from the record").set(
        _waiting.untested
    )
    _gauge("hooks_installed", "Changes of SGLang in place, in the process that carries most").set(
        _waiting.hooks
    )
    build = _gauge("build_info", "Always 1; the labels say what serves", ("version", "platform"))
    build.labels(version=__version__, platform=_waiting.platform).set(1)


def _gauge(name: str, meaning: str, labels: tuple[str, ...] = ()) -> Any:
    """The gauge `glm_sglang:NAME`, one time series over all processes: the largest value counts."""
    from prometheus_client import Gauge

    if name not in _gauges:
        _gauges[name] = Gauge(f"glm_sglang:{name}", meaning, labels, multiprocess_mode="max")
    return _gauges[name]
