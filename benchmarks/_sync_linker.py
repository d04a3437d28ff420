"""The other arm of `benchmarks.async_save`: our cache, with saves as LMCache makes them.

In the scheduler's thread, a chunk of 256 tokens at a time: gather layer by layer, copy, wait for the whole device
(LMCache 0.5.6: gpu_connectors.py:410,423,1644, cache_engine.py:511,569). Named on the command line by the benchmark.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from glm_sglang.cache.linker import GlmCacheLinker, _kv
from glm_sglang.cache.slots import page_numbers

CHUNK = 4  # pages


class SyncCacheLinker(GlmCacheLinker):
    """Saves before it returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._results: deque[bool] = deque()

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Blocks the scheduler until the bytes are in the pool."""
        with self.stalls.measure():
            transfer = _kv(transfers)
            keys = [bytes.fromhex(key) for key in transfer.keys]
            torch.cuda.synchronize()
            numbers = page_numbers(transfer.device_indices, self.page_tokens)
            saved = all(
                self._chunk(keys[start : start + CHUNK], list(numbers[start : start + CHUNK]))
                for start in range(0, len(keys), CHUNK)
            )
            self._results.append(saved)
            return True

    def _chunk(self, keys: list[bytes], numbers: list[int]) -> bool:
        pages = self._store.reserve(len(keys))
        if pages is None:
            return False
        device = self.parts.device
        rows = torch.tensor(numbers, device=device.device)
        staging = torch.empty(len(keys), device.layout.page_bytes, dtype=torch.uint8, device=device.device)
        for layer in device.layers:
            for part in layer:
                staging[:, part.span] = part.rows.index_select(0, rows)
        for row, page in zip(staging, pages, strict=True):
            page.tensor.copy_(row, non_blocking=True)
        torch.cuda.synchronize()
        self._store.commit(pages, keys)
        self.recorder.add("cache_offload_pages", "saved", amount=len(keys))
        return True

    def num_completed_offloads(self) -> int:
        """All of them."""
        super().num_completed_offloads()
        return len(self._results)

    def pop_completed_offload(self) -> bool:
        """The oldest result."""
        return self._results.popleft()

    def reset(self) -> None:
        """A flush."""
        self._results.clear()
        super().reset()
