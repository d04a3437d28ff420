"""Run by test_kernels with TRITON_INTERPRET=1: the kernels themselves, on a CPU, against the references.

The interpreter truncates to bf16 and rounds to E4M3 wrongly (see `alike`). So sums go to fp32 here, and codes are
compared with that left out, which tests/gpu makes good; scales, rows and layouts are exact.
"""

from __future__ import annotations

import itertools
import random
import sys

import torch
from glm_kernels.mega_moe.numerics import E4M3
from glm_kernels.overlapped_moe import row_kernels
from glm_kernels.overlapped_moe import rows as reference
from glm_kernels.overlapped_moe.layout import NOWHERE, Layout, counts_for, layout_reference
from glm_kernels.overlapped_moe.layout_kernels import LayoutKernels
from glm_kernels.overlapped_moe.plan import Chunk, Geometry, Plan, exact_plan, worst_case_plan

CPU = torch.device("cpu")


def codes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(E4M3)


def alike(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal but for the interpreter's rounding: a tie goes the other way, and what should be rounded up to a power of two
    becomes the power below, because the carry into the exponent is lost."""

    def magnitude(x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.uint8).int() & 127

    power = got.float().frexp().mantissa.abs() == 0.5
    carried = torch.where(power, (2 * got.float()).to(E4M3).view(torch.uint8), got.view(torch.uint8)).view(
        E4M3
    )
    close = [(magnitude(x) - magnitude(want)).abs() <= 1 for x in (got, carried)]
    same_sign = (got.float() * want.float() >= 0).all()
    return bool(same_sign) and bool((close[0] | close[1]).all())


def same_layout(plan: Plan, ids: torch.Tensor) -> Layout:
    got, want = Layout.empty(plan, CPU), Layout.empty(plan, CPU)
    got.expert.fill_(77)  # what a step before left
    layout_reference(ids, plan, want)
    LayoutKernels(plan, CPU)(ids, got)
    filled = sum(chunk.rows for chunk in plan.chunks)
    assert torch.equal(got.place, want.place)
    assert torch.equal(got.expert[:filled], want.expert[:filled])
    assert torch.equal(got.overflow, want.overflow)
    return want


def layouts() -> int:
    draw, checked = random.Random(3), 0
    for ranks, experts, top_k in itertools.product((1, 3), (2, 33), (1, 8)):
        tokens, rank = draw.choice((1, 7, 190)), draw.randrange(ranks)
        of = Geometry(ranks, rank, experts, top_k, 256, 128, tokens)
        ids = torch.randint(-1, ranks * experts, (ranks, tokens, top_k), dtype=torch.int32)
        if draw.random() < 0.3:
            ids[ids >= 0] = rank * experts
        for shares, splits in (((1,), 1), ((1, 3), 2)):
            same_layout(worst_case_plan(of, shares=shares, expert_splits=splits), ids)
            counts = counts_for(of, ids, shares)
            plan = exact_plan(of, counts, shares=shares, expert_splits=splits)
            same_layout(plan, ids)
            same_layout(plan, ids.flip(1))  # other rows, maybe too many: the flag is compared, too
            checked += 3
    return checked


def rows() -> int:
    checked = 0
    for hidden, width, tokens, top_k, experts in ((384, 256, 37, 3, 4), (2176, 128, 20, 8, 6)):
        x = torch.randn(tokens, hidden).bfloat16()
        x[3] = 0
        want, want_scale = codes(tokens, hidden), torch.empty(tokens, hidden // 128)
        got, got_scale = codes(tokens, hidden), torch.empty_like(want_scale)
        reference.quantise_reference(x, want, want_scale)
        row_kernels.quantise(x, got, got_scale, grid=5)
        assert alike(got, want)
        assert torch.equal(got_scale, want_scale)

        of = Geometry(1, 0, experts, top_k, hidden, width, tokens)
        ids = torch.randint(-1, experts, (1, tokens, top_k), dtype=torch.int32)
        plan = worst_case_plan(of)
        layout = same_layout(plan, ids)
        table = reference.scale_table(plan, hidden // 128)
        a, b = codes(plan.rows, hidden), codes(plan.rows, hidden)
        a_scale, b_scale = (torch.ones(plan.rows * hidden // 128) for _ in "ab")
        reference.place_reference(want, want_scale, layout.place[0], a, a_scale, table)
        row_kernels.place(want, want_scale, layout.place[0], b, b_scale, table, grid=3)
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        assert torch.equal(a_scale, b_scale)

        gate_up = torch.randn(plan.rows, 2 * width).bfloat16()
        for chunk in plan.chunks:
            part = slice(chunk.start, chunk.start + chunk.rows)
            alone = Chunk(0, 0, experts, 0, chunk.rows)
            a, b = codes(chunk.rows, width), codes(chunk.rows, width)
            flat = [torch.ones(chunk.rows * width // 128) for _ in "ab"]
            a_scale, b_scale = (reference.chunk_scales(f, alone, width // 128) for f in flat)
            reference.swiglu_reference(gate_up[part], layout.expert[part], a, a_scale)
            row_kernels.swiglu(gate_up[part], layout.expert[part], b, b_scale, grid=4)
            live = layout.expert[part] != NOWHERE
            if bool(live.any()):
                assert alike(b[live], a[live])
                assert torch.allclose(a_scale[live], b_scale[live], rtol=1e-6, atol=0)

        slots, weights = torch.randn(plan.rows, hidden).bfloat16(), torch.rand(tokens, top_k)
        weights[ids[0] == NOWHERE] = float("nan")
        for peers in (0, 1, 3):
            partials = torch.randn(peers, tokens + 5, hidden).bfloat16()[:, 2 : 2 + tokens] if peers else None
            sums = [torch.empty(tokens, hidden) for _ in "ab"]
            reference.reduce_reference(slots, layout.place[0], weights, 2.5, partials, sums[0])
            row_kernels.reduce(slots, layout.place[0], weights, 2.5, partials, sums[1], grid=7)
            assert torch.equal(*sums)
        checked += 1
    return checked


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.stdout.write(f"layouts {layouts()} rows {rows()}\n")
