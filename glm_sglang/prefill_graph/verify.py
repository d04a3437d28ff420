"""`--glm-verify-graphs`: every graph replays random input beside the eager model, full and one row short.

A bucket with a dense graph (`dense`) has two: its sparse one serves what has a prefix, and is replayed here for the
same fresh prompt, of which each row selects all of its keys. Eager attends as the graph does: dense and sparse attention
over the same keys round otherwise, and on an H200 that alone changed a greedy token beyond TIE in 7 of 1,337 prompts. A
bucket in which no fresh row has more keys than it may select is replayed behind a prefix, too, for selections to run.

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
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glm_sglang.prefill_graph import counts, options, verify_steps, whole
from glm_sglang.prefill_graph.verify_steps import Step

if TYPE_CHECKING:
    from glm_sglang.prefill_graph.arena import Arena

logger = logging.getLogger(__name__)

KL_LIMIT = 0.0025  # nats: the project's bound for graph against eager, here of the worst row
TIE = 0.05  # logits: two tokens this close may change places


@dataclass(frozen=True, slots=True)
class Difference:
    """Graph against eager on one step: of its worst request the KL divergence in nats, and whether all tokens agree."""

    bucket: int
    step: Step
    kl: float
    largest: float
    same_token: bool

    @property
    def passes(self) -> bool:
        """Whether the graph may serve."""
        return self.kl <= KL_LIMIT and self.same_token

    def __str__(self) -> str:
        token = "same token" if self.same_token else "ANOTHER TOKEN"
        graph = f"bucket {self.bucket}, {'dense' if self.step.dense else 'sparse'} graph, {self.step.tokens} tokens"
        if self.step.prefix:
            graph += f" behind {self.step.prefix}"
        return f"{graph}: KL {self.kl:.2e}, largest |Δ| {self.largest:.3f}, {token}"


def compare(bucket: int, step: Step, graph: Any, eager: Any) -> Difference:
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
        step=step,
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
        for step in _steps(model_runner, runner, bucket, arena):
            with _sparse_only(None if step.dense else arena), counts.paused():
                logits = _both(model_runner, runner, step)
            found.append(compare(bucket, step, *logits))
            logger.info("prefill graph: verified %s", found[-1])
    if bad := [difference for difference in found if not difference.passes]:
        raise RuntimeError(
            "prefill graph: graph and eager model differ: "
            + "; ".join(map(str, bad))
            + "; serve without these buckets (--glm-prefill-graph-buckets) or with --glm-prefill-graph off"
        )


def _steps(model_runner: Any, runner: Any, bucket: int, arena: Arena | None) -> list[Step]:
    """What this bucket's graphs replay."""
    fresh = verify_steps.counts(model_runner, runner, bucket)
    if not fresh:
        room = model_runner.token_to_kv_pool.size
        logger.warning(
            "prefill graph: no step fills the bucket of %d tokens: the KV pool has %d", bucket, room
        )
        return []
    variants = (True, False) if arena is not None and bucket in arena.dense_buckets else (False,)
    steps = [Step(tokens, dense) for tokens in fresh for dense in variants]
    prefix = verify_steps.prefix(model_runner, runner, bucket)
    return [*steps, Step(bucket, prefix=prefix)] if prefix else steps


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


@contextlib.contextmanager
def _attends_as(step: Step) -> Iterator[None]:
    """Eager passes attend as this step's graph does: sparsely, however short requests are, unless it is the dense one.

    UPSTREAM: DeepseekSparseAttnBackend.set_dsa_prefill_impl reads the limit anew in each pass.
    """
    from sglang.srt.environ import envs

    limit = envs.SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD
    with contextlib.nullcontext() if step.dense else limit.override(0):
        yield


def _both(model_runner: Any, runner: Any, step: Step) -> tuple[Any, Any]:
    """Logits [requests, vocabulary] of one random step, from the graph and from the eager model.

    Raises RuntimeError where SGLang does not replay the bucket that it captured.
    """
    import torch

    table = model_runner.req_to_token_pool.req_to_token
    lengths = [step.prefix + new for new in runner.capture_prepare(step.tokens)[0].extend_seq_lens_cpu]
    slots = verify_steps.place(lengths, model_runner.page_size)
    before = table[: len(lengths)].clone()
    for row, (first, length) in enumerate(zip(slots, lengths, strict=True)):
        table[row, :length] = torch.arange(first, first + length, device=table.device, dtype=table.dtype)

    def run(chosen: Any, one: Step) -> Any:
        model_runner.prefill_cuda_graph_runner = chosen
        batch = verify_steps.build(runner, one, slots, replays=chosen is runner)
        with torch.no_grad():
            output = model_runner._forward_raw(batch, None)
        if chosen is runner and not output.can_run_graph:
            raise RuntimeError(f"prefill graph: {one.tokens} tokens do not replay: {output.can_run_graph}")
        return output.logits_output.next_token_logits[: len(lengths)].clone()

    eager = model_runner.eager_runner
    try:
        with _attends_as(step):
            for chunk in verify_steps.chunks(step, runner.max_num_tokens):
                run(eager, chunk)
        graph_logits = run(runner, step)
        with _attends_as(step):
            return graph_logits, run(eager, step)
    finally:
        model_runner.prefill_cuda_graph_runner = runner
        table[: len(lengths)] = before
