"""What the measurements of page copies share: a pool and host pages of true GLM-5.x sizes, and clocks.

78 layers of FP8 main KV (656 bytes a token), 21 layers of index keys (132 bytes), 64 tokens a page, 3.45 MB. Every time
is a median of `REPEATS`, after one that is not counted.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from glm_connectors.tiers import PageLayout

from glm_sglang.cache.device_pages import DevicePages, Part

TOKENS = 64
LAYERS = 78
OWNERS = tuple(layer for layer in range(LAYERS) if layer < 3 or (layer - 2) % 4 == 0)
MAIN, INDEX = 656 * TOKENS, 132 * TOKENS
REPEATS = 5
HEADER, ALIGN = 128, 512  # of a slot of the CPU pool (glm_connectors.tiers.pool)


@dataclass(frozen=True, slots=True)
class HostPage:
    """A page of pinned memory."""

    tensor: torch.Tensor

    @property
    def address(self) -> int:
        """Of its first byte."""
        return self.tensor.data_ptr()


def device_pages(pages: int) -> DevicePages:
    """A pool of random bytes."""
    layers: list[tuple[Part, ...]] = []
    for layer in range(LAYERS):
        layers.append((Part(_random(pages, MAIN), layer * MAIN),))
    for place, owner in enumerate(OWNERS):
        layers[owner] += (Part(_random(pages, INDEX), LAYERS * MAIN + place * INDEX),)
    layout = PageLayout(TOKENS, (("kv", LAYERS * MAIN), ("index", len(OWNERS) * INDEX)))
    return DevicePages(tuple(layers), layout, torch.device("cuda", torch.cuda.current_device()))


def _random(pages: int, size: int) -> torch.Tensor:
    return torch.randint(0, 256, (pages, size), dtype=torch.uint8, device="cuda")


def host_pages(page_bytes: int, count: int) -> tuple[torch.Tensor, list[HostPage]]:
    """(pinned memory, its pages, laid out as the CPU pool's slots)."""
    slot = -(-(HEADER + page_bytes) // ALIGN) * ALIGN
    memory = torch.empty(count * slot, dtype=torch.uint8, pin_memory=True)
    starts = range(HEADER, count * slot, slot)
    return memory, [HostPage(memory[start : start + page_bytes]) for start in starts]


def seconds(work: Callable[[], None]) -> float:
    """Median wall-clock seconds of `work`, which ends when its last byte has arrived."""
    times = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def device_seconds(work: Callable[[], None]) -> float:
    """Median seconds between events around `work` on the current stream."""
    cuda: Any = torch.cuda
    times: list[float] = []
    for _ in range(REPEATS + 1):
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return statistics.median(times[1:])


def rate(size: int, taken: float) -> float:
    """GB/s."""
    return round(size / taken / 1e9, 2)


def shuffled(count: int) -> list[int]:
    """Pages 1 … count in a seeded order: page 0 is the pool's padding."""
    pages = list(range(1, count + 1))
    random.Random(count).shuffle(pages)
    return pages


def slots_of(pages: Sequence[int]) -> torch.Tensor:
    """The slots of those pages' tokens on the device, page by page."""
    numbers = torch.tensor(pages, dtype=torch.int64)
    return (numbers[:, None] * TOKENS + torch.arange(TOKENS)).view(-1).cuda()
