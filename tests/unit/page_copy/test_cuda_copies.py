"""The copier on a device that runs its streams in any order their events allow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glm_sglang.cache.cuda_copies import CudaPageCopier
from glm_sglang.cache.cuda_layers import StreamLayerCounter
from glm_sglang.cache.device_pages import DevicePages
from glm_sglang.errors import UsageError
from tests.unit.page_copy.layouts import PAGES, SMALL, Case, pool
from tests.unit.page_copy.pages_on_sim import (
    APART,
    TOGETHER,
    copier,
    device_pages,
    expected,
    host_pages,
    shuffled,
    slots_of,
)
from tests.unit.page_copy.simulator import SimDevice

FP8 = SMALL[1]
SEEDS = range(12)
POOL = 12


def equal(pages: DevicePages, case: Case, of: dict[int, int]) -> bool:
    """Whether page p of the pool holds the known bytes of page of[p], and every other page is untouched (255)."""
    truth = pool(case, POOL)
    parts = sorted((part.start, part.rows) for layer in pages.layers for part in layer)
    for row, (_, rows) in zip(truth, parts, strict=True):
        for page in range(POOL):
            want = row.pool[of[page]] if page in of else torch.full_like(row.pool[0], 255)
            if not torch.equal(rows[page], want):
                return False
    return True


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("which", PAGES)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_save_then_load_elsewhere_brings_back_every_byte(case: Case, which: str, seed: int) -> None:
    device = SimDevice(seed)
    numbers = PAGES[which]
    memory, slots = host_pages(case, 12)
    into = [slots[i] for i in shuffled(12, seed)[: len(numbers)]]
    copier(device_pages(case, POOL), device).save(numbers, into)
    for page, want in zip(into, expected(case, numbers), strict=True):
        assert np.array_equal(page.tensor.numpy(), want)
    written = sum(page.tensor.numel() for page in into)
    assert int((memory == 99).sum()) >= memory.numel() - written  # between the pages nothing was written

    again = device_pages(case, POOL, empty=True)
    targets = [(number * 5 + 1) % POOL for number in numbers]
    layers: list[int] = []
    copier(again, device).load([slots_of(targets)], into, layers.append)
    assert layers == list(range(case.layers))
    assert equal(again, case, dict(zip(targets, numbers, strict=True)))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_save_reads_what_the_forward_wrote_and_not_what_it_writes_next(seed: int) -> None:
    device = SimDevice(seed)
    pages = device_pages(FP8, POOL, empty=True)
    truth = pool(FP8, POOL)
    forward = device.stream(urgent=False)
    parts = sorted((part.start, part.rows) for layer in pages.layers for part in layer)

    def write(page: int) -> None:
        for row, (_, rows) in zip(truth, parts, strict=True):
            rows[page] = row.pool[page]

    ours = copier(pages, device)
    _, slots = host_pages(FP8, 8)
    waits, ready = [], []
    for start in (1, 4):  # two chunks of a prompt; both forwards are queued before the first save begins
        for page in range(start, start + 3):
            forward.put(lambda page=page: write(page))  # type: ignore[misc]
        ready.append(ours.written(forward))
    assert device.host_waits == 0
    for start, wait in zip((1, 4), ready, strict=True):
        wait()
        waits.append(ours.start_save(range(start, start + 3), slots[start : start + 3]))
    for wait in waits:
        wait()
    for slot, want in zip(slots[1:7], expected(FP8, range(1, 7)), strict=True):
        assert np.array_equal(slot.tensor.numpy(), want)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_load_writes_no_slot_that_the_batch_before_still_reads(seed: int) -> None:
    device = SimDevice(seed)
    _, slots = host_pages(FP8, 6)
    copier(device_pages(FP8, POOL), device).save([1, 2, 3], slots[:3])
    pages = device_pages(FP8, POOL, empty=True)
    ours = copier(pages, device)
    forward = device.stream(urgent=False)
    seen: list[bool] = []
    for _ in range(4):
        forward.put(lambda: seen.append(equal(pages, FP8, {})))
    free = ours.free(forward)
    free()
    ours.load([slots_of([1, 2, 3])], slots[:3], lambda layer: None)
    device.run_all()
    assert seen == [True] * 4
    assert equal(pages, FP8, {1: 1, 2: 2, 3: 3})


@pytest.mark.parametrize("seed", SEEDS)
def test_a_load_is_queued_before_its_slots_are_computed(seed: int) -> None:
    """They lie behind the forward before, on the schedule stream. Nobody waits for them but what writes the pages; copies
    run ahead as far as staging reaches.
    """
    device = SimDevice(seed)
    _, host = host_pages(FP8, 6)
    copier(device_pages(FP8, POOL), device).save([1, 2, 3, 4, 5], host[:5])
    pages = device_pages(FP8, POOL, empty=True)
    ours = copier(pages, device, block=1)
    forward = device.stream(urgent=False)
    device.stuck.add(forward)
    seen: list[bool] = []
    forward.put(lambda: seen.append(equal(pages, FP8, {})))
    before = device.event()
    before.record(forward)
    device.current().wait_event(before)
    slots = [torch.full((of * 64,), -1, dtype=torch.int64) for of in (2, 3)]  # two requests
    for one, numbers in zip(slots, ([7, 3], [11, 1, 4]), strict=True):
        device.current().put(lambda one=one, numbers=numbers: one.copy_(slots_of(numbers)))  # type: ignore[misc]
    waited, moved = device.host_waits, device.moved
    ours.free(forward)()
    layers: list[int] = []
    end = ours.start_load(slots, host[:5], layers.append)
    assert device.host_waits == waited
    assert layers == list(range(FP8.layers))
    device.run_what_can()
    assert device.moved > moved
    assert (seen, equal(pages, FP8, {})) == ([], True)
    device.stuck.clear()
    assert end() == 1
    assert seen == [True]
    assert equal(pages, FP8, {7: 1, 3: 2, 11: 3, 1: 4, 4: 5})


@pytest.mark.parametrize("seed", SEEDS)
def test_the_forwards_stream_sees_each_layer_complete_and_its_thread_waits_for_nothing(seed: int) -> None:
    device = SimDevice(seed)
    _, slots = host_pages(FP8, 6)
    copier(device_pages(FP8, POOL), device).save([1, 2, 3, 4, 5], slots[:5])
    pages = device_pages(FP8, POOL, empty=True)
    ours = copier(pages, device)
    counter = StreamLayerCounter(FP8.layers, ours)
    truth = pool(FP8, POOL)
    by_start = {row.start: row.pool for row in truth}
    read: list[tuple[int, bool]] = []

    def forward_reads(layer: int) -> None:
        before = device.host_waits
        counter.wait_until(layer)
        assert device.host_waits == before

        def look() -> None:
            parts = pages.layers[layer]
            whole = all(torch.equal(part.rows[1:6], by_start[part.start][1:6]) for part in parts)
            read.append((layer, whole))

        device.current().put(look)

    index = counter.update_producer()
    counter.set_consumer(index)

    def landed(layer: int) -> None:
        counter.complete(index, layer)
        forward_reads(layer)  # the earliest moment at which the forward's thread could

    ours.load([slots_of([1, 2, 3, 4, 5])], slots[:5], landed)
    assert counter.finish(index)
    device.run_all()
    assert read == [(layer, True) for layer in range(FP8.layers)]


@pytest.mark.parametrize("fail_at", range(3))
def test_a_load_that_fails_raises_only_when_nothing_is_under_way(fail_at: int) -> None:
    device = SimDevice(fail_at)
    _, slots = host_pages(FP8, 6)
    copier(device_pages(FP8, POOL), device).save([1, 2, 3, 4, 5], slots[:5])
    pages = device_pages(FP8, POOL, empty=True)
    ours = copier(pages, device)
    counter = StreamLayerCounter(FP8.layers, ours)
    index = counter.update_producer()
    counter.set_consumer(index)
    device.break_copy_at = device.copies + fail_at
    with pytest.raises(RuntimeError, match="copy engine") as caught:
        ours.load([slots_of([1, 2, 3, 4, 5])], slots[:5], lambda layer: counter.complete(index, layer))
    assert not any(device.streams)  # its slots may be given away now
    counter.fail(index, caught.value)
    for layer in range(FP8.layers):
        counter.wait_until(layer)
    assert not counter.finish(index)


@pytest.mark.parametrize("fail_at", range(4))
def test_a_save_that_fails_raises_only_when_nothing_is_under_way(fail_at: int) -> None:
    device = SimDevice(fail_at)
    _, slots = host_pages(FP8, 12)
    ours = copier(device_pages(FP8, POOL), device)
    device.break_copy_at = fail_at
    with pytest.raises(RuntimeError, match="copy engine"):
        ours.save(range(1, 9), [slots[i] for i in shuffled(12, 3)[:8]])
    assert not any(device.streams)


def test_starting_saves_and_recording_events_waits_for_nothing() -> None:
    device = SimDevice(1)
    ours = copier(device_pages(FP8, POOL), device, block=1)
    _, slots = host_pages(FP8, 8)
    forward = device.stream(urgent=False)
    ours.written(forward)
    ends = [ours.start_save([page], [slots[page]]) for page in range(1, 8)]
    assert device.host_waits == 0
    for end in ends:
        end()
    for page, want in zip(slots[1:8], expected(FP8, range(1, 8)), strict=True):
        assert np.array_equal(page.tensor.numpy(), want)


def test_neighbouring_host_pages_are_saved_by_one_copy_a_block() -> None:
    device = SimDevice(1)
    ours = copier(device_pages(FP8, POOL), device, block=4)
    _, slots = host_pages(FP8, 8)
    ours.save(range(1, 9), slots)
    assert device.copies == 2


def test_a_load_takes_a_copy_for_each_run_step_and_part() -> None:
    """Three layers, one at a time: a copy a run for the main KV of each, and one for the index keys of two of them."""
    device = SimDevice(1)
    _, slots = host_pages(FP8, 12)
    apart = [slots[i] for i in (0, 1, 3, 7)]  # at three distances, so two runs of two
    copier(device_pages(FP8, POOL), device, block=4).load([slots_of(range(1, 5))], apart, lambda layer: None)
    assert device.copies == 2 * (3 + 2)


def test_layers_of_a_step_share_an_event() -> None:
    """All three layers at once, as a load of few bytes goes, and one after the other."""
    device = SimDevice(1)
    _, slots = host_pages(FP8, 3)
    pages = device_pages(FP8, POOL)
    for costs, events in ((TOGETHER, 1), (APART, FP8.layers)):
        ours = CudaPageCopier(pages, device, slot_bytes=FP8.page_bytes + 64, costs=costs)
        marks: list[object] = []

        def landed(layer: int, ours: CudaPageCopier = ours, marks: list[object] = marks) -> None:
            marks.append(ours.queued_layer())

        ours.load([slots_of([1, 2, 3])], slots, landed)
        assert len(marks) == FP8.layers
        assert len(set(map(id, marks))) == events


def test_warming_up_changes_no_byte() -> None:
    device = SimDevice(1)
    pages = device_pages(FP8, POOL)
    copier(pages, device).warm()
    assert not any(device.streams)
    assert equal(pages, FP8, {page: page for page in range(POOL)})


def test_pages_and_host_pages_must_be_as_many() -> None:
    device = SimDevice(1)
    _, slots = host_pages(FP8, 3)
    ours = copier(device_pages(FP8, POOL), device)
    with pytest.raises(ValueError, match="2 device pages for 3 host pages"):
        ours.save([1, 2], slots)
    with pytest.raises(ValueError, match="128 slots for 3 host pages of 64 tokens"):
        ours.load([slots_of([1, 2])], slots, lambda layer: None)


@pytest.mark.parametrize("fits", [0, 5])
def test_no_room_for_staging_is_refused_with_what_to_change(
    fits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is allocated when SGLang has sized the KV pool: by then a high memory fraction has left too little."""
    device = SimDevice()
    left = [fits]

    def staging(size: int) -> torch.Tensor:
        if not left[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")
        left[0] -= 1
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(device, "staging", staging)
    with pytest.raises(UsageError, match=rf"384 MiB \({384 << 20} bytes\).*--mem-fraction-static"):
        CudaPageCopier(device_pages(FP8, POOL), device)
