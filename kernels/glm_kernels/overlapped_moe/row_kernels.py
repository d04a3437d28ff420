"""The row operations on a GPU, each bound by memory. H 6144, I 2048, 8,192 tokens a rank, EP2, top-8, even routing:

| kernel | bytes | at 4.8 TB/s |
|---|---|---|
| quantise | 8,192 rows of bf16 in, E4M3 out: 151 MB | 31 µs |
| place | 16,384 rows of codes in, 65,536 out: 503 MB | 105 µs |
| swiglu | 65,536 rows of 2I bf16 in, I codes out: 671 MB | 140 µs |
| reduce and finish | 65,536 rows of bf16 in, 16,384 sums out, 8,192 in: 1,107 MB, 101 of them over NVLink | 231 µs |

A program takes units of work grid-stride, so the grid says how many SMs are used: few beside a GEMM, all without one.
Beside a GEMM they have its 3 to 5 ms; a unit is small enough that the last one of a grid is not waited for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm_kernels.overlapped_moe.plan import TILE

_WARPS = 8
_GROUPS = 16  # of 128 columns that a program quantises at once: 8 values a thread
_ROWS = 32  # of a chunk that a program activates at once, over 128 columns
_COLUMNS = 2048  # of a token that a program reduces at once


@triton.jit
def _codes(values):  # type: ignore[no-untyped-def]
    """[N, 128] fp32 -> E4M3 codes and the scale of each row. UPSTREAM: sm90_mega_moe_pre_dispatch_kernel."""
    scale = tl.maximum(tl.max(tl.abs(values), 1), 1e-10) / 448.0
    codes = values * (1.0 / scale)[:, None]
    codes = tl.minimum(tl.maximum(codes, -448.0), 448.0)
    return codes.to(tl.float8e4nv), scale


@triton.jit  # type: ignore[untyped-decorator]
def _quantise(  # type: ignore[no-untyped-def]
    x, codes, scales, tokens, HIDDEN: tl.constexpr, GROUPS: tl.constexpr, STEP: tl.constexpr
):
    PARTS: tl.constexpr = (GROUPS + STEP - 1) // STEP
    column = tl.arange(0, 128)
    pitch = tl.full([], HIDDEN, tl.int64)
    for unit in range(tl.program_id(0), tokens * PARTS, tl.num_programs(0)):
        token = unit // PARTS
        group = unit % PARTS * STEP + tl.arange(0, STEP)
        at = token * pitch + group[:, None] * 128 + column[None, :]
        inside = (group < GROUPS)[:, None]
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        made, scale = _codes(values)
        tl.store(codes + at, made, mask=inside)
        tl.store(scales + token * GROUPS + group, scale, mask=group < GROUPS)


@triton.jit  # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
    codes, scales, place, a, a_scale, table, tokens,
    WORDS: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr, MANY: tl.constexpr,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """codes and a as 4-byte words, WORDS a row; WIDE, MANY and SLOTS are the powers of two not below."""
    word = tl.arange(0, WIDE)
    group = tl.arange(0, MANY)
    slot = tl.arange(0, SLOTS)
    pitch = tl.full([], WORDS, tl.int64)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        rows = tl.load(place + token * TOP_K + slot, mask=slot < TOP_K, other=-1)
        if tl.max(rows, 0) >= 0:
            values = tl.load(codes + token * pitch + word, mask=word < WORDS, other=0)
            scale = tl.load(scales + token * GROUPS + group, mask=group < GROUPS, other=0.0)
            for k in tl.static_range(TOP_K):
                row = tl.load(place + token * TOP_K + k)
                if row >= 0:
                    tl.store(a + row * pitch + word, values, mask=word < WORDS)
                    first = tl.load(table + row // 128 * 2) + row % 128
                    step = tl.load(table + row // 128 * 2 + 1)
                    tl.store(a_scale + first + group * step, scale, mask=group < GROUPS)


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu(  # type: ignore[no-untyped-def]
    gate_up, expert, codes, scales, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    GROUPS: tl.constexpr = WIDTH // 128
    column = tl.arange(0, 128)
    for unit in range(tl.program_id(0), rows // ROWS * GROUPS, tl.num_programs(0)):
        start = unit // GROUPS * ROWS
        group = unit % GROUPS
        # A tile's pairs come first, so a block without one in its first row has none.
        if tl.load(expert + start) >= 0:
            row = start + tl.arange(0, ROWS)
            wide = row.to(tl.int64)[:, None]
            at = group * 128 + column[None, :]
            gate = tl.load(gate_up + wide * (2 * WIDTH) + at).to(tl.float32)
            up = tl.load(gate_up + wide * (2 * WIDTH) + WIDTH + at).to(tl.float32)
            made, scale = _codes(gate / (1.0 + tl.exp(-gate)) * up)
            tl.store(codes + wide * WIDTH + at, made)
            tl.store(scales + group * rows + row, scale)


@triton.jit  # type: ignore[untyped-decorator]
def _reduce(  # type: ignore[no-untyped-def]
    rows, place, weights, partials, out, tokens, stride, scaling,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, PEERS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    pitch = tl.full([], HIDDEN, tl.int64)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        # All of a token by one program: its rows and weights come from L2 once.
        for part in tl.static_range(PARTS):
            column = part * COLUMNS + tl.arange(0, COLUMNS)
            inside = column < HIDDEN
            at = token * pitch + column
            total = tl.zeros([COLUMNS], tl.float32)
            for k in tl.static_range(TOP_K):
                row = tl.load(place + token * TOP_K + k)
                weight = tl.load(weights + token * TOP_K + k) * scaling
                weight = tl.where(row >= 0, weight, 0.0)
                there = rows + row * pitch + column
                total += weight * tl.load(there, mask=inside & (row >= 0), other=0.0).to(tl.float32)
            for peer in tl.static_range(PEERS):
                there = partials + peer * stride.to(tl.int64) + at
                total += tl.load(there, mask=inside, other=0.0).to(tl.float32)
            tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def quantise(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, grid: int) -> None:
    """As `quantise_reference`, for contiguous tensors, by at most `grid` programs. No tokens: no launch."""
    tokens, hidden = x.shape
    if tokens:
        units = tokens * triton.cdiv(hidden // 128, _GROUPS)
        _quantise[(min(grid, units),)](
            x, codes, scales, tokens, HIDDEN=hidden, GROUPS=hidden // 128, STEP=_GROUPS, num_warps=_WARPS
        )


def place(
    codes: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor,
    a: torch.Tensor,
    a_scale: torch.Tensor,
    table: torch.Tensor,
    *,
    grid: int,
) -> None:
    """As `place_reference`; codes and scales may be a peer's, mapped here: rows without a pair are not read."""
    tokens, top_k = rows.shape
    words, groups = codes.shape[1] // 4, scales.shape[1]
    if tokens:
        _place[(min(grid, tokens),)](
            codes.view(torch.int32), scales, rows, a.view(torch.int32), a_scale, table, tokens,
            WORDS=words, WIDE=triton.next_power_of_2(words),
            GROUPS=groups, MANY=triton.next_power_of_2(groups),
            TOP_K=top_k, SLOTS=triton.next_power_of_2(top_k), num_warps=_WARPS,
        )  # fmt: skip


