"""Attention and indexer of the reference platform against their definitions, written out in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_sglang.reference_platform import attention, indexer
from glm_sglang.reference_platform.sequences import Sequence

HEADS, DIM, V = 3, 20, 16


def by_definition(
    q: torch.Tensor, keys: torch.Tensor, allowed: list[list[int]], v_dim: int, scale: float
) -> torch.Tensor:
    """Softmax attention of each row over the keys it is allowed, one row and head at a time."""
    out = torch.empty(q.shape[0], q.shape[1], v_dim, dtype=torch.float64)
    for row, positions in enumerate(allowed):
        chosen = keys[positions].double()
        for head in range(q.shape[1]):
            weights = (chosen @ q[row, head].double() * scale).softmax(-1)
            out[row, head] = weights @ chosen[:, :v_dim]
    return out


@given(rows=st.integers(1, 9), prefix=st.integers(0, 11), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_dense_is_causal_attention(rows: int, prefix: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    length = prefix + rows
    q = torch.randn(rows, HEADS, DIM, generator=generator)
    keys = torch.randn(length, DIM, generator=generator)
    visible = Sequence(slice(0, rows), torch.arange(length), prefix).visible()
    expected = by_definition(q, keys, [list(range(prefix + i + 1)) for i in range(rows)], V, 0.3)
    torch.testing.assert_close(
        attention.attend_dense(q, keys, visible, V, 0.3).double(), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("block", [1, 4 * 6 * DIM, 1 << 20])  # a row at a time, four rows, all
def test_selected_attends_to_exactly_the_selection(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "GATHER_ELEMENTS", block)
    generator = torch.Generator().manual_seed(1)
    q, keys = torch.randn(9, HEADS, DIM, generator=generator), torch.randn(30, DIM, generator=generator)
    allowed = [torch.randperm(30, generator=generator)[: 1 + i % 6].tolist() for i in range(9)]
    selected = torch.tensor([row + [-1] * (6 - len(row)) for row in allowed], dtype=torch.int32)
    got = attention.attend_selected(q, keys, selected, V, 0.3)
    torch.testing.assert_close(got.double(), by_definition(q, keys, allowed, V, 0.3), rtol=1e-5, atol=1e-6)


def test_selecting_everything_is_dense_attention() -> None:
    q, keys, visible = torch.randn(5, HEADS, DIM), torch.randn(12, DIM), torch.arange(8, 13)
    everything = torch.arange(12, dtype=torch.int32).expand(5, 12).clone()
    everything[everything >= visible[:, None]] = -1
    torch.testing.assert_close(
        attention.attend_selected(q, keys, everything, V, 0.3),
        attention.attend_dense(q, keys, visible, V, 0.3),
    )


@pytest.mark.parametrize("block", [1, 1 << 8, 1 << 21])
def test_index_scores_by_definition(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """score[t, s] = Σ_h w[t, h] relu(q[t, h] · k[s]) for s that t may see, −inf elsewhere."""
    monkeypatch.setattr(indexer, "SCORE_ELEMENTS", block)
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(7, 4, 16, generator=generator), torch.randn(19, 16, generator=generator)
    weights = torch.randn(7, 4, generator=generator)
    visible = torch.arange(13, 20)
    expected = torch.einsum(
        "th,ths->ts", weights.double(), torch.einsum("thd,sd->ths", q.double(), k.double()).relu()
    )
    expected[torch.arange(19) >= visible[:, None]] = float("-inf")
    got = indexer.scores(q, k, weights, visible)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@given(length=st.integers(1, 12), k=st.integers(1, 8), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_select_takes_the_k_highest(length: int, k: int, seed: int) -> None:
    """What is selected is, as a set, the k highest of the finite scores; the rest of the row is −1."""
    score = torch.randn(3, length, generator=torch.Generator().manual_seed(seed))
    score[torch.arange(length) >= torch.tensor([1, length // 2 + 1, length])[:, None]] = float("-inf")
    for row, chosen in zip(score.tolist(), indexer.select(score, k).tolist(), strict=True):
        finite = [i for i, value in enumerate(row) if value > float("-inf")]
        best = sorted(finite, key=lambda i: -row[i])[:k]
        assert sorted(i for i in chosen if i >= 0) == sorted(best)
        assert chosen.count(-1) == k - len(best)
