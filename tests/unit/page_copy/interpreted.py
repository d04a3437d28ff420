"""Run by test_page_copy with TRITON_INTERPRET=1: the kernels themselves, on a CPU, against the references."""

from __future__ import annotations

import torch
from glm_kernels.page_copy import (
    CopyTable,
    Rows,
    gather,
    gather_reference,
    pull,
    pull_reference,
    scatter,
    scatter_reference,
)


def buffers(sizes: tuple[int, ...], pages: int) -> list[Rows]:
    rows, start = [], 0
    for size in sizes:
        rows.append(Rows(torch.randint(0, 256, (pages, size), dtype=torch.uint8), start))
        start += size
    return rows


def main() -> None:
    torch.manual_seed(0)
    checked = {"gather": 0, "scatter": 0}
    for sizes in ((656 * 64, 656 * 64, 132 * 64), (33, 16401)):
        for pages in ([], [5], [1, 2, 3], [7, 2, 4]):
            for extra in (0, 5):
                width = sum(sizes)
                rows = buffers(sizes, 8)
                numbers = torch.tensor(pages, dtype=torch.int64)
                got, want = (torch.full((len(pages), width + extra * 16), 9, dtype=torch.uint8) for _ in "ab")
                table = CopyTable(rows)
                gather(table, numbers, got)
                gather_reference(rows, numbers, want)
                assert torch.equal(got, want)
                checked["gather"] += 1
                staging = torch.randint(0, 256, (len(pages), width + extra * 16), dtype=torch.uint8)
                twin = [Rows(row.pool.clone(), row.start) for row in rows]
                scatter(table, numbers, staging)
                scatter_reference(twin, numbers, staging)
                assert all(torch.equal(a.pool, b.pool) for a, b in zip(rows, twin, strict=True))
                checked["scatter"] += 1
    checked["pull"] = pulls()
    print(*(word for name in checked for word in (name, checked[name])))


def pulls() -> int:
    """GLM-5.x's layouts (bf16 and FP8 main KV, index keys of some layers), then sizes that are not aligned."""
    checked = 0
    for sizes in ((1152 * 64, 132 * 64), (656 * 64, 656 * 64, 132 * 64), (656 * 64,), (33, 16401)):
        host = torch.randint(0, 256, (9, 128 + sum(sizes)), dtype=torch.uint8)[:, 128:]  # behind headers
        for pages in ([], [5], [1, 2, 3, 4, 5], [7, 2, 4]):
            at = torch.tensor([host[(4 * page) % 9].data_ptr() for page in pages], dtype=torch.int64)
            numbers = torch.tensor(pages, dtype=torch.int64)
            rows = buffers(sizes, 8)
            for group in filter(None, (rows, rows[1:])):  # all layers, and some of them
                for programs in (1, 3, 64):  # several chunks each, and fewer chunks than programs
                    got, want = ([Rows(row.pool.clone(), row.start) for row in group] for _ in "ab")
                    table = CopyTable(got)
                    assert table.aligned == (sizes[0] != 33)
                    pull(table, at, numbers, programs=programs)
                    pull_reference(want, at, numbers)
                    assert all(torch.equal(a.pool, b.pool) for a, b in zip(got, want, strict=True))
                    checked += 1
    return checked


if __name__ == "__main__":
    main()
