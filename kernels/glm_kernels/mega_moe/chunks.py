"""How many MegaMoE calls a layer makes, so that every EP rank makes the same number.

Policy only: no torch, no device. The kernel is a collective, so ranks that disagree about the count hang; the
count here depends on nothing but the largest token count of any rank and the buffer's capacity, which all
ranks know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below a / b; b > 0."""
    return -(-a // b)


def align(a: int, b: int) -> int:
    """Smallest multiple of b not below a."""
    return ceil_div(a, b) * b


@dataclass(frozen=True)
class ChunkPlan:
    """`count` calls in which no rank brings more than `bound` tokens. The same object on every rank."""

    count: int
    bound: int
    """The largest share of one rank in any call: what 0.2.5 takes as `num_tokens_bound`."""

    def rows(self, tokens: int, chunk: int) -> slice:
        """This rank's rows of call `chunk`, for a rank with `tokens` tokens; empty slices are calls without
        tokens.

        Shares differ by at most one row, so that no call carries a rank's whole load while another carries
        none.
        """
        if not 0 <= chunk < self.count:
            raise IndexError(f"chunk {chunk} of {self.count}")
        share = slice(tokens * chunk // self.count, tokens * (chunk + 1) // self.count)
        if share.stop - share.start > self.bound:
            raise ValueError(
                f"{tokens} tokens do not fit {self.count} chunks of {self.bound}: the plan is another batch's"
            )
        return share


def plan_chunks(max_tokens_per_rank: int, capacity: int) -> ChunkPlan:
    """Fewest calls that fit: `max_tokens_per_rank` is the maximum over all EP ranks, `capacity` the buffer's
    tokens a rank.

    No tokens on any rank means no call. A rank without tokens still makes all `count` calls.
    """
    if max_tokens_per_rank < 0:
        raise ValueError(f"max_tokens_per_rank is {max_tokens_per_rank}; a token count is not negative")
    if capacity < 1:
        raise ValueError(f"MegaMoE buffer capacity is {capacity} tokens a rank; it must be at least 1")
    count = ceil_div(max_tokens_per_rank, capacity)
    return ChunkPlan(count, ceil_div(max_tokens_per_rank, count) if count else 0)


def plan_for_ranks(tokens: Sequence[int], capacity: int) -> ChunkPlan:
    """`plan_chunks` from every rank's token count, as DP attention knows them."""
    return plan_chunks(max(tokens, default=0), capacity)


def buffer_capacity(max_tokens_per_rank: int, cap: int, alignment: int) -> int:
    """Tokens a rank to allocate for: no more than the largest batch's even share, aligned, and no more than
    `cap`.

    `max_tokens_per_rank`: the most one rank ever brings to one forward (chunk size, or its CP share). `cap`:
    the operator's limit in tokens. `alignment`: the kernel's (`buffer.SM90_TOKEN_ALIGNMENT`). A cap below the
    batch gives balanced chunks: 16,384 tokens under a cap of 12,000 take two calls of 8,192, so the buffer is
    8,192.
    """
    usable = cap // alignment * alignment
    if usable < 1:
        raise ValueError(
            f"the MegaMoE token cap is {cap}; it must be at least the kernel's alignment, {alignment}"
        )
    if max_tokens_per_rank < 1:
        raise ValueError(f"max_tokens_per_rank is {max_tokens_per_rank}; it must be at least 1")
    count = ceil_div(max_tokens_per_rank, usable)
    return align(ceil_div(max_tokens_per_rank, count), alignment)
