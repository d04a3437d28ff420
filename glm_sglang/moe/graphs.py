"""What a replayed graph's MoE layers did: counted once, at its capture, and added at every replay.

Targets       FullCudaGraphBackend and BreakableCudaGraphBackend: .capture_one, .replay.
Why           Python does not run at a replay, so no layer reports its calls and rows.
Upstream      none.
Goes when     SGLang counts which path its MoE layers took.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from glm_sglang.moe import state
from glm_sglang.moe.counters import Count, Counters

_ATTRIBUTE = "glm_moe_counts"  # on the backend: gone with its graphs


def capture_one(
    graphs: Any, shape_key: Any, forward_fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before capture_one, which calls `forward_fn` to warm up, then once for the graph: the last call counts.

    By size: variants of a graph (dense attention, adapters) have as many rows.
    """
    counters = _counters()
    if counters is None:
        return None
    captured: dict[int, Count] = graphs.__dict__.setdefault(_ATTRIBUTE, {})

    def counted() -> Any:
        counters.discard()
        result = forward_fn()
        captured[shape_key.size] = replace(counters.open)
        return result

    return (graphs, shape_key, counted, *args), kwargs


def replay(_: Any, graphs: Any, shape_key: Any, *args: Any, **kwargs: Any) -> None:
    """After replay: adds what the capture counted, unless layers ran in a break and reported themselves."""
    counters = _counters()
    captured = graphs.__dict__.get(_ATTRIBUTE, {}).get(shape_key.size)
    if counters is not None and captured is not None and (counters.replayed or not counters.open.calls):
        counters.replay(captured)


def _counters() -> Counters | None:
    running = state.running()
    return None if running is None or running.routed is None else running.counters
