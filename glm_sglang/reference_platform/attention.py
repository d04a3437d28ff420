"""Absorbed MLA attention over SGLang's paged pool, dense or restricted to the indexer's selection.

Arithmetic: scores and softmax in fp32, outputs in the model's dtype. A key holds the normalised latent (kv_lora_rank)
and the rotated part (qk_rope_head_dim); a value is the latent alone, as in DeepSeek-V3.2's absorbed form.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from glm_sglang.reference_platform.context_parallel import shard_of
from glm_sglang.reference_platform.sequences import Sequence, sequences

#: Elements of one gathered block of keys: 4 MiB in fp32 stay in the cache (measured: 4 times faster than 64 MiB).
GATHER_ELEMENTS = 1 << 20


def attend_dense(
    q: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, v_dim: int, scale: float
) -> torch.Tensor:
    """Causal attention of q [rows, heads, d] over keys [length, d]; row i sees keys[:visible[i]].

    Returns [rows, heads, v_dim] fp32; the value of a key is its first `v_dim` columns.
    """
    rows, heads, dim = q.shape
    scores = (q.float().reshape(rows * heads, dim) @ keys.float().T).view(rows, heads, -1).mul_(scale)
    hidden = torch.arange(keys.shape[0]) >= visible[:, None]
    scores.masked_fill_(hidden[:, None, :], float("-inf"))
    weights = scores.softmax(-1)
    return (weights.view(rows * heads, -1) @ keys[:, :v_dim].float()).view(rows, heads, v_dim)


def attend_selected(
    q: torch.Tensor, keys: torch.Tensor, selected: torch.Tensor, v_dim: int, scale: float
) -> torch.Tensor:
    """Attention of q [rows, heads, d] over keys[selected[i]] for row i.

    selected [rows, k] int: positions in keys, −1 where a row has fewer than k. Every row selects at least one key.
    Returns [rows, heads, v_dim] fp32.
    """
    rows, heads, dim = q.shape
    count = selected.shape[1]
    out = torch.empty(rows, heads, v_dim, dtype=torch.float32)
    block = min(rows, max(1, GATHER_ELEMENTS // (count * dim)))
    gathered = torch.empty(block * count, dim, dtype=torch.float32)
    queries, keys, selected = q.float(), keys.float(), selected.long()
    for start in range(0, rows, block):
        part = slice(start, min(rows, start + block))
        chosen = selected[part]
        values = gathered[: chosen.numel()]
        torch.index_select(keys, 0, chosen.clamp_min(0).reshape(-1), out=values)
        values = values.view(-1, count, dim)
        scores = torch.bmm(queries[part], values.transpose(1, 2)).mul_(scale)
        scores.masked_fill_((chosen < 0)[:, None, :], float("-inf"))
        torch.bmm(scores.softmax(-1), values[..., :v_dim], out=out[part])
    return out


class ReferenceMlaBackend(AttentionBackend):  # type: ignore[misc]
    """SGLang attention backend `glm_reference`: MLA layers only, page tables and pools are SGLang's."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        if not runner.use_mla_backend:
            raise ValueError(
                "--attention-backend glm_reference serves MLA models (GlmMoeDsaForCausalLM) only; "
                "use torch_native for this model"
            )
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.index_topk: int | None = getattr(runner.model_config.hf_config, "index_topk", None)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Splits the batch once a pass; the indexer reads the same split."""
        rows = forward_batch.input_ids.shape[0] if forward_batch.input_ids is not None else 0
        self.sequences: list[Sequence] = (
            []
            if forward_batch.forward_mode.is_idle()
            else list(sequences(forward_batch, self.req_to_token, rows, shard_of(forward_batch)))
        )

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return False

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        topk_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [rows, heads·d], k [rows, 1, d] or [rows, d]; returns [rows, heads·v_dim] in q's dtype."""
        if save_kv_cache:
            # UPSTREAM: dsa_backend.prepare_kv_for_attention has gathered k over CP ranks already.
            self.token_to_kv_pool.set_kv_buffer(
                layer, forward_batch.out_cache_loc, k.view(-1, 1, layer.qk_head_dim), v
            )
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        pool = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        out = torch.zeros(queries.shape[0], layer.tp_q_head_num, layer.v_head_dim, dtype=q.dtype)
        for seq in self.sequences:
            keys = pool[seq.slots, 0]
            if topk_indices is None or (self.index_topk is not None and seq.length <= self.index_topk):
                result = attend_dense(queries[seq.rows], keys, seq.visible(), layer.v_head_dim, layer.scaling)
            else:
                result = attend_selected(
                    queries[seq.rows], keys, topk_indices[seq.rows], layer.v_head_dim, layer.scaling
                )
            out[seq.rows] = result.to(q.dtype)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    #: One row a request is the same computation; the split knows.
    forward_decode = forward_extend
