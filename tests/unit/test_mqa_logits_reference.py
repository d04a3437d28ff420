"""The reference of the MQA logits kernels against its definition."""

from __future__ import annotations

import pytest
import torch
from glm_kernels.mqa_logits import deep_gemm_025, reference


def test_by_definition() -> None:
    q, k = torch.randn(3, 2, 8).to(torch.float8_e4m3fn), torch.randn(5, 8).to(torch.float8_e4m3fn)
    scales, weights = torch.rand(5) + 0.5, torch.randn(3, 2)
    got = reference.ragged(q, k, scales, weights, torch.tensor([0, 1, 4]), torch.tensor([1, 4, 5]))
    for t, (start, end) in enumerate(((0, 1), (1, 4), (4, 5))):
        for s in range(5):
            if not start <= s < end:
                assert got[t, s] == float("-inf")
                continue
            dots = [max(0.0, float(q[t, h].double() @ k[s].double())) for h in range(2)]
            expected = float(scales[s]) * sum(float(weights[t, h]) * dots[h] for h in range(2))
            assert float(got[t, s]) == pytest.approx(expected, rel=1e-5)


def test_a_page_holds_its_keys_then_its_scales() -> None:
    keys, scales = torch.randn(2 * 64, 128).to(torch.float8_e4m3fn), torch.rand(2 * 64)
    pages = torch.cat([keys.view(torch.uint8).view(2, -1), scales.view(torch.uint8).view(2, -1)], 1)
    assert pages.shape[1] == 64 * 132
    got_keys, got_scales = reference.unpack_pages(pages)
    assert torch.equal(got_keys.view(torch.uint8), keys.view(torch.uint8))
    assert torch.equal(got_scales, scales)


def test_cleaning_is_refused_before_anything_runs() -> None:
    nothing = torch.empty(0)
    with pytest.raises(ValueError, match="clean_logits=True"):
        deep_gemm_025.fp8_mqa_logits(nothing, (nothing, nothing), nothing, nothing, nothing)


def test_expanding_by_definition() -> None:
    """Column s of row t is what stood at column s − start[t]."""
    from glm_kernels.mqa_logits.expand import expand_reference

    logits = torch.arange(12.0).view(2, 6)
    got = expand_reference(logits, torch.tensor([0, 2]), torch.tensor([3, 5]))
    nothing = float("-inf")
    assert got.tolist() == [[0, 1, 2, nothing, nothing, nothing], [nothing, nothing, 6, 7, 8, nothing]]
