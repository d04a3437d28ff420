"""A vLLM plugin of the tests: the copy between vLLM's KV blocks and LMCache's chunks, on a CPU.

UPSTREAM: `lmcache.v1.gpu_connector.CreateGPUConnector` has one for each kind of GPU, and raises "No supported cpu
connector found." in a CPU build of vLLM, which then serves as if LMCache were not there.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Has this process make a `BlockCopy` once it imports LMCache (a plugin must not: glm_connectors.vllm_plugin)."""
    from glm_connectors.lmcache_repairs.grafting import Repair, RepairOnImport, replace

    graft = replace("CreateGPUConnector", _create)
    RepairOnImport().add(Repair("lmcache.v1.gpu_connector", symbols=(), grafts=(graft,)))


def _create(_config: Any, metadata: Any, *_: Any, **__: Any) -> Any:
    import torch
    from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface

    class BlockCopy(GPUConnectorInterface):  # type: ignore[misc]
        """A chunk is a block of every layer, as it lies in vLLM's memory: with chunks as long as blocks."""

        def __init__(self, kv_shape: tuple[int, int, int, int, int]) -> None:
            self.layers, _, self.tokens, heads, size = kv_shape
            self.width = heads * size

        def get_shape(self, num_tokens: int) -> torch.Size:
            return torch.Size([2, self.layers, num_tokens, self.width])

        def _pairs(self, chunk: Any, start: int, end: int, layers: Any, slots: Any) -> Any:
            """Each layer's part of the chunk and of vLLM's memory."""
            block, row = divmod(int(slots[start]), self.tokens)
            assert row == 0, f"slot {int(slots[start])} begins no block of {self.tokens}"
            assert end - start == self.tokens, f"a chunk of {end - start} tokens"
            parts = chunk.tensor.view(self.layers, *layers[0][block].shape)
            return zip(parts, (layer[block] for layer in layers), strict=True)

        def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            for part, block in self._pairs(
                memory_obj, start, end, kwargs["kvcaches"], kwargs["slot_mapping"]
            ):
                block.copy_(part)

        def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            for part, block in self._pairs(
                memory_obj, start, end, kwargs["kvcaches"], kwargs["slot_mapping"]
            ):
                part.copy_(block)

        def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
            for chunk, start, end in zip(memory_objs, starts, ends, strict=True):
                self.to_gpu(chunk, start, end, **kwargs)

        def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
            for chunk, start, end in zip(memory_objs, starts, ends, strict=True):
                self.from_gpu(chunk, start, end, **kwargs)

    return BlockCopy(metadata.kv_shape)
