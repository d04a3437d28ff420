"""A step as SGLang pads it where ranks sync their token counts: tensor parallelism of two with MegaMoE, without CP."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

RANKS = 2


def blank(**fields: Any) -> Any:
    """A ForwardBatch with every field at its default, or None."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    batch = object.__new__(ForwardBatch)
    for field in dataclasses.fields(ForwardBatch):
        value = None if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        setattr(batch, field.name, fields.get(field.name, value))
    return batch


def step(tokens: int, prefix: int = 0) -> Any:
    """One request behind `prefix` tokens in the pool, as ForwardBatch.init_new makes it on each rank."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    total = prefix + tokens
    return blank(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.arange(prefix, total),
        out_cache_loc=torch.arange(64, 64 + tokens),
        req_pool_indices=torch.tensor([1]),
        seq_lens=torch.tensor([total]),
        seq_lens_cpu=torch.tensor([total]),
        seq_lens_sum=total,
        extend_num_tokens=tokens,
        extend_seq_lens=torch.tensor([tokens]),
        extend_seq_lens_cpu=[tokens],
        extend_prefix_lens=torch.tensor([prefix]),
        extend_prefix_lens_cpu=[prefix],
        extend_start_loc=torch.tensor([0]),
        extend_logprob_start_lens_cpu=[0],
        global_num_tokens_cpu=[tokens],
        global_num_tokens_for_logprob_cpu=[1],
        global_num_tokens_gpu=torch.tensor([tokens]),
        is_extend_in_batch=True,
        can_run_dp_prefill_cuda_graph=True,
    )


def install(monkeypatch: pytest.MonkeyPatch, buckets: Sequence[int]) -> Any:
    """SGLang's padding as it runs there, on a CPU; returns the model runner that it asks."""
    from sglang.srt.batch_overlap.two_batch_overlap import TboForwardBatchPreparer
    from sglang.srt.layers.dp_attention import DpPaddingMode
    from sglang.srt.model_executor import forward_batch_info as module

    parallel = SimpleNamespace(
        attn_tp_size=RANKS, attn_dp_size=1, tp_size=RANKS, attn_cp_size=1, num_dp_ranks=1
    )
    prefill = SimpleNamespace(prefill=SimpleNamespace(bs=list(buckets)))
    execution = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=prefill))
    for name, value in {
        "_is_cpu": True,  # else it pins memory
        "get_parallel": lambda: parallel,
        "get_exec": lambda: execution,
        "prefill_graph_tolerates_sum_len": lambda: False,  # moe.entry.one_bucket
        "dp_slot_in": lambda counts: 0,
        "set_dp_buffer_len_from_batch": lambda batch: None,
        "set_is_extend_in_batch": lambda value: None,
        "_mega_moe_materializes_idle_rank": lambda batch: False,
        "_elastic_should_preserve_local_token_counts": lambda **_: False,
    }.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(TboForwardBatchPreparer, "prepare", classmethod(lambda cls, **_: None))
    mode = classmethod(lambda cls, *_: DpPaddingMode.SUM_LEN)
    monkeypatch.setattr(DpPaddingMode, "get_dp_padding_mode", mode)
    return SimpleNamespace(
        is_draft_worker=False,
        attn_tp_sequence_sharded=lambda tokens: True,
        attn_backend=SimpleNamespace(
            get_cpu_graph_seq_len_fill_value=lambda: 1, late_layer_num_tokens=lambda _: None
        ),
    )
