"""What this room puts on /metrics: eager prefill steps by reason, how many buckets there are, and breaks in a graph.

Every rank of an attention group runs the same step, so one of them counts it: the first one of its tensor, context and
pipeline parallel groups. Each DP rank counts its own steps.

Target        ModelRunner.init_cuda_graphs (after it): every series is there, at 0, before the first step.
Why           a counter that appears with its first event has no rate for that event, and no zero to alert on.
Upstream      none.
Goes when     never: they are this fork's metrics.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

from glm_sglang.prefill_graph import options, reasons

STATES = ("captured", "failed", "left_out")
OWNERS = ("captured", "sglang")
_paused = False


def after_capture(result: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
    """Make every series; of the target model's runner the buckets are known from here on."""
    if not options.current().ours or model_runner.is_draft_worker or not _published():
        return
    for reason in reasons.WORDS:
        _eager().labels(reason=reason)
    for state, number in buckets(model_runner).items():
        _buckets().labels(state=state).set(number)
    for of, number in breaks(model_runner).items():
        _breaks().labels(of=of).set(number)


def buckets(model_runner: Any) -> Mapping[str, int]:
    """Of the plan: captured; failed, here or on another rank; left out, because memory would not suffice."""
    runner = model_runner.prefill_cuda_graph_runner
    report = getattr(runner, "glm_report", None)
    numbers = (
        len(getattr(runner, "capture_num_tokens", ())),
        len(report.failed) if report is not None else 0,
        getattr(model_runner.server_args, "_glm_left_out", 0),
    )
    return dict(zip(STATES, numbers, strict=True))


def breaks(model_runner: Any) -> Mapping[str, int]:
    """In a pass that replays: of the graphs that were captured, and of SGLang's own; 0 where none was."""
    report = getattr(model_runner.prefill_cuda_graph_runner, "glm_report", None)
    return dict(zip(OWNERS, report.most() if report is not None else (0, 0), strict=True))


def eager(reason: str) -> None:
    """Count one step under its reason."""
    if not _paused and _published():
        _eager().labels(reason=reason).inc()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Passes inside are nobody's steps."""
    global _paused
    _paused = True
    try:
        yield
    finally:
        _paused = False


def _published() -> bool:
    return bool(os.environ.get("PROMETHEUS_MULTIPROC_DIR")) and _speaks()


def _speaks() -> bool:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return not (parallel.attn_tp_rank or parallel.attn_cp_rank or parallel.pp_rank)


@functools.cache
def _eager() -> Any:
    # prometheus_client decides for its multi-process mode when it is imported; SGLang has set it up by now.
    from prometheus_client import Counter

    return Counter(
        "glm_sglang:prefill_graph_eager",
        "Prefill steps that ran without a CUDA graph, by reason",
        ("reason",),
    )


@functools.cache
def _buckets() -> Any:
    from prometheus_client import Gauge

    return Gauge(
        "glm_sglang:prefill_graph_buckets",
        "Buckets of prefill graphs: captured, failed, and left out of the plan for memory's sake",
        ("state",),
        multiprocess_mode="max",
    )


@functools.cache
def _breaks() -> Any:
    from prometheus_client import Gauge

    return Gauge(
        "glm_sglang:prefill_graph_breaks",
        "Breaks in a pass of the prefill graphs: as captured, and as SGLang alone would have captured them",
        ("of",),
        multiprocess_mode="max",
    )
