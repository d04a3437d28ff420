"""How fast is a MoE layer of GLM-5.x: MegaMoE, our overlapped path, all-gather + grouped FP8 GEMM + reduce-scatter,
stock SGLang?

`torchrun --nproc-per-node 2 -m benchmarks.moe_layer --json` on one host with SM90 GPUs. All arms see the same
weights and tokens in one run, each captured as a CUDA graph, so that host launches don't count; a time is the
slowest rank's, and the figure is the median of `--repeat` replays. `--dry-run` prints the plan (calls,
buffers, FLOPs, bytes on the wire) and needs no GPU; nor does `--crossover RESULT.json`, which adds a saved result to
the table that picks a path by GPU, EP size and tokens.

Every row of every arm is compared with the exact result, all of them together and each by itself; exit status 1 where one
is beyond its bound. One GPU is a group of one rank, without torchrun; `--alone` is MegaMoE with nothing to compare its
time with: `python -m benchmarks.moe_layer --alone --routing skewed --tokens 0,1,63,64,1919,1920 --soak 1000 --json`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm_kernels.mega_moe.buffer import SM90_TOKEN_ALIGNMENT, sm90_buffer_bytes
from glm_kernels.mega_moe.chunks import align, plan_chunks
from glm_kernels.mega_moe.limits import Arch, check_shape

from benchmarks import _moe_overlapped, _result

if TYPE_CHECKING:
    import torch
    from glm_kernels.mega_moe import ExpertWeights

    from benchmarks._moe_arms import Arm, Batch

TOKENS = (64, 512, 1024, 1920, 2048, 4096, 8192, 16384)
HEADLINE = 8192
ROUTINGS = ("random", "skewed", "one_rank")
OPTIONAL_ARMS = ("stock", "overlapped")
DEFAULT_ARMS = ("stock",)
# calc_diff against the exact result, of all rows and of any one: half a squared relative error. All rows of a right layer
# have 2e-4, for the kernels accumulate in less than fp32; a tile of 128 columns that is missing makes 1e-2 of its rows.
BOUND, ROW_BOUND = 1e-3, 5e-3


@dataclass(frozen=True)
class Layer:
    """One MoE layer as the whole EP group sees it."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    ranks: int


