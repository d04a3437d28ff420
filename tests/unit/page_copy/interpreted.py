"""Run by test_page_copy with TRITON_INTERPRET=1: the kernels themselves, on a CPU, against the references."""

from __future__ import annotations

import torch
from glm_kernels.page_copy import (
    CopyTable,
    Rows,
    gather,
    gather_reference,
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
    print(*(word for name in checked for word in (name, checked[name])))


if __name__ == "__main__":
    main()
