"""Index keys in SGLang's DSA pool: exact in the model's dtype, or as a GPU stores them.

The page layout is upstream's (a page's keys, then its scales), so prefix hits, offload and PD transfer move index pages
without knowing which of the two it is. `GLM_SGLANG_INDEX_KEYS` chooses: `exact` (default) or `fp8` (132 bytes a row:
128 E4M3 values and one fp32 scale, amax / 448). Both ends of a prefill-decode pair must choose the same.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.mem_cache.index_key_cache import IndexKeyCache
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MLATokenToKVPool

VARIABLE = "GLM_SGLANG_INDEX_KEYS"
E4M3_MAX = 448.0


def index_keys_mode() -> str:
    """`exact` or `fp8`. Raises ValueError naming the variable for anything else."""
    mode = os.environ.get(VARIABLE, "exact")
    if mode not in ("exact", "fp8"):
        raise ValueError(f"{VARIABLE} is {mode!r}; allowed: exact, fp8")
    return mode


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [n, 128] → E4M3 values [n, 128] and fp32 scales [n, 1]; value ≈ e4m3 · scale."""
    rows = rows.float()
    scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-4) / E4M3_MAX
    return (rows / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


class ReferenceIndexKeyCache(IndexKeyCache):  # type: ignore[misc]
    """Index-key pages with row reads and writes in PyTorch. Buffers: one [pages, page bytes] uint8 a full layer."""

    def __init__(self, pool: Any, index_buf_size: int) -> None:
        if pool.index_kpool != 1:
            raise ValueError(
                f"index_kpool {pool.index_kpool} does not run on the reference platform; GLM-5.x has 1"
            )
        self.exact = index_keys_mode() == "exact"
        #: bytes of one row's key, and of its scale
        self.key_bytes = pool.index_head_dim * (pool.dtype.itemsize if self.exact else 1)
        self.scale_bytes = 0 if self.exact else 4
        super().__init__(pool, index_buf_size)

    def _buffer_shape(self, num_pages: int) -> tuple[int, int]:
        return num_pages, self.pool.page_size * (self.key_bytes + self.scale_bytes)

    def _views(self, layer_id: int) -> list[torch.Tensor]:
        """Keys [pages, page_size, values], then, in the GPU's layout, scales [pages, page_size, 1] fp32; no copies."""
        buffer = self.get_local_buffer(layer_id)
        page = self.pool.page_size
        split = page * self.key_bytes
        keys = buffer[:, :split].unflatten(1, (page, self.key_bytes))
        if self.exact:
            return [keys.view(self.pool.dtype)]
        scales = buffer[:, split:].unflatten(1, (page, self.scale_bytes))
        return [keys.view(torch.float8_e4m3fn), scales.view(torch.float32)]

    def store(self, layer_id: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes rows [n, index_head_dim] at slots [n]."""
        page, offset = slots // self.pool.page_size, slots % self.pool.page_size
        parts = (rows.to(self.pool.dtype),) if self.exact else quantise(rows)
        for view, part in zip(self._views(layer_id), parts, strict=True):
            view[page, offset] = part

    def load(self, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
        """Rows at slots [n], as fp32 [n, index_head_dim]."""
        page, offset = slots // self.pool.page_size, slots % self.pool.page_size
        parts = [view[page, offset].float() for view in self._views(layer_id)]
        return parts[0] if self.exact else parts[0] * parts[1]

    def move(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copies rows within every full layer. tgt_loc, src_loc [n]."""
        page_size = self.pool.page_size
        for layer in range(self.pool.layer_num):
            if self.buffer[layer].shape[0] == 0:
                continue
            for view in self._views(layer + self.pool.start_layer):
                view[tgt_loc // page_size, tgt_loc % page_size] = view[
                    src_loc // page_size, src_loc % page_size
                ]

    def _pages(self, slots: torch.Tensor) -> torch.Tensor:
        page_size: int = self.pool.page_size
        return slots[::page_size] // page_size

    def cpu_copy(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """Copies of the whole pages that slots `indices` fill, a tensor a layer (no rows for a shared layer)."""
        return [buffer[self._pages(indices)] if len(buffer) else buffer.clone() for buffer in self.buffer]

    def load_cpu_copy(self, index_k_cpu: list[torch.Tensor], indices: torch.Tensor) -> None:
        """Writes what `cpu_copy` returned into the pages that slots `indices` fill."""
        for buffer, saved in zip(self.buffer, index_k_cpu, strict=True):
            if len(buffer):
                buffer[self._pages(indices)] = saved


class ReferenceDSATokenToKVPool(DSATokenToKVPool):  # type: ignore[misc]
    """SGLang's MLA + DSA pool with the index-key cache above.

    UPSTREAM: DSATokenToKVPool's copies for retracted requests wait for the CUDA device; here a copy is complete when it
    returns.
    """

    def _create_index_key_cache(self) -> ReferenceIndexKeyCache:
        return ReferenceIndexKeyCache(self, self.index_buf_size)

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: None = None, req_pool_index: int | None = None
    ) -> dict[str, Any]:
        """What a retracted request needs to go on: its main KV rows and its index pages."""
        return {
            "kv": MLATokenToKVPool.get_cpu_copy(self, indices),
            "index_k": self.index_key_cache.cpu_copy(indices),
        }

    def load_cpu_copy(
        self,
        kv_cache_cpu_dict: dict[str, Any],
        indices: torch.Tensor,
        mamba_indices: None = None,
        req_pool_index: int | None = None,
    ) -> None:
        """Writes what `get_cpu_copy` returned at slots `indices`."""
        MLATokenToKVPool.load_cpu_copy(self, kv_cache_cpu_dict["kv"], indices)
        self.index_key_cache.load_cpu_copy(kv_cache_cpu_dict["index_k"], indices)
