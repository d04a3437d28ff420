"""One launch that copies the pages of all buffers (or of some layers' buffers) to or from staging.

Bytes: a gather or scatter of n pages of B bytes reads n·B and writes n·B, all in device memory. The floor is
2·n·B / bandwidth: 16 pages of 78 FP8 layers and 21 index layers are 55 MB, so 110 MB, 23 µs at an H200's 4.8 TB/s. The
copy over PCIe 5 that follows or precedes takes n·B / 55 GB/s = 1.0 ms: the kernel is 1/40 of it, and uses SMs for so
long only. Launch and table reads (32 bytes a program) are below that from 2 pages on.

A program copies one chunk of one row of one page. What it must know lies in a table, a line a chunk; the same table
serves both directions. Words are 16 bytes a thread where every address, stride and size is a multiple of 16 (GLM's
layouts are, in SGLang's pools), and single bytes otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from glm_kernels.page_copy.rows import Rows, check, extent

_CHUNK = 16384  # bytes a program: 8 loads of 16 bytes for each of 128 threads before the first store
_WARPS = 4
_VECTOR = 16


@triton.jit
def _move(source, target, inside):  # type: ignore[no-untyped-def]
    # Neither side is read again soon: the forward's lines stay in L2.
    values = tl.load(source, mask=inside, eviction_policy="evict_first")
    tl.store(target, values, mask=inside, eviction_policy="evict_first")


# One variant a direction and alignment, whatever the arguments' values: none is compiled while a server serves.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["staging", "pitch"], do_not_specialize_on_alignment=["table", "pages"]
)
def _copy(  # type: ignore[no-untyped-def]
    table, pages, staging, pitch, TO_STAGING: tl.constexpr, ALIGNED: tl.constexpr, WORDS: tl.constexpr
):
    chunk = tl.program_id(0)
    page = tl.program_id(1)
    line = table + chunk * 4
    first = tl.load(line)  # address of this chunk in page 0 of the pool
    stride = tl.load(line + 1)  # bytes from page to page of the pool
    start = tl.load(line + 2)  # where the chunk lies in a staged page
    words = tl.load(line + 3)  # of the chunk
    number = tl.load(pages + page)
    pool = first + number * stride
    there = staging + page.to(tl.int64) * pitch + start
    if ALIGNED:
        pool_at = tl.multiple_of(pool.to(tl.pointer_type(tl.int32)), 16)
        staging_at = tl.multiple_of(there.to(tl.pointer_type(tl.int32)), 16)
    else:
        pool_at = pool.to(tl.pointer_type(tl.uint8))
        staging_at = there.to(tl.pointer_type(tl.uint8))
    word = tl.arange(0, WORDS)
    # A multiple of 4 words where aligned, so that the mask is the same for the words of a vector.
    inside = word < (tl.multiple_of(words, 4) if ALIGNED else words)
    if TO_STAGING:
        _move(pool_at + word, staging_at + word, inside)
    else:
        _move(staging_at + word, pool_at + word, inside)


class CopyTable:
    """The lines of `_copy` for some buffers: int64 [chunks, 4] on their device, 32 bytes a chunk.

    Holds the buffers, whose addresses it contains. Made once; copying it to the device waits for the current stream.
    """

    def __init__(self, rows: Sequence[Rows]) -> None:
        self._extent = extent(rows)
        self.rows = tuple(rows)
        self.aligned = all(
            number % _VECTOR == 0
            for row in rows
            for number in (row.pool.data_ptr(), row.pool.stride(0), row.size, row.start)
        )
        word = 4 if self.aligned else 1
        lines = [
            (
                row.pool.data_ptr() + at,
                row.pool.stride(0),
                row.start + at,
                min(_CHUNK, row.size - at) // word,
            )
            for row in rows
            for at in range(0, row.size, _CHUNK)
        ]
        self.chunks = len(lines)
        self.lines = torch.tensor(lines, dtype=torch.int64).to(rows[0].pool.device)

    def launch(self, pages: torch.Tensor, staging: torch.Tensor, *, to_staging: bool) -> None:
        """On the current stream; waits for nothing. Raises ValueError as `gather` does."""
        check(self._extent, pages, staging)
        if not pages.shape[0]:
            return
        pitch = staging.stride(0)
        aligned = self.aligned and staging.data_ptr() % _VECTOR == 0 and pitch % _VECTOR == 0
        if self.aligned and not aligned:
            raise ValueError(f"staging must begin and advance in multiples of {_VECTOR} bytes, found {pitch}")
        words = _CHUNK // 4 if aligned else _CHUNK
        _copy[(self.chunks, pages.shape[0])](
            self.lines,
            pages,
            staging.data_ptr(),
            pitch,
            TO_STAGING=to_staging,
            ALIGNED=aligned,
            WORDS=words,
            num_warps=_WARPS,
        )


def gather(table: CopyTable, pages: torch.Tensor, staging: torch.Tensor) -> None:
    """Row pages[i] of each buffer of `table` goes to staging[i], at the buffer's start; other bytes stay.

    pages int64 [n], staging uint8 [n, bytes] with any row stride, both on the pool's device; n ≤ 65535. Raises
    ValueError for shapes that do not fit, and for staging that is not aligned where the pool is.
    """
    table.launch(pages, staging, to_staging=True)


def scatter(table: CopyTable, pages: torch.Tensor, staging: torch.Tensor) -> None:
    """staging[i] goes to row pages[i] of each buffer of `table`. Pages are distinct. Raises as `gather`."""
    table.launch(pages, staging, to_staging=False)
