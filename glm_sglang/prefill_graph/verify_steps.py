"""The steps that `verify` runs: random requests from the KV pool's first pages on, in tensors of their own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SEED = 37606


@dataclass(frozen=True, slots=True)
class Step:
    """Random tokens for one bucket: `dense` by its dense graph; `prefix` tokens are in the pool already."""

    tokens: int
    dense: bool = False
    prefix: int = 0


def counts(model_runner: Any, runner: Any, bucket: int) -> list[int]:
    """Tokens of fresh steps for this bucket: full, and one row short; no larger than the KV pool, as no step ever is."""
    page = model_runner.page_size
    requests = math.ceil(bucket / model_runner.model_config.context_len)
    room = model_runner.token_to_kv_pool.size - (requests - 1) * page
    below = max((size for size in runner.capture_num_tokens if size < bucket), default=0)
    if room <= below:
        return []
    return sorted({min(bucket, room), max(1, min(bucket - 1, room))} - set(range(below + 1)))


def prefix(model_runner: Any, runner: Any, bucket: int) -> int:
    """Tokens of a cached prefix, whole pages, behind which each row of this bucket has more keys than it may select.

    0 where a fresh step has rows with more, or where context, pool or graphs have no room for it.
    """
    topk = int(getattr(model_runner.model_config.hf_config, "index_topk", 0))
    page = model_runner.page_size
    found = int((topk // page + 1) * page)
    limits = (
        model_runner.token_to_kv_pool.size,
        model_runner.model_config.context_len,
        getattr(runner, "max_context_size", None),
        getattr(runner, "max_seq_len", None),
    )
    return found if bucket <= topk and found + bucket <= min(filter(None, limits)) else 0


def chunks(step: Step, largest: int) -> list[Step]:
    """The steps that leave this step's prefix in the pool, none larger than `largest`."""
    starts = range(0, step.prefix, largest)
    return [Step(min(largest, step.prefix - start), prefix=start) for start in starts]


def place(lengths: Sequence[int], page: int) -> list[int]:
    """The first slot of each request, in pages of its own; page 0 takes the padding's writes.

    >>> place([64, 65, 1], 64)
    [64, 128, 256]
    """
    ends = itertools.accumulate((-(-length // page) * page for length in lengths), initial=page)
    return list(ends)[:-1]


def build(runner: Any, step: Step, slots: Sequence[int], *, replays: bool) -> Any:
    """The step's requests, whose first slots are these: one, or without a prefix as few as the context allows."""
    import torch

    batch, _ = runner.capture_prepare(step.tokens)
    generator = torch.Generator(device="cpu").manual_seed(SEED + step.prefix + step.tokens)
    vocabulary = runner.model_runner.model_config.vocab_size
    ids = torch.randint(0, vocabulary, (step.tokens,), generator=generator)
    lengths = batch.extend_seq_lens_cpu
    positions = torch.cat([torch.arange(length) for length in lengths]) + step.prefix
    starts = torch.repeat_interleave(torch.tensor(slots), torch.tensor(lengths))
    for name, value in (("input_ids", ids), ("positions", positions), ("out_cache_loc", starts + positions)):
        setattr(batch, name, value.to(getattr(batch, name).dtype).to(runner.device))
    for name in ("extend_seq_lens", "extend_start_loc", "req_pool_indices"):
        setattr(batch, name, getattr(batch, name).clone())
    for name in ("seq_lens", "seq_lens_cpu", "orig_seq_lens", "extend_prefix_lens"):
        setattr(batch, name, getattr(batch, name) + step.prefix)
    batch.seq_lens_sum += step.prefix * len(lengths)
    batch.extend_prefix_lens_cpu = [step.prefix] * len(lengths)
    if batch.num_token_non_padded is not None:  # UPSTREAM: ForwardBatch.init_new
        batch.global_num_token_non_padded = torch.tensor(step.tokens, dtype=torch.int32, device=runner.device)
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
