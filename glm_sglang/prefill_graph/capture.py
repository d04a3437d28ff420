"""Capture, bucket by bucket: a failure names its bucket, and alone costs only it; what was captured is said.

Beside other ranks a failure ends the start, with auto as well: docs/decisions.md says why ranks can't agree on it.

Targets       PrefillCudaGraphRunner.capture_one_shape, ._capture_one_stream.
Why           one bucket that cannot be captured ends SGLang's start, with a message that does not name it.
Upstream      none.
Goes when     SGLang goes on without a bucket that fails.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from glm_sglang.prefill_graph import agreement, break_counts, lifetime, options, whole

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Report:
    """What one runner captured, by bucket: `breaks`, and `stock`, SGLang's own; `failed`, with the error in one line."""

    breaks: dict[int, int] = field(default_factory=dict)
    stock: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0

    def most(self) -> tuple[int, int]:
        """Breaks of the bucket that has most, and SGLang's of one that has most; 0 where none was captured."""
        return max(self.breaks.values(), default=0), max(self.stock.values(), default=0)

    def line(self, layers: int) -> str:
        """For the log."""
        if not self.breaks:
            return "prefill graph: no bucket was captured"
        most, stock = self.most()
        held = lifetime.kept().bytes / 2**30
        return (
            f"prefill graph: {len(self.breaks)} buckets from {min(self.breaks)} to {max(self.breaks)} tokens in "
            f"{self.seconds:.1f} s; {most} breaks in {layers} layers ({most / max(layers, 1):.2f} a layer) instead of "
            f"SGLang's {stock} ({stock / max(layers, 1):.2f}); break inputs hold {held:.2f} GiB"
        )


def one_bucket(original: Callable[..., None], runner: Any, size: int, **kwargs: Any) -> None:
    """For capture_one_shape: capture, note the breaks; a failure ends the server or loses this bucket only."""
    if not _ours(runner):
        original(runner, size, **kwargs)
        return
    report = _report(runner)
    began = time.perf_counter()
    try:
        original(runner, size, **kwargs)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if options.current().strict:
            raise RuntimeError(
                f"prefill graph: the bucket of {size} tokens cannot be captured ({reason}); "
                "--glm-prefill-graph is strict: give auto, or other --glm-prefill-graph-buckets"
            ) from error
        if agreement.ranks().world_size > 1:
            # The other ranks wait in this bucket's barriers and collectives; no rank can tell them.
            raise RuntimeError(
                f"prefill graph: the bucket of {size} tokens cannot be captured ({reason}) and the other ranks "
                "cannot go on without this one; leave it out with --glm-prefill-graph-buckets"
            ) from error
        report.failed[size] = reason
        logger.error(
            "prefill graph: the bucket of %d tokens cannot be captured and is left out: %s", size, reason
        )
    else:
        graphs = [graph for key, graph in runner.backend._graphs.items() if key.size == size]
        # The dense graph, which SGLang has not, is cut less often.
        found = max((break_counts.of(graph) for graph in graphs), default=(0, 0))
        report.breaks[size], report.stock[size] = found
    report.seconds += time.perf_counter() - began


def all_buckets(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """After _capture_one_stream: from here on only buckets, and dense graphs, that every rank holds exist."""
    if not _ours(runner):
        return
    report = _report(runner)
    gather = agreement.gather_over(agreement.ranks())
    held = agreement.agree(sorted(report.breaks), gather)
    if lost := sorted(set(report.breaks) - set(held)):
        logger.warning("prefill graph: buckets %s were not captured by every rank and are left out", lost)
        report.failed.update(dict.fromkeys(lost, "not captured by every rank"))
    arena = whole.arena_of(runner.model_runner.attn_backend)
    dense = agreement.agree(sorted(arena.dense_buckets) if arena is not None else (), gather)
    if arena is not None:
        arena.dense_buckets = set(dense) & set(held)
    runner.capture_num_tokens = list(held)
    runner.max_num_tokens = max(held, default=0)
    logger.info("%s", report.line(runner.model_runner.model_config.hf_config.num_hidden_layers))


def _ours(runner: Any) -> bool:
    return options.current().ours and runner.prefill_backend_name == "breakable"


def _report(runner: Any) -> Report:
    report: Report | None = getattr(runner, "glm_report", None)
    if report is None:
        report = runner.glm_report = Report()
    return report
