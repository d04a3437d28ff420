"""The overlapped arm of `benchmarks.moe_layer`: its variants, measured after every other arm, and the crossover table.

A variant is a line of `name=value` pairs (`side_sms=16,shares=1:1,dispatch=nccl`); the fastest at a size is the arm.
What fails is named in the result, and a variant that hangs ends the run with what was measured before it. Row counts
are known to the host, as the gathered arm's are; the layout itself is made on the device in every replay.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm_kernels.overlapped_moe.crossover import Crossover, Key, Measured

if TYPE_CHECKING:
    import torch.distributed as dist
    from glm_kernels.mega_moe import ExpertWeights

    from benchmarks._moe_arms import Arm, Batch
    from benchmarks.moe_layer import Layer

VARIANTS = (
    "side_sms=16",
    "side_sms=16,early_finish=1",
    "step_sms=16:8:16:8:20:20",
    "side_sms=0,shares=1,order=own_first,combine=copy_engine",
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run the overlapped path. What the first seven mean: glm_kernels.overlapped_moe.backend.Options.

    shares, expert_splits: of the plan. dispatch: copy_engine, peer_reads, nccl. combine: peer_writes, copy_engine; nccl
    with dispatch=nccl only, and then both. rows: exact, or worst_case for buffers that take any routing.
    """

    side_sms: int = 16
    step_sms: tuple[int, ...] = ()
    leave_sms: bool = True
    side_programs: int = 4
    gate_cycles: int = 6000
    order: str = "peers_second"
    early_finish: bool = False
    shares: tuple[int, ...] = (1, 1)
    expert_splits: int = 1
    dispatch: str = "copy_engine"
    combine: str = "peer_writes"
    rows: str = "exact"

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Of `name=value,…`; truth as 0 or 1, several numbers as 2:1. Raises ValueError naming the fields."""
        values: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            default = {field.name: field.default for field in dataclasses.fields(cls)}.get(name)
            if default is None:
                allowed = ", ".join(field.name for field in dataclasses.fields(cls))
                raise ValueError(f"--overlap has {name!r}; allowed are {allowed}")
            if isinstance(default, tuple):
                values[name] = tuple(int(share) for share in value.split(":"))
            else:
                values[name] = value if isinstance(default, str) else type(default)(int(value))
        variant = cls(**values)
        if (variant.dispatch == "nccl") != (variant.combine == "nccl"):
            raise ValueError("--overlap: dispatch=nccl and combine=nccl go together")
        if variant.rows not in ("exact", "worst_case"):
            raise ValueError(f"--overlap: rows is {variant.rows!r}; allowed are exact, worst_case")
        return variant


def overlapped(
    batch: Batch, weights: ExpertWeights, layer: Layer, group: dist.ProcessGroup, variant: Variant
) -> Arm:
    """The overlapped path; its parts are all operations of a kind, one after the other, as wide as in the step."""
    import torch
    import torch.distributed as dist
    from glm_kernels.overlapped_moe import (
        Collective,
        Geometry,
        Options,
        OverlappedMoe,
        Symmetric,
        exact_plan,
        worst_case_plan,
    )
    from glm_kernels.overlapped_moe.backend import CudaBackend
    from glm_kernels.overlapped_moe.layout import counts_for
    from glm_kernels.overlapped_moe.schedule import Kind
    from glm_kernels.overlapped_moe.transport import Transport, cuda_symmetric_memory

    from benchmarks import _moe_arms

    rank, ranks, device = dist.get_rank(group), dist.get_world_size(group), batch.x.device
    geometry = Geometry(
        ranks, rank, weights.num_experts, layer.top_k, layer.hidden, layer.intermediate, batch.padded
    )
    cut = {"shares": variant.shares, "expert_splits": variant.expert_splits}
    if variant.rows == "exact":
        ids, _ = _moe_arms.gather_routing(batch, group)
        ring = ids.view(ranks, batch.padded, -1).roll(-rank, 0)
        plan = exact_plan(geometry, counts_for(geometry, ring, variant.shares), **cut)
    else:
        plan = worst_case_plan(geometry, **cut)
    options = Options(
        **{f.name: getattr(variant, f.name) for f in dataclasses.fields(Options) if hasattr(variant, f.name)}
    )
    transport: Transport
    if variant.dispatch == "nccl":
        transport = Collective(geometry, group, device)
    else:
        transport = Symmetric(
            geometry,
            cuda_symmetric_memory(group, device),
            dispatch=variant.dispatch,
            combine=variant.combine,
        )
    backend = CudaBackend(plan, device, options)
    moe = OverlappedMoe(plan, transport, backend, scaling=_moe_arms.ROUTED_SCALING, options=options)
    out = torch.zeros_like(batch.x)

    def run() -> None:
        moe(batch.x, batch.ids, batch.weights, weights, out)

    def part(*kinds: Kind) -> Callable[[], None]:
        def steps() -> None:
            for op in moe.ops:
                if op.kind in kinds:
                    moe.do(op, batch.x, batch.ids, batch.weights, weights, out)

        return steps

    everywhere = CudaBackend(plan, device, dataclasses.replace(options, leave_sms=False))

    def gemms_all_sms() -> None:
        moe.backend = everywhere
        part(Kind.GEMM1, Kind.GEMM2)()
        moe.backend = backend

    # The same on every rank, whatever its rows are: each part is timed by all of them at once.
    joined = {"dispatch": (Kind.ANNOUNCE, Kind.PULL), "gemms": (Kind.GEMM1, Kind.GEMM2)}
    apart = set(Kind) - {kind for kinds in joined.values() for kind in kinds}
    apart -= set() if transport.pushes else {Kind.PUSH}
    parts = {kind.value: part(kind) for kind in Kind if kind in apart}
    parts |= {name: part(*kinds) for name, kinds in joined.items()}
    facts = {
        "options": _for_json(variant),
        "rows": plan.rows,
        "row_bytes": plan.row_bytes,
        "symmetric_bytes": getattr(transport, "bytes", 0),
        "overflow": lambda: int(moe.layout.overflow),
    }
    return _moe_arms.Arm("overlapped", run, out, parts | {"gemms_all_sms": gemms_all_sms}, facts)


def _for_json(variant: Variant) -> dict[str, Any]:
    return {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(variant).items()}


@contextmanager
def limited(seconds: float, expired: Callable[[], None]) -> Iterator[None]:
    """Ends this process, after `expired`, if the block takes longer: a rank that waits in a kernel cannot be stopped."""

    def end() -> None:
        try:
            expired()
        finally:
            os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclasses.dataclass
class Sweep:
    """Every variant at one size: `measured` by its text, `failed` with the reason, and whether the GPU still answers."""

    measured: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    alive: bool = True

    @property
    def best(self) -> str | None:
        """The text of the fastest variant."""
        return min(self.measured, key=lambda text: float(self.measured[text]["ms"]), default=None)


def sweep(
    variants: tuple[str, ...],
    build: Callable[[Variant], Arm],
    time: Callable[[Arm], dict[str, Any]],
    say: Callable[[str], None],
) -> Sweep:
    """Measures every variant, and the parts of the fastest. After an error of the device itself it stops."""
    import torch

    result = Sweep()

    def attempt(text: str, with_parts: bool) -> None:
        try:
            arm = build(Variant.parse(text))
            if not with_parts:
                arm.parts = {}
            measured = {name: v() if callable(v) else v for name, v in time(arm).items()}
            if measured["overflow"]:
                raise RuntimeError("the plan's rows did not suffice: the routing was another than the plan's")
            result.measured[text] = measured
            say(f"  {measured['ms']:.3f} ms  {measured['calc_diff']:.1e}  {text}")
        except Exception as error:
            traceback.print_exc()
            result.failed[text] = f"{type(error).__name__}: {error}".splitlines()[0]
            try:
                torch.cuda.synchronize()
            except Exception:
                result.alive = False

    for text in variants:
        if result.alive:
            attempt(text, with_parts=False)
            torch.cuda.empty_cache()
    if result.best is not None and result.alive:
        first = result.measured[result.best]["ms"]
        attempt(result.best, with_parts=True)
        result.measured[result.best]["ms_before_parts"] = first
    return result


def add_to(size: dict[str, Any], found: Sweep) -> None:
    """The fastest variant becomes the size's arm `overlapped`, beside what the others took."""
    best = found.best
    if best is None:
        return
    arm = {
        **found.measured[best],
        "variants_ms": {text: measured["ms"] for text, measured in found.measured.items()},
        "variants_diff": {text: measured["calc_diff"] for text, measured in found.measured.items()},
    }
    arm["exposed_ms"] = round(arm["ms"] - size["gemms_ms"], 4)
    arm["exposed_share"] = round(max(arm["exposed_ms"], 0.0) / arm["ms"], 4)
    size["arms"]["overlapped"] = arm
    size["speedup_overlapped"] = round(size["arms"]["gathered"]["ms"] / arm["ms"], 4)
    size["overlapped_over_megamoe"] = round(size["arms"]["megamoe"]["ms"] / arm["ms"], 4)


