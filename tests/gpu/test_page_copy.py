"""Page copies on a GPU: kernels equal references; pages of SGLang's own pool survive save, eviction and load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from glm_kernels.page_copy import (
    CopyTable,
    Rows,
    gather,
    gather_reference,
    scatter,
    scatter_reference,
)

from glm_sglang.cache.cuda_copies import CudaPageCopier
from glm_sglang.cache.cuda_layers import StreamLayerCounter
from glm_sglang.cache.cuda_runtime import CudaRuntime
from glm_sglang.cache.device_pages import DevicePages, device_pages
from tests.unit.page_copy.layouts import CASES, PAGES, Case, pool
from tests.unit.page_copy.pages_on_sim import APART, HEADER, SLOT, Slot, shuffled, slots_of

pytestmark = pytest.mark.gpu
POOL = 40
KINDS = {"fp8": (torch.float8_e4m3fn, 656), "bf16": (torch.bfloat16, 576)}
LAYERS = 6
OWNERS = (0, 1, 2, 5)  # of an indexer


@pytest.fixture(autouse=True)
def waits_are_errors() -> Iterator[None]:
    """Tests switch it on around what must not wait for the device."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def numbers(which: str) -> torch.Tensor:
    return torch.tensor(PAGES[which], dtype=torch.int64, device="cuda")


