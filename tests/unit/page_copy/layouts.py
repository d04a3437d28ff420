"""GLM-5.x's page layouts as SGLang's DSA pool has them, small, with known bytes in them.

Byte k of page p of buffer b is (7·b + 13·p + k) mod 251, so every byte of every page says where it came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from glm_kernels.page_copy import Rows

MAIN = {"bf16": 1152, "fp8": 656, "fp32": 2304}  # bytes a token
INDEX = 132


@dataclass(frozen=True)
class Case:
    """Layers of main KV of one kind; those in `owners` have index rows too. Pages of `tokens` tokens."""

    kind: str
    layers: int
    owners: tuple[int, ...]
    tokens: int = 64

    @property
    def sizes(self) -> list[int]:
        """Bytes a page of each buffer: main KV by layer, then index keys by owner."""
        main, index = MAIN[self.kind] * self.tokens, INDEX * self.tokens
        return [main] * self.layers + [index] * len(self.owners)

    @property
    def page_bytes(self) -> int:
        """Of all buffers."""
        return sum(self.sizes)

    def __str__(self) -> str:
        return f"{self.kind}-{self.layers}-{len(self.owners)}"


CASES = (
    Case("bf16", 2, (0, 1)),
    Case("fp8", 3, (0, 2)),
    Case("fp8", 2, ()),
    Case("fp32", 1, (0,)),
)
SMALL = tuple(
    replace(case, tokens=4) for case in CASES
)  # 4 tokens: 528 bytes of index keys, a multiple of 16
PAGES: dict[str, tuple[int, ...]] = {
    "none": (),
    "one": (5,),
    "many": (1, 2, 3, 4, 5, 6, 7, 8),
    "apart": (9, 2, 11, 4, 1),
}


def content(buffer: int, page: int, size: int) -> npt.NDArray[np.uint8]:
    """The known bytes."""
    return ((7 * buffer + 13 * page + np.arange(size)) % 251).astype(np.uint8)


def pool(case: Case, pages: int, device: str = "cpu", *, empty: bool = False) -> list[Rows]:
    """The case's buffers, filled with known bytes, or with 255 (which no known byte is)."""
    rows, start = [], 0
    for buffer, size in enumerate(case.sizes):
        values: npt.NDArray[np.uint8] = np.full((pages, size), 255, dtype=np.uint8)
        if not empty:
            values = np.stack([content(buffer, page, size) for page in range(pages)])
        rows.append(Rows(torch.from_numpy(values).to(device), start))
        start += size
    return rows


def staged(case: Case, pages: Sequence[int]) -> npt.NDArray[np.uint8]:
    """What the staged pages must be, by construction."""
    parts = [[content(buffer, page, size) for buffer, size in enumerate(case.sizes)] for page in pages]
    if not parts:
        return np.zeros((0, case.page_bytes), dtype=np.uint8)
    return np.stack([np.concatenate(part) for part in parts])
