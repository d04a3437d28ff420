"""SGLang's KV pool seen as pages: which bytes of which buffers one page of 64 tokens consists of.

A page holds the main KV of every layer and the index keys of the layers that run an indexer of their own, back
to back: one value, so that main KV and index keys are restored together or not at all. Beyond the index top-k a
model that got its main KV back without its index keys selects garbage.

UPSTREAM: hybrid_cache.linker_pool_assembler._build_dsa_device_pool_group divides by the number of rows of each
index buffer, and layers that share the indexer of another have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from glm_connectors.tiers import PageLayout


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one layer's buffer that belong to pages.

    rows   uint8 [pages, bytes], a view of the pool's own memory.
    start  where these bytes begin within a page.
    """

    rows: torch.Tensor
    start: int

    @property
    def span(self) -> slice:
        """Where these bytes lie within a page."""
        return slice(self.start, self.start + self.rows.shape[1])


@dataclass(frozen=True, slots=True)
class DevicePages:
    """A pool's pages.

    layers   for each layer of this rank, its parts: main KV, and index keys where it has any.
    layout   names and sizes of what a page is made of; part of the fingerprint.
    device   where the buffers are.
    """

    layers: tuple[tuple[Part, ...], ...]
    layout: PageLayout
    device: torch.device

    @property
    def count(self) -> int:
        """Pages of the pool, the padding page 0 included."""
        return int(self.layers[0][0].rows.shape[0])


def device_pages(pool: Any, page_tokens: int) -> DevicePages:
    """The pages of SGLang's MLA + DSA pool (`DSATokenToKVPool` and what derives from it).

    Raises ValueError for a pool whose pages this cache cannot hold.
    """
    _refuse(pool, page_tokens)
    main = [_token_rows(buffer, page_tokens) for buffer in pool.kv_buffer]
    index = [buffer.view(torch.uint8).flatten(1) for buffer in pool.index_k_with_scale_buffer]
    if len(main) != len(index):
        raise ValueError(f"the KV pool has {len(main)} layers of main KV and {len(index)} of index keys")
    layers: list[tuple[Part, ...]] = []
    start = 0
    for kv in main:
        layers.append((Part(kv, start),))
        start += kv.shape[1]
    kv_bytes, owners = start, []
    for layer, keys in enumerate(index):
        if not keys.shape[0]:  # shares the indexer of an earlier layer
            continue
        layers[layer] += (Part(keys, start),)
        owners.append(layer)
        start += keys.shape[1]
    first = int(pool.start_layer)
    parts = [(f"kv: layers {first}-{first + len(main) - 1}, {_row(pool.kv_buffer[0])}", kv_bytes)]
    if owners:
        numbers = ",".join(str(first + layer) for layer in owners)
        parts.append((f"index: layers {numbers}, {_index(pool)}", start - kv_bytes))
    return DevicePages(tuple(layers), PageLayout(page_tokens, tuple(parts)), main[0].device)


def _refuse(pool: Any, page_tokens: int) -> None:
    if not hasattr(pool, "index_k_with_scale_buffer"):
        raise ValueError(
            f"--glm-cache-url serves GLM-5.x's MLA + DSA pools; this model's pool is {type(pool).__name__}. Leave "
            "the flag out"
        )
    if pool.page_size != page_tokens:
        raise ValueError(f"--page-size is {pool.page_size}; with --glm-cache-url it must be {page_tokens}")
    if getattr(pool, "layer_shard_enabled", False):
        raise ValueError("--glm-cache-url: this pool keeps the layers of other CP ranks apart; leave one out")
    if pool.index_kpool != 1:
        raise ValueError(
            f"--glm-cache-url: index keys pooled by {pool.index_kpool} have a tail that no page holds"
        )


def _token_rows(buffer: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """[tokens, 1, width] of any dtype → uint8 [pages, bytes of a page]; no copy."""
    pages = buffer.shape[0] // page_tokens
    return buffer[: pages * page_tokens].view(torch.uint8).view(pages, -1)


def _row(buffer: torch.Tensor) -> str:
    return f"{buffer.dtype}".removeprefix("torch.") + f" {tuple(buffer.shape[1:])} a token"


def _index(pool: Any) -> str:
    cache = pool.index_key_cache
    exact = getattr(cache, "exact", False)  # the reference platform's two ways
    how = f"{pool.dtype}".removeprefix("torch.") if exact else "fp8 and scale"
    return f"{how} {pool.index_head_dim} a token"
