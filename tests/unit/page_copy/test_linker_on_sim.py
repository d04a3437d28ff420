"""The whole cache of a rank on a GPU, but for the GPU: SGLang's radix tree, our linker and its threads, the copier
and its layer counter, over the simulator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from glm_sglang.cache.cuda_copies import CudaPageCopier
from glm_sglang.cache.cuda_layers import StreamLayerCounter
from glm_sglang.cache.linker import Parts
from tests.unit.cache import memory_store
from tests.unit.cache import tree as trees
from tests.unit.cache.conftest import context, make_tree  # noqa: F401
from tests.unit.cache.tree import PAGE, Tree, expected_page
from tests.unit.page_copy.pages_on_sim import APART
from tests.unit.page_copy.simulator import SimDevice

MakeTree = Callable[..., Tree]


@pytest.fixture
def on_sim(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], SimDevice]:
    """Trees made after `on_sim(seed)` have their copies on the device that it gives."""

    def use(seed: int) -> SimDevice:
        device = SimDevice(seed)

        def copier(pages: Any) -> CudaPageCopier:
            size = pages.layout.page_bytes
            return CudaPageCopier(
                pages,
                device,
                slots=2,
                slot_bytes=2 * size,
                costs=APART,
            )

        def parts(**fields: Any) -> Parts:
            pages = fields["device"]
            fields["copier"] = copier(pages)
            return Parts(**fields, counter=StreamLayerCounter(len(pages.layers), fields["copier"]))

        monkeypatch.setattr(trees, "Parts", parts)
        return device

    address = property(lambda page: page.tensor.data_ptr())
    monkeypatch.setattr(memory_store.Page, "address", address, raising=False)
    return use


def prompt(pages: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, 150_000, (pages * PAGE,), generator=generator).tolist()
    return ids


def restored(tree: Tree, tokens: list[int], slots: torch.Tensor) -> bool:
    return all(
        torch.equal(tree.read(int(slots[n * PAGE]) // PAGE), expected_page(tokens, n, tree.pages))
        for n in range(slots.numel() // PAGE)
    )


def read_by_the_forward(
    tree: Tree, device: SimDevice, tokens: list[int], slots: torch.Tensor
) -> tuple[int, list[bool]]:
    """Starts the load, and a forward that waits for each layer, then looks at it; (buffers looked at, what it saw)."""
    counter = tree.linker.layer_done_counter
    counter.set_consumer(tree.cache.linker.start_layer_wise_loading())
    numbers = [int(slot) // PAGE for slot in slots[::PAGE]]
    seen: list[bool] = []

    def look(part: Any) -> None:
        seen.append(
            all(
                torch.equal(part.rows[number], expected_page(tokens, n, tree.pages)[part.span])
                for n, number in enumerate(numbers)
            )
        )

    for layer, parts in enumerate(tree.pages.layers):
        counter.wait_until(layer)
        for part in parts:
            device.current().put(functools.partial(look, part))
    return sum(map(len, tree.pages.layers)), seen


@pytest.mark.parametrize("seed", range(4))
def test_prompts_come_back_and_each_layer_is_whole_when_the_forward_reads_it(
    make_tree: MakeTree,  # noqa: F811
    on_sim: Callable[[int], SimDevice],
    seed: int,
) -> None:
    device = on_sim(seed)
    tree = make_tree()
    for pages in (1, 5, 3):
        tokens = prompt(pages, seed=10 * seed + pages)
        tree.prefill(tokens)
        tree.drain()
        tree.flush_device()
        req = tree.request([*tokens, 7])
        assert tree.match(req) == (0, pages * PAGE)
        slots = tree.load(req)
        count, seen = read_by_the_forward(tree, device, tokens, slots)
        assert tree.cache.linker.finish_loads() == []
        assert restored(tree, tokens, slots)
        device.run_all()
        assert seen == [True] * count
        tree.linker._loads.quiesce()
        assert tree.store.pinned == 0
        tree.allocator.free(slots)


def test_pages_stay_on_the_device_until_their_bytes_have_left(
    make_tree: MakeTree,  # noqa: F811
    on_sim: Callable[[int], SimDevice],
) -> None:
    device = on_sim(1)
    tree = make_tree(pages=8)
    device.paused = True
    tokens = prompt(4, seed=1)
    tree.prefill(tokens)
    tree.step()
    tree.flush_device()
    assert tree.allocator.available_size() == 4 * PAGE  # the other four
    device.paused = False
    tree.drain()
    tree.flush_device()
    assert tree.allocator.available_size() == 8 * PAGE
    for number, data in enumerate(tree.store.remote.values()):
        assert data == expected_page(tokens, number, tree.pages).numpy().tobytes()


def test_a_load_whose_copy_fails_aborts_its_request_with_nothing_under_way(
    make_tree: MakeTree,  # noqa: F811
    on_sim: Callable[[int], SimDevice],
) -> None:
    device = on_sim(2)
    tree = make_tree()
    tokens = prompt(4, seed=2)
    tree.prefill(tokens)
    tree.drain()
    tree.flush_device()
    req = tree.request([*tokens, 7])
    tree.match(req)
    tree.load(req)
    device.break_copy_at = device.copies + 1
    tree.cache.linker.start_layer_wise_loading()
    assert tree.cache.linker.finish_loads() == [req.rid]
    tree.linker._loads.quiesce()
    assert not any(device.streams)
    assert tree.store.pinned == 0


def test_a_save_that_fails_gives_its_slots_back_and_the_next_one_works(
    make_tree: MakeTree,  # noqa: F811
    on_sim: Callable[[int], SimDevice],
) -> None:
    device = on_sim(3)
    tree = make_tree()
    device.break_copy_at = 1
    tree.prefill(prompt(4, seed=3))
    tree.drain()
    assert tree.store.reserved == 0
    assert not tree.store.remote
    assert not any(device.streams)
    device.break_copy_at = None
    tokens = prompt(3, seed=4)
    tree.prefill(tokens)
    tree.drain()
    assert len(tree.store.remote) == 3


def test_a_flush_ends_what_is_under_way(
    make_tree: MakeTree,  # noqa: F811
    on_sim: Callable[[int], SimDevice],
) -> None:
    device = on_sim(4)
    tree = make_tree()
    for seed in range(3):
        tree.prefill(prompt(3, seed=20 + seed))
    tree.cache.linker.reset()
    assert not any(device.streams)
    assert tree.store.reserved == 0
    assert not tree.store.pool
