"""Experts, FP8 blocks and index keys of the reference platform."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from glm_sglang.reference_platform import block_fp8, index_keys
from glm_sglang.reference_platform.experts import grouped_experts
from glm_sglang.reference_platform.sequences import sequences


def test_grouped_experts_by_definition() -> None:
    """One token and slot at a time in float64; slots of −1 and of other ranks' experts add nothing."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(11, 8, generator=generator)
    w13, w2 = torch.randn(5, 12, 8, generator=generator), torch.randn(5, 8, 6, generator=generator)
    ids = (
        torch.stack([torch.randperm(7, generator=generator)[:3] for _ in range(11)]) - 1
    )  # −1 … 5; 5 is not here
    weights = torch.rand(11, 3, generator=generator)
    expected = torch.zeros(11, 8, dtype=torch.float64)
    for token in range(11):
        for slot in range(3):
            expert = int(ids[token, slot])
            if 0 <= expert < 5:
                gate, up = (w13[expert].double() @ x[token].double()).chunk(2)
                expected[token] += weights[token, slot] * (w2[expert].double() @ (F.silu(gate) * up))
    got = grouped_experts(x, ids.to(torch.int32), weights, w13, w2)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


def test_no_tokens() -> None:
    out = grouped_experts(
        torch.empty(0, 8),
        torch.empty(0, 2, dtype=torch.int32),
        torch.empty(0, 2),
        torch.ones(2, 4, 8),
        torch.ones(2, 8, 2),
    )
    assert out.shape == (0, 8)


@pytest.mark.parametrize("shape", [(128, 128), (129, 200), (1, 384), (300, 127)])
def test_blocks_scale_their_own_rows_and_columns(shape: tuple[int, int]) -> None:
    n, k = shape
    scales = torch.rand(-(-n // 128), -(-k // 128)) + 0.5
    got = block_fp8.dequantise_blocks(torch.ones(n, k), scales)
    for row in (0, n // 2, n - 1):
        for column in (0, k // 2, k - 1):
            assert got[row, column] == scales[row // 128, column // 128]


def test_other_block_sizes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"weight_block_size is \[64, 64\]"):
        block_fp8.ReferenceFp8Config.from_config({"weight_block_size": [64, 64]})


def cache(
    mode: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> index_keys.ReferenceIndexKeyCache:
    """A cache of 4 pages and 3 layers, the middle one shared."""
    from contextlib import nullcontext

    monkeypatch.setenv(index_keys.VARIABLE, mode)
    pool: Any = SimpleNamespace(
        page_size=64, index_kpool=1, index_page_size=64, index_head_dim=128, layer_num=3, start_layer=0, dtype=dtype,
        device="cpu", skip_topk_layers=[False, True, False], custom_mem_pool=None, layer_transfer_counter=None,
        index_k_with_scale_buffer_dtype=torch.uint8, memory_saver_adapter=SimpleNamespace(region=lambda _: nullcontext()),
    )  # fmt: skip
    return index_keys.ReferenceIndexKeyCache(pool, 4 * 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_keys_come_back_bit_for_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = cache("exact", dtype, monkeypatch)
    slots = torch.tensor([0, 63, 64, 65, 200])
    rows = torch.randn(5, 128).to(dtype)
    keys.store(2, slots, rows)
    assert torch.equal(keys.load(2, slots), rows.float())
    assert torch.equal(keys.load(0, slots), torch.zeros(5, 128))  # another layer's


def test_fp8_keys_take_132_bytes_and_err_by_at_most_half_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """E4M3 has 3 mantissa bits: a relative error of at most 2⁻⁴, or half a subnormal step of the scaled row."""
    keys = cache("fp8", torch.bfloat16, monkeypatch)
    assert keys.buffer[0].shape[1] == 64 * 132
    rows = torch.randn(40, 128) * torch.logspace(-3, 3, 40)[:, None]
    slots = torch.arange(50, 90)
    keys.store(0, slots, rows)
    error = (keys.load(0, slots) - rows).abs()
    step = rows.abs().amax(-1, keepdim=True) / 448
    assert torch.all(error <= rows.abs() / 16 + step * 2**-10)


@pytest.mark.parametrize("mode", ["exact", "fp8"])
def test_moves_and_copies_carry_whole_rows(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = cache(mode, torch.float32, monkeypatch)
    slots = torch.arange(64, 128)
    keys.store(0, slots, torch.randn(64, 128))
    before = keys.load(0, slots)
    saved = keys.cpu_copy(slots)
    keys.move(torch.arange(5, 10), torch.arange(64, 69))
    assert torch.equal(keys.load(0, torch.arange(5, 10)), before[:5])
    keys.store(0, slots, torch.zeros(64, 128))
    keys.load_cpu_copy(saved, slots)
    assert torch.equal(keys.load(0, slots), before)


def test_an_unknown_mode_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="GLM_SGLANG_INDEX_KEYS is 'fp16'; allowed: exact, fp8"):
        cache("fp16", torch.float32, monkeypatch)


def batch(decode: bool, lengths: list[int], prefixes: list[int]) -> Any:
    mode = SimpleNamespace(is_decode_or_idle=lambda: decode)
    return SimpleNamespace(
        seq_lens=torch.tensor(lengths), req_pool_indices=torch.arange(len(lengths)), forward_mode=mode,
        extend_prefix_lens=None if decode else torch.tensor(prefixes),
    )  # fmt: skip


def test_a_batch_splits_by_request() -> None:
    table = torch.arange(300).view(3, 100)
    first, second = sequences(batch(False, [10, 7], [4, 0]), table, 13)
    assert (first.rows, first.first, first.length) == (slice(0, 6), 4, 10)
    assert first.visible().tolist() == [5, 6, 7, 8, 9, 10]
    assert second.slots.tolist() == list(range(100, 107))
    assert [s.visible().tolist() for s in sequences(batch(True, [10, 7], []), table, 2)] == [[10], [7]]


def test_a_batch_with_too_few_rows_is_an_error() -> None:
    with pytest.raises(AssertionError, match="12 rows, its requests need 13"):
        list(sequences(batch(False, [10, 7], [4, 0]), torch.arange(300).view(3, 100), 12))


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [({0, 1}, 2, "0|1"), ({2, 3, 4, 5, 9}, 2, "2,3|4,5"), ({7}, 3, "7|7|7"), ({0, 1, 2}, 1, "0,1,2")],
)
def test_cores_are_dealt_out_to_ranks(
    cores: set[int], ranks: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from glm_sglang.reference_platform import adjustments

    monkeypatch.setattr("os.sched_getaffinity", lambda _: cores)
    assert adjustments.cores_of_ranks(ranks) == expected