def parser() -> argparse.ArgumentParser:
    """Every option with its default: GLM-5.x with 32 experts a rank."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.moe_layer", description=__doc__)
    p.add_argument(
        "--tokens", type=_counts, default=TOKENS, help="tokens a rank, comma-separated; 0: a call without any"
    )
    p.add_argument("--hidden", type=int, default=6144)
    p.add_argument("--intermediate", type=int, default=2048)
    p.add_argument("--experts-per-rank", type=int, default=32)
    p.add_argument("--top-k", type=int, default=8)
    p.add_argument("--routing", choices=ROUTINGS, default="random")
    p.add_argument("--uneven", action="store_true", help="rank r has 1 / (r + 1) of the tokens")
    p.add_argument(
        "--capacity", type=_capacities, default=(), help="also MegaMoE in calls of these many tokens at most"
    )
    p.add_argument("--repeat", type=int, default=30, help="timed replays")
    p.add_argument(
        "--soak", type=int, default=0, help="also this many MegaMoE calls with changing token counts"
    )
    p.add_argument(
        "--alone", action="store_true", help="MegaMoE only, no other arm and no share of the GPU's peak"
    )
    p.add_argument(
        "--arms", type=_optional, default=DEFAULT_ARMS, help="beside megamoe and gathered: stock,overlapped"
    )
    p.add_argument(
        "--overlap", action="append", default=[], help="a variant of the overlapped path; several: once each"
    )
    p.add_argument("--overlap-limit", type=float, default=120.0, help="seconds for all variants and sizes")
    p.add_argument("--crossover", type=Path, help="add this saved result to the crossover table, and end")
    p.add_argument("--ranks", type=int, default=2, help="EP size of a dry run; torchrun sets it otherwise")
    p.add_argument("--dry-run", action="store_true", help="print the plan, without a GPU")
    _result.add_arguments(p)
    return p


def _counts(text: str, least: int = 0) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(","))
    if min(values) < least:
        raise argparse.ArgumentTypeError(f"token counts must be {least} or more, found {text}")
    return values


def _capacities(text: str) -> tuple[int, ...]:
    return _counts(text, least=1)


def _optional(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, text.split(",")))
    if not set(names) <= set(OPTIONAL_ARMS):
        raise argparse.ArgumentTypeError(f"optional arms are {', '.join(OPTIONAL_ARMS)}, found {text}")
    return names


def plan(layer: Layer, tokens: int, capacities: tuple[int, ...]) -> dict[str, Any]:
    """What one size means before anything runs: work, wire bytes under even routing, calls and buffers."""
    pairs = tokens * layer.top_k
    remote = pairs * (layer.ranks - 1) / layer.ranks
    result: dict[str, Any] = {
        "tokens": tokens,
        "tflop_a_rank": 6 * pairs * layer.hidden * layer.intermediate / 1e12,
        "weight_bytes_a_rank": 3 * layer.hidden * layer.intermediate * layer.experts // layer.ranks,
        "wire_bytes_a_rank": {
            # E4M3 row + fp32 scales out, bf16 row back, for every pair whose expert lives elsewhere
            "megamoe": int(remote * (layer.hidden + layer.hidden // 32 + 2 * layer.hidden)),
            # every row to every other rank, and a bf16 partial sum of every row back
            "gathered": int(
                tokens * (layer.ranks - 1) * (layer.hidden + layer.hidden // 32 + 2 * layer.hidden)
            ),
        },
        "megamoe": [],
    }
    most = max(tokens, 1)
    for capacity in (most, *(c for c in capacities if c < tokens)):
        chunks = plan_chunks(most, capacity)
        allocated = align(min(capacity, most), SM90_TOKEN_ALIGNMENT)
        size = sm90_buffer_bytes(
            ranks=layer.ranks,
            experts=layer.experts,
            capacity=allocated,
            top_k=layer.top_k,
            hidden=layer.hidden,
            intermediate=layer.intermediate,
        )
        result["megamoe"].append(
            {
                "calls": chunks.count,
                "tokens_a_call": chunks.bound,
                "capacity": allocated,
                "buffer_bytes": size,
            }
        )
    return result


def main(argv: list[str] | None = None) -> int:
    """Runs, and on rank 0 prints the result. Exit status: 0, 1 where an arm's result is wrong, 2 for a machine or a shape
    that cannot answer the question.
    """
    args = parser().parse_args(argv)
    if args.alone:
        args.arms = ()
    if args.crossover is not None:
        for entry in _moe_overlapped.update_table(args.crossover):
            print(f"{entry.key.gpu} EP{entry.key.ranks}, {entry.tokens} tokens a rank: {entry.winner}")
        return 0
    ranks = args.ranks if args.dry_run else int(os.environ.get("WORLD_SIZE", "1"))
    layer = Layer(args.hidden, args.intermediate, args.experts_per_rank * ranks, args.top_k, ranks)
    try:
        check_shape(Arch.SM90, **asdict(layer))
        for text in args.overlap:
            _moe_overlapped.Variant.parse(text)
    except ValueError as refusal:
        print(f"moe_layer: {refusal}", file=sys.stderr)
        return 2
    if args.dry_run:
        plans = [plan(layer, tokens, args.capacity) for tokens in args.tokens]
        _result.finish("moe_layer", {"dry_run": True, "layer": asdict(layer), "plan": plans}, args)
        return 0
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print(
            "moe_layer: needs SM90 GPUs, several under torchrun; --dry-run prints the plan without one",
            file=sys.stderr,
        )
        return 2
    result = measure(layer, args)
    if result is None:
        return 0
    _result.finish("moe_layer", result, args)
    for fault in result["wrong"]:
        print(f"moe_layer: {fault}", file=sys.stderr)
    return 1 if result["wrong"] else 0


# --- from here on there is a GPU ---


def measure(layer: Layer, args: argparse.Namespace) -> dict[str, Any] | None:
    """Times every size; the result on rank 0, None elsewhere."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # the kernel uses peer pointers only
    import torch
    import torch.distributed as dist

    from benchmarks import _moe_arms, _moe_batches, _moe_compile

    rank = int(os.environ.get("RANK", "0"))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device = torch.device("cuda", torch.cuda.current_device())
    store = (
        dist.HashStore() if layer.ranks == 1 else None
    )  # several of one rank may run side by side: no port
    dist.init_process_group("nccl", store=store, rank=rank, world_size=layer.ranks, device_id=device)
    compiling = []
    if rank == 0 and "overlapped" in args.arms:
        variants = map(_moe_overlapped.Variant.parse, _variants(args))
        compiling = _moe_compile.start(layer, filter(None, args.tokens), variants)
    weights = _moe_batches.weights_of(layer, rank)
    _moe_compile.finish(compiling)
    dist.barrier()
    clock = Clock(args.repeat)
    peak = None if args.alone else _moe_arms.fp8_peak_tflops(clock.graph)
    sizes = []
    for tokens in args.tokens:
        _say(rank, f"{tokens} tokens a rank")
        sizes.append(_measure_size(layer, weights, tokens, args, clock, peak))
        _say(rank, "  " + "  ".join(f"{name} {arm['ms']:.3f} ms" for name, arm in sizes[-1]["arms"].items()))
        torch.cuda.empty_cache()
    result = {
        "layer": asdict(layer),
        "routing": args.routing,
        "uneven": args.uneven,
        "fp8_peak_tflops": None if peak is None else round(peak, 1),
        "sizes": sizes,
        "unavailable": _moe_arms.unavailable(),
    }
    if args.soak:
        result["soak"] = _moe_batches.soak(layer, weights, max(args.tokens), args)
    alive = True
    if peak is not None and "overlapped" in args.arms:
        alive = _overlapped(layer, weights, args, clock, peak, result)
    if alive:
        dist.barrier()
        dist.destroy_process_group()
    return _summed_up(result) if rank == 0 else None


