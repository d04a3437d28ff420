"""`--glm-verify-graphs`: every graph replays random input beside the eager model, full and one row short.

A bucket with a dense graph (`dense`) has two: its sparse one serves what has a prefix, and is replayed here for the
same fresh prompt, of which each row selects all of its keys.

Runs after capture, before the server is ready, when nobody has a slot of the KV pool. What it writes there stays: a
request reads only slots that it has written or loaded. Ranks run the same steps in the same order, as they do when they
serve; their counts are synced as the scheduler syncs them. Where there is nothing to compare, and under pipeline
parallelism, `resolution` ends the start.

Target        ModelRunner.init_cuda_graphs (after it).
Upstream      none.
Goes when     never: it is a feature, off by default.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glm_sglang.prefill_graph import counts, options, whole

if TYPE_CHECKING:
    from glm_sglang.prefill_graph.arena import Arena

logger = logging.getLogger(__name__)

KL_LIMIT = 0.0025  # nats: the project's bound for graph against eager, here of the worst row
TIE = 0.05  # logits: two tokens this close may change places
SEED = 37606


@dataclass(frozen=True, slots=True)
class Difference:
    """Graph against eager on one step: of its worst request the KL divergence in nats, and whether all tokens agree."""

    bucket: int
    tokens: int
    dense: bool
    kl: float
    largest: float
    same_token: bool

    @property
    def passes(self) -> bool:
        """Whether the graph may serve."""
        return self.kl <= KL_LIMIT and self.same_token

    def __str__(self) -> str:
        token = "same token" if self.same_token else "ANOTHER TOKEN"
        graph = f"bucket {self.bucket}, {'dense' if self.dense else 'sparse'} graph, {self.tokens} tokens"
        return f"{graph}: KL {self.kl:.2e}, largest |Δ| {self.largest:.3f}, {token}"


def compare(bucket: int, tokens: int, graph: Any, eager: Any, *, dense: bool = False) -> Difference:
    """Of logits [rows, vocabulary]. A greedy token that differs within TIE counts as the same."""
    import torch

    graph, eager = graph.float(), eager.float()
    divergence = torch.nn.functional.kl_div(
        torch.log_softmax(graph, -1), torch.log_softmax(eager, -1), log_target=True, reduction="none"
    )
    chosen = graph.argmax(-1, keepdim=True)
    behind = eager.max(-1, keepdim=True).values - eager.gather(-1, chosen)
    largest = float((graph - eager).abs().max())
    finite = bool(torch.isfinite(graph).all())
    return Difference(
        bucket=bucket,
        tokens=tokens,
        dense=dense,
        kl=float(divergence.sum(-1).max()) if finite else float("inf"),
        largest=largest,
        same_token=finite and bool((behind <= TIE).all()),
    )


def after_capture(result: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
    """Compare every captured graph of the target model; one that differs ends the server.

    Raises RuntimeError naming the bucket, or where there is nothing to compare.
    """
    if not (options.current().ours and options.current().verify) or model_runner.is_draft_worker:
        return
    runner = model_runner.prefill_cuda_graph_runner
    if not getattr(runner, "capture_num_tokens", None):
        raise RuntimeError(
            "prefill graph: --glm-verify-graphs has no graphs to compare (the log says why); serve without it"
        )
    found: list[Difference] = []
    arena = whole.arena_of(model_runner.attn_backend)
    for bucket in runner.capture_num_tokens:
        variants = (True, False) if arena is not None and bucket in arena.dense_buckets else (False,)
        for tokens, dense in itertools.product(_counts(model_runner, runner, bucket), variants):
            with _sparse_only(None if dense else arena), counts.paused():
                logits = _both(model_runner, runner, tokens)
            found.append(compare(bucket, tokens, *logits, dense=dense))
            logger.info("prefill graph: verified %s", found[-1])
    if bad := [difference for difference in found if not difference.passes]:
        raise RuntimeError(
            "prefill graph: graph and eager model differ: "
            + "; ".join(map(str, bad))
            + "; serve without these buckets (--glm-prefill-graph-buckets) or with --glm-prefill-graph off"
        )


def _counts(model_runner: Any, runner: Any, bucket: int) -> list[int]:
    """Steps for this bucket: full, and one row short; no larger than the KV pool, as no step ever is."""
    page = model_runner.page_size
    requests = math.ceil(bucket / model_runner.model_config.context_len)
    room = model_runner.token_to_kv_pool.size - (requests - 1) * page
    below = max((size for size in runner.capture_num_tokens if size < bucket), default=0)
    if room <= below:
        logger.warning(
            "prefill graph: no step fills the bucket of %d tokens: the KV pool has %d", bucket, room
        )
        return []
    return sorted({min(bucket, room), max(1, min(bucket - 1, room))} - set(range(below + 1)))


@contextlib.contextmanager
def _sparse_only(arena: Arena | None) -> Iterator[None]:
    """No prompt is short enough for a dense graph of this arena meanwhile."""
    if arena is None:
        yield
        return
    limit, arena.dense_limit = arena.dense_limit, 0
    try:
        yield
    finally:
        arena.dense_limit = limit


def _both(model_runner: Any, runner: Any, tokens: int) -> tuple[Any, Any]:
    """Logits [requests, vocabulary] of one random step of `tokens`, from the graph and from the eager model.

    One request, or as few as the context length allows. Raises RuntimeError where SGLang does not replay the bucket that
    it captured.
    """
    import torch

    table = model_runner.req_to_token_pool.req_to_token
    lengths = runner.capture_prepare(tokens)[0].extend_seq_lens_cpu
    slots = place(lengths, model_runner.page_size)
    before = table[: len(lengths)].clone()
    for row, (first, length) in enumerate(zip(slots, lengths, strict=True)):
        table[row, :length] = torch.arange(first, first + length, device=table.device, dtype=table.dtype)
    logits = []
    try:
        for chosen in (runner, model_runner.eager_runner):
            model_runner.prefill_cuda_graph_runner = chosen
            batch = _batch(runner, tokens, slots, replays=chosen is runner)
            with torch.no_grad():
                output = model_runner._forward_raw(batch, None)
            if chosen is runner and not output.can_run_graph:
                raise RuntimeError(f"prefill graph: {tokens} tokens do not replay: {output.can_run_graph}")
            logits.append(output.logits_output.next_token_logits[: len(lengths)].clone())
    finally:
        model_runner.prefill_cuda_graph_runner = runner
        table[: len(lengths)] = before
    return logits[0], logits[1]


def place(lengths: Sequence[int], page: int) -> list[int]:
    """The first slot of each request, in pages of its own; page 0 takes the padding's writes.

    >>> place([64, 65, 1], 64)
    [64, 128, 256]
    """
    ends = itertools.accumulate((-(-length // page) * page for length in lengths), initial=page)
    return list(ends)[:-1]


def _batch(runner: Any, tokens: int, slots: Sequence[int], *, replays: bool) -> Any:
    """Requests of `tokens` random tokens together without a prefix, in tensors of their own, from these slots on."""
    import torch

    batch, _ = runner.capture_prepare(tokens)
    lengths = batch.extend_seq_lens_cpu
    generator = torch.Generator(device="cpu").manual_seed(SEED + tokens)
    vocabulary = runner.model_runner.model_config.vocab_size
    ids = torch.randint(0, vocabulary, (tokens,), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])
    starts = torch.repeat_interleave(torch.tensor(slots), torch.tensor(lengths))
    for name, value in (("input_ids", ids), ("positions", positions), ("out_cache_loc", starts + positions)):
        setattr(batch, name, value.to(getattr(batch, name).dtype).to(runner.device))
    for name in ("seq_lens", "extend_seq_lens", "extend_prefix_lens", "extend_start_loc", "req_pool_indices"):
        setattr(batch, name, getattr(batch, name).clone())
    if batch.num_token_non_padded is not None:  # UPSTREAM: ForwardBatch.init_new
        batch.global_num_token_non_padded = torch.tensor(tokens, dtype=torch.int32, device=runner.device)
    if batch.global_num_tokens_cpu is not None:
        _sync(batch, replays)
    return batch


def _sync(batch: Any, replays: bool) -> None:
    """As the scheduler leaves a batch whose counts ranks sync: every one has the same. UPSTREAM: _update_gather_batch."""
    rows = [batch.batch_size] * len(batch.global_num_tokens_cpu)
    batch.global_num_tokens_for_logprob_cpu = rows
    batch.global_num_tokens_for_logprob_gpu = batch.global_num_tokens_gpu.new_tensor(rows)
    batch.is_extend_in_batch = True
    batch.can_run_dp_prefill_cuda_graph = replays
