"""One view of a SGLang batch: which rows of it belong to which sequence, and where that sequence's tokens lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from glm_sglang.reference_platform.context_parallel import Shard


@dataclass(frozen=True, slots=True)
class Sequence:
    """One request's part of a forward pass.

    rows       its rows in the batch's token dimension.
    slots      [length] int64: its slots in the token pool, in order of position, this pass's tokens last.
    first      position of the first of its rows.
    step       positions from one row to the next: the size of the CP group in a sharded pass, 1 otherwise.
    """

    rows: slice
    slots: torch.Tensor
    first: int
    step: int = 1

    @property
    def length(self) -> int:
        """Tokens that the sequence has after this pass."""
        return self.slots.shape[0]

    def visible(self) -> torch.Tensor:
        """[rows] int64: how many tokens each row may attend to, itself included."""
        return torch.arange(self.first + 1, self.length + 1, self.step)


def sequences(
    batch: Any, req_to_token: torch.Tensor, num_rows: int, shard: Shard | None = None
) -> Iterator[Sequence]:
    """Splits a ForwardBatch (extend, mixed, decode) by request; `req_to_token` is the request pool's table.

    Decode has one row a request, at position seq_len − 1. Rows beyond the last request's are padding and belong to none.
    num_rows: the whole batch's. With a shard, rows are this rank's, and requests without a row here are left out.
    """
    lengths = batch.seq_lens.tolist()
    pool_rows = batch.req_pool_indices.tolist()
    decode = batch.forward_mode.is_decode_or_idle()
    prefixes = [length - 1 for length in lengths] if decode else batch.extend_prefix_lens.tolist()
    start = 0
    for pool_row, length, prefix in zip(pool_rows, lengths, prefixes, strict=True):
        count = length - prefix
        if start + count > num_rows:
            raise AssertionError(f"batch holds {num_rows} rows, its requests need {start + count} or more")
        slots = req_to_token[pool_row, :length].long()
        if shard is None:
            yield Sequence(slice(start, start + count), slots, prefix)
        elif (rows := shard.rows(start, start + count)).start < rows.stop:
            yield Sequence(rows, slots, prefix + shard.token(rows.start) - start, shard.size)
        start += count
