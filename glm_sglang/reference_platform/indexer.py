"""The DSA lightning indexer in PyTorch: which `index_topk` earlier tokens each row attends to.

score[t, s] = Σ_h w[t, h] · relu(q[t, h] · k[s]),  w = weights_proj(x) · heads^−½ · head_dim^−½, causal, top-k over s.
q and k carry rotary embedding on their first rope_head_dim columns. The Hadamard rotation that the GPU path applies to
both before quantising cancels in exact arithmetic and is left out (DeepSeek-V3.2 report, section 2.1).
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool

from glm_sglang.reference_platform.context_parallel import gathered

#: Elements of one block of per-head scores: 8 MiB in fp32 (measured: twice as fast as one large block).
SCORE_ELEMENTS = 1 << 21


def scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """q [rows, heads, d], k [length, d], weights [rows, heads], all fp32; visible [rows], ascending.

    Returns [rows, length] fp32; −inf where column s is not among the first visible[i].
    """
    rows, heads, dim = q.shape
    length = k.shape[0]
    out = torch.full((rows, length), float("-inf"), dtype=torch.float32)
    block = min(rows, max(1, SCORE_ELEMENTS // (heads * length)))
    logits = torch.empty(block * heads * length, dtype=torch.float32)
    for start in range(0, rows, block):
        part = slice(start, min(rows, start + block))
        count, reach = part.stop - start, int(visible[part.stop - 1])
        flat = logits[: count * heads * reach].view(count * heads, reach)
        torch.mm(q[part].reshape(-1, dim), k[:reach].T, out=flat).relu_()
        score = torch.bmm(weights[part, None, :], flat.view(count, heads, reach))[:, 0]
        out[part, :reach] = score.masked_fill_(torch.arange(reach) >= visible[part, None], float("-inf"))
    return out


def select(score: torch.Tensor, k: int) -> torch.Tensor:
    """Top-k positions of each row of score [rows, length]: [rows, k] int32, −1 where fewer than k are above −inf."""
    length = score.shape[1]
    top = score.topk(min(k, length), dim=-1)
    chosen = top.indices.to(torch.int32).masked_fill_(top.values == float("-inf"), -1)
    if length >= k:
        return chosen
    return torch.nn.functional.pad(chosen, (0, k - length), value=-1)


def forward(
    self: Any,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    layer_id: int,
    return_indices: bool = True,
    **_: Any,
) -> torch.Tensor | None:
    """Forward of SGLang's Indexer on this platform: writes this pass's index keys, returns the selection.

    x [rows, hidden], q_lora [rows, q_lora_rank] → [rows, index_topk] int32 positions within each row's sequence, −1
    for none; rows whose sequence is no longer than index_topk get −1 throughout (attention is dense there).
    """
    pool = get_token_to_kv_pool()
    keys = pool.index_key_cache
    q = self.wq_b(q_lora)[0].view(-1, self.n_heads, self.head_dim)
    k = self.k_norm(self.wk(x)[0]).view(-1, 1, self.head_dim)
    q_rope, k_rope = self.rotary_emb(
        positions, q[..., : self.rope_head_dim].contiguous(), k[..., : self.rope_head_dim].contiguous()
    )
    q = torch.cat([q_rope, q[..., self.rope_head_dim :]], -1)
    k = torch.cat([k_rope, k[..., self.rope_head_dim :]], -1)
    k = gathered(k, forward_batch)
    keys.store(layer_id, forward_batch.out_cache_loc, k[: forward_batch.out_cache_loc.shape[0], 0])
    if not return_indices:
        return None
    weights = torch.nn.functional.linear(x.float(), self.weights_proj.weight.float())
    weights *= self.n_heads**-0.5 * self.softmax_scale
    out = torch.full((x.shape[0], self.index_topk), -1, dtype=torch.int32)
    for seq in get_attn_backend().sequences:
        if seq.length > self.index_topk:
            loaded = keys.load(layer_id, seq.slots)
            score = scores(q[seq.rows].float(), loaded, weights[seq.rows], seq.visible())
            out[seq.rows] = select(score, self.index_topk)
    return out
