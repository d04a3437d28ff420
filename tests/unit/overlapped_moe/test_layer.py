"""The whole path against the exact reference: over gloo, and over symmetric memory that threads stand in for.

The grouped GEMM and the kernels are their references here; the schedule, the layout, the buffers and the transports
are what a GPU runs.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from glm_kernels.mega_moe import Arithmetic, ExpertWeights, calc_diff, mega_moe_reference
from glm_kernels.overlapped_moe import (
    Collective,
    Geometry,
    Options,
    OverlappedMoe,
    Symmetric,
    exact_plan,
    worst_case_plan,
)
from glm_kernels.overlapped_moe.backend import ReferenceBackend
from glm_kernels.overlapped_moe.layout import counts_for
from glm_kernels.overlapped_moe.transport import Transport
from mega_moe_cases import SCALING, Tokens, checkpoint, shard, tokens

LOCAL, TOP_K, HIDDEN, WIDTH = 3, 2, 256, 128
CPU = torch.device("cpu")
BOUND = 1e-3


@dataclass(frozen=True)
class Case:
    """Tokens of each rank under one bound, a routing, and how the path runs."""

    counts: tuple[int, ...]
    bound: int
    routing: str = "random"
    exact: bool = True
    shares: tuple[int, ...] = (1, 1)
    splits: int = 1
    options: Options = field(default_factory=Options)


def cases(ranks: int) -> list[Case]:
    full = (300,) * ranks
    uneven = tuple(300 // (rank + 1) for rank in range(ranks))
    return [
        Case(full, 300),
        Case(full, 300, exact=False, options=Options(order="peers_early")),
        Case(full, 300, routing="skewed", shares=(2, 1), splits=2, options=Options(order="own_first")),
        Case(uneven, 320, routing="masked", options=Options(early_finish=True)),
        Case((0,) * (ranks - 1) + (77,), 100, exact=False, options=Options(side_sms=0)),
        Case((1,) * ranks, 1, shares=(1,)),
        Case(full, 300, routing="last_rank_empty"),
        Case((5,) * ranks, 5, routing="all_masked"),
    ]


def batches(case: Case, ranks: int) -> list[Tokens]:
    return [
        tokens(90 + rank, count, LOCAL * ranks, TOP_K, hidden=HIDDEN, routing=case.routing)
        for rank, count in enumerate(case.counts)
    ]


def all_weights(ranks: int) -> ExpertWeights:
    return checkpoint(17, LOCAL * ranks, HIDDEN, WIDTH)


def planned(case: Case, rank: int, ranks: int, given: list[Tokens]) -> Any:
    geometry = Geometry(ranks, rank, LOCAL, TOP_K, HIDDEN, WIDTH, case.bound)
    cut: dict[str, Any] = {"shares": case.shares, "expert_splits": case.splits}
    if not case.exact:
        return worst_case_plan(geometry, **cut)
    ring = torch.full((ranks, case.bound, TOP_K), -1, dtype=torch.int32)
    for i in range(ranks):
        ids = given[(rank + i) % ranks].ids
        ring[i, : len(ids)] = ids
    return exact_plan(geometry, counts_for(geometry, ring, case.shares), **cut)


def computed(case: Case, rank: int, ranks: int, transport: Callable[[Geometry], Transport]) -> torch.Tensor:
    """This rank's result. Two steps over the same buffers: what the first one left must not show in the second."""
    given = batches(case, ranks)
    plan = planned(case, rank, ranks, given)
    moe = OverlappedMoe(
        plan, transport(plan.geometry), ReferenceBackend(plan), scaling=SCALING, options=case.options
    )
    mine, experts = given[rank], shard(all_weights(ranks), rank, ranks)
    outs = [torch.full_like(mine.x, float("nan")) for _ in "ab"]
    for out in outs:
        moe(mine.x, mine.ids, mine.weights, experts, out)
    assert int(moe.layout.overflow) == 0
    assert torch.equal(*outs)
    return outs[0]


def expected(case: Case, rank: int, ranks: int) -> torch.Tensor:
    mine = batches(case, ranks)[rank]
    return mega_moe_reference(
        mine.x,
        mine.ids,
        mine.weights,
        all_weights(ranks),
        arithmetic=Arithmetic.SM90,
        routed_scaling_factor=SCALING,
    )


