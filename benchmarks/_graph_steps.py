"""Arithmetic of prefill steps: which bucket one replays, which attention runs, and what company makes eager's the same.

SGLang's eager path attends densely (all heads, expanded keys) where no request of the step has more than LIMIT tokens
in all, behind a cached prefix too. Our graphs do where the step fits a dense graph; SGLang's never do. Else both attend
sparsely (absorbed). Both are exact over the same keys and round otherwise.

A filler is one more request at the end of an eager step, for as many rows as the graph pads. Behind a cached prefix of
more than LIMIT tokens it also turns eager's attention, which is one choice for the whole step, to sparse.

UPSTREAM: DeepseekSparseAttnBackend.set_dsa_prefill_impl, PrefillAdder, PrefillCudaGraphRunner.can_replay_locally.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from glm_sglang.prefill_graph.buckets import Plan

PAGE = 64  # tokens, of the KV pool; the scheduler's budget counts whole pages of each request's new tokens
DENSE_REQUESTS = 8  # a dense graph has one fewer, and its padding (glm_sglang.prefill_graph.arena.REQUESTS)
PADDING = 2  # SGLang replays no bucket of more than this many times the step's rows

DENSE, SPARSE = "dense", "sparse"


def pages(tokens: int) -> int:
    """Rounded up to whole pages, in tokens."""
    return -(-tokens // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class Request:
    """`new` tokens of a step behind `prefix` tokens that the pool holds."""

    new: int
    prefix: int = 0

    @property
    def total(self) -> int:
        """Tokens that its last row may attend to."""
        return self.prefix + self.new


Step = tuple[Request, ...]


def rows(step: Step) -> int:
    """Rows that the step computes."""
    return sum(request.new for request in step)


@dataclass(frozen=True, slots=True)
class Rules:
    """`chunk` tokens a step at most; `limit`: tokens of a request up to which attention may be dense."""

    plan: Plan
    chunk: int
    limit: int

    def steps(self, requests: Sequence[Request]) -> list[Step]:
        """What the scheduler makes of requests that arrive together at an idle server, in their order.

        All in one step; or one long request, in chunks, whose company joins the last of them. Raises ValueError for
        several requests that do not fit one step: how those are cut is not asked here.
        """
        if sum(pages(request.new) for request in requests) <= self.chunk:
            return [tuple(requests)]
        first, *others = requests
        if others and pages(first.new) <= self.chunk:
            raise ValueError(f"{len(requests)} requests of {rows(tuple(requests))} tokens do not fit a step")
        done = []
        while pages(first.new) > self.chunk:
            done.append((Request(self.chunk, first.prefix),))
            first = Request(first.new - self.chunk, first.prefix + self.chunk)
        return [*done, *self.steps([first, *others])]

    def bucket(self, step: Step) -> int | None:
        """The bucket that the step replays, None where it runs eagerly."""
        bucket = self.plan.bucket(rows(step))
        return bucket if bucket is not None and bucket <= PADDING * rows(step) else None

    def eager_attention(self, step: Step) -> str:
        """DENSE or SPARSE, for all requests of the step."""
        return DENSE if max(request.total for request in step) <= self.limit else SPARSE

    def graph_attention(self, step: Step) -> str:
        """The same of the graph that the step replays."""
        bucket = self.bucket(step)
        fits = (
            bucket is not None
            and bucket <= self.limit
            and len(step) < DENSE_REQUESTS
            and not any(request.prefix for request in step)
            and self.eager_attention(step) == DENSE
        )
        return DENSE if fits else SPARSE

    @property
    def long_prefix(self) -> int:
        """Tokens of a cached prefix behind which no filler is short, in whole pages."""
        return pages(self.limit + 1)

    def filler(self, step: Step, *, attention: bool = True) -> Request | None:
        """Who makes an eager `step` as large as the graph's, and its attention the graph's; None: nobody is needed.

        `attention` False: as large only, with the attention that eager has by itself. Raises ValueError where nobody can.
        """
        bucket = self.bucket(step)
        if bucket is None:
            raise ValueError("the step replays no graph")
        new = bucket - rows(step)
        turns = self.eager_attention(step) != self.graph_attention(step)
        if not new:
            if turns and attention:
                raise ValueError("no row of padding is there to turn eager's attention")
            return None
        found = Request(new, self.long_prefix if turns and attention else 0)
        if sum(pages(request.new) for request in (*step, found)) > self.chunk:
            raise ValueError("the chunk has no room for the filler")
        if not (turns and attention) and self.eager_attention((*step, found)) != self.eager_attention(step):
            raise ValueError("the filler is too long for dense attention")
        return found


def logprob_rows(new: Sequence[int], most: int) -> list[int]:
    """Of each request the last rows of which logprobs are asked: at most `most`, at least one."""
    return [min(most, max(1, tokens)) for tokens in new]


def beside_filler(kept: Sequence[int]) -> list[int]:
    """The same with one fewer, as a filler adds one: the head's matrix product keeps its size, so its tiles.

    >>> beside_filler([1, 5, 5])
    [1, 4, 5]
    """
    fewer = list(kept)
    for index, count in enumerate(fewer):
        if count > 1:
            fewer[index] -= 1
            break
    return fewer


def edges(buckets: Sequence[int]) -> Iterator[int]:
    """Each bucket, one token fewer and one more, each once."""
    yield from sorted({size for bucket in buckets for size in (bucket - 1, bucket, bucket + 1)})
