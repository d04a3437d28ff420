"""Which copies a save or load on a GPU consists of: plain arithmetic, apart from CUDA.

Pages of the CPU pool are slots at equal distances, and a prompt's pages mostly lie in slots next to each other: such a
run is one strided copy, however many pages it has. Loads go layer by layer: a layer of a page is 42 KB (FP8) in the
middle of 3.4 MB, and one strided copy takes it out of every page of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_LARGEST_PITCH = (1 << 31) - 1  # of cudaMemcpy2DAsync (cudaDeviceProp.memPitch)
_ALIGN = 16


@dataclass(frozen=True, slots=True)
class Run:
    """`count` pages in host memory, `pitch` bytes apart, from `address` on; they are staged from place `first` on."""

    address: int
    pitch: int
    count: int
    first: int


def one_region(address: int) -> int:
    """Memory that was pinned as a whole."""
    return 0


def runs(
    addresses: Sequence[int], page_bytes: int, region_of: Callable[[int], int] = one_region
) -> list[Run]:
    """Ascending addresses of pages → as few runs as taking them greedily gives. A single page has pitch page_bytes.

    No run goes from one region to another: CUDA refuses a copy over memory that was pinned in parts.
    """
    regions = [region_of(address) for address in addresses]
    found: list[Run] = []
    start = 0
    while start < len(addresses):
        end, pitch = start + 1, page_bytes
        if end < len(addresses) and page_bytes <= addresses[end] - addresses[start] <= _LARGEST_PITCH:
            step = addresses[end] - addresses[start]
            while (
                end < len(addresses)
                and addresses[end] - addresses[end - 1] == step
                and regions[end] == regions[start]
            ):
                end += 1
                pitch = step
        found.append(Run(addresses[start], pitch, end - start, start))
        start = end
    return found


def clip(found: Sequence[Run], start: int, end: int) -> list[Run]:
    """The runs of places start … end − 1 of those of `found`, counted from `start`."""
    inside: list[Run] = []
    for run in found:
        first, last = max(run.first, start), min(run.first + run.count, end)
        if first < last:
            skipped = first - run.first
            inside.append(Run(run.address + skipped * run.pitch, run.pitch, last - first, first - start))
    return inside


@dataclass(frozen=True, slots=True)
class Span:
    """`size` bytes from byte `start` of a host page on lie from byte `at` of a staged page on."""

    start: int
    size: int
    at: int


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive layers that are loaded together.

    layers  their numbers.
    spans   what is copied of each page: main KV of these layers is one span, their index keys another.
    starts  for each layer, where its parts lie in a staged page.
    width   bytes of a staged page.
    """

    layers: range
    spans: tuple[Span, ...]
    starts: tuple[tuple[int, ...], ...]
    width: int


def growing(count: int, first: int, most: int) -> list[range]:
    """0 … count − 1 in ranges: `first` of them, then as many again as there were before, up to `most` or `first`.

    A forward reads a range while the next one is copied. Where that takes no longer a layer than the forward, all it
    waits for is the first, and fewer than `most`.
    """
    found: list[range] = []
    start = 0
    while start < count:
        end = min(count, start + max(first, min(start, most)))
        found.append(range(start, end))
        start = end
    return found


def groups(layers: Sequence[Sequence[tuple[int, int]]], first: int, most: int) -> list[Group]:
    """layers: for each layer its parts as (start within a page, bytes) → groups of layers, `growing`."""
    found: list[Group] = []
    for numbers in growing(len(layers), first, most):
        parts = sorted(part for layer in numbers for part in layers[layer])
        spans: list[Span] = []
        width = 0
        for start, size in parts:
            if spans and spans[-1].start + spans[-1].size == start:
                last = spans.pop()
                spans.append(Span(last.start, last.size + size, last.at))
            else:
                width = aligned(width)
                spans.append(Span(start, size, width))
            width = spans[-1].at + spans[-1].size
        places = {
            start: span.at + start - span.start
            for start, _ in parts
            for span in spans
            if span.start <= start < span.start + span.size
        }
        starts = tuple(tuple(places[start] for start, _ in layers[layer]) for layer in numbers)
        found.append(Group(numbers, tuple(spans), starts, aligned(width)))
    return found


@dataclass(frozen=True, slots=True)
class Costs:
    """What holds a load's forward up, in seconds.

    call   of the host, for a strided copy.
    block  of the host, for what else a block of pages takes: a slot, events, a scatter.
    byte   of the bus, for a byte that the forward waits for before it has begun.
    """

    call: float
    block: float
    byte: float


@dataclass(frozen=True, slots=True)
class Course:
    """A way to load all layers: groups in order, and what is counted of them."""

    groups: tuple[Group, ...]
    spans: int
    width: int

    @staticmethod
    def of(found: Sequence[Group]) -> Course:
        """One of these groups."""
        return Course(
            tuple(found), sum(len(group.spans) for group in found), sum(group.width for group in found)
        )

    def delay(self, pages: int, run_count: int, slot_bytes: int, costs: Costs) -> float:
        """Seconds by which the forward is launched and begins later, at most: what the host queues before the last
        layer can be launched, and the copy of the first group.

        Both at once: groups of few layers start early and are many; scattered pages take a call each, whatever a
        group has of them.
        """
        calls = self.spans * run_count
        blocks = len(self.groups) + pages * self.width // slot_bytes
        return costs.call * calls + costs.block * blocks + costs.byte * pages * self.groups[0].width


def best(courses: Sequence[Course], pages: int, run_count: int, slot_bytes: int, costs: Costs) -> Course:
    """The one that delays the forward least; of equals the first."""
    return min(courses, key=lambda course: course.delay(pages, run_count, slot_bytes, costs))


def group_sizes(layers: int) -> list[int]:
    """How many layers the first group of a course may have: powers of two, and all."""
    return sorted({min(layers, 1 << power) for power in range(layers.bit_length() + 1)})


def aligned(size: int) -> int:
    """The next multiple of 16."""
    return -(-size // _ALIGN) * _ALIGN
