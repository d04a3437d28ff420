"""References to LMCache's buffers (`MemoryObj`) that travel as arguments and results of jobs, at any nesting.

Known by their methods and not by their class: this module is used before LMCache is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from glm_connectors.lmcache_repairs.counters import COUNTERS

logger = logging.getLogger(__name__)

_DEPTH = 4  # list of tiers > list of chunks > (key, buffer) is the deepest that upstream builds


def buffers(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Every buffer inside lists, tuples, sets and mapping values, as often as it occurs."""
    if hasattr(value, "ref_count_down"):
        yield value
    elif depth and isinstance(value, Mapping):
        for item in value.values():
            yield from buffers(item, depth - 1)
    elif depth and isinstance(value, list | tuple | set | frozenset):
        for item in value:
            if hasattr(item, "ref_count_down"):  # mostly: lists of buffers, which need no generator each
                yield item
            else:
                yield from buffers(item, depth - 1)


def hold(value: Any) -> list[Any]:
    """Takes one reference for us on every buffer in `value`; `release` returns them."""
    held = list(buffers(value))
    for buffer in held:
        buffer.ref_count_up()
    return held


def release(held: Iterable[Any]) -> None:
    """Returns the references that `hold` took."""
    for buffer in held:
        buffer.ref_count_down()


def dispose(value: Any) -> int:
    """Returns a result that nobody will take to the allocator: its owner's pins and its owner's reference.

    The result of a job belongs to the job's caller. With the caller gone it belongs to nobody, so its pins
    (a disk prefetch pins what it loads) can't be anyone else's. Returns how many buffers there were.
    """
    orphans = list(buffers(value))
    for buffer in orphans:
        COUNTERS.add("orphan_bytes", buffer.get_physical_size())
        while buffer.is_pinned:
            buffer.unpin()
        buffer.ref_count_down()
    if orphans:
        COUNTERS.add("orphans_disposed", len(orphans))
        logger.debug("returned %d buffers of a result without a taker", len(orphans))
    return len(orphans)


def prefix(results: Iterable[Any]) -> list[Any]:
    """The buffers before the first miss; later ones go back, since they'd be taken for their predecessors'
    keys.
    """
    kept: list[Any] = []
    missed = False
    for result in results:
        if result is None:
            missed = True
        elif missed:
            dispose(result)
        else:
            kept.append(result)
    return kept
