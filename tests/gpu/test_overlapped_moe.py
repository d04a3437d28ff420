"""The overlapped MoE path on real GPUs: kernels equal references, and the layer the exact one, one rank a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from glm_kernels.mega_moe import Arithmetic, ExpertWeights, calc_diff, mega_moe_reference, numerics
from glm_kernels.overlapped_moe import (
    Collective,
    Geometry,
    Options,
    OverlappedMoe,
    Symmetric,
    exact_plan,
    row_kernels,
    worst_case_plan,
)
from glm_kernels.overlapped_moe import rows as reference
from glm_kernels.overlapped_moe.backend import CudaBackend
from glm_kernels.overlapped_moe.layout import Layout, counts_for, layout_reference
from glm_kernels.overlapped_moe.layout_kernels import LayoutKernels
from glm_kernels.overlapped_moe.plan import Chunk
from glm_kernels.overlapped_moe.transport import cuda_symmetric_memory

from tests.gpu.ranks import worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs SM90"
    ),
]
HIDDEN, WIDTH, TOP_K, LOCAL = 1024, 512, 8, 16
SCALING, BOUND = 2.5, 1e-3


def codes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device="cuda").view(numerics.E4M3)


def same(a: torch.Tensor, b: torch.Tensor, share: float) -> bool:
    """Codes that differ are at most this share, and by one step: division and exp round differently by an ulp."""
    left, right = (x.view(torch.uint8).int() for x in (a, b))
    unlike = left != right
    return float(unlike.float().mean()) <= share and bool(((left - right).abs()[unlike] == 1).all())


@pytest.mark.parametrize(("hidden", "width"), [(6144, 2048), (1024, 512), (384, 128)])
def test_row_kernels(hidden: int, width: int) -> None:
    torch.manual_seed(1)
    tokens, device = 700, torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    x[5] = 0
    got, want = codes(tokens, hidden), codes(tokens, hidden)
    scales = [torch.empty(tokens, hidden // 128, device=device) for _ in "ab"]
    row_kernels.quantise(x, got, scales[0], grid=300)
    reference.quantise_reference(x, want, scales[1])
    assert same(got, want, 1e-3)
    assert torch.allclose(*scales, rtol=1e-6, atol=0)

    of = Geometry(2, 1, LOCAL, TOP_K, hidden, width, tokens)
    ids = torch.randint(-1, 2 * LOCAL, (2, tokens, TOP_K), dtype=torch.int32, device=device)
    plan = exact_plan(of, counts_for(of, ids))
    layouts = [Layout.empty(plan, device) for _ in "ab"]
    LayoutKernels(plan, device)(ids, layouts[0])
    layout_reference(ids, plan, layouts[1])
    assert torch.equal(layouts[0].place, layouts[1].place)
    assert torch.equal(layouts[0].expert, layouts[1].expert)

    place, table = layouts[0].place[0], reference.scale_table(plan, hidden // 128).to(device)
    a, b = codes(plan.rows, hidden), codes(plan.rows, hidden)
    flat = [torch.ones(plan.rows * hidden // 128, device=device) for _ in "ab"]
    row_kernels.place(want, scales[1], place, a, flat[0], table, grid=100)
    reference.place_reference(want, scales[1], place, b, flat[1], table)
    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert torch.equal(*flat)

    gate_up = torch.randn(plan.rows, 2 * width, device=device).bfloat16()
    expert, one = layouts[0].expert, Chunk(0, 0, LOCAL, 0, plan.rows)
    a, b = codes(plan.rows, width), codes(plan.rows, width)
    parts = [
        reference.chunk_scales(torch.ones(plan.rows * width // 128, device=device), one, width // 128)
        for _ in "ab"
    ]
    row_kernels.swiglu(gate_up, expert, a, parts[0], grid=200)
    reference.swiglu_reference(gate_up, expert, b, parts[1])
    live = expert >= 0
    assert same(a.view(torch.uint8)[live], b.view(torch.uint8)[live], 1e-2)
    assert torch.allclose(parts[0][live], parts[1][live], rtol=1e-5, atol=0)

    slots, weights = (
        torch.randn(plan.rows, hidden, device=device).bfloat16(),
        torch.rand(tokens, TOP_K).cuda(),
    )
    partials = torch.randn(3, tokens, hidden, device=device).bfloat16()
    sums = [torch.empty(tokens, hidden, device=device) for _ in "ab"]
    for given in (None, partials):
        row_kernels.reduce(slots, place, weights, SCALING, given, sums[0], grid=64)
        reference.reduce_reference(slots, place, weights, SCALING, given, sums[1])
        assert torch.allclose(*sums, rtol=1e-5, atol=1e-5)


def experts_of(rank: int) -> ExpertWeights:
    draw = torch.Generator().manual_seed(100 + rank)
    w13 = torch.randn(LOCAL, 2 * WIDTH, HIDDEN, generator=draw) * HIDDEN**-0.5
    w2 = torch.randn(LOCAL, HIDDEN, WIDTH, generator=draw) * 2 * WIDTH**-0.5
    (c13, s13), (c2, s2) = numerics.quantize_blocks(w13), numerics.quantize_blocks(w2)
    return ExpertWeights(c13.cuda(), c2.cuda(), s13.cuda(), s2.cuda())


def batch(rank: int, count: int, experts: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(count, HIDDEN, generator=draw).bfloat16()
    ids = torch.rand(count, experts, generator=draw).topk(TOP_K, dim=-1).indices.int()
    weights = torch.rand(count, TOP_K, generator=draw) + 0.1
    if count > 2:
        ids[-1] = -1
    return x.cuda(), ids.cuda(), (weights / weights.sum(-1, keepdim=True)).cuda()


def made(rank: int, ranks: int, tokens: int, how: dict[str, Any]) -> OverlappedMoe:
    """The path for `tokens` a rank and any routing; `how`: options, and what the transport is."""
    how = dict(how)
    dispatch, combine = how.pop("dispatch", "copy_engine"), how.pop("combine", "peer_writes")
    shares = how.pop("shares", (1, 1))
    device, group = torch.device("cuda", rank), dist.group.WORLD
    geometry = Geometry(ranks, rank, LOCAL, TOP_K, HIDDEN, WIDTH, tokens)
    plan, options = worst_case_plan(geometry, shares=shares), Options(**how)
    assert group is not None
    transport: Any
    if dispatch == "nccl":
        transport = Collective(geometry, group, device)
    else:
        transport = Symmetric(
            geometry, cuda_symmetric_memory(group, device), dispatch=dispatch, combine=combine
        )
    return OverlappedMoe(
        plan, transport, CudaBackend(plan, device, options), scaling=SCALING, options=options
    )


def check(out: torch.Tensor, given: Any, experts: ExpertWeights, what: object) -> None:
    want = mega_moe_reference(
        *given, experts, arithmetic=Arithmetic.SM90, routed_scaling_factor=SCALING, group=dist.group.WORLD
    )
    diff = calc_diff(out, want)
    assert diff <= BOUND, (what, diff)


WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"order": "peers_early", "shares": (2, 1), "early_finish": True},
    {"side_sms": 0, "shares": (1,), "order": "own_first", "combine": "copy_engine"},
    {"dispatch": "peer_reads"},
    {"leave_sms": False, "gate_cycles": 0},
    {"dispatch": "nccl"},
)


# --- what every rank does ---


def eager(rank: int, ranks: int) -> None:
    experts = experts_of(rank)
    for how in WAYS:
        for seed, most in enumerate((1, 130, 2000)):
            moe = made(rank, ranks, most, how)
            for counts in (
                [most] * ranks,
                [most // (r + 1) for r in range(ranks)],
                [most] + [0] * (ranks - 1),
            ):
                given = batch(rank, counts[rank], LOCAL * ranks, seed)
                out = torch.full_like(given[0], float("nan"))
                moe(*given, experts, out)
                check(out, given, experts, (how, counts))


def captured(rank: int, ranks: int) -> None:
    """One graph, replayed over other tokens and ids than it was captured with, twice with the same bits."""
    experts, most = experts_of(rank), 1500
    for how in WAYS:
        moe = made(rank, ranks, most, how)
        given = batch(rank, most, LOCAL * ranks, 5)
        out = torch.zeros_like(given[0])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                moe(*given, experts, out)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            moe(*given, experts, out)
        for seed in (6, 7):
            for target, fresh in zip(given, batch(rank, most, LOCAL * ranks, seed), strict=True):
                target.copy_(fresh)
            results = []
            for _ in range(3):
                graph.replay()
                results.append(out.clone())
            check(results[0], given, experts, (how, seed))
            assert all(torch.equal(results[0], again) for again in results[1:]), how


@pytest.mark.timeout(240)
@pytest.mark.parametrize("work", [eager, captured], ids=lambda work: str(work.__name__))
def test_against_the_reference(work: Callable[[int, int], None], tmp_path: Path) -> None:
    ranks = torch.cuda.device_count()
    try:
        mp.spawn(worker, args=(ranks, work, tmp_path / "store", tmp_path), nprocs=ranks)
    except Exception:
        pytest.fail("\n".join(file.read_text() for file in sorted(tmp_path.glob("rank*.txt"))) or "no trace")
