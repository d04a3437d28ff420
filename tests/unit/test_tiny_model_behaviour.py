"""What the tiny checkpoint's weights are built for: clear choices, readable text, attention that needs the
top-k.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from glm_sglang.oracle import Oracle

TEXT = (
    "Prefill reads the whole prompt at once and writes its keys to the pool; decode adds a token at a time.\n"
    "A page holds 64 tokens, and the indexer keeps the few that matter.\n\t"
    "Überlong prompts (§4) need chunks: 1, 2, 3!"
)


@pytest.fixture(scope="module")
def oracle(checkpoint: Callable[..., Path]) -> Oracle:
    return Oracle(checkpoint("bf16"))


@pytest.fixture(scope="module")
def routing(oracle: Oracle) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of every MoE layer: sigmoid scores [tokens, experts], and the experts' correction bias."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    gates = [layer.mlp.gate for layer in oracle.model.model.layers if hasattr(layer.mlp, "gate")]

    def keep(gate: Any, _args: Any, output: Any) -> None:
        seen.append((output[0].sigmoid(), gate.e_score_correction_bias))

    handles = [gate.register_forward_hook(keep) for gate in gates]
    oracle.logits(list(TEXT.encode()))
    for handle in handles:
        handle.remove()
    assert len(seen) == 4
    return seen


def test_every_expert_is_used_and_none_by_a_hair(routing: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for scores, bias in routing:
        ranked = (scores + bias).sort(-1, descending=True)
        assert set(ranked.indices[:, :4].flatten().tolist()) == set(range(8))
        margin = ranked.values[:, 3] - ranked.values[:, 4]
        assert float(margin.min()) > 0.015  # rounding to bf16 moves a score by about 0.001


def test_the_correction_bias_decides_some_choices_and_not_all(
    routing: list[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    for scores, bias in routing:
        plain, corrected = (s.topk(4).indices.sort(-1).values for s in (scores, scores + bias))
        changed = float((plain != corrected).any(-1).float().mean())
        assert 0.05 < changed < 0.6


def test_answers_are_readable_and_vary(oracle: Oracle) -> None:
    answers = [oracle.greedy(list(prompt.encode()), 24) for prompt in (TEXT[:40], TEXT[:120], TEXT)]
    for answer in answers:
        assert all(0x20 <= token < 0x7F for token in answer)
        assert len(set(answer)) >= 6
    assert len({tuple(answer) for answer in answers}) == 3


def test_leaving_out_the_selection_is_seen_in_bf16_too(oracle: Oracle) -> None:
    # Attention to everything instead of the top-k differs by more than the bf16 bound.
    ids = list((TEXT * 2).encode())
    right = torch.tensor(oracle.judge(ids).input_logprobs[1:])
    topk = oracle.config.index_topk
    try:
        for layer in oracle.model.model.layers:
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer.index_topk = len(ids)
        dense = torch.tensor(oracle.judge(ids).input_logprobs[1:])
    finally:
        for layer in oracle.model.model.layers:
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer.index_topk = topk
    differences = (right - dense).abs()
    assert float(differences[: topk - 1].max()) < 1e-5
    assert float(differences[topk:].max()) > 2e-2
