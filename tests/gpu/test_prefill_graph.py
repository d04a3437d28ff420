"""Prefill graphs on a GPU: the reproducer of sglang issue 37606 with its cost, and the kernels that are captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glm_sglang.prefill_graph import lifetime, options
from glm_sglang.prefill_graph.options import Options

pytestmark = pytest.mark.gpu
ROWS, WIDTH = 1024, 512  # of a bridge: 1 MiB in bf16


@pytest.fixture
def breakable(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's breakable graph, with our hook on it as the plugin would put it; `options.current` decides."""
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
        breakable_cuda_graph as module,
    )

    original = module._weak_ref_if_tensor
    monkeypatch.setattr(module, "_weak_ref_if_tensor", lambda value: lifetime.keep(original, value))
    monkeypatch.setattr(lifetime, "_kept", lifetime.Kept())
    return module


def use(monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    monkeypatch.setattr(options, "current", lambda: Options(mode=mode))


def bucket(module: Any, pool: Any, stream: Any, seen: list[torch.Tensor], head: float, tail: float) -> Any:
    """A bucket of two segments around a break that fills the tail of its input once and reads all of it."""
    filled = False

    def fill(bridge: torch.Tensor) -> None:
        nonlocal filled
        if not filled:
            bridge[ROWS // 2 :].fill_(tail)
            filled = True
        bridge[: ROWS // 2].fill_(head)
        seen.append(bridge.clone())

    attention = module.eager_on_graph(fill)
    graph = module.BreakableCUDAGraph()
    with module.BreakableCUDAGraphCapture(graph, pool=pool, stream=stream):
        bridge = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda")
        attention(bridge)
        del bridge
        after = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda")
        after.fill_(-head)
        del after
    torch.cuda.synchronize()
    return graph


def replayed(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # one for all buckets, as SGLang has
    seen: list[torch.Tensor] = []
    first = bucket(module, pool, stream, seen, head=1.0, tail=7.0)
    second = bucket(module, pool, stream, [], head=2.0, tail=9.0)
    second.replay()
    first.replay()
    torch.cuda.synchronize()
    return seen[0], seen[-1]


def test_stock_lets_a_later_bucket_overwrite_what_a_break_reads(
    breakable: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, "off")
    captured, later = replayed(breakable)
    assert not torch.equal(captured, later)


def test_ours_keeps_it_and_counts_what_that_costs(breakable: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "auto")
    captured, later = replayed(breakable)
    assert torch.equal(captured, later)
    assert lifetime.kept().bytes >= 2 * ROWS * WIDTH * 2


def test_breaks_for_which_every_replay_writes_share_one_layers_memory(
    breakable: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, "auto")
    layers, names = 4, (1, 2, 3)
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    result = torch.zeros(layers, ROWS, WIDTH, dtype=torch.bfloat16, device="cuda")
    addresses: set[int] = set()

    def attend(queries: torch.Tensor, out: torch.Tensor) -> None:
        addresses.update((queries.data_ptr(), out.data_ptr()))
        out.copy_(-queries)

    attention = breakable.eager_on_graph(attend)
    graphs = {}
    for name in names:
        graphs[name] = breakable.BreakableCUDAGraph()
        with breakable.BreakableCUDAGraphCapture(graphs[name], pool=pool, stream=stream):
            for layer in range(layers):
                queries = torch.full((ROWS, WIDTH), 10.0 * name + layer, dtype=torch.bfloat16, device="cuda")
                out = torch.empty_like(queries)
                with lifetime.rewritten():
                    attention(queries, out)
                result[layer].copy_(out)
                del queries, out
    assert lifetime.kept().bytes == 0
    assert len(addresses) == 2
    for name in (3, 1, 2, 2, 1, 3):
        graphs[name].replay()
        torch.cuda.synchronize()
        expected = [-(10.0 * name + layer) for layer in range(layers)]
        assert [rows.unique().tolist() for rows in result] == [[value] for value in expected]


@pytest.mark.parametrize("rows", [128, 1024])
def test_sparse_attention_takes_lengths_and_slots_from_device_memory_when_it_is_captured(rows: int) -> None:
    from sglang.kernels.ops.attention.flash_mla_interface import flash_mla_sparse_fwd

    generator = torch.Generator("cuda").manual_seed(5)
    slots, topk = 8192, 2048
    kv = torch.randn(slots, 1, 576, device="cuda", dtype=torch.bfloat16, generator=generator) / 10
    q = torch.randn(rows, 64, 576, device="cuda", dtype=torch.bfloat16, generator=generator)
    indices = torch.zeros(rows, 1, topk, dtype=torch.int32, device="cuda")
    lengths = torch.ones(rows, dtype=torch.int32, device="cuda")

    def attend() -> torch.Tensor:
        out: torch.Tensor = flash_mla_sparse_fwd(
            q=q, kv=kv, indices=indices, sm_scale=0.06, d_v=512, attn_sink=None, topk_length=lengths
        )[0]
        return out

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = attend()
    for longest in (1, 64, 700, topk):
        wanted = torch.randint(1, longest + 1, (rows,), device="cuda", generator=generator, dtype=torch.int32)
        chosen = torch.rand(rows, slots, device="cuda", generator=generator).topk(topk).indices.int()
        columns = torch.arange(topk, device="cuda")
        lengths.copy_(wanted)
        indices.copy_(torch.where(columns < wanted[:, None], chosen, -1)[:, None, :])
        graph.replay()
        expected = attend()
        torch.cuda.synchronize()
        assert torch.isfinite(held).all()
        torch.testing.assert_close(held, expected, rtol=0, atol=1e-3)


def test_a_padding_row_is_finite_whatever_its_other_indices_are() -> None:
    from sglang.kernels.ops.attention.flash_mla_interface import flash_mla_sparse_fwd

    kv = torch.zeros(64, 1, 576, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(128, 64, 576, device="cuda", dtype=torch.bfloat16)
    indices = torch.full((128, 1, 2048), -1, dtype=torch.int32, device="cuda")
    indices[:, :, 0] = 0
    lengths = torch.ones(128, dtype=torch.int32, device="cuda")
    out = flash_mla_sparse_fwd(
        q=q, kv=kv, indices=indices, sm_scale=0.06, d_v=512, attn_sink=None, topk_length=lengths
    )[0]
    assert torch.equal(out, torch.zeros_like(out)), "one key of zeros: its value is zero"


@pytest.mark.parametrize("bucket", [256, 1024])
def test_dense_attention_takes_request_boundaries_from_device_memory_when_it_is_captured(bucket: int) -> None:
    from sglang.srt.layers.attention.dsa_backend import flash_attn_varlen_func

    from glm_sglang.prefill_graph import dense

    heads, dim = 8, 256
    generator = torch.Generator("cuda").manual_seed(6)
    q, k, v = (
        torch.randn(bucket, heads, dim, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(3)
    )
    ends = torch.tensor(dense.boundaries([bucket], bucket), dtype=torch.int32, device="cuda")

    def attend() -> torch.Tensor:
        out: torch.Tensor = flash_attn_varlen_func(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=ends,
            cu_seqlens_k=ends,
            max_seqlen_q=bucket,
            max_seqlen_k=bucket,
            softmax_scale=0.06,
            causal=True,
        )
        return out

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = attend()
    for lengths in ([bucket], [bucket - 1], [1], [100, 1, 60], [30] * 7):
        ends.copy_(torch.tensor(dense.boundaries(lengths, bucket), dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.isfinite(held).all(), "padding rows too"
        start = 0
        for length in lengths:
            rows = slice(start, start + length)
            start += length
            mine = [x[rows].transpose(0, 1).float() for x in (q, k, v)]
            expected = torch.nn.functional.scaled_dot_product_attention(
                mine[0], mine[1], mine[2], is_causal=True, scale=0.06
            ).transpose(0, 1)
            torch.testing.assert_close(held[rows].float(), expected, rtol=2e-2, atol=2e-2)
