"""Which token counts are captured: covers every step up to the chunk, pads little, fits into memory.

A step of n tokens replays the smallest bucket that holds it, and the GPU computes the padding too. A graph saves
launches, which matter when rows are few; padding costs arithmetic, which matters when rows are many. So: at most
half of a step is padding up to `FINE_FROM` tokens, and at most an eighth of its rows above.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from glm_sglang.errors import UsageError

FINE_FROM = 1024  # tokens; from here on padding is bounded by FINE
FINE = 1 / 8  # padding over real tokens, for steps of more than FINE_FROM tokens
COARSE = 1 / 2  # padding over real tokens, for smaller steps
ROW_UNIT = 64  # local rows: FP8 GEMMs and the sparse attention work in tiles of 64 rows or more
# Local rows of the buckets below one tile. A few new tokens behind a cached prefix cost launches, not rows; SGLang
# replays no bucket of more than twice the tokens.
FEW_ROWS = (8, 16, 32)


@dataclass(frozen=True, slots=True)
class Memory:
    """What captured buckets hold, in bytes.

    row_peak   the graph pool, for each local row of the largest bucket: the buckets share it.
    row_kept   for each local row of every bucket: what its breaks own (0 where they own nothing).
    bucket     for every bucket: graph executables, for all layers.
    limit      all of it together; 0 for no limit.
    """

    row_peak: int = 0
    row_kept: int = 0
    bucket: int = 0
    limit: int = 0

    def of(self, rows: Sequence[int]) -> int:
        """Bytes that buckets of these local rows hold."""
        if not rows:
            return 0
        return self.row_peak * max(rows) + self.row_kept * sum(rows) + self.bucket * len(rows)


@dataclass(frozen=True, slots=True)
class Plan:
    """The buckets in ascending order, in tokens of the whole step, and what was left out for memory's sake."""

    buckets: tuple[int, ...]
    wanted: int
    bytes_held: int
    limit: int = 0

    @property
    def covers(self) -> int:
        """The largest step that replays a graph, in tokens; 0 for none."""
        return self.buckets[-1] if self.buckets else 0

    def bucket(self, tokens: int) -> int | None:
        """The bucket that a step of `tokens` replays, or None where none holds it."""
        return next((bucket for bucket in self.buckets if bucket >= tokens), None)


def unit(cp_size: int) -> int:
    """Tokens that a bucket is a multiple of: whole tiles of local rows on every context-parallel rank.

    UPSTREAM: layers/cp/padding.py pads each rank's rows to a multiple of the CP size.
    """
    return math.lcm(ROW_UNIT, cp_size) * cp_size


def local_rows(tokens: int, cp_size: int) -> int:
    """Rows on one rank of a step of `tokens` under interleaved context parallelism, as SGLang pads them."""
    return math.ceil(math.ceil(tokens / cp_size) / cp_size) * cp_size if cp_size > 1 else tokens


def plan(largest: int, *, cp_size: int = 1, memory: Memory | None = None, dense: int = 0) -> Plan:
    """Buckets for steps of 1 to `largest` tokens.

    The largest bucket is `largest` rounded up to the unit. Where memory does not suffice the largest buckets go
    first: a large step gains least from a graph and holds most. dense: tokens of the largest bucket that may have a
    dense graph (`dense.py`), 0 for none; there is a bucket of so many whole tiles, or steps just below it would replay a
    larger bucket, which has none. Raises ValueError for sizes below 1.
    """
    if largest < 1 or cp_size < 1:
        raise ValueError(f"largest is {largest} and cp_size {cp_size}; both must be at least 1")
    memory = memory or Memory()
    step = unit(cp_size)
    chosen = [_up(largest, step)]
    dense -= dense % step
    while chosen[-1] > step:
        below = _next_below(chosen[-1], step)
        chosen.append(dense if below < dense < chosen[-1] else below)
    few = {math.lcm(rows, cp_size) * cp_size for rows in FEW_ROWS}
    ascending = sorted({*chosen, *(bucket for bucket in few if bucket < min(step, largest))})
    wanted = ascending[-1]

    def held(buckets: Sequence[int]) -> int:
        return memory.of([local_rows(bucket, cp_size) for bucket in buckets])

    while memory.limit and ascending and held(ascending) > memory.limit:
        ascending.pop()
    return Plan(tuple(ascending), wanted, held(ascending), memory.limit)


def _next_below(bucket: int, step: int) -> int:
    """The smallest multiple of `step` such that whatever lies between it and `bucket` pads within the bound.

    A step of n tokens pads by bucket − n; the worst n is one above the bucket below.
    """
    share = FINE if bucket > FINE_FROM * (1 + FINE) else COARSE
    least = bucket / (1 + share) - 1
    below = _up(max(math.ceil(least), 1), step)
    # One unit is the finest there is: below bucket / unit = 8 the bound cannot be kept any better.
    return below if below < bucket else bucket - step


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def padding(bucket: int, tokens: int) -> float:
    """Padding rows over real rows of a step of `tokens` in `bucket`."""
    return (bucket - tokens) / tokens


def parse(text: str) -> tuple[int, ...] | None:
    """The buckets of `--glm-prefill-graph-buckets`, ascending; None for "auto".

    Raises UsageError for anything but positive whole numbers separated by commas.
    """
    if text.strip() in ("", "auto"):
        return None
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--glm-prefill-graph-buckets is {text!r}, expected token counts separated by commas, or auto"
        ) from None
    if any(value < 1 for value in values):
        raise UsageError(f"--glm-prefill-graph-buckets is {text!r}; every count must be at least 1")
    return tuple(sorted(set(values)))


def chunk(
    chunked_prefill_size: int | None, max_prefill_tokens: int | None, limits: Iterable[int | None]
) -> int:
    """The largest step that the scheduler builds, in tokens.

    UPSTREAM: `--chunked-prefill-size` −1 turns chunks off, and then `--max-prefill-tokens` bounds a batch.
    """
    size = chunked_prefill_size if chunked_prefill_size and chunked_prefill_size > 0 else max_prefill_tokens
    return min([size or 8192, *(limit for limit in limits if limit)])