def _variants(args: argparse.Namespace) -> tuple[str, ...]:
    return tuple(args.overlap) or _moe_overlapped.VARIANTS


def _summed_up(result: dict[str, Any]) -> dict[str, Any]:
    sizes = result["sizes"]
    wrong = faults(sizes, result.get("soak"))
    return {**result, **headline(sizes), **_moe_overlapped.headline(sizes, HEADLINE), "wrong": wrong}


def faults(sizes: list[dict[str, Any]], soaked: dict[str, Any] | None) -> list[str]:
    """What is beyond the bounds, by size and arm."""
    found = {f"{size['tokens']} tokens, {name}": arm for size in sizes for name, arm in size["arms"].items()}
    lines = [
        f"{where}: calc_diff {arm['calc_diff']} of all rows, {arm['row_diff']} of one; allowed {BOUND}, {ROW_BOUND}"
        for where, arm in (found | ({"soak": soaked} if soaked else {})).items()
        if not (arm["calc_diff"] <= BOUND and arm["row_diff"] <= ROW_BOUND)
    ]
    if soaked and soaked["written_behind"]:
        lines.append(f"soak: {soaked['written_behind']} values written behind the rows of a call")
    return lines


def _overlapped(
    layer: Layer,
    weights: ExpertWeights,
    args: argparse.Namespace,
    clock: Clock,
    peak: float,
    result: dict[str, Any],
) -> bool:
    """Adds the overlapped arm to every size of `result`, after all others; whether the device still answers."""
    import torch
    import torch.distributed as dist

    from benchmarks import _moe_batches

    rank, group = dist.get_rank(), dist.group.WORLD
    sizes = [size for size in result["sizes"] if size["tokens"]]
    assert group is not None
    reasons: dict[str, str] = result["unavailable"]

    def finish() -> None:
        if rank == 0:
            _result.finish("moe_layer", _summed_up(result), args)

    def expired() -> None:
        reasons["overlapped"] = f"not done after {args.overlap_limit:.0f} s (--overlap-limit)"
        finish()
        time.sleep(0 if rank == 0 else 10)  # torchrun ends all ranks with the first

    finish()  # an error of the device may end this process at any time
    variants = _variants(args)
    with _moe_overlapped.limited(args.overlap_limit, expired):
        for size in sizes:
            _say(rank, f"{size['tokens']} tokens a rank, overlapped")
            batch = _moe_batches.batch_of(layer, size["tokens"], args)
            found = _moe_overlapped.sweep(
                variants,
                partial(_moe_overlapped.overlapped, batch, weights, layer, group),
                partial(
                    _measure_arm,
                    batch=batch,
                    truth=_moe_batches.reference(batch, weights, group),
                    tflop=size["tflop_a_rank"],
                    clock=clock,
                    peak=peak,
                ),
                partial(_say, rank),
            )
            _moe_overlapped.add_to(size, found)
            reasons |= {f"overlapped {size['tokens']} {text}": why for text, why in found.failed.items()}
            if not found.alive:
                reasons["overlapped"] = "the GPU failed; larger and later sizes were not measured"
                return False
            torch.cuda.empty_cache()
    return True


def headline(sizes: list[dict[str, Any]]) -> dict[str, Any]:
    """MegaMoE over the gathered path: `speedup` at 8,192 tokens (null if not measured), and the least."""
    by_tokens = {size["tokens"]: size["speedup"] for size in sizes if size["speedup"] is not None}
    arms = [arm for size in sizes for arm in size["arms"].values()]
    return {
        "speedup": by_tokens.get(HEADLINE),
        "min_speedup": min(by_tokens.values(), default=None),
        "largest_diff": max((arm["calc_diff"] for arm in arms), default=None),
        "largest_row_diff": max((arm["row_diff"] for arm in arms), default=None),
        "rows_checked": sum(size["rows_checked"] for size in sizes),
    }


