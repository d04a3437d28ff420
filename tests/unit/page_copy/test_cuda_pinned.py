"""The CPU pool's memory that is pinned while it is in use: what may be used when, and what is left behind."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.memory_management import MemoryFormat

from glm_sglang.cache import cuda_plan, numa
from glm_sglang.cache.cuda_pinned import GrowingAllocator, PinnedMemory, PinningError, piece_of

SLOT = 1536
PIECE = 12288  # the least common multiple of SLOT and 4096: 8 slots
SLOTS = 20


class HandPinner:
    """Pins when the test says so."""

    def __init__(self, allowed: int, fail_at: int | None = None) -> None:
        self.may = threading.Semaphore(allowed)
        self.pinned: dict[int, int] = {}
        self.fail_at = fail_at
        self.began_on: int | None = None
        self.asked = threading.Semaphore(0)

    def begin(self) -> str:
        self.began_on = threading.get_ident()
        return "a table"

    def pin(self, address: int, size: int) -> None:
        assert threading.get_ident() == self.began_on
        self.asked.release()
        self.may.acquire()
        if len(self.pinned) == self.fail_at:
            raise RuntimeError("no more memory may be locked")
        self.pinned[address] = size

    def unpin(self, address: int) -> None:
        del self.pinned[address]


def allocator(pinner: HandPinner) -> GrowingAllocator:
    made = PinnedMemory(pinner, piece_bytes=PIECE)(
        SLOTS * SLOT,
        use_paging=True,
        shapes=[torch.Size([SLOT])],
        dtypes=[torch.uint8],
        fmt=MemoryFormat.BINARY_BUFFER,
    )
    assert isinstance(made, GrowingAllocator)
    return made


def take(made: GrowingAllocator, count: int) -> Any:
    return made.batched_allocate([torch.Size([SLOT])], [torch.uint8], count, MemoryFormat.BINARY_BUFFER)


def end(made: GrowingAllocator) -> None:
    made.finish()
    for block in made.allocator.free_blocks:
        block.invalidate()
    made.close()


def test_slots_come_into_use_as_their_piece_is_pinned() -> None:
    pinner = HandPinner(allowed=1)
    made = allocator(pinner)
    assert (len(made.allocator.free_blocks), made.pinned_bytes) == (8, PIECE)
    taken = take(made, 8)
    assert sorted(block.meta.address for block in taken) == list(range(8))
    assert take(made, 1) is None
    pinner.may.release(2)
    made._thread.join(10)
    assert len(made.allocator.free_blocks) == SLOTS - 8
    assert list(pinner.pinned.values()) == [PIECE, PIECE, SLOTS * SLOT - 2 * PIECE]
    for block in taken:
        block.ref_count_down()
    end(made)
    assert pinner.pinned == {}


def flags_of(address: int) -> set[str]:
    """Of the mapping that holds this address, as the kernel names them (proc_pid_smaps(5))."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"{address:#x} is not mapped")


def test_a_fork_does_not_copy_the_pool() -> None:
    """The kernel copies pages that are pinned for DMA while it forks, so a child has none of this memory."""
    made = allocator(HandPinner(allowed=3))
    assert "dc" in flags_of(made.base)  # dc: do not copy on fork
    assert "dc" in flags_of(made.base + made.size - 1)
    end(made)


def test_what_cannot_register_memory_gets_it_from_cuda_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    pinner = HandPinner(allowed=1, fail_at=0)
    arguments: dict[str, Any] = {
        "shapes": [torch.Size([SLOT])],
        "dtypes": [torch.uint8],
        "fmt": MemoryFormat.BINARY_BUFFER,
    }
    with pytest.raises(PinningError, match="--glm-cache-pool-gb"):
        GrowingAllocator(SLOTS * SLOT, pinner=pinner, **arguments)
    memory = PinnedMemory(HandPinner(allowed=1, fail_at=0))
    made = memory(SLOTS * SLOT, use_paging=True, **arguments)
    assert not memory.in_background
    assert memory.registered_bytes() == 0
    assert "at once instead" in caplog.text
    assert len(made.allocator.free_blocks) == SLOTS
    assert memory.region_of(made.buffer.data_ptr()) == 0
    for block in made.allocator.free_blocks:
        block.invalidate()
    made.close()


def test_a_later_failure_leaves_a_smaller_pool(caplog: pytest.LogCaptureFixture) -> None:
    pinner = HandPinner(allowed=3, fail_at=1)
    made = allocator(pinner)
    made._thread.join(10)
    assert len(made.allocator.free_blocks) == 8
    assert "stays at" in caplog.text
    end(made)
    assert pinner.pinned == {}


def test_closing_stops_the_pinning_and_counts_every_slot() -> None:
    pinner = HandPinner(allowed=1)
    made = allocator(pinner)
    assert pinner.asked.acquire(timeout=10)
    assert pinner.asked.acquire(timeout=10)  # the second piece is under way
    ending = threading.Thread(target=made.finish)
    ending.start()
    assert made._stop.wait(10)
    pinner.may.release()
    ending.join(10)
    assert len(made.allocator.free_blocks) == SLOTS
    assert len(pinner.pinned) == 2
    end(made)


def test_no_run_crosses_a_piece() -> None:
    pinner = HandPinner(allowed=3)
    made = allocator(pinner)
    addresses = [made.base + slot * SLOT + 128 for slot in range(SLOTS)]
    runs = cuda_plan.runs(addresses, SLOT - 128, made.region_of)
    assert [run.count for run in runs] == [8, 8, 4]
    assert [run.address + i * run.pitch for run in runs for i in range(run.count)] == addresses
    end(made)


@pytest.mark.parametrize("slot", [512, 1536, 4096, 3_450_368])
def test_a_piece_holds_whole_slots_and_whole_pages_of_the_system(slot: int) -> None:
    piece = piece_of(slot, 1 << 30)
    assert piece % slot == 0
    assert piece % 4096 == 0
    assert (1 << 30) <= piece < (1 << 30) + 8 * max(slot, 4096)


def test_a_gpus_node_and_its_cpus_are_read_from_sysfs(tmp_path: Path) -> None:
    for address, node in (("0000:1b:00.0", 1), ("0000:1c:00.0", -1)):
        device = tmp_path / "bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    cpus = tmp_path / "devices/system/node/node1"
    cpus.mkdir(parents=True)
    (cpus / "cpulist").write_text("48-50,144,146-147\n")
    assert numa.node_of("0000:1B:00.0", tmp_path) == 1
    assert numa.node_of("0000:1c:00.0", tmp_path) is None
    assert numa.node_of("0000:ff:00.0", tmp_path) is None
    assert numa.cpus_of(1, tmp_path) == {48, 49, 50, 144, 146, 147}
    assert numa.cpus_of(7, tmp_path) == set()


def test_a_thread_is_kept_where_it_may_run_and_left_alone_where_not(tmp_path: Path) -> None:
    import os

    own = sorted(os.sched_getaffinity(0))
    for node, cpus in ((0, str(own[0])), (1, "100000")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    seen: list[tuple[bool, set[int]]] = []

    def thread() -> None:
        for node in (1, 0):
            seen.append((numa.keep_thread_on(node, tmp_path), os.sched_getaffinity(0)))

    runner = threading.Thread(target=thread)
    runner.start()
    runner.join()
    assert seen == [(False, set(own)), (True, {own[0]})]
    assert os.sched_getaffinity(0) == set(own)
