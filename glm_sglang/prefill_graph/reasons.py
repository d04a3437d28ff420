"""Every prefill step that runs without a graph has a reason: counted, and in the batch log.

Target        ModelRunner._forward_raw, whose `can_run_graph` is a bare False that SGLang logs and counts.
Why           an eager step costs several times the launches; nobody sees why it ran eagerly.
How           the False becomes a `Verdict`, an int that is falsy and prints its reason, and travels where SGLang
              carries the flag: into "Prefill batch …, cuda graph: False (above the largest bucket, …)".
Upstream      none.
Goes when     SGLang says why it did not replay.
"""

from __future__ import annotations

from typing import Any

from glm_sglang.prefill_graph import options

# The label values of glm_sglang:prefill_graph_eager_total. Few, and each says what to change.
DISABLED = "disabled"
NOT_CAPTURED = "not_captured"
ABOVE_LARGEST = "above_largest_bucket"
PADDING = "too_much_padding"
CONTEXT = "context_too_long"
CP_INACTIVE = "cp_inactive"
CP_BUCKET = "cp_rows_fit_no_bucket"
RANK_VOTE = "a_rank_voted_against"
IDLE_RANK = "a_rank_is_idle"
EMBEDDINGS = "input_embeddings"
HIDDEN_STATES = "hidden_states_wanted"
LORA = "lora"
OTHER = "other"

WORDS = {
    DISABLED: "graphs are disabled",
    NOT_CAPTURED: "no bucket was captured",
    ABOVE_LARGEST: "above the largest bucket",
    PADDING: "more padding than rows",
    CONTEXT: "context too long",
    CP_INACTIVE: "too few tokens for context parallelism",
    CP_BUCKET: "its rows fit no bucket of context parallelism",
    RANK_VOTE: "a rank voted against",
    IDLE_RANK: "a rank is idle",
    EMBEDDINGS: "input embeddings",
    HIDDEN_STATES: "hidden states wanted",
    LORA: "LoRA",
    OTHER: "refused by SGLang",
}


class Verdict(int):
    """SGLang's False with a reason: falsy, equal to False, printed as "False (reason)"."""

    reason: str
    detail: str

    def __new__(cls, reason: str, detail: str = "") -> Verdict:
        verdict = super().__new__(cls, 0)
        verdict.reason = reason
        verdict.detail = detail
        return verdict

    def __str__(self) -> str:
        return f"False ({WORDS[self.reason]}{': ' if self.detail else ''}{self.detail})"

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def name_eager_step(result: Any, model_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    """After a forward pass: give an eager prefill step its reason, and count it."""
    if not options.current().ours or result.can_run_graph or model_runner.is_draft_worker:
        return
    if not forward_batch.forward_mode.is_extend_without_speculative():
        return
    from glm_sglang.prefill_graph import counts

    verdict = find(model_runner.prefill_cuda_graph_runner, forward_batch)
    counts.eager(verdict.reason)
    result.can_run_graph = verdict


def find(runner: Any, batch: Any) -> Verdict:
    """Why `runner` does not replay `batch`: what this rank itself has against it, then what other ranks have.

    UPSTREAM: PrefillCudaGraphRunner.can_run_graph, .can_replay_locally. Where counts are synced, also where there is no
    other rank to vote, the vote is on can_replay_locally of the step as it was before its padding.
    """
    if runner is None or not hasattr(runner, "capture_num_tokens"):
        return Verdict(DISABLED)
    if not runner.capture_num_tokens:
        return Verdict(NOT_CAPTURED)
    if batch.input_embeds is not None or batch.replace_embeds is not None:
        return Verdict(EMBEDDINGS)
    if runner.capture_hidden_mode < batch.capture_hidden_mode:
        return Verdict(HIDDEN_STATES)
    longest = runner._batch_max_context_len(batch)
    limits = [limit for limit in (runner.max_context_size, runner.max_seq_len) if limit is not None]
    if limits and (longest is None or longest > min(limits)):
        return Verdict(CONTEXT, f"{longest} > {min(limits)} tokens")
    counts = batch.global_num_tokens_cpu
    tokens = len(batch.input_ids) if counts is None else sum(batch.extend_seq_lens_cpu)
    if tokens > runner.max_num_tokens:
        return Verdict(ABOVE_LARGEST, f"{tokens} > {runner.max_num_tokens} tokens")
    bucket = next((size for size in runner.capture_num_tokens if size >= tokens), None)
    if bucket is not None and bucket > 2 * tokens:  # UPSTREAM: _MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR
        return Verdict(PADDING, f"{tokens} tokens in a bucket of {bucket}")
    if runner.enable_cp_bcg_capture:
        return Verdict(CP_BUCKET if _cp_active(batch) else CP_INACTIVE, f"{tokens} tokens")
    if runner.enable_lora:
        return Verdict(LORA)
    if counts is not None and len(counts) > 1 and not batch.can_run_dp_prefill_cuda_graph:
        return Verdict(RANK_VOTE)
    return Verdict(IDLE_RANK if runner._has_inactive_dp_rank(batch) else OTHER)


def _cp_active(batch: Any) -> bool:
    from sglang.srt.layers.cp.utils import is_cp_active

    return bool(is_cp_active(batch))
