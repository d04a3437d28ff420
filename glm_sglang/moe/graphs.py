"""What a replayed graph's MoE layers did: counted once, at its capture, and added at every replay.

Targets       FullCudaGraphBackend and BreakableCudaGraphBackend: .capture_one, .replay.
Why           Python does not run at a replay, so no layer reports its calls and rows.
Upstream      none.
Goes when     SGLang counts which path its MoE layers took.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from glm_sglang.moe import state
from glm_sglang.moe.counters import Count, Counters

_ATTRIBUTE = "glm_moe_counts"  # on the backend, by ShapeKey: gone with its graphs


def capture_one(
    original: Callable[..., None],
    graphs: Any,
    shape_key: Any,
    forward_fn: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Around capture_one, which calls `forward_fn` to warm up, then once for the graph: the last call counts."""
    counters = _counters()
    if counters is None:
        original(graphs, shape_key, forward_fn, *args, **kwargs)
        return

    def counted(*given: Any, **named: Any) -> Any:
        counters.discard()
        return forward_fn(*given, **named)

    original(graphs, shape_key, counted, *args, **kwargs)
    captured: dict[Any, Count] = graphs.__dict__.setdefault(_ATTRIBUTE, {})
    captured[shape_key] = counters.discard()


def replay(original: Callable[..., Any], graphs: Any, shape_key: Any, *args: Any, **kwargs: Any) -> Any:
    """Around replay: adds what the capture counted, unless layers ran in a break and reported themselves."""
    counters = _counters()
    if counters is None:
        return original(graphs, shape_key, *args, **kwargs)
    before = counters.open.calls
    result = original(graphs, shape_key, *args, **kwargs)
    captured = graphs.__dict__.get(_ATTRIBUTE, {}).get(shape_key)
    if captured is not None and counters.open.calls == before:
        counters.replay(captured)
    return result


def _counters() -> Counters | None:
    running = state.running()
    return None if running is None or running.routed is None else running.counters
