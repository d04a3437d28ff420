"""Device pages: where their bytes are, and that copies bring them there and back."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm_sglang.cache.copier import TorchPageCopier
from glm_sglang.cache.device_pages import DevicePages, device_pages
from tests.unit.cache.tree import PAGE, SKIP_TOPK, make_pool


@pytest.fixture
def pool(context: None) -> Any:
    pool = make_pool(8)
    generator = torch.Generator().manual_seed(5)
    for buffer in [*pool.kv_buffer, *pool.index_k_with_scale_buffer]:
        view = buffer.view(torch.uint8)
        view.copy_(torch.randint(0, 256, view.shape, generator=generator, dtype=torch.uint8))
    return pool


def host(pages: DevicePages, count: int) -> list[Any]:
    return [
        SimpleNamespace(tensor=torch.zeros(pages.layout.page_bytes, dtype=torch.uint8)) for _ in range(count)
    ]


def test_a_page_is_main_kv_of_all_layers_and_index_keys_of_those_that_have_some(pool: Any) -> None:
    pages = device_pages(pool, PAGE)
    kv, index = PAGE * 24 * 2, PAGE * 128 * 2  # bf16; the exact index keys of the reference platform
    assert [len(parts) for parts in pages.layers] == [1 if shared else 2 for shared in SKIP_TOPK]
    assert pages.layout.page_bytes == 4 * kv + 3 * index
    spans = sorted((part.span.start, part.span.stop) for parts in pages.layers for part in parts)
    assert spans[0][0] == 0
    assert spans[-1][1] == pages.layout.page_bytes
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    page = 3
    expected = torch.cat(
        [buffer[page * PAGE : (page + 1) * PAGE].reshape(-1).view(torch.uint8) for buffer in pool.kv_buffer]
        + [b[page].reshape(-1).view(torch.uint8) for b in pool.index_k_with_scale_buffer if b.shape[0]]
    )
    [got] = host(pages, 1)
    TorchPageCopier(pages).save([page], [got])
    assert torch.equal(got.tensor, expected)


@pytest.mark.parametrize("block", [1, 2, 5, 64])
def test_there_and_back(pool: Any, block: int) -> None:
    """Five pages to host pages and to five others, in another order, in blocks of any size; other pages stay."""
    pages = device_pages(pool, PAGE)
    copier = TorchPageCopier(pages, block_bytes=block * pages.layout.page_bytes)
    source, target = [1, 4, 2, 8, 5], [3, 6, 7, 0, 1]
    before = {part: part.rows.clone() for parts in pages.layers for part in parts}
    saved = host(pages, 5)
    copier.save(source, saved)
    landed: list[int] = []
    copier.load(target, saved, landed.append)
    assert landed == [0, 1, 2, 3]
    for part, rows in before.items():
        expected = rows.clone()
        expected[target] = rows[source]
        assert torch.equal(part.rows, expected)


def test_a_layer_has_landed_when_it_is_said(pool: Any) -> None:
    pages = device_pages(pool, PAGE)
    copier = TorchPageCopier(pages, block_bytes=pages.layout.page_bytes)
    saved = host(pages, 3)
    for number, page in enumerate(saved):
        page.tensor.fill_(number + 1)
    seen: list[bool] = []

    def landed(layer: int) -> None:
        rows = [part.rows[[2, 3, 4]] for part in pages.layers[layer]]
        seen.append(all(torch.equal(r, torch.tensor([[1], [2], [3]]).expand_as(r)) for r in rows))

    copier.load([2, 3, 4], saved, landed)
    assert seen == [True] * 4


@pytest.mark.parametrize(
    ("places", "runs"), [([2, 3, 4], 1), ([4, 2, 0], 1), ([0, 1, 4, 5], 2), ([5, 1, 2, 3, 9, 20], 3)]
)
def test_a_load_says_how_many_runs_its_host_pages_are(pool: Any, places: list[int], runs: int) -> None:
    """Pages at equal distances in memory, whatever the order in which they are asked for."""
    pages = device_pages(pool, PAGE)
    memory = torch.zeros(21, pages.layout.page_bytes, dtype=torch.uint8)
    host = [SimpleNamespace(tensor=memory[place], address=memory[place].data_ptr()) for place in places]
    slots = torch.arange(len(places) * PAGE)
    assert TorchPageCopier(pages).start_load([slots], host, lambda layer: None)() == runs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 32}, "--page-size is 32; with --glm-cache-url it must be 64"),
        ({"layer_shard_enabled": True}, "layers of other CP ranks apart"),
        ({"index_kpool": 4}, "pooled by 4"),
    ],
)
def test_pools_that_are_not_served_are_refused(pool: Any, change: dict[str, Any], message: str) -> None:
    for name, value in change.items():
        setattr(pool, name, value)
    with pytest.raises(ValueError, match=message):
        device_pages(pool, PAGE)
    with pytest.raises(ValueError, match=r"serves GLM-5\.x's MLA"):
        device_pages(SimpleNamespace(page_size=PAGE), PAGE)
