"""How often a captured graph stops for Python: as it was captured, and as SGLang alone would have captured it.

SGLang's number is counted in the same capture, which passes each of its breaks: one stays, or a break of this room stands
in its place, or a hook puts what it runs into a segment. Hooks note the last, and breaks that they add.
"""

from __future__ import annotations

from typing import Any

_MOVED = "glm_breaks_moved"


def moved(number: int) -> None:
    """While a graph is captured: so many of SGLang's breaks went into its segments; below 0, breaks that it has not."""
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import breakable_cuda_graph

    # UPSTREAM: None in the rounds before a capture that warm up.
    capture = breakable_cuda_graph._current_capture_var.get()
    if capture is not None:
        setattr(capture.cuda_graph, _MOVED, getattr(capture.cuda_graph, _MOVED, 0) + number)


def of(graph: Any) -> tuple[int, int]:
    """Of a captured BreakableCUDAGraph that SGLang has, too (no dense one): its breaks, and SGLang's."""
    own = len(graph._break_fns)
    return own, own + int(getattr(graph, _MOVED, 0))
