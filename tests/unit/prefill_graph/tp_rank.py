"""One rank of two under tensor parallelism with MegaMoE, without context parallelism: SGLang's runners, both ways.

As `cp_rank`, with SGLang's padding of steps whose counts ranks sync. Each rank has its heads and, of the experts' rows,
its share; what goes between the ranks does so at breaks of the test's own, which own nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from tests.unit.prefill_graph import cp_kernels
from tests.unit.prefill_graph.cp_kernels import OnDevice
from tests.unit.prefill_graph.cp_rank import (
    HEADS,
    HIDDEN,
    INDEX_DIM,
    INDEX_HEADS,
    LATENT,
    LAYERS,
    RANKS,
    ROPE,
    VOCABULARY,
    Body,
    Gloo,
    Layer,
    Model,
    Rank,
    normal,
    rope,
    turned,
)

MINE = HEADS // RANKS  # heads of a rank


class Norm:
    """k_norm's fields."""

    weight = bias = None
    variance_epsilon = 1e-6


def query(q: torch.Tensor, gates: torch.Tensor, scale: float, _: Any, positions: torch.Tensor) -> Any:
    """fused_q_indexer_rope_first_quant."""
    cp_kernels.same("gates", gates.shape[0], q.shape[0])
    cp_kernels.same("positions", positions.shape[0], q.shape[0])
    return turned(positions, q).as_subclass(OnDevice), (gates * scale)[..., None]


def store(key: torch.Tensor, buffer: Any, loc: Any, *_: Any) -> None:
    """fused_k_indexer_norm_rope_store."""
    *_, positions, page = _
    cp_kernels.same("positions", positions.shape[0], key.shape[0])
    cp_kernels.store_index_keys(turned(positions, key), buffer, loc, page)


@functools.cache
def between_ranks() -> tuple[Callable[..., None], Callable[..., None]]:
    """Breaks: the sum over ranks of `partial`, of which this rank's rows into `mine`; every rank's `mine` into `full`."""
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import eager_on_graph

    @eager_on_graph
    def reduce_scatter(partial: torch.Tensor, mine: torch.Tensor) -> None:
        total = partial.clone()
        dist.all_reduce(total)
        mine.copy_(total.chunk(RANKS)[dist.get_rank()])

    @eager_on_graph
    def gather(mine: torch.Tensor, full: torch.Tensor) -> None:
        parts = [torch.empty_like(mine) for _ in range(RANKS)]
        dist.all_gather(parts, mine.contiguous())
        full.copy_(torch.cat(parts))

    return reduce_scatter, gather


class TensorParallelLayer(Layer):
    """Attention of this rank's heads, then experts on this rank's rows."""

    def __init__(self, index: int, selects: bool) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention

        super().__init__(index, selects)
        for name, value in {
            "dsa_enable_prefill_cp": False,
            "k_norm": Norm(),
            "rotary_emb": SimpleNamespace(cos_sin_cache=None),
        }.items():
            object.__setattr__(self.indexer, name, value)
        self.attn_mqa = RadixAttention(MINE, LATENT + ROPE, 0.4, 1, index, v_head_dim=LATENT)

    def __call__(self, positions: torch.Tensor, x: torch.Tensor, batch: Any, topk: Any) -> Any:
        from sglang.srt.layers.moe import mega_moe

        from glm_sglang.prefill_graph import lifetime

        reduce_scatter, gather = between_ranks()
        rank, rows = dist.get_rank(), x.shape[0]
        heads = slice(rank * MINE, (rank + 1) * MINE)
        latent = x @ self.wkv
        q = (x @ self.wq).view(rows, HEADS, LATENT + ROPE)[:, heads]
        q_nope, q_pe = q.split((LATENT, ROPE), dim=-1)
        if self.selects:
            topk = self.indexer.forward_cuda(x, x, positions, batch, self.index)
        q_pe, k_pe = rope(positions, q_pe, latent[:, None, LATENT:])
        k_nope = latent[:, None, :LATENT]
        q_nope = q_nope.contiguous()
        out = self.attn_mqa(q_nope, k_nope, k_nope, batch, q_rope=q_pe, k_rope=k_pe, topk_indices=topk)
        weight = self.wo.view(HEADS, LATENT, HIDDEN)[heads].reshape(-1, HIDDEN)
        partial = out.reshape(rows, MINE * LATENT) @ weight
        mine = torch.empty(rows // RANKS, HIDDEN, dtype=x.dtype)
        with lifetime.rewritten():
            reduce_scatter(partial, mine)
        mine = x.chunk(RANKS)[rank] + mine
        mine = mine + mega_moe._run_mega_routed(self.moe, mine, batch, None, mine.shape[0])
        full = torch.empty_like(x)
        with lifetime.rewritten():
            gather(mine, full)
        return full, topk


class TensorParallelBody(Body):
    """Embeds, too: so is what SGLang captures without context parallelism."""

    def __init__(self) -> None:
        self.layers = [TensorParallelLayer(index, selects) for index, selects in enumerate(LAYERS)]
        self.table = normal(2, VOCABULARY, HIDDEN)

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any, input_embeds: Any = None) -> Any:
        return super().forward(input_ids, positions, forward_batch, self.table[input_ids])


