"""`--glm-verify-graphs`: every graph replays random input beside the eager model, full and one row short.

A bucket with a dense graph (`dense`) has two: its sparse one serves what has a prefix, and is replayed here for the
same fresh prompt, of which each row selects all of its keys.

Runs after capture, before the server is ready. The KV pool is empty then; rows of it are used and zeroed again.

Target        ModelRunner.init_cuda_graphs (after it).
Upstream      none.
Goes when     never: it is a feature, off by default.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glm_sglang.prefill_graph import options, whole

if TYPE_CHECKING:
    from glm_sglang.prefill_graph.arena import Arena

logger = logging.getLogger(__name__)

KL_LIMIT = 0.0025  # nats, mean over rows: the project's bound for graph against eager
TIE = 0.05  # logits: two tokens this close may change places
SEED = 37606


@dataclass(frozen=True, slots=True)
class Difference:
    """Graph against eager on one prompt: KL divergence in nats, and whether the greedy token is the same."""

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
        torch.log_softmax(graph, -1), torch.log_softmax(eager, -1), log_target=True, reduction="batchmean"
    )
    chosen = graph.argmax(-1, keepdim=True)
    behind = eager.max(-1, keepdim=True).values - eager.gather(-1, chosen)
    largest = float((graph - eager).abs().max())
    finite = bool(torch.isfinite(graph).all())
    return Difference(
        bucket=bucket,
        tokens=tokens,
        dense=dense,
        kl=float(divergence) if finite else float("inf"),
        largest=largest,
        same_token=finite and bool((behind <= TIE).all()),
    )


def after_capture(result: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
    """Compare every captured graph; one that differs ends the server. Raises RuntimeError naming the bucket."""
    runner = model_runner.prefill_cuda_graph_runner
    if not (options.current().ours and options.current().verify) or not hasattr(runner, "capture_num_tokens"):
        return
    if model_runner.is_draft_worker or runner.enable_cp_bcg_capture:
        logger.warning(
            "prefill graph: --glm-verify-graphs compares the target model without context parallelism only"
        )
        return
    found: list[Difference] = []
    arena = whole.arena_of(model_runner.attn_backend)
    for bucket in runner.capture_num_tokens:
        variants = (True, False) if arena is not None and bucket in arena.dense_buckets else (False,)
        for tokens, dense in itertools.product(sorted({bucket, max(1, bucket - 1)}), variants):
            with _sparse_only(None if dense else arena):
                logits = _both(model_runner, runner, tokens)
            found.append(compare(bucket, tokens, *logits, dense=dense))
            logger.info("prefill graph: verified %s", found[-1])
    if bad := [difference for difference in found if not difference.passes]:
        raise RuntimeError(
            "prefill graph: graph and eager model differ: "
            + "; ".join(map(str, bad))
            + "; serve without these buckets (--glm-prefill-graph-buckets) or with --glm-prefill-graph off"
        )


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
    """Logits [1, vocabulary] of one random prompt of `tokens`, from the graph and from the eager model.

    Raises RuntimeError where SGLang does not replay the bucket that it captured.
    """
    import torch

    table = model_runner.req_to_token_pool.req_to_token
    before = table[0, :tokens].clone()
    first = model_runner.page_size  # UPSTREAM: page 0 takes the padding's writes
    slots = torch.arange(first, first + tokens, device=runner.device)
    table[0, :tokens] = slots.to(table.dtype)
    logits = []
    try:
        for chosen in (runner, model_runner.eager_runner):
            model_runner.prefill_cuda_graph_runner = chosen
            with torch.no_grad():
                output = model_runner._forward_raw(_batch(runner, tokens, slots), None)
            if chosen is runner and not output.can_run_graph:
                raise RuntimeError(f"prefill graph: {tokens} tokens do not replay: {output.can_run_graph}")
            logits.append(output.logits_output.next_token_logits[:1].clone())
    finally:
        model_runner.prefill_cuda_graph_runner = runner
        table[0, :tokens] = before
    return logits[0], logits[1]


def _batch(runner: Any, tokens: int, slots: Any) -> Any:
    """One request of `tokens` random tokens without a prefix, in tensors of its own."""
    import torch

    batch, _ = runner.capture_prepare(tokens)
    generator = torch.Generator(device="cpu").manual_seed(SEED + tokens)
    vocabulary = runner.model_runner.model_config.vocab_size
    ids = torch.randint(0, vocabulary, (tokens,), generator=generator)
    batch.input_ids = ids.to(batch.input_ids.dtype).to(runner.device)
    batch.positions = torch.arange(tokens, device=runner.device, dtype=batch.positions.dtype)
    batch.out_cache_loc = slots.to(batch.out_cache_loc.dtype)
    for name in ("seq_lens", "extend_seq_lens", "extend_prefix_lens", "extend_start_loc", "req_pool_indices"):
        setattr(batch, name, getattr(batch, name).clone())
    return batch