class Clock:
    """Milliseconds of a step: captured once, replayed, the slowest rank's each time, their median."""

    def __init__(self, repeat: int) -> None:
        self.repeat = repeat

    def graph(self, step: Callable[[], None], out: torch.Tensor | None = None) -> float:
        """Median of replays of `step` as a CUDA graph. The first calls, which compile, are not part of it. What `out` has
        afterwards one more replay has written.
        """
        import torch
        import torch.distributed as dist

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        times = torch.empty(self.repeat, device="cuda")
        for i in range(-3, self.repeat):
            dist.barrier()
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(400_000)  # lets every rank's replay queue before any starts
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if i >= 0:
                times[i] = begin.elapsed_time(end)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        if out is not None:
            out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
        return float(statistics.median(times.tolist()))


def _measure_size(
    layer: Layer,
    weights: ExpertWeights,
    tokens: int,
    args: argparse.Namespace,
    clock: Clock,
    peak: float | None,
) -> dict[str, Any]:
    """Every arm at one size. Without tokens MegaMoE alone: one call that has none, which servers make where another rank
    has some.
    """
    import torch
    import torch.distributed as dist

    from benchmarks import _moe_arms, _moe_batches

    group = dist.group.WORLD
    assert group is not None
    batch = _moe_batches.batch_of(layer, tokens, args)
    truth = _moe_batches.reference(batch, weights, group)
    facts = plan(layer, tokens, args.capacity)
    arms: dict[str, dict[str, Any]] = {}
    most = max(tokens, 1)
    builders: dict[str, Callable[[], Arm]] = {
        "megamoe": partial(_moe_arms.megamoe, batch, weights, layer, most, most, group),
    }
    if tokens and not args.alone:
        builders["gathered"] = partial(_moe_arms.gathered, batch, weights, layer, group)
    if tokens and "stock" in args.arms:
        builders["stock"] = partial(_moe_arms.stock, batch, weights, layer, group)
    for capacity in args.capacity:
        if capacity < tokens:
            chunked = partial(_moe_arms.megamoe, batch, weights, layer, capacity, tokens, group)
            builders[f"megamoe_{capacity}"] = chunked
    for name, build in builders.items():
        arms[name] = _measure_arm(build(), batch, truth, facts["tflop_a_rank"], clock, peak)
    rows = torch.tensor([batch.count], device="cuda")
    dist.all_reduce(rows)
    size: dict[str, Any] = {
        **facts,
        "arms": arms,
        "rows_checked": int(rows),
        "gemms_ms": None,
        "speedup": None,
        "speedup_best_chunking": None,
    }
    if "gathered" not in arms:
        return size
    gemms = arms["gathered"]["parts_ms"]["gemms"]
    for arm in arms.values():
        arm["exposed_ms"] = round(arm["ms"] - gemms, 4)
        arm["exposed_share"] = round(max(arm["ms"] - gemms, 0.0) / arm["ms"], 4)
    best = min(arm["ms"] for name, arm in arms.items() if name.startswith("megamoe"))
    size |= {
        "gemms_ms": gemms,
        "speedup": round(arms["gathered"]["ms"] / arms["megamoe"]["ms"], 4),
        "speedup_best_chunking": round(arms["gathered"]["ms"] / best, 4),
    }
    if "stock" in arms:
        size["speedup_over_stock"] = round(arms["stock"]["ms"] / arms["megamoe"]["ms"], 4)
    return size


def _measure_arm(
    arm: Arm, batch: Batch, truth: torch.Tensor, tflop: float, clock: Clock, peak: float | None
) -> dict[str, Any]:
    """One arm's time, rate, parts, and difference to the exact result: the worst rank's, and its worst row's."""
    import torch.distributed as dist

    from benchmarks import _moe_batches

    ms = clock.graph(arm.run, arm.out)
    diff = _moe_batches.difference(arm.out[: batch.count], truth[: batch.count])
    dist.all_reduce(diff, op=dist.ReduceOp.MAX)
    whole, row = diff.tolist()
    rate = tflop / ms * 1e3
    return {
        "ms": round(ms, 4),
        "tflops_a_rank": round(rate, 1),
        "share_of_fp8_peak": None if peak is None else round(rate / peak, 4),
        "calc_diff": whole,
        "row_diff": row,
        "parts_ms": {name: round(clock.graph(part), 4) for name, part in arm.parts.items()},
        **arm.facts,
    }


def _say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