class TensorParallelModel(Model):
    """With the forward pass that both runners call."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TensorParallelBody()

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any, **_: Any) -> Any:
        hidden = self.model.forward(input_ids, positions, forward_batch)
        return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch, None)


class TensorParallelRank(Rank):
    """With the arena where attention is captured (flashmla_sparse), at SGLang's breaks elsewhere (flashmla_kv)."""

    arguments: ClassVar[dict[str, Any]] = {}
    hooked: ClassVar[tuple[str, ...]] = (
        "lifetime:keep",
        "whole:bind_capture",
        "whole:bind_replay",
        "whole:attention_forward",
        "whole:indexer_forward",
        "rows:cached_lengths",
        "rows:output_rows",
    )
    moe_hooked: ClassVar[tuple[str, ...]] = ("routed_experts", "one_bucket")
    context_parallel = False

    def parallel(self, rank: int) -> dict[str, Any]:
        return {
            "attn_tp_size": RANKS,
            "attn_tp_rank": rank,
            "attn_tp_group": Gloo(),
            "attn_cp_group": SimpleNamespace(world_size=1),
            "enable_prefill_cp": False,
        }

    def make_model(self) -> Model:
        return TensorParallelModel()

    def _backend(self, impl: str) -> Any:
        from sglang.srt.layers.attention.dsa import dsa_indexer, dsa_prefill_cuda_graph
        from sglang.srt.layers.attention.dsa import utils as dsa_utils
        from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import eager_on_graph

        from glm_sglang.prefill_graph import whole
        from glm_sglang.prefill_graph.arena import Arena

        split = dsa_prefill_cuda_graph.pcg_dsa_indexer_prefill_split.__wrapped__  # the operator is CUDA's
        changes: Any = {
            dsa_utils: {"is_cuda": lambda: True},
            dsa_prefill_cuda_graph: {"_is_cuda": True},
            dsa_indexer: {
                "bcg_dsa_indexer_prefill_split": eager_on_graph(True)(split),
                "fused_q_indexer_rope_first_quant": query,
                "fused_k_indexer_norm_rope_store": store,
            },
        }
        for module, values in changes.items():
            for name, value in values.items():
                setattr(module, name, value)
        create = Arena.create

        def exact(rows: int, **kwargs: Any) -> Arena:
            """The arithmetic is exact here, and the indexer asks its queries for their device's index."""
            made = create(rows, **kwargs)
            made.query = torch.zeros(rows, INDEX_HEADS, INDEX_DIM, dtype=torch.float64).as_subclass(OnDevice)
            made.gate = made.gate.double()
            return made

        whole.Arena = SimpleNamespace(create=exact)  # type: ignore[misc, assignment]
        backend = super()._backend(impl)
        backend.flashmla_kv_num_q_heads = MINE
        backend.device_sm_major = 9
        return backend
