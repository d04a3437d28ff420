"""SGLang's CUDA kernels of DSA under context parallelism, in PyTorch: they refuse the shapes that the kernels refuse."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

PAGE = 64


class OnDevice(torch.Tensor):
    """A tensor whose device has an index, which the indexer asks of its queries."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu", 0)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)


def same(name: str, rows: int, expected: int) -> None:
    """As a kernel's host check; the words are SGLang's."""
    if rows != expected:
        raise RuntimeError(f"Size mismatch for {name}: expected {expected} but got {rows}")


class Pool:
    """Slots of latent KV and of index keys for every layer; what reached each slot is what it holds."""

    index_page_size = page_size = PAGE
    dtype = torch.bfloat16  # what the backend asks; the arithmetic is exact here
    dsa_kv_cache_store_fp8 = False
    start_layer = 0
    layer_transfer_counter = None

    def __init__(self, layers: int, slots: int, latent: int, index: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.kv = torch.randn(layers, slots, 1, latent, generator=generator, dtype=torch.float64)
        keys = torch.randn(layers, slots, index, generator=generator)
        self.keys = keys.to(torch.float8_e4m3fn).view(torch.uint8)
        self.size = slots - PAGE

    def copy(self) -> Pool:
        other = object.__new__(Pool)
        other.kv, other.keys, other.size = self.kv.clone(), self.keys.clone(), self.size
        return other

    def load(self, other: Pool) -> None:
        self.kv.copy_(other.kv)
        self.keys.copy_(other.keys)

    def set_mla_kv_buffer(self, layer: Any, loc: Any, nope: torch.Tensor, rope: torch.Tensor) -> None:
        same("num_tokens of KV", loc.shape[0], nope.shape[0])
        same("num_tokens of KV", loc.shape[0], rope.shape[0])
        self.kv[layer.layer_id][loc] = torch.cat((nope, rope), dim=-1)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.kv[layer_id]

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys[layer_id]

    def get_index_k_scale_buffer(
        self, layer_id: int, lengths: torch.Tensor, pages: torch.Tensor, total: int, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        same("requests", pages.shape[0], lengths.shape[0])
        slots = [
            (table[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
            for table, length in zip(pages, lengths.tolist(), strict=True)
        ]
        keys = self.keys[layer_id][torch.cat(slots)]
        same("gathered keys", keys.shape[0], total)
        return keys, torch.ones(total, 1).view(torch.uint8)


def store_index_keys(key: torch.Tensor, buffer: torch.Tensor, loc: torch.Tensor, page_size: int) -> None:
    """fused_store_index_k_cache."""
    same("num_tokens", loc.shape[0], key.shape[0])
    buffer[loc] = plain(key).to(torch.float8_e4m3fn).view(torch.uint8)


def mqa_logits(q: Any, kv: Any, weights: Any, ks: Any, ke: Any, clean_logits: bool) -> torch.Tensor:
    """deep_gemm's fp8_mqa_logits."""
    q, weights, keys = plain(q), plain(weights), kv[0].to(torch.float64)
    for rows in (weights.shape[0], ks.shape[0], ke.shape[0]):
        same("seq_len", rows, q.shape[0])
    same("seq_len_kv", kv[1].shape[0], keys.shape[0])
    scores = torch.relu(torch.einsum("rhd,kd->rhk", q.to(torch.float64), keys))
    return torch.einsum("rhk,rh->rk", scores, weights.to(torch.float64))


def topk_to_slots(
    *, score: Any, lengths: Any, page_table_size_1: Any, cu_seqlens_q: Any, topk: int, row_starts: Any
) -> torch.Tensor:
    """sgl_kernel's fast_topk_transform_fused."""
    same("lengths", lengths.shape[0], score.shape[0])
    row_starts = torch.zeros(score.shape[0]) if row_starts is None else row_starts
    same("row_starts", row_starts.shape[0], score.shape[0])
    same("cu_seqlens_q", cu_seqlens_q.shape[0], page_table_size_1.shape[0] + 1)
    same("queries", int(cu_seqlens_q[-1]), score.shape[0])
    out = torch.full((score.shape[0], topk), -1, dtype=torch.int32)
    for row in range(score.shape[0]):
        request = int((cu_seqlens_q[1:] <= row).sum())
        start, length = int(row_starts[row]), int(lengths[row])
        chosen = score[row, start : start + length].topk(min(topk, length)).indices.sort().values
        out[row, : len(chosen)] = page_table_size_1[request, chosen].to(torch.int32)
    return out


def attend(
    q: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, width: int, scale: float
) -> torch.Tensor:
    """Softmax over each row's slots; a row without any is not a number, as the kernels leave it."""
    keys = cache.view(-1, cache.shape[-1])[slots.clamp(min=0).long()]
    scores = torch.einsum("rhd,rkd->rhk", q, keys) * scale
    scores = scores.masked_fill((slots < 0)[:, None, :], -torch.inf)
    return torch.einsum("rhk,rkd->rhd", scores.softmax(-1), keys[..., :width])


class Attention:
    """flash_mla_sparse_fwd and flash_mla_with_kvcache; `calls`: queries, slots, and lengths where they count, copied."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []

    def _note(self, q: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor | None) -> None:
        self.calls.append((q.clone(), slots.clone(), None if lengths is None else lengths.clone()))

    def sparse(
        self, *, q: Any, kv: Any, indices: Any, sm_scale: float, d_v: int, attn_sink: Any, topk_length: Any
    ) -> tuple[torch.Tensor, None, None]:
        same("indices", indices.shape[0], q.shape[0])
        if topk_length is not None:
            same("topk_length", topk_length.shape[0], q.shape[0])
        self._note(q, indices[:, 0], topk_length)
        return attend(q, kv, indices[:, 0], d_v, sm_scale), None, None

    def schedule(self, *, cache_seqlens: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """get_mla_metadata."""
        return torch.zeros(1), torch.arange(cache_seqlens.shape[0] + 1)

    def paged(
        self,
        *,
        q: Any,
        k_cache: Any,
        block_table: Any,
        cache_seqlens: Any,
        head_dim_v: int,
        num_splits: Any,
        softmax_scale: float,
        indices: Any,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        rows = q.shape[0]
        same("indices", indices.shape[0], rows)
        same("block_table", block_table.shape[0], rows)
        same("cache_seqlens", cache_seqlens.shape[0], rows)
        same("num_splits", num_splits.shape[0], rows + 1)
        self._note(q[:, 0], indices[:, 0], cache_seqlens)
        return attend(q[:, 0], k_cache, indices[:, 0], head_dim_v, softmax_scale)[:, None], None


def share_of(lengths: torch.Tensor, requests: int, size: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """dsa_cp_interleave_q_seqs."""
    from sglang.srt.layers.cp.interleave import interleave_rows_per_request

    rows = torch.tensor(interleave_rows_per_request(lengths.tolist(), rank, size), dtype=lengths.dtype)
    same("requests", int((rows > 0).sum()), requests)
    return rows[rows > 0], torch.nonzero(rows).flatten().to(torch.int32)


def install() -> Attention:
    """Put them where SGLang takes its kernels from, in this process, for good."""
    from sglang.kernels.ops.attention.dsa import cp_split
    from sglang.srt import utils
    from sglang.srt.layers.attention import dsa_backend
    from sglang.srt.layers.attention.dsa import dsa_indexer

    attention = Attention()
    _module("sgl_kernel", fast_topk_transform_fused=topk_to_slots, fast_topk_transform_ragged_fused=None)
    _module(
        "sglang.kernels.ops.attention.flash_mla_interface",
        flash_mla_sparse_fwd=attention.sparse,
        flash_mla_with_kvcache=attention.paged,
        get_mla_metadata=attention.schedule,
    )
    _module(
        "sglang.kernels.ops.quantization.act_quant_triton",
        act_quant=lambda x, *_: (x.as_subclass(OnDevice), torch.ones(*x.shape[:-1], 1, dtype=x.dtype)),
    )
    cp_split.dsa_cp_interleave_q_seqs = share_of
    utils.is_cuda = lambda: True
    changes: Any = {
        dsa_indexer: {
            "_is_cuda": True,
            "can_use_dsa_fused_store": lambda *_: True,
            "fused_store_index_k_cache": store_index_keys,
            "resolve_fp8_mqa_logits_fn": lambda: mqa_logits,
        },
        dsa_backend: {
            "concat_mla_absorb_q_general": lambda nope, rope: torch.cat((nope, rope), dim=-1),
        },
    }
    for module, values in changes.items():
        for name, value in values.items():
            assert hasattr(module, name)
            setattr(module, name, value)
    return attention


def _module(name: str, **values: Any) -> None:
    module = ModuleType(name)
    vars(module).update(values)
    sys.modules[name] = module
