"""The layout on a GPU: count pairs in blocks, scan the blocks, turn counts into first rows, place. Four launches.

Bytes: ids are read twice and rows written once, 12 bytes a pair; counts are [blocks, E]. At 2 x 8,192 tokens of top-8,
131,072 pairs, that is 1.6 MB: the time is that of four dependent launches, and they run beside the quantisation.
Nothing is atomic: an expert's rows are in arrival order, whatever the blocks' order of execution.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm_kernels.overlapped_moe.layout import Layout, spans
from glm_kernels.overlapped_moe.plan import TILE, Plan

_WORK = 8192  # pairs times experts that one program ranks at once
_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _ids_of(ids, line, first_expert, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pair numbers of a block, which of them count, and their local experts."""
    first = tl.load(line)
    number = tl.load(line + 1)
    offset = tl.arange(0, BLOCK)
    local = tl.load(ids + first + offset, mask=offset < number, other=-1) - first_expert
    return first + offset, offset < number, (local >= 0) & (local < EXPERTS) & (offset < number), local


@triton.jit  # type: ignore[untyped-decorator]
def _count(  # type: ignore[no-untyped-def]
    ids,
    blocks,
    counts,
    overflow,
    first_expert,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    _, _, here, local = _ids_of(ids, blocks + block * 2, first_expert, EXPERTS, BLOCK)
    expert = tl.arange(0, PADDED)
    hit = ((local[:, None] == expert[None, :]) & here[:, None]).to(tl.int32)
    tl.store(counts + block * PADDED + expert, tl.sum(hit, 0))
    if block == 0:
        tl.store(overflow, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _scan(counts, before, number, PADDED: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """before[b] = pairs of each expert in blocks 0 to b - 1, for b up to `number` inclusive. One program."""
    expert = tl.arange(0, PADDED)
    offset = tl.arange(0, STEP)
    running = tl.zeros([PADDED], tl.int32)
    for start in range(0, number, STEP):
        block = start + offset
        at = block[:, None] * PADDED + expert[None, :]
        inside = (block < number)[:, None]
        tile = tl.load(counts + at, mask=inside, other=0)
        tl.store(before + at, tl.cumsum(tile, 0) - tile + running[None, :], mask=inside)
        running += tl.sum(tile, 0)
    tl.store(before + number * PADDED + expert, running)


@triton.jit  # type: ignore[untyped-decorator]
def _first_rows(  # type: ignore[no-untyped-def]
    before, source_block, home, shift, bound, expert_of_row, overflow,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, SOURCES: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Program (s, e): where the tiles of expert e in region s begin, and the experts of their rows.

    home [S, E, 4]: first row and end of the chunk, its first expert, whether e is its last. shift [S, E]: row minus
    number of a pair. bound [S, E]: number of the first pair behind the region.
    """
    source = tl.program_id(0)
    mine = tl.program_id(1)
    line = home + (source * EXPERTS + mine) * 4
    start = tl.load(line)
    end = tl.load(line + 1)
    first = tl.load(line + 2)
    closes = tl.load(line + 3)
    expert = tl.arange(0, PADDED)
    low = tl.load(before + tl.load(source_block + source) * PADDED + expert)
    high = tl.load(before + tl.load(source_block + source + 1) * PADDED + expert)
    pairs = tl.load(before + tl.load(source_block + SOURCES) * PADDED + mine)
    low = low // TILE * TILE
    high = tl.where(source == SOURCES - 1, high + TILE - 1, high) // TILE * TILE
    rows = high - low
    row = start + tl.sum(tl.where((expert >= first) & (expert < mine), rows, 0))
    size = tl.sum(tl.where(expert == mine, rows, 0))
    begin = tl.sum(tl.where(expert == mine, low, 0))
    tl.store(shift + source * EXPERTS + mine, row - begin)
    tl.store(bound + source * EXPERTS + mine, begin + size)
    if row + size > end:
        tl.store(overflow, 1)
    # The chunk's last expert also clears what the routing leaves of the chunk.
    stop = tl.where(closes != 0, end, tl.minimum(row + size, end))
    offset = tl.arange(0, STEP)
    for at in range(row, stop, STEP):
        number = begin + at - row + offset
        value = tl.where((at + offset < row + size) & (number < pairs), mine, -1)
        tl.store(expert_of_row + at + offset, value, mask=at + offset < stop)


@triton.jit  # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
    ids, blocks, before, home, shift, bound, place, first_expert,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, SOURCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    pair, inside, here, local = _ids_of(ids, blocks + block * 2, first_expert, EXPERTS, BLOCK)
    expert = tl.arange(0, PADDED)
    hit = ((local[:, None] == expert[None, :]) & here[:, None]).to(tl.int32)
    earlier = tl.cumsum(hit, 0) - hit + tl.load(before + block * PADDED + expert)[None, :]
    number = tl.sum(hit * earlier, 1)
    safe = tl.where(here, local, 0)
    row = tl.full([BLOCK], -1, tl.int32)
    # Regions downwards: the first one that the pair's number lies in wins; the last takes what is left.
    for back in tl.static_range(SOURCES):
        region = SOURCES - 1 - back
        at = region * EXPERTS + safe
        candidate = tl.load(shift + at) + number
        candidate = tl.where(candidate < tl.load(home + at * 4 + 1), candidate, -1)
        row = tl.where(number < tl.load(bound + at), candidate, row)
    tl.store(place + pair, tl.where(here, row, -1), mask=inside)


class LayoutKernels:
    """Tables and scratch of one plan, on its device; owned by whoever owns the plan's buffers, as long as they live."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        of = plan.geometry
        self.plan = plan
        self._padded = triton.next_power_of_2(of.experts)
        self._block = max(_WORK // self._padded, 16)
        lines, source_block = [], [0]
        for first, last in spans(plan):
            lines += [(at, min(self._block, last - at)) for at in range(first, last, self._block)]
            source_block.append(len(lines))
        home = [[0, 0, 0, 0] for _ in range(len(plan.sources) * of.experts)]
        for chunk in plan.chunks:
            for expert in range(chunk.first, chunk.last):
                home[chunk.region * of.experts + expert] = [
                    chunk.start,
                    chunk.start + chunk.rows,
                    chunk.first,
                    int(expert == chunk.last - 1),
                ]

        def table(values: object) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32).to(device)

        self._number = len(lines)
        self._blocks, self._source_block, self._home = table(lines), table(source_block), table(home)
        self._counts = torch.zeros(self._number, self._padded, dtype=torch.int32, device=device)
        self._before = torch.zeros(self._number + 1, self._padded, dtype=torch.int32, device=device)
        self._shift = torch.zeros(len(plan.sources), of.experts, dtype=torch.int32, device=device)
        self._bound = torch.zeros_like(self._shift)

    def __call__(self, ids: torch.Tensor, out: Layout) -> None:
        """As `layout_reference`, on the current stream; waits for nothing."""
        of, sources = self.plan.geometry, len(self.plan.sources)
        first = of.rank * of.experts
        shape = {"EXPERTS": of.experts, "PADDED": self._padded}
        _count[(self._number,)](
            ids, self._blocks, self._counts, out.overflow, first, BLOCK=self._block, num_warps=_WARPS, **shape
        )
        _scan[(1,)](
            self._counts,
            self._before,
            self._number,
            PADDED=self._padded,
            STEP=max(_WORK // self._padded, 1),
            num_warps=_WARPS,
        )
        _first_rows[(sources, of.experts)](
            self._before, self._source_block, self._home, self._shift, self._bound, out.expert, out.overflow,
            SOURCES=sources, TILE=TILE, STEP=1024, num_warps=4, **shape,
        )  # fmt: skip
        _place[(self._number,)](
            ids, self._blocks, self._before, self._home, self._shift, self._bound, out.place, first,
            SOURCES=sources, BLOCK=self._block, num_warps=_WARPS, **shape,
        )  # fmt: skip