def check(case: Case, rank: int, ranks: int, out: torch.Tensor) -> None:
    want = expected(case, rank, ranks)
    assert out.shape == want.shape
    assert calc_diff(out, want) <= BOUND, (case, rank)


# --- processes over gloo ---


def worker(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    try:
        for case in cases(ranks):
            out = computed(case, rank, ranks, lambda of: Collective(of, dist.group.WORLD, CPU))
            check(case, rank, ranks, out)
        (folder / f"done{rank}").touch()
    except BaseException:
        (folder / f"rank{rank}.txt").write_text(traceback.format_exc())
        raise
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 4])
def test_over_gloo(ranks: int, tmp_path: Path) -> None:
    try:
        mp.spawn(worker, args=(ranks, tmp_path), nprocs=ranks)
    except Exception:
        pytest.fail("\n".join(file.read_text() for file in sorted(tmp_path.glob("rank*.txt"))) or "no trace")
    assert len(list(tmp_path.glob("done*"))) == ranks


# --- threads over one process's memory ---


class Mapped:
    """Symmetric memory of `ranks` threads: each maps every buffer, and a barrier lets nobody pass before all came."""

    def __init__(self, ranks: int) -> None:
        self.buffers: list[torch.Tensor | None] = [None] * ranks
        self.gate = threading.Barrier(ranks, timeout=60)

    def allocate(self, rank: int) -> Callable[[int], tuple[torch.Tensor, Any]]:
        def make(size: int) -> tuple[torch.Tensor, Any]:
            mine = torch.full((size,), 255, dtype=torch.uint8)
            self.buffers[rank] = mine
            self.gate.wait()
            return mine, self

        return make

    def get_remote_tensor(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        buffer = self.buffers[rank]
        assert buffer is not None
        return buffer.view(dtype).view(shape)

    def barrier(self, channel: int) -> None:
        self.gate.wait()


@pytest.fixture(autouse=True)
def one_thread_an_operation() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("combine", ["peer_writes", "copy_engine"])
@pytest.mark.parametrize("dispatch", ["copy_engine", "peer_reads"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_over_symmetric_memory(ranks: int, dispatch: str, combine: str) -> None:
    for case in cases(ranks):
        memory = Mapped(ranks)

        def run(rank: int, case: Case = case, memory: Mapped = memory) -> torch.Tensor:
            return computed(
                case,
                rank,
                ranks,
                lambda of: Symmetric(of, memory.allocate(rank), dispatch=dispatch, combine=combine),
            )

        with ThreadPoolExecutor(ranks) as pool:
            for rank, out in enumerate(pool.map(run, range(ranks))):
                check(case, rank, ranks, out)


def test_one_rank_needs_no_group() -> None:
    for case in cases(1):
        check(case, 0, 1, computed(case, 0, 1, lambda of: Collective(of, None, CPU)))


def test_what_does_not_fit_is_refused() -> None:
    case = Case((4,), 4)
    plan = planned(case, 0, 1, batches(case, 1))
    moe = OverlappedMoe(plan, Collective(plan.geometry, None, CPU), ReferenceBackend(plan), scaling=SCALING)
    given, experts = tokens(1, 5, LOCAL, TOP_K, hidden=HIDDEN), all_weights(1)
    with pytest.raises(ValueError, match="5 rows; this plan takes 4 tokens a rank"):
        moe(given.x, given.ids, given.weights, experts, torch.empty_like(given.x))
    small = given[slice(0, 4)]
    with pytest.raises(ValueError, match=r"ids is torch\.int64"):
        moe(small.x, small.ids.long(), small.weights, experts, torch.empty_like(small.x))
    with pytest.raises(ValueError, match="the plan has"):
        moe(small.x, small.ids, small.weights, checkpoint(1, LOCAL, 512, WIDTH), torch.empty_like(small.x))
    with pytest.raises(ValueError, match="must be even"):
        Options(side_sms=7)
    with pytest.raises(ValueError, match="at least 2, and side_sms not 0"):
        Options(side_sms=0, step_sms=(8,))
    with pytest.raises(ValueError, match="dispatch is 'nccl'"):
        Symmetric(plan.geometry, lambda size: None, dispatch="nccl")
