"""Prefill context parallelism on the reference platform: each CP rank computes every size-th token, all keep all keys.

Interleave only: rank r of n has the batch's tokens r, r + n, r + 2n …, its shard padded to its peers' length.
UPSTREAM: layers/cp/interleave.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of a batch: tokens `rank`, `rank + size`, …"""

    rank: int
    size: int

    def rows(self, start: int, stop: int) -> slice:
        """Local rows of the batch's tokens [start, stop): neighbours here too. Empty where this rank has none."""
        first, end = (max(0, -(-(token - self.rank) // self.size)) for token in (start, stop))
        return slice(first, end)

    def token(self, row: int) -> int:
        """The batch's token that a local row holds."""
        return self.rank + self.size * row


def shard_of(batch: Any) -> Shard | None:
    """The shard that this pass computes on this rank, None where every rank computes all of it."""
    from sglang.srt.layers.attention.dsa.utils import dsa_use_prefill_cp
    from sglang.srt.layers.cp.base import get_cp_strategy

    if not dsa_use_prefill_cp(batch):
        return None
    strategy = get_cp_strategy()
    if strategy is None or strategy.name != "interleave":
        raise ValueError(
            f"--cp-strategy {getattr(strategy, 'name', None)} does not run on the reference platform; allowed: interleave"
        )
    return Shard(strategy.cp_rank, strategy.cp_size)


def gathered(rows: torch.Tensor, batch: Any) -> torch.Tensor:
    """Every rank's rows in the batch's order, where the pass is sharded: [local rows, …] → [tokens, …]."""
    if shard_of(batch) is None:
        return rows
    from sglang.srt.layers.cp.base import get_cp_strategy

    full: torch.Tensor = get_cp_strategy().gather_kv_cache(rows.contiguous(), batch)
    return full


def without_streams(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around EagerRunner._execute_extend_cp. UPSTREAM: it asks for the current CUDA stream and hands it to a gather."""
    cuda: Any = torch.cuda
    asked = cuda.current_stream
    cuda.current_stream = lambda device=None: None
    try:
        return original(*args, **kwargs)
    finally:
        cuda.current_stream = asked
