"""The server's MoE path on real GPUs, one rank a GPU, against the exact reference: sizes, chunks, reload, zero scales;
and at GLM-5.x's widths, every row by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from glm_kernels.mega_moe import Arithmetic, ExpertWeights, calc_diff, mega_moe_reference, numerics

from tests.gpu.ranks import worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs SM90"
    ),
]
HIDDEN, WIDTH, TOP_K, LOCAL = 1024, 512, 8, 8
WIDE_HIDDEN, WIDE_WIDTH, WIDE_LOCAL = 6144, 2048, 32
SCALING, BOUND, ROW_BOUND = 2.5, 1e-3, 5e-3
CAPACITY = 1920


def experts_of(rank: int, zero_blocks: bool = False) -> SimpleNamespace:
    """A layer's parameters as SGLang's loader leaves them."""
    draw = torch.Generator().manual_seed(100 + rank)
    w13 = torch.randn(LOCAL, 2 * WIDTH, HIDDEN, generator=draw) * HIDDEN**-0.5
    w2 = torch.randn(LOCAL, HIDDEN, WIDTH, generator=draw) * 2 * WIDTH**-0.5
    made = {}
    for name, w in (("w13", w13), ("w2", w2)):
        codes, scale = numerics.quantize_blocks(w)
        if zero_blocks:
            scale[:, 1, 0] = 0.0
            scale[0, 0, :] = 0.0
        made[f"{name}_weight"], made[f"{name}_weight_scale_inv"] = codes, scale
    return SimpleNamespace(
        **{name: torch.nn.Parameter(t.cuda(), requires_grad=False) for name, t in made.items()}
    )


def reference_weights(ranks: int, zero_blocks: bool = False) -> ExpertWeights:
    """All ranks' experts, in checkpoint layout."""
    parts = [experts_of(rank, zero_blocks) for rank in range(ranks)]

    def codes(name: str) -> torch.Tensor:
        joined = torch.cat([getattr(part, name).data.view(torch.uint8) for part in parts])
        return joined.view(numerics.E4M3)

    def scales(name: str) -> torch.Tensor:
        return torch.cat([getattr(part, f"{name}_scale_inv").data for part in parts])

    return ExpertWeights(codes("w13_weight"), codes("w2_weight"), scales("w13_weight"), scales("w2_weight"))


def wide_experts(rank: int) -> ExpertWeights:
    """This rank's experts at GLM-5.x's widths, drawn on its GPU one by one."""
    draw = torch.Generator("cuda").manual_seed(100 + rank)
    parts: list[list[torch.Tensor]] = [[], [], [], []]
    for _ in range(WIDE_LOCAL):
        w13 = torch.randn(2 * WIDE_WIDTH, WIDE_HIDDEN, generator=draw, device="cuda") * WIDE_HIDDEN**-0.5
        w2 = torch.randn(WIDE_HIDDEN, WIDE_WIDTH, generator=draw, device="cuda") * 2 * WIDE_WIDTH**-0.5
        for kept, one in zip(
            parts, (*numerics.quantize_blocks(w13), *numerics.quantize_blocks(w2)), strict=True
        ):
            kept.append(one)
    codes13, scale13, codes2, scale2 = (torch.stack(part) for part in parts)
    return ExpertWeights(codes13, codes2, scale13, scale2)


def as_loaded(weights: ExpertWeights) -> SimpleNamespace:
    """The same as a layer's parameters, copied: they are arranged in place."""
    named = {
        "w13_weight": weights.w13,
        "w2_weight": weights.w2,
        "w13_weight_scale_inv": weights.w13_scale,
        "w2_weight_scale_inv": weights.w2_scale,
    }
    return SimpleNamespace(
        **{
            name: torch.nn.Parameter(tensor.clone(), requires_grad=False)
            for name, tensor in named.items()
            if tensor is not None
        }
    )