def swiglu(
    gate_up: torch.Tensor, expert: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, grid: int
) -> None:
    """As `swiglu_reference`, for scales of strides (1, M) and M a multiple of 128; also rows of -1 that share a block of
    32 with a pair are written."""
    rows, width = codes.shape
    if rows % TILE or scales.stride() != (1, rows):
        raise ValueError(
            f"scales of {rows} rows must have strides (1, {rows}), rows a multiple of {TILE}; "
            f"found {tuple(scales.stride())}"
        )
    units = rows // _ROWS * (width // 128)
    if units:
        _swiglu[(min(grid, units),)](
            gate_up, expert, codes, scales, rows, WIDTH=width, ROWS=_ROWS, num_warps=_WARPS
        )


def reduce(
    rows: torch.Tensor,
    place: torch.Tensor,
    weights: torch.Tensor,
    scaling: float,
    partials: torch.Tensor | None,
    out: torch.Tensor,
    *,
    grid: int,
) -> None:
    """As `reduce_reference`; `out` may be a peer's memory, mapped here, and is written once, in rows of 4 KB."""
    tokens, hidden = out.shape
    if tokens:
        _reduce[(min(grid, tokens),)](
            rows, place, weights, rows if partials is None else partials, out, tokens,
            0 if partials is None else partials.stride(0), scaling,
            HIDDEN=hidden, TOP_K=place.shape[1], PEERS=0 if partials is None else partials.shape[0],
            COLUMNS=min(_COLUMNS, triton.next_power_of_2(hidden)), num_warps=_WARPS,
        )  # fmt: skip
