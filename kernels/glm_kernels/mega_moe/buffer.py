"""Bytes of the SM90 kernel's symmetric buffer, before there is a GPU to ask: for planning, refusals and the
memory report.

Derived from the layout in the pinned headers (UPSTREAM: SM90Workspace::get_num_bytes,
sm90_fp8_mega_moe_impl's buffers) and from the ring size the pinned library answers; a test holds it equal to
that library, byte for byte, over a grid of shapes. The buffers of 2xH200 in the measured table are 0.25,
0.56, 1.08 and 2.13 GiB for 1,024 to 16,384 tokens: the same numbers.
"""

from __future__ import annotations

from glm_kernels.mega_moe.chunks import align, ceil_div

SM90_TOKEN_ALIGNMENT = 128
"""Capacity is a multiple of this (1,920 in 0.2.3.post2). UPSTREAM: get_token_alignment_for_sm90_mega_moe."""

_BLOCK_M = 128  # UPSTREAM: kSM90MaxCandidateBlockM and kSM90LCMBlockM
_MIN_BLOCK_M = 8  # UPSTREAM: kMinCandidateBlockM, the workspace's block granularity
_RING_FROM_TOKENS = 1024  # below this capacity the pool holds every row
_UNIT_ROWS = 1024  # a lag unit is 8 tiles of 128 rows (UPSTREAM: kSM90LagUnitM)
_RING_SLACK_ROWS = 4608  # rows in flight beside the lag
_LAG_UNITS = (8, 64)


def pool_rows(ranks: int, experts: int, capacity: int, top_k: int) -> int:
    """Rows that could arrive at one rank at worst, each expert padded to whole tiles.

    UPSTREAM: get_num_max_pool_tokens_sm90.
    """
    local = experts // ranks
    return align(ranks * capacity * min(top_k, local) + local * (_BLOCK_M - 1), _BLOCK_M)


def ring_rows(ranks: int, experts: int, capacity: int, top_k: int) -> int:
    """Rows that the buffer really holds: a ring from 1,024 tokens on, the whole pool below (or where it is
    smaller).

    The second GEMM trails the first by `lag` units of 1,024 rows, 0.45 of the units of an even routing, from
    8 to 64.
    """
    pool = pool_rows(ranks, experts, capacity, top_k)
    if capacity < _RING_FROM_TOKENS:
        return pool
    local = experts // ranks
    units = local * max(1, ceil_div(capacity * top_k, _UNIT_ROWS * local))
    low, high = _LAG_UNITS
    lag = min(max(int(units * 0.45 + 0.5), low), high)
    return min(pool, lag * _UNIT_ROWS + _RING_SLACK_ROWS)


def sm90_buffer_bytes(
    *, ranks: int, experts: int, capacity: int, top_k: int, hidden: int, intermediate: int
) -> int:
    """Bytes of one rank's symmetric buffer for `capacity` tokens a rank (a multiple of 128).

    Inputs, the ring between the GEMMs and, largest, the combine area: capacity x top_k rows of bf16.
    """
    if capacity % SM90_TOKEN_ALIGNMENT or capacity < 1:
        raise ValueError(
            f"capacity is {capacity} tokens a rank; it must be a positive multiple of {SM90_TOKEN_ALIGNMENT}"
        )
    if experts % ranks:
        raise ValueError(f"{experts} experts do not divide over an EP size of {ranks}")
    ring = ring_rows(ranks, experts, capacity, top_k)
    scale_rows = 2 * ring  # sized for tiles of 64 rows, whose scales take 128
    inputs = capacity * (hidden + hidden // 32 + top_k * (8 + 4))
    rows = ring * (hidden + 4 + intermediate) + scale_rows * (hidden + intermediate) // 32
    combine = capacity * top_k * hidden * 2
    return _workspace_bytes(ranks, experts, capacity, top_k, ring) + inputs + rows + combine


def _workspace_bytes(ranks: int, experts: int, capacity: int, top_k: int, ring: int) -> int:
    """Barriers, per-expert counts and flags (two banks), tile counters, source indices, row origins."""
    local = experts // ranks
    pool = pool_rows(ranks, experts, capacity, top_k)
    pool_blocks, ring_blocks = pool // _MIN_BLOCK_M, ring // _MIN_BLOCK_M
    flag_words = experts + local + 1 + ranks
    banks = align(align(flag_words * 4, 8) + (experts + local) * 8 + flag_words * 4, 1024)
    counters = 32 + experts * 16 + local * 8 + align(pool_blocks, 2) * 4 + pool_blocks * 8 + ring_blocks * 8
    sources = experts * ranks * capacity * 4 + pool * 12
    return align(counters + sources + banks, 1024)
