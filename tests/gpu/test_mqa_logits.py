"""DeepGEMM 0.2.5's MQA logits, called as SGLang calls 0.2.3's, against the exact reference."""

from __future__ import annotations

import pytest
import torch
from glm_kernels.mqa_logits import deep_gemm_025, expand, reference

pytestmark = pytest.mark.gpu
HEADS, DIM, PAGE = 32, 128, 64


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """DeepGEMM's measure: 1 − 2⟨x, y⟩ / (⟨x, x⟩ + ⟨y, y⟩)."""
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def e4m3(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(("rows", "keys"), [(1, 64), (130, 130), (512, 3000), (2048, 8192)])
def test_ragged(rows: int, keys: int) -> None:
    q, k = e4m3(rows, HEADS, DIM, seed=1), e4m3(keys, DIM, seed=2)
    scales, weights = torch.rand(keys, device="cuda") + 0.5, torch.randn(rows, HEADS, device="cuda")
    ends = torch.linspace(1, keys, rows, device="cuda").int()
    starts = (ends // 3).int()
    got = deep_gemm_025.fp8_mqa_logits(q, (k, scales), weights, starts, ends, clean_logits=False)
    assert got.shape == (rows, keys)
    expected = reference.ragged(q, k, scales, weights, starts, ends)
    inside = expected > float("-inf")
    assert calc_diff(got[inside], expected[inside]) < 1e-5


@pytest.mark.parametrize("lengths", [[1], [64, 65, 1000], [4096] * 4])
def test_paged(lengths: list[int]) -> None:
    import deep_gemm

    batch, longest = len(lengths), max(lengths)
    pages = -(-longest // PAGE)
    cache = torch.empty(batch * pages, PAGE * (DIM + 4), dtype=torch.uint8, device="cuda")
    cache[:, : PAGE * DIM] = e4m3(batch * pages, PAGE * DIM, seed=3).view(torch.uint8)
    cache[:, PAGE * DIM :] = (torch.rand(batch * pages, PAGE, device="cuda") + 0.5).view(torch.uint8)
    table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
    q, weights = e4m3(batch, 1, HEADS, DIM, seed=4), torch.randn(batch, HEADS, device="cuda")
    context = torch.tensor(lengths, device="cuda", dtype=torch.int32)[:, None]
    schedule = deep_gemm.get_paged_mqa_logits_metadata(context, PAGE, deep_gemm.get_num_sms())
    got = deep_gemm_025.fp8_paged_mqa_logits(
        q,
        cache.view(-1, PAGE, 1, DIM + 4),
        weights,
        context,
        table,
        schedule,
        pages * PAGE,
        clean_logits=False,
    )
    keys, scales = reference.unpack_pages(cache)
    for i, length in enumerate(lengths):
        slots = (table[i, :, None] * PAGE + torch.arange(PAGE, device="cuda")).reshape(-1)[:length].long()
        start, end = torch.zeros(1, device="cuda").int(), torch.full((1,), length, device="cuda").int()
        expected = reference.ragged(q[i], keys[slots], scales[slots], weights[i : i + 1], start, end)
        assert calc_diff(got[i : i + 1, :length], expected) < 1e-5


@pytest.mark.parametrize("keys", [1, 100, 2048, 2049, 20000])
def test_expanding_moves_exactly_the_ranges(keys: int) -> None:
    rows = 300
    ends = torch.randint(0, keys + 1, (rows,), device="cuda").int()
    starts = (ends * torch.rand(rows, device="cuda")).int()
    starts[::3] = 0
    logits = torch.randn(rows, keys, device="cuda")
    expected = expand.expand_reference(logits, starts, ends)
    got = expand.expand_(logits.clone(), starts, ends)
    inside = expected > float("-inf")
    assert torch.equal(got[inside], expected[inside])


def test_cleaning_is_refused() -> None:
    with pytest.raises(ValueError, match="clean_logits=True"):
        deep_gemm_025.fp8_mqa_logits(*[torch.empty(0)] * 2, *[torch.empty(0)] * 3)  # type: ignore[arg-type]