def headline(sizes: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """The overlapped path over the gathered one, at `tokens` and at the least; None where it was not measured."""
    found = {size["tokens"]: size["speedup_overlapped"] for size in sizes if "speedup_overlapped" in size}
    return {
        "speedup_overlapped": found.get(tokens),
        "min_speedup_overlapped": min(found.values(), default=None),
    }


def entries(result: dict[str, Any]) -> list[Measured]:
    """What a result of the benchmark says about the crossover.

    Only an even, random routing counts, and only rows=worst_case: exact rows are counted by the host outside the time
    that is measured, and MegaMoE needs no count.
    """
    layer = result["layer"]
    if result["routing"] != "random" or result["uneven"]:
        return []
    key = Key(
        gpu=result["machine"]["gpu"],
        ranks=layer["ranks"],
        hidden=layer["hidden"],
        intermediate=layer["intermediate"],
        experts_a_rank=layer["experts"] // layer["ranks"],
        top_k=layer["top_k"],
    )
    return [
        Measured(
            key,
            size["tokens"],
            size["arms"]["megamoe"]["ms"],
            size["arms"]["overlapped"]["ms"],
            size["arms"]["overlapped"]["options"],
            result["date"],
        )
        for size in result["sizes"]
        if {"megamoe", "overlapped"} <= size["arms"].keys()
        and size["arms"]["overlapped"]["options"].get("rows") == "worst_case"
    ]


def update_table(result: Path) -> list[Measured]:
    """Adds a saved result of `benchmarks.moe_layer` to the table that `Crossover.load` reads."""
    found = entries(json.loads(result.read_text()))
    table = Crossover.load()
    table.add(found)
    table.save()
    return found
