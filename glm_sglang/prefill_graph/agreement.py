"""Every rank replays a graph, or none does: a rank that ran eagerly beside others would leave their collectives waiting.

With tensor, expert and context parallelism all ranks see the same batch, so the choice is the same as long as they
hold the same graphs. After capture they tell each other which buckets they hold, and all keep what all have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

# Every rank's buckets, in rank order, from this rank's.
Gather = Callable[[Sequence[int]], Sequence[Sequence[int]]]


def ranks() -> Any:
    """SGLang's coordinator of the group of all ranks that run a step together."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_group


def common(held: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The buckets that every rank holds, ascending; () where one holds none."""
    sets = [frozenset(buckets) for buckets in held]
    return tuple(sorted(frozenset.intersection(*sets))) if sets else ()


def agree(mine: Sequence[int], gather: Gather) -> tuple[int, ...]:
    """What this rank may replay. A collective: every rank of the group calls it once after capture."""
    return common(gather(mine))


def gather_over(group: object) -> Gather:
    """All-gather over the CPU group of one of SGLang's group coordinators; the rank alone where it has no peers."""

    def gather(mine: Sequence[int]) -> Sequence[Sequence[int]]:
        if group.world_size == 1:  # type: ignore[attr-defined]
            return [mine]
        import torch.distributed as dist

        found: list[Sequence[int]] = [()] * group.world_size  # type: ignore[attr-defined]
        dist.all_gather_object(found, list(mine), group=group.cpu_group)  # type: ignore[attr-defined]
        return found

    return gather