def batch(
    rank: int, count: int, experts: int, seed: int, hidden: int = HIDDEN, skewed: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """skewed: the first expert is ten times as likely as the last."""
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(count, hidden, generator=draw).bfloat16()
    score = torch.rand(count, experts, generator=draw)
    if skewed:
        score *= torch.logspace(0, -1, experts)
    ids = score.topk(TOP_K, dim=-1).indices.int()
    weights = torch.rand(count, TOP_K, generator=draw) + 0.1
    if count > 2:
        ids[-1] = -1  # a padding row
    return x.cuda(), ids.cuda(), (weights / weights.sum(-1, keepdim=True)).cuda()


def routed(ranks: int, capacity: int, *, local: int = LOCAL, hidden: int = HIDDEN, width: int = WIDTH) -> Any:
    from glm_sglang.moe.kernels import Geometry, Sm90
    from glm_sglang.moe.layer import RoutedExperts
    from glm_sglang.moe.rows import Attention

    geometry = Geometry(
        experts=local * ranks, top_k=TOP_K, hidden=hidden, intermediate=width, capacity=capacity
    )
    return RoutedExperts(Sm90(dist.group.WORLD, geometry), capacity, Attention(dp=ranks), lambda: None)


def run(layer: Any, experts: Any, counts: list[int], rank: int, seed: int) -> tuple[torch.Tensor, Any]:
    given = batch(rank, counts[rank], LOCAL * len(counts), seed)
    return call(layer, experts, counts, given), given


def call(layer: Any, experts: Any, counts: list[int], given: Any) -> torch.Tensor:
    layer.global_tokens = lambda: counts
    layer.attention = type(layer.attention)(dp=len(counts))
    out: torch.Tensor = layer(experts, *given, top_k=TOP_K, scaling=SCALING, clamp=None)
    return out


def check(out: torch.Tensor, given: Any, weights: ExpertWeights, what: object) -> None:
    expected = mega_moe_reference(
        given[0], given[1], given[2], weights, arithmetic=Arithmetic.SM90, routed_scaling_factor=SCALING
    )
    assert out.shape == expected.shape
    diff = calc_diff(out, expected)
    assert diff <= BOUND, (what, diff)


# --- what every rank does ---


def sizes(rank: int, ranks: int) -> None:
    from glm_kernels.mega_moe.limits import Arch

    from glm_sglang.moe.weights import arrange

    experts, weights = experts_of(rank), reference_weights(ranks)
    assert arrange(experts, Arch.SM90) == LOCAL
    assert arrange(experts, Arch.SM90) == 0
    layer = routed(ranks, CAPACITY)
    for seed, most in enumerate((0, 1, 2, 63, 64, 1919, 1920, 1921, 5000)):
        for counts in ([most] * ranks, [most // (r + 1) for r in range(ranks)], [most] + [0] * (ranks - 1)):
            out, given = run(layer, experts, counts, rank, seed)
            check(out, given, weights, counts)


def true_widths(rank: int, ranks: int) -> None:
    """Each rank has its own experts only; the reference asks their owners, as the kernel does."""
    from glm_kernels.mega_moe.limits import Arch

    from benchmarks._moe_batches import difference
    from glm_sglang.moe.weights import arrange

    weights = wide_experts(rank)
    experts = as_loaded(weights)
    assert arrange(experts, Arch.SM90) == WIDE_LOCAL
    layer = routed(ranks, CAPACITY, local=WIDE_LOCAL, hidden=WIDE_HIDDEN, width=WIDE_WIDTH)
    for seed, most in enumerate((1, 63, 64, 1919, 1920, 5000)):
        counts = [most // (r + 1) for r in range(ranks)]
        given = batch(rank, counts[rank], WIDE_LOCAL * ranks, seed, WIDE_HIDDEN, skewed=seed % 2 == 1)
        out = call(layer, experts, counts, given)
        expected = mega_moe_reference(
            *given,
            weights,
            arithmetic=Arithmetic.SM90,
            routed_scaling_factor=SCALING,
            group=dist.group.WORLD if ranks > 1 else None,
        )
        assert out.shape == expected.shape
        whole, row = difference(out, expected).tolist()
        print(f"rank {rank}: {counts[rank]} tokens, calc_diff {whole:.1e}, of a row {row:.1e}", flush=True)
        assert whole <= BOUND, (most, whole)
        assert row <= ROW_BOUND, (most, row)


def reload(rank: int, ranks: int) -> None:
    """The same weights loaded again, in place, are arranged again; half a load is refused."""
    from glm_kernels.mega_moe.limits import Arch

    from glm_sglang.moe.weights import arrange

    experts, fresh, weights = experts_of(rank), experts_of(rank), reference_weights(ranks)
    arrange(experts, Arch.SM90)
    experts.w13_weight.data.view(torch.uint8).copy_(fresh.w13_weight.data.view(torch.uint8))
    assert arrange(experts, Arch.SM90) == LOCAL
    out, given = run(routed(ranks, CAPACITY), experts, [300] * ranks, rank, 1)
    check(out, given, weights, "reloaded")
    experts.w13_weight.data.view(torch.uint8)[0, :WIDTH] = fresh.w13_weight.data.view(torch.uint8)[0, :WIDTH]
    with pytest.raises(ValueError, match="only parts"):
        arrange(experts, Arch.SM90)


def zero_scales(rank: int, ranks: int) -> None:
    """Blocks under a scale of 0: NaN or wrong as they are, exact once mended."""
    from glm_kernels.mega_moe.interleave import prepare_sm90_
    from glm_kernels.mega_moe.limits import Arch
    from glm_kernels.mega_moe.reload import TransformState

    from glm_sglang.moe.weights import ATTRIBUTE, Arranged, arrange

    weights = reference_weights(ranks, zero_blocks=True)
    experts = experts_of(rank, zero_blocks=True)
    arrange(experts, Arch.SM90)
    layer = routed(ranks, CAPACITY)
    for most in (64, 1920):
        out, given = run(layer, experts, [most] * ranks, rank, 2)
        check(out, given, weights, ("mended", most))
    raw = experts_of(rank, zero_blocks=True)
    prepare_sm90_(raw.w13_weight.data, TransformState())
    setattr(raw, ATTRIBUTE, Arranged((raw.w13_weight.data, raw.w13_weight_scale_inv.data),
                                     (raw.w2_weight.data, raw.w2_weight_scale_inv.data)))  # fmt: skip
    found = {}
    for most in (64, 1920):
        out, _ = run(layer, raw, [most] * ranks, rank, 2)
        found[most] = int(out.isnan().sum())
    print(f"rank {rank}: NaN without mending, by tokens: {found}", flush=True)


@pytest.mark.parametrize(
    "work", [sizes, true_widths, reload, zero_scales], ids=lambda work: str(work.__name__)
)
def test_against_the_reference(work: Callable[[int, int], None], tmp_path: Path) -> None:
    ranks = torch.cuda.device_count()
    try:
        mp.spawn(worker, args=(ranks, work, tmp_path / "store", tmp_path), nprocs=ranks)
    except Exception:
        pytest.fail("\n".join(file.read_text() for file in sorted(tmp_path.glob("rank*.txt"))) or "no trace")