@pytest.mark.parametrize("which", PAGES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gather_equals_the_reference(case: Case, which: str) -> None:
    rows = pool(case, 12, "cuda")
    got, want = (
        torch.full((len(PAGES[which]), case.page_bytes + 16), 254, dtype=torch.uint8, device="cuda")
        for _ in range(2)
    )
    gather(CopyTable(rows), numbers(which), got)
    gather_reference(rows, numbers(which), want)
    assert torch.equal(got, want)


@pytest.mark.parametrize("which", PAGES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_scatter_equals_the_reference(case: Case, which: str) -> None:
    got, want = (pool(case, 12, "cuda", empty=True) for _ in range(2))
    staging = torch.randint(0, 256, (len(PAGES[which]), case.page_bytes), dtype=torch.uint8, device="cuda")
    scatter(CopyTable(got), numbers(which), staging)
    scatter_reference(want, numbers(which), staging)
    assert all(torch.equal(a.pool, b.pool) for a, b in zip(got, want, strict=True))


def test_rows_that_are_not_aligned() -> None:
    rows = [
        Rows(torch.randint(0, 256, (9, size), dtype=torch.uint8, device="cuda"), at)
        for size, at in ((33, 0), (16401, 33))
    ]
    got, want = (torch.zeros(4, 16434, dtype=torch.uint8, device="cuda") for _ in range(2))
    pages = torch.tensor([8, 0, 3, 5], device="cuda")
    gather(CopyTable(rows), pages, got)
    gather_reference(rows, pages, want)
    assert torch.equal(got, want)


# SGLang's pool and the copier


def make_pool(kind: str) -> Any:
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    dtype, width = KINDS[kind]
    return DSATokenToKVPool(
        size=64 * (POOL - 1),
        page_size=64,
        kv_lora_rank=512,
        dtype=dtype,
        qk_rope_head_dim=64,
        layer_num=LAYERS,
        device="cuda",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=width,
        index_buf_size=64 * (POOL - 1),
        skip_topk_layers=[layer not in OWNERS for layer in range(LAYERS)],
    )


def fill(pages: DevicePages, seed: int) -> list[torch.Tensor]:
    """Random bytes in every page; a copy of each buffer."""
    generator = torch.Generator("cuda").manual_seed(seed)
    copies = []
    for layer in pages.layers:
        for part in layer:
            part.rows.copy_(
                torch.randint(0, 256, part.rows.shape, dtype=torch.uint8, device="cuda", generator=generator)
            )
            copies.append(part.rows.clone())
    torch.cuda.synchronize()  # the copies under test run on streams of their own
    return copies


def same(pages: DevicePages, truth: list[torch.Tensor], at: list[int], of: list[int]) -> bool:
    """Whether pages `at` hold what pages `of` held when they were copied."""
    parts = [part for layer in pages.layers for part in layer]
    return all(torch.equal(part.rows[at], was[of]) for part, was in zip(parts, truth, strict=True))


def pinned(page_bytes: int, slots: int) -> list[Slot]:
    size = -(-(HEADER + page_bytes) // SLOT) * SLOT
    memory = torch.zeros(slots * size, dtype=torch.uint8, pin_memory=True)
    return [Slot(memory[slot * size + HEADER : slot * size + HEADER + page_bytes]) for slot in range(slots)]


def small(pages: DevicePages) -> CudaPageCopier:
    """Slots of three pages, a layer a step, so that the ring turns and layers go apart."""
    size = pages.layout.page_bytes
    return CudaPageCopier(
        pages,
        CudaRuntime(pages.device),
        slots=2,
        slot_bytes=3 * size,
        costs=APART,
    )


@pytest.mark.parametrize("host_order", ["neighbours", "scattered"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_page_survives_save_eviction_and_load(kind: str, host_order: str) -> None:
    sglang_pool = make_pool(kind)
    pages = device_pages(sglang_pool, 64)
    assert pages.layout.page_bytes == 64 * (LAYERS * (656 if kind == "fp8" else 1152) + len(OWNERS) * 132)
    truth = fill(pages, 1)
    copier = small(pages)
    slots = pinned(pages.layout.page_bytes, POOL)
    of = [1 + number for number in shuffled(POOL - 1, 5)]
    host = (
        slots[: len(of)] if host_order == "neighbours" else [slots[i] for i in shuffled(POOL, 7)[: len(of)]]
    )
    copier.save(of, host)
    fill(pages, 2)
    at = of[3:] + of[:3]
    layers: list[int] = []
    copier.load([slots_of(at, "cuda")], host, layers.append)
    torch.cuda.synchronize()
    assert layers == list(range(LAYERS))
    assert same(pages, truth, at, of)


@pytest.mark.parametrize("kind", KINDS)
def test_no_thread_waits_and_the_streams_do(kind: str) -> None:
    """The forward writes late; the save that was queued before must read what it wrote, and the reader of a load must
    see each layer whole. Between, a wait for the device in our calls raises.
    """
    pages = device_pages(make_pool(kind), 64)
    truth = fill(pages, 3)
    parts = [part for layer in pages.layers for part in layer]
    copier = small(pages)
    counter = StreamLayerCounter(LAYERS, copier)
    slots = pinned(pages.layout.page_bytes, 6)
    cuda: Any = torch.cuda
    forward = cuda.Stream()
    of = [4, 9, 2, 30, 11, 5]
    at = slots_of(of, "cuda")
    copier.save(of, slots)  # kernels and tables are made once, and that waits
    copier.load([at], slots, lambda layer: None)
    for part in parts:
        part.rows.zero_()
    torch.cuda.synchronize()

    torch.cuda.set_sync_debug_mode("error")
    with torch.cuda.stream(forward):
        cuda._sleep(200_000_000)  # 0.1 s
        for part, was in zip(parts, truth, strict=True):
            part.rows.copy_(was)
    ready = copier.written(forward)
    with torch.cuda.stream(forward):  # the next forward goes on in other pages
        cuda._sleep(1_000_000)
    ready()
    saved = copier.start_save(of, slots)
    assert not forward.query()
    saved()
    for part in parts:
        part.rows.zero_()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()

    index = counter.update_producer()
    counter.set_consumer(index)
    seen: list[torch.Tensor] = []
    copier.free(forward)()
    torch.cuda.set_sync_debug_mode("error")

    def landed(layer: int) -> None:
        counter.complete(index, layer)
        with torch.cuda.stream(forward):
            counter.wait_until(layer)
            seen.extend(part.rows.clone() for part in pages.layers[layer])

    copier.load([at], slots, landed)
    assert counter.finish(index)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert len(seen) == len(parts)
    for rows, was in zip(seen, truth, strict=True):
        assert torch.equal(rows[of], was[of])


@pytest.mark.parametrize("kind", KINDS)
def test_a_launch_goes_on_while_its_load_is_under_way(kind: str) -> None:
    """The batch before keeps the load from landing; two batches are launched over it, the second into the same slots, and
    then these are another's. Who reads and writes them comes in that order, whoever has gone on.
    """
    pages = device_pages(make_pool(kind), 64)
    truth = fill(pages, 6)
    parts = [part for layer in pages.layers for part in layer]
    copier = small(pages)
    counter = StreamLayerCounter(LAYERS, copier)
    slots = pinned(pages.layout.page_bytes, 12)
    cuda: Any = torch.cuda
    forward = cuda.Stream()
    first, second = [4, 9, 2, 30, 11, 5], [7, 1, 22, 3, 17, 8]
    copier.save(first + second, slots)
    at = [slots_of(first[:2], "cuda"), slots_of(first[2:], "cuda")]  # of two requests
    copier.load(at, slots[:6], lambda layer: None)  # kernels are made once, and that waits
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    with torch.cuda.stream(forward):
        cuda._sleep(2_000_000_000)  # about 1 s
    seen: list[list[torch.Tensor]] = []
    ends = []
    for host in (slots[:6], slots[6:]):  # both into the slots of `first`
        copier.free(forward)()
        index = counter.update_producer()
        counter.set_consumer(index)
        ends.append(copier.start_load(at, host, lambda layer, index=index: counter.complete(index, layer)))
        read: list[torch.Tensor] = []
        with torch.cuda.stream(forward):
            for layer in range(LAYERS):
                counter.wait_until(layer)
                read += [part.rows.clone() for part in pages.layers[layer]]
        seen.append(read)
        assert counter.finish(index)
        assert not forward.query()
    with torch.cuda.stream(forward):
        for part in parts:
            part.rows.fill_(7)
    for end in ends:
        end()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for read, of in zip(seen, (first, second), strict=True):
        assert len(read) == len(parts)
        for rows, was in zip(read, truth, strict=True):
            assert torch.equal(rows[first], was[of])
    assert all(bool((part.rows == 7).all()) for part in parts)


def test_slots_are_read_on_the_device_when_they_are_computed_and_kept_until_then() -> None:
    """As SGLang computes them: on a stream that waits for the forward before. Their owner lets them go at once, and the
    memory goes to what that stream allocates next.
    """
    pages = device_pages(make_pool("fp8"), 64)
    truth = fill(pages, 8)
    copier = small(pages)
    host = pinned(pages.layout.page_bytes, 6)
    cuda: Any = torch.cuda
    forward, schedule = cuda.Stream(), cuda.Stream()
    of, at = [4, 9, 2, 30, 11, 5], [7, 1, 22, 3, 17, 8]
    known = slots_of(at, "cuda")
    copier.save(of, host)
    copier.load([slots_of(of, "cuda")], host, lambda layer: None)  # kernels are made once, and that waits
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    with torch.cuda.stream(forward):
        cuda._sleep(1_000_000_000)  # about 0.5 s
    schedule.wait_stream(forward)
    with torch.cuda.stream(schedule):
        slots = known + 0
        where = slots.data_ptr()
        copier.free(forward)()
        end = copier.start_load([slots], host, lambda layer: None)
        assert not forward.query()
        del slots
        others = [torch.zeros_like(known) for _ in range(8)]
    assert where not in [other.data_ptr() for other in others]
    end()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert same(pages, truth, at, of)


def test_pages_survive_in_memory_that_is_pinned_in_pieces_while_a_graph_is_captured() -> None:
    from lmcache.v1.memory_management import MemoryFormat

    from glm_sglang.cache.cuda_pinned import CudaPinner, PinnedMemory

    pages = device_pages(make_pool("fp8"), 64)
    truth = fill(pages, 4)
    size = -(-(HEADER + pages.layout.page_bytes) // SLOT) * SLOT
    memory = PinnedMemory(CudaPinner(torch.device("cuda", 0)), piece_bytes=4 * size)
    counted = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # SGLang captures so, while the pool is pinned
        counted.add_(1)
        made = memory(
            20 * size, shapes=[torch.Size([size])], dtypes=[torch.uint8], fmt=MemoryFormat.BINARY_BUFFER
        )
        assert memory.in_background
        made._thread.join()
    graph.replay()
    assert counted.item() == 1
    assert made.pinned_bytes == 20 * size
    blocks = list(made.allocator.free_blocks)
    assert all(block.raw_data.is_pinned() for block in blocks)
    slots = [Slot(block.raw_data[HEADER : HEADER + pages.layout.page_bytes]) for block in blocks]
    copier = CudaPageCopier(pages, CudaRuntime(pages.device), region_of=memory.region_of)
    of = [1 + number for number in shuffled(20, 2)]
    copier.save(of, slots)
    fill(pages, 5)
    copier.load([slots_of(of, "cuda")], slots, lambda layer: None)
    torch.cuda.synchronize()
    assert same(pages, truth, of, of)
    for block in blocks:
        block.invalidate()
    made.close()


def test_a_copy_that_cuda_refuses_is_an_error() -> None:
    pages = device_pages(make_pool("fp8"), 64)
    copier = small(pages)

    class Nowhere:
        address = 0

    with pytest.raises(RuntimeError, match="cudaMemcpy2DAsync: cudaError"):
        copier.save([1], [Nowhere()])  # type: ignore[list-item]
