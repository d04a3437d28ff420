"""Pages from pinned host memory straight into the pool: one launch, which reads the host over the bus itself.

For pages that lie anywhere: the copy engine takes a call a page and layer, of 8 µs of the host each (measured beside an
H200), where this takes one launch for all of them. It needs no staging. What it takes instead are SMs, for as long as
the copy lasts: `programs` of them at most, since each program loops over chunks.

Bytes: a pull of n pages of B bytes reads n·B over the bus and writes n·B to device memory. The floor is n·B / bus: PCIe 5
gives 55 GB/s. A program has a chunk of 16 KiB in flight, 8 loads of 16 bytes a thread of 128, and then stores it; so p
programs have p · 16 KiB in flight, 256 KiB with 16. By Little's law 55 GB/s need 165 KiB for a round trip of 3 µs: the
chunk's own and those to its table, its page's number and its address, which lie in device memory. How many programs reach
the floor is measured, not derived.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from glm_kernels.page_copy.kernels import CHUNK, WARPS, CopyTable, move
from glm_kernels.page_copy.reference import scatter_reference
from glm_kernels.page_copy.rows import Rows, check_numbers, extent, host_bytes

PROGRAMS = 16


# One variant an alignment, whatever the arguments' values: none is compiled while a server serves.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["chunks", "total"], do_not_specialize_on_alignment=["table", "hosts", "pages"]
)
def _pull(  # type: ignore[no-untyped-def]
    table, hosts, pages, chunks, total, ALIGNED: tl.constexpr, WORDS: tl.constexpr
):
    word = tl.arange(0, WORDS)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        page = item // chunks
        line = table + (item % chunks) * 4
        first = tl.load(line)  # address of this chunk in page 0 of the pool
        stride = tl.load(line + 1)  # bytes from page to page of the pool
        start = tl.load(line + 2)  # where the chunk lies in a host page
        words = tl.load(line + 3)  # of the chunk
        source = tl.load(hosts + page) + start
        target = first + tl.load(pages + page) * stride
        if ALIGNED:
            # A multiple of 4 words, so that the mask is the same for the words of a vector.
            source_at = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
            target_at = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
            move(source_at + word, target_at + word, word < tl.multiple_of(words, 4))
        else:
            source_at = source.to(tl.pointer_type(tl.uint8))
            target_at = target.to(tl.pointer_type(tl.uint8))
            move(source_at + word, target_at + word, word < words)


def pull(table: CopyTable, hosts: torch.Tensor, pages: torch.Tensor, *, programs: int = PROGRAMS) -> None:
    """Host page i's bytes from each buffer's start on go to row pages[i] of that buffer. Pages are distinct.

    hosts int64 [n], addresses of host pages that the device can read (pinned; on a CPU any), multiples of 16 where
    `table.aligned`; pages int64 [n]; both on the pool's device. Neither their values nor the host pages' sizes are
    looked at here. programs ≥ 1: how many run at once. On the current stream; waits for nothing. ValueError for shapes
    that do not fit. No pages are one program that does nothing: that compiles the kernel.
    """
    _check(table.device, hosts, pages)
    total = table.chunks * pages.shape[0]
    _pull[(max(1, min(programs, total)),)](
        table.lines,
        hosts,
        pages,
        table.chunks,
        total,
        ALIGNED=table.aligned,
        WORDS=CHUNK // 4 if table.aligned else CHUNK,
        num_warps=WARPS,
    )


def pull_reference(rows: Sequence[Rows], hosts: torch.Tensor, pages: torch.Tensor) -> None:
    """The same, exactly, in PyTorch: through a staged copy of the host pages."""
    found = extent(rows)
    _check(found.device, hosts, pages)
    staged = [host_bytes(address, found.end) for address in hosts.tolist()]
    staging = torch.stack(staged) if staged else torch.empty(0, found.end, dtype=torch.uint8)
    scatter_reference(rows, pages, staging.to(found.device))


def _check(device: torch.device, hosts: torch.Tensor, pages: torch.Tensor) -> None:
    for name, numbers in (("hosts", hosts), ("pages", pages)):
        check_numbers(name, numbers)
    if hosts.shape != pages.shape:
        raise ValueError(f"{hosts.shape[0]} host pages and {pages.shape[0]} pages")
    if not hosts.device == pages.device == device:
        raise ValueError(f"hosts on {hosts.device}, pages on {pages.device}, buffers on {device}")
