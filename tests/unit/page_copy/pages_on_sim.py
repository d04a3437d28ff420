"""A pool of known bytes, host pages as the CPU pool lays them out, and a copier over the simulator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from glm_connectors.tiers import PageLayout

from glm_sglang.cache.cuda_copies import CudaPageCopier
from glm_sglang.cache.cuda_plan import Costs
from glm_sglang.cache.device_pages import DevicePages, Part
from tests.unit.page_copy.layouts import Case, pool, staged
from tests.unit.page_copy.simulator import SimDevice

HEADER = 128
SLOT = 512
TOKENS = 64
# What a load takes into account, so that it goes layer by layer, or all layers at once.
APART = Costs(call=0.0, block=0.0, byte=1.0)
TOGETHER = Costs(call=1.0, block=1.0, byte=0.0)


@dataclass(frozen=True)
class Slot:
    """A host page: bytes within a slot of a larger buffer."""

    tensor: torch.Tensor

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()


def device_pages(case: Case, pages: int, *, empty: bool = False) -> DevicePages:
    """Layers with main KV, index keys where the case has them."""
    rows = pool(case, pages, empty=empty)
    layers: list[tuple[Part, ...]] = [(Part(row.pool, row.start),) for row in rows[: case.layers]]
    for owner, row in zip(case.owners, rows[case.layers :], strict=True):
        layers[owner] += (Part(row.pool, row.start),)
    layout = PageLayout(TOKENS, (("kv", case.page_bytes),))
    return DevicePages(tuple(layers), layout, torch.device("cpu"))


def host_pages(case: Case, slots: int) -> tuple[torch.Tensor, list[Slot]]:
    """(the whole buffer, filled with 99; its pages)."""
    size = -(-(HEADER + case.page_bytes) // SLOT) * SLOT
    memory = torch.full((slots * size,), 99, dtype=torch.uint8)
    starts = [slot * size + HEADER for slot in range(slots)]
    return memory, [Slot(memory[start : start + case.page_bytes]) for start in starts]


def copier(pages: DevicePages, device: SimDevice, *, block: int = 2, slots: int = 2) -> CudaPageCopier:
    """Small slots, so that every load and save goes round the ring."""
    size = pages.layout.page_bytes
    return CudaPageCopier(
        pages,
        device,
        slots=slots,
        slot_bytes=block * size + 64,
        costs=APART,
    )


def slots_of(pages: Sequence[int], device: str = "cpu") -> torch.Tensor:
    """The slots of those pages' tokens, page by page, int64."""
    return (
        (torch.tensor(pages, dtype=torch.int64)[:, None] * TOKENS + torch.arange(TOKENS)).view(-1).to(device)
    )


def expected(case: Case, pages: Sequence[int]) -> list[np.ndarray]:  # type: ignore[type-arg]
    """The bytes of those pages, by construction."""
    return list(staged(case, pages))


def shuffled(count: int, seed: int) -> list[int]:
    """0 … count − 1 in some order."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order
