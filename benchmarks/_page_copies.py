"""The copies of the GPU cache by themselves, without a server: bandwidths, equality, what a load costs a forward.

Every time is a wall-clock time from the call to the last byte.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks._page_loads import Loads
from benchmarks._page_memory import (
    ALIGN,
    HEADER,
    LAYERS,
    OWNERS,
    TOKENS,
    HostPage,
    device_pages,
    device_seconds,
    host_pages,
    rate,
    seconds,
    shuffled,
    slots_of,
)
from glm_sglang.cache.copier import TorchPageCopier
from glm_sglang.cache.cuda_copies import CudaPageCopier
from glm_sglang.cache.cuda_runtime import CudaRuntime
from glm_sglang.cache.saves import RESERVE

LAUNCHES = 50  # between two events: what the host takes for one would hide the kernel
BLOCK = RESERVE  # pages: what a save reserves at once
UPSTREAM_CHUNK = 4  # pages: LMCache's 256 tokens


class Copies:
    """The memory that all measurements share: a pool of `pages`, twice as many host pages, and the copier."""

    def __init__(self, pages: int) -> None:
        began = time.perf_counter()
        self.device = device_pages(pages + 1)
        self.page_bytes = self.device.layout.page_bytes
        self.memory, self.host = host_pages(self.page_bytes, 2 * pages)
        self.setup_s = round(time.perf_counter() - began, 2)
        self.runtime = CudaRuntime(self.device.device)
        self.copier = CudaPageCopier(self.device, self.runtime)

    def scattered(self, count: int) -> list[HostPage]:
        """Host pages that are neighbours by chance only: at most half of all, in any order."""
        return random.Random(count).sample(self.host, count)

    def plain(self) -> dict[str, float]:
        """One contiguous copy of 1 GiB each way: what the bus gives."""
        size = min(1 << 30, self.memory.numel())
        far = torch.empty(size, dtype=torch.uint8, device="cuda")
        near = self.memory[:size]

        def out() -> None:
            near.copy_(far, non_blocking=True)
            torch.cuda.synchronize()

        def back() -> None:
            far.copy_(near, non_blocking=True)
            torch.cuda.synchronize()

        return {"d2h_gb_s": rate(size, seconds(out)), "h2d_gb_s": rate(size, seconds(back))}

    def kernels(self, pages: int) -> dict[str, float]:
        """Gather and scatter alone; GB/s of bytes read plus bytes written."""
        size = pages * self.page_bytes
        staging = torch.empty(pages, self.page_bytes, dtype=torch.uint8, device="cuda")
        numbers = torch.tensor(shuffled(pages), dtype=torch.int64, device="cuda")
        table = self.copier._whole

        def many(to_staging: bool) -> Callable[[], None]:
            def work() -> None:
                for _ in range(LAUNCHES):
                    table.launch(numbers, staging, to_staging=to_staging)

            return work

        gather, scatter = (device_seconds(many(way)) / LAUNCHES for way in (True, False))
        torch.cuda.synchronize()
        began = time.perf_counter()
        many(True)()
        launch = (time.perf_counter() - began) / LAUNCHES
        return {
            "host_us_a_launch": round(launch * 1e6, 1),
            "gather_us": round(gather * 1e6, 1),
            "scatter_us": round(scatter * 1e6, 1),
            "gather_gb_s": rate(2 * size, gather),
            "scatter_gb_s": rate(2 * size, scatter),
        }

    def save(self, pages: Sequence[int], into: Sequence[HostPage]) -> None:
        """As SaveQueue does it: blocks of 16 pages, up to `depth` under way."""
        under_way: list[Callable[[], None]] = []
        for start in range(0, len(pages), BLOCK):
            end = start + BLOCK
            under_way.append(self.copier.start_save(pages[start:end], into[start:end]))
            if len(under_way) >= self.copier.depth:
                under_way.pop(0)()
        for wait in under_way:
            wait()

    def saves(self, count: int) -> dict[str, float]:
        """GB/s of a save of `count` pages, three ways, into neighbours and into scattered host pages."""
        pages, size = shuffled(count), count * self.page_bytes
        torch_copier = TorchPageCopier(self.device)
        scattered = self.scattered(count)
        return {
            "ours_gb_s": rate(size, seconds(lambda: self.save(pages, self.host[:count]))),
            "ours_scattered_gb_s": rate(size, seconds(lambda: self.save(pages, scattered))),
            "torch_copier_gb_s": rate(
                size, seconds(lambda: torch_copier.start_save(pages, self.host[:count])())
            ),
            "upstream_chunks_gb_s": rate(
                size, seconds(lambda: self.save_as_upstream(pages, self.host[:count]))
            ),
        }

    def save_as_upstream(self, pages: Sequence[int], into: Sequence[HostPage]) -> None:
        """LMCache's order of events: a chunk of 256 tokens is gathered layer by layer, copied, and waited for with
        the whole device.
        """
        for start in range(0, len(pages), UPSTREAM_CHUNK):
            numbers = torch.tensor(pages[start : start + UPSTREAM_CHUNK], device="cuda")
            chunk = torch.empty(len(numbers), self.page_bytes, dtype=torch.uint8, device="cuda")
            for layer in self.device.layers:
                for part in layer:
                    chunk[:, part.span] = part.rows.index_select(0, numbers)
            for row, page in zip(chunk, into[start : start + UPSTREAM_CHUNK], strict=True):
                page.tensor.copy_(row, non_blocking=True)
            torch.cuda.synchronize()

    def pinning(self, count: int) -> dict[str, Any]:
        """The CPU pool's own memory for `count` pages: how fast it is pinned in the background, and saved into."""
        from lmcache.v1.memory_management import MemoryFormat

        from glm_sglang.cache.cuda_pinned import CudaPinner, PinnedMemory

        slot = -(-(HEADER + self.page_bytes) // ALIGN) * ALIGN
        memory = PinnedMemory(CudaPinner(self.device.device))
        began = time.perf_counter()
        made: Any = memory(
            count * slot, shapes=[torch.Size([slot])], dtypes=[torch.uint8], fmt=MemoryFormat.BINARY_BUFFER
        )
        first = time.perf_counter() - began
        if not memory.in_background:
            return {"in_background": False, "all_at_once_s": round(first, 3), "gigabytes": count * slot / 1e9}
        made._thread.join()
        total = time.perf_counter() - began
        blocks = list(made.allocator.free_blocks)
        host = [HostPage(block.raw_data[HEADER : HEADER + self.page_bytes]) for block in blocks]
        copier = CudaPageCopier(self.device, CudaRuntime(self.device.device), region_of=memory.region_of)
        saved = seconds(lambda: copier.save(range(1, count + 1), host))
        for block in blocks:
            block.invalidate()
        made.close()
        return {
            "in_background": True,
            "place": made.place,
            "first_piece_s": round(first, 3),
            "gb_s_pinned": rate(made.pinned_bytes, total),
            "save_gb_s": rate(count * self.page_bytes, saved),
        }

    def equality(self, count: int) -> dict[str, Any]:
        """Save, overwrite, load elsewhere: bytes of every buffer of every page compared on the device."""
        pages = shuffled(count)
        parts = [part for layer in self.device.layers for part in layer]
        truth = [part.rows.clone() for part in parts]
        host = self.scattered(count)
        self.save(pages, host)
        for part in parts:
            part.rows.fill_(0)
        targets = [*pages[7:], *pages[:7]]
        self.copier.load([slots_of(targets)], host, lambda layer: None)
        torch.cuda.synchronize()
        wrong = sum(
            int((part.rows[targets] != was[pages]).any(dim=1).sum())
            for part, was in zip(parts, truth, strict=True)
        )
        others = [0, *range(count + 1, self.device.count)]
        touched = sum(int(part.rows[others].any(dim=1).sum()) for part in parts)
        return {
            "pages": count,
            "bytes": count * self.page_bytes,
            "bytes_expected": count * TOKENS * (LAYERS * 656 + len(OWNERS) * 132),
            "wrong_rows": wrong,
            "other_rows_touched": touched,
        }


def measure(note: Callable[[str, Any], None], seconds_left: Callable[[], float], pages: int) -> None:
    """Everything, most important first; `note` gets each result as it is there."""
    copies = Copies(pages)
    loads = Loads(copies)
    note("memory", {"pages": pages, "page_bytes": copies.page_bytes, "setup_s": copies.setup_s})
    long, short = min(pages, 2048), min(pages, 512)
    parts: list[tuple[str, Callable[[], Any]]] = [
        ("plain_copy", copies.plain),
        ("equality", lambda: copies.equality(min(pages, 700))),
        ("save_16k_tokens", lambda: copies.saves(min(pages, 256))),
        (f"kernels_{BLOCK}_pages", lambda: copies.kernels(BLOCK)),
        ("load_32k_tokens", lambda: loads.load(short, (100.0,))),
        ("load_128k_tokens", lambda: loads.load(long, (100.0, 400.0))),
        ("save_4k_tokens", lambda: copies.saves(min(pages, 64))),
        ("save_one_page", lambda: copies.saves(1)),
        ("pinning", lambda: copies.pinning(min(pages, 512))),
        ("kernels_1_page", lambda: copies.kernels(1)),
        ("plain_copy_at_the_end", copies.plain),
    ]
    for name, work in parts:
        if seconds_left() <= 0:
            note(name, "skipped: out of time")
            continue
        try:
            note(name, work())
        except Exception as error:  # the other parts, and the servers behind them, are still measured
            note(name, f"failed: {type(error).__name__}: {error}"[:400])
