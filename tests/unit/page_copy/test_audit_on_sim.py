"""The audit sees what the pool's digests cannot: a gather too early, a scatter to another page, each in some order of the
device's streams; and nothing where all is right, though slots are written again as soon as they may be.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from glm_kernels.page_copy import CopyTable, scatter_reference

from glm_sglang.cache import audit as audits
from glm_sglang.cache.audit import Audit, looks, mismatches
from glm_sglang.cache.cuda_copies import CudaPageCopier
from tests.unit.cache import tree as trees
from tests.unit.cache.conftest import context, make_tree  # noqa: F401
from tests.unit.cache.tree import PAGE, Tree
from tests.unit.page_copy.simulator import SimDevice, SimStream
from tests.unit.page_copy.test_linker_on_sim import on_sim, prompt  # noqa: F401

MakeTree = Callable[..., Tree]
PAGES = 5


@pytest.fixture
def audited(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_tree: MakeTree,  # noqa: F811
    on_sim: Callable[[int], SimDevice],  # noqa: F811
) -> Callable[[int], tuple[SimDevice, Tree]]:
    """The device of a seed, and a tree on it whose audit writes to `tmp_path`."""

    own: list[torch.Tensor] = []
    own_memory = CudaPageCopier.own_memory

    def remember(copier: CudaPageCopier, pages: int) -> torch.Tensor:
        own.append(own_memory(copier, pages))
        return own[-1]

    def region_of(address: int) -> int:
        for memory in own:
            assert not 0 <= address - memory.data_ptr() < memory.nbytes, "is in no memory of the CPU pool"
        return 0

    def make(seed: int) -> tuple[SimDevice, Tree]:
        device = on_sim(seed)
        monkeypatch.setattr(CudaPageCopier, "own_memory", remember)
        monkeypatch.setattr(trees, "Audit", partial(Audit, str(tmp_path / str(seed))))
        tree = make_tree()
        copier: Any = tree.linker.parts.copier
        copier._region_of = region_of  # PinnedMemory's knows the pool's memory only
        return device, tree

    return make


def forward(device: SimDevice, tree: Tree, tokens: list[int]) -> torch.Tensor:
    """Computes a prompt on the forward's stream and inserts it, both at once, as the scheduler does."""
    if tree.linker.forward_stream is None:
        tree.linker.forward_stream = device.stream(urgent=False)
    slots = tree.alloc(len(tokens) // PAGE)
    assert slots is not None
    tree.linker.forward_stream.put(lambda: tree.compute(tokens, slots))
    tree.insert(tokens, slots)
    return slots


def save_and_load(device: SimDevice, tree: Tree, tokens: list[int]) -> None:
    """Both; then, behind the load's forward, somebody else writes its slots."""
    forward(device, tree, tokens)
    tree.drain()
    tree.flush_device()
    req = tree.request([*tokens, 7])
    assert tree.match(req) == (0, len(tokens))
    slots = tree.load(req)
    counter = tree.linker.layer_done_counter
    counter.set_consumer(tree.cache.linker.start_layer_wise_loading())
    for layer in range(len(tree.pages.layers)):
        counter.wait_until(layer)
    device.current().put(lambda: tree.compute(prompt(PAGES, seed=99), slots))
    assert tree.cache.linker.finish_loads() == []
    tree.linker._loads.quiesce()
    device.run_all()


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_wrong_where_all_is_right(
    audited: Callable[[int], tuple[SimDevice, Tree]], tmp_path: Path, seed: int
) -> None:
    device, tree = audited(seed)
    save_and_load(device, tree, prompt(PAGES, seed))
    folder = tmp_path / str(seed)
    assert looks(folder) == {"save": PAGES, "again": PAGES, "load": PAGES, "device": PAGES}
    assert mismatches(folder) == (PAGES, [])


@pytest.mark.parametrize("seed", range(3))
def test_a_scatter_to_another_page_is_found(
    audited: Callable[[int], tuple[SimDevice, Tree]],
    tmp_path: Path,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, tree = audited(seed)

    def scatter(table: CopyTable, pages: torch.Tensor, staging: torch.Tensor) -> None:
        device._put(lambda: scatter_reference(table.rows, (pages + 1) % 16, staging))

    monkeypatch.setattr(device, "scatter", scatter)
    save_and_load(device, tree, prompt(PAGES, seed))
    checked, wrong = mismatches(tmp_path / str(seed))
    assert checked == PAGES  # in the pool nothing is wrong
    assert wrong
    assert all(one.startswith("device ") for one in wrong)


@pytest.mark.parametrize("seed", range(3))
def test_a_gather_before_the_forward_has_written_is_found(
    audited: Callable[[int], tuple[SimDevice, Tree]],
    tmp_path: Path,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The save does not wait for the forward's event, and the forward takes longer than its copies."""
    device, tree = audited(seed)
    copier: Any = tree.linker.parts.copier
    monkeypatch.setattr(copier, "_events", lambda: ())
    stream = tree.linker.forward_stream = device.stream(urgent=False)
    device.stuck.add(stream)
    again = copier.save_again

    def save_again(pages: Any, into: Any) -> None:
        device.stuck.discard(stream)
        again(pages, into)

    monkeypatch.setattr(copier, "save_again", save_again)
    slots = forward(device, tree, prompt(PAGES, seed))
    tree.drain()
    device.run_all()
    numbers = [int(slot) // PAGE for slot in slots[::PAGE]]
    assert mismatches(tmp_path / str(seed)) == (0, [f"again {number}" for number in numbers])


def test_a_load_that_the_forward_does_not_wait_for_is_no_reason_to_look_too_late(
    audited: Callable[[int], tuple[SimDevice, Tree]], tmp_path: Path
) -> None:
    """The launch is told of the last layer behind the look: the event it is given comes after the gathers."""
    device, tree = audited(3)
    tokens = prompt(PAGES, 3)
    forward(device, tree, tokens)
    tree.drain()
    tree.flush_device()
    req = tree.request([*tokens, 7])
    tree.match(req)
    tree.load(req)
    copier: Any = tree.linker.parts.copier
    counter = tree.linker.layer_done_counter
    counter.set_consumer(tree.cache.linker.start_layer_wise_loading())
    last = len(tree.pages.layers) - 1
    counter.wait_until(last)
    back: SimStream = copier._back.gather
    copier.settle(counter._batches[counter.consumer_index].queued[last])
    assert not len(back)
    assert tree.cache.linker.finish_loads() == []
    tree.linker._loads.quiesce()
    assert mismatches(tmp_path / "3") == (PAGES, [])


def test_loads_beyond_the_audits_memory_are_looked_at_in_part(
    audited: Callable[[int], tuple[SimDevice, Tree]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audits, "BACK_BYTES", 1)  # eight pages, the least
    device, tree = audited(5)
    save_and_load(device, tree, prompt(10, seed=5))
    assert looks(tmp_path / "5")["device"] == 8
    assert mismatches(tmp_path / "5") == (10, [])
    assert len(tree.linker._loads._watch._back._free) == 8  # type: ignore[union-attr]


def test_an_audit_that_is_off_looks_at_nothing(
    make_tree: MakeTree,  # noqa: F811
    on_sim: Callable[[int], SimDevice],  # noqa: F811
) -> None:
    device = on_sim(6)
    tree = make_tree()
    save_and_load(device, tree, prompt(PAGES, seed=6))
    copier: Any = tree.linker.parts.copier
    assert copier.saved is None
    assert copier._back is None
