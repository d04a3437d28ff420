"""The buffers at which captured segments and breaks meet, and what a step puts into them.

One set for a runner, as many rows as the largest bucket, shared by every bucket and every layer: a segment
writes its queries, the break after it reads them before the next layer's segment runs. So a break owns nothing of
the graph pool, and a step's metadata is written once, not once a layer.

Padding rows. A row behind the step's last token attends to one slot that holds a key, whatever it was: the rows'
first index is a real slot from the start on (0, which SGLang never hands out), and their length is 1. Their
results are finite and are thrown away; their own keys go to slot 0, because SGLang pads `out_cache_loc` with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

PADDED_LENGTH = 1
REQUESTS = 8  # of a dense graph: the last one is its padding


@dataclass(slots=True)
class Arena:
    """Static buffers of one prefill runner; never reallocated after the first capture.

    topk     int32 [rows, index_topk]: the last full layer's selection as slots of the KV pool, −1 behind the end.
    query    E4M3 [rows, index heads, 128]: the indexer's queries of the layer at work.
    gate     fp32 [rows, index heads, 1]: the weights of its heads, scales of the queries in them.
    lengths  int32 [rows]: how many of a row's indices count.
    ends     int32 [REQUESTS + 1]: request boundaries of the dense graphs.
    group_ends  for each layer the last one before the next break (eligibility.group_ends).
    dense_limit, dense_buckets  most tokens of a request in a dense graph (0: none), and the buckets that have one.
    """

    topk: torch.Tensor
    query: torch.Tensor
    gate: torch.Tensor
    lengths: torch.Tensor
    ends: torch.Tensor
    group_ends: tuple[int, ...] = ()
    dense_limit: int = 0
    dense_buckets: set[int] = field(default_factory=set)
    capturing_dense: bool = False
    # Of the step at hand:
    batch: Any = None
    rows: int = 0
    dense: bool = False  # every row selects all of its keys
    dense_step: bool = False  # and the step replays a dense graph

    @classmethod
    def create(
        cls,
        rows: int,
        *,
        index_topk: int,
        index_heads: int,
        head_dim: int,
        group_ends: tuple[int, ...],
        device: Any,
        dense_limit: int = 0,
    ) -> Arena:
        """Buffers of `rows` rows. 8 KiB of selection and 4 KiB of queries a row for GLM-5.x."""
        return cls(
            topk=torch.zeros((rows, index_topk), dtype=torch.int32, device=device),
            query=torch.zeros((rows, index_heads, head_dim), dtype=torch.float8_e4m3fn, device=device),
            gate=torch.zeros((rows, index_heads, 1), dtype=torch.float32, device=device),
            lengths=torch.full((rows,), PADDED_LENGTH, dtype=torch.int32, device=device),
            ends=torch.zeros(REQUESTS + 1, dtype=torch.int32, device=device),
            group_ends=group_ends,
            dense_limit=dense_limit,
        )

    @property
    def bytes(self) -> int:
        """Device memory held."""
        return sum(
            t.numel() * t.element_size() for t in (self.topk, self.query, self.gate, self.lengths, self.ends)
        )

    @property
    def index_topk(self) -> int:
        """Indices a row selects at most."""
        return self.topk.shape[1]

    def load(self, batch: Any, metadata: Any, indexer_metadata: Any, bucket: int) -> None:
        """Take over a step's metadata; `bucket` rows will run, the first ones the step's.

        metadata.dsa_cache_seqlens_int32 int32 [the step's rows, or more].

        Where no request has more keys than a row may select, every row selects all of its keys, in every layer
        alike: that selection is made here, once, and the breaks have nothing to do.
        """
        lengths = metadata.dsa_cache_seqlens_int32
        # UPSTREAM: prepare_mlp_sync_batch makes extend_num_tokens the bucket's and pads lengths with zeros.
        rows = sum(batch.extend_seq_lens_cpu)
        self.batch, self.rows = batch, rows
        self.lengths[:rows].copy_(lengths[:rows])
        if rows < bucket:
            self.lengths[rows:bucket].fill_(PADDED_LENGTH)
        self.dense = int(batch.seq_lens_cpu.max()) <= self.index_topk
        if self.dense:
            # UPSTREAM: topk_transform writes 0 … length − 1 without reading scores where all of them are selected.
            scores = torch.empty((rows, self.index_topk), dtype=torch.float32, device=self.topk.device)
            self.topk[:rows].copy_(indexer_metadata.topk_transform(scores, self.index_topk))
