"""Which rows are computed together, and in which buffer rows they may lie. Policy only: no torch, no device.

Tokens arrive from sources: parts of this rank's own tokens, then each peer's, in ring order. Every expert sees its
(token, slot) pairs as one sequence in that order, cut into tiles of 128 rows. The region of a source holds the whole
tiles that end in it; what is left over, at most 127 rows an expert, starts the next region's first tile. So an expert
is padded once, in the last region, as if there were no chunks at all, and

- the first GEMM of region s needs the sources 0 to s,
- the outputs of source s lie in region s and later ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

TILE = 128
"""Rows of one expert in a tile of the grouped GEMM. UPSTREAM: deep_gemm get_mk_alignment_for_contiguous_layout."""


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below a / b; b > 0."""
    return -(-a // b)


@dataclass(frozen=True)
class Geometry:
    """One layer as one rank of the EP group sees it; `tokens` is the most that any rank brings to a step."""

    ranks: int
    rank: int
    experts: int
    """Of this rank: global ids [rank * experts, (rank + 1) * experts)."""
    top_k: int
    hidden: int
    intermediate: int
    tokens: int

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate"):
            value = getattr(self, name)
            if value < TILE or value % TILE:
                raise ValueError(f"{name} is {value}; the overlapped path takes multiples of {TILE}")
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} of {self.ranks}")
        if min(self.experts, self.top_k, self.tokens) < 1:
            raise ValueError(
                f"experts, top_k and tokens must be positive, found {self.experts}, {self.top_k}, {self.tokens}"
            )


@dataclass(frozen=True)
class Source:
    """Tokens [start, stop) of the rank that is `peer` steps after this one in the ring (0: this rank)."""

    peer: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Chunk:
    """One grouped GEMM: experts [first, last) of a region, in buffer rows [start, start + rows)."""

    region: int
    first: int
    last: int
    start: int
    rows: int


@dataclass(frozen=True)
class Plan:
    """Sources in the order of their regions, and the chunks in the order of their rows.

    `exact`: the rows are those of one known routing, not a bound for any.
    """

    geometry: Geometry
    sources: tuple[Source, ...]
    chunks: tuple[Chunk, ...]
    exact: bool

    @property
    def rows(self) -> int:
        """Rows of each row buffer, at least one tile."""
        return max(self.chunks[-1].start + self.chunks[-1].rows, TILE)

    @property
    def own(self) -> tuple[int, ...]:
        """Sources that are this rank's tokens."""
        return tuple(i for i, source in enumerate(self.sources) if source.peer == 0)

    @property
    def row_bytes(self) -> int:
        """Bytes of all row buffers: codes and scales of both GEMMs' operands, both outputs in bf16, the expert."""
        hidden, width = self.geometry.hidden, self.geometry.intermediate
        return self.rows * (hidden + width + (hidden + width) // 32 + 4 * width + 2 * hidden + 4)


def sources_of(geometry: Geometry, shares: Sequence[int] = (1, 1)) -> tuple[Source, ...]:
    """The sources of a plan: own tokens cut in the ratio of `shares` (empty parts left out), then the peers."""
    if not shares or min(shares) < 1:
        raise ValueError(f"shares of the own tokens must be positive integers, found {tuple(shares)}")
    ends = [0]
    for share in shares:
        ends.append(ends[-1] + share)
    cuts = [geometry.tokens * end // ends[-1] for end in ends]
    own = [Source(0, a, b) for a, b in pairwise(cuts) if b > a]
    peers = [Source(peer, 0, geometry.tokens) for peer in range(1, geometry.ranks)]
    return tuple(own + peers)


def _expert_cuts(experts: int, splits: int) -> list[int]:
    if splits < 1:
        raise ValueError(f"expert_splits is {splits}; it must be at least 1")
    splits = min(splits, experts)
    return [experts * i // splits for i in range(splits + 1)]


def _chunks(rows: Sequence[Sequence[int]], cuts: Sequence[int]) -> tuple[Chunk, ...]:
    """rows [regions][cuts - 1], multiples of TILE."""
    chunks, start = [], 0
    for region, sizes in enumerate(rows):
        for first, last, size in zip(cuts[:-1], cuts[1:], sizes, strict=True):
            chunks.append(Chunk(region, first, last, start, size))
            start += size
    return tuple(chunks)


def tiles_of(counts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Tiles of every region and expert, [S][E], for counts [S][E] of pairs by source and expert.

    Their sum over regions is ceil(pairs / 128) for every expert: chunks cost no padding.
    """
    seen, before, tiles = [0] * len(counts[0]), [0] * len(counts[0]), []
    for source, row in enumerate(counts):
        seen = [a + b for a, b in zip(seen, row, strict=True)]
        last = source == len(counts) - 1
        ends = [ceil_div(n, TILE) if last else n // TILE for n in seen]
        tiles.append([b - a for a, b in zip(before, ends, strict=True)])
        before = ends
    return tiles


def exact_plan(
    geometry: Geometry,
    counts: Sequence[Sequence[int]],
    *,
    shares: Sequence[int] = (1, 1),
    expert_splits: int = 1,
) -> Plan:
    """Buffers for one routing that the host knows: counts [S][E], pairs by source of `sources_of` and local expert.

    `expert_splits`: chunks of a region, by experts. A routing that asks for more rows of any chunk sets the layout's
    overflow flag. Raises ValueError for counts that are not of these sources and experts.
    """
    sources = sources_of(geometry, shares)
    if [len(row) for row in counts] != [geometry.experts] * len(sources):
        raise ValueError(f"counts must be {len(sources)} sources by {geometry.experts} experts")
    cuts = _expert_cuts(geometry.experts, expert_splits)
    rows = [[sum(row[a:b]) * TILE for a, b in pairwise(cuts)] for row in tiles_of(counts)]
    return Plan(geometry, sources, _chunks(rows, cuts), exact=True)


def worst_case_plan(geometry: Geometry, *, shares: Sequence[int] = (1, 1), expert_splits: int = 1) -> Plan:
    """Buffers for any routing: a captured graph stays right whatever the ids are.

    A chunk of t tokens and n experts gets t * top_k + 127 * n rows for what is left over from before it, and in the
    last region as many again for padding, rounded down to tiles; each (region, expert) has at most that many. The
    GEMM still loads the operands of tiles that a routing leaves empty, which costs about what a full one does: over
    R ranks that is R times the work of an even routing, so this plan is for correctness, `exact_plan` for speed.
    UPSTREAM: sm90_fp8_gemm_1d2d.cuh loads before it asks is_computation_valid.
    """
    sources, cuts = sources_of(geometry, shares), _expert_cuts(geometry.experts, expert_splits)
    rows = []
    for region, source in enumerate(sources):
        pads = 2 if region == len(sources) - 1 else 1
        bounds = [source.tokens * geometry.top_k + pads * (TILE - 1) * (b - a) for a, b in pairwise(cuts)]
        rows.append([bound // TILE * TILE for bound in bounds])
    return Plan(geometry, sources, _chunks(rows, cuts), exact=False)
