"""Whose rows attention has: lengths end with them, and behind them the output is cleared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm_sglang.prefill_graph import options, rows
from glm_sglang.prefill_graph.options import Options


def batch(mode: str = "EXTEND", own: int | None = 5, shared: Any = None) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return SimpleNamespace(
        forward_mode=ForwardMode[mode], global_num_token_non_padded_cpu=own, attn_cp_metadata=shared
    )


def padded(_: Any, lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat((lengths, torch.zeros(3)))


@pytest.mark.parametrize(
    ("chosen", "step", "kept"),
    [
        ("auto", batch(), True),
        ("auto", batch("MIXED"), True),
        ("off", batch(), False),
        ("auto", batch("DECODE"), False),
        ("auto", batch("TARGET_VERIFY"), False),
        ("auto", batch(own=0), False),  # a rank without a request: attention has the padding's rows
        ("auto", batch(own=None), False),
        ("auto", batch(shared=SimpleNamespace(graph_num_tokens=8)), True),
        ("auto", batch(shared=SimpleNamespace()), False),  # eagerly under context parallelism
    ],
)
def test_lengths_are_those_of_attentions_rows(
    monkeypatch: pytest.MonkeyPatch, chosen: Any, step: Any, kept: bool
) -> None:
    monkeypatch.setattr(options, "current", lambda: Options(mode=chosen))
    assert len(rows.cached_lengths(padded, step, torch.ones(5))) == (5 if kept else 8)


@pytest.mark.parametrize(
    ("chosen", "step", "raw", "expected"),
    [
        ("auto", batch(), 8, 5),
        ("auto", batch(), 5, 5),
        ("auto", batch(own=8), 5, 5),
        ("auto", batch(), None, None),  # while a graph is captured
        ("auto", batch(own=None), 8, None),
        ("auto", batch(shared=object()), 8, None),
        ("off", batch(), 8, None),
    ],
)
def test_the_output_is_cleared_behind_the_steps_own_rows(
    monkeypatch: pytest.MonkeyPatch, chosen: Any, step: Any, raw: int | None, expected: int | None
) -> None:
    """None: SGLang's result stays."""
    monkeypatch.setattr(options, "current", lambda: Options(mode=chosen))
    assert rows.output_rows(raw, step, raw) == expected
