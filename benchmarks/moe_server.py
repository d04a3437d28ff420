"""Does a server with MegaMoE answer as SGLang's stock expert parallelism does, and how much faster is its prefill?

    python -m benchmarks.moe_server --json                 # two SM90 GPUs
    python -m benchmarks.moe_server --reference --json     # the same questions on a CPU, in miniature

agreement  a small GLM-5.3-shaped FP8 model, TP2/EP2, three servers: stock EP, MegaMoE under a cap that the largest
           prompts exceed, and SGLang's own megamoe above its cap. Greedy tokens, and the mean KL divergence of the
           whole distribution at the prompt's last positions, against stock EP.
layouts    the same with prefill CP (two ranks a prompt) and with attention DP, also for uneven batches.
speed      true widths, few layers, random weights: prefill tokens/s of stock EP and MegaMoE, taken in turns.

Of the article's node (`--ranks N`: prefill CP and EP over N GPUs), in five arms that differ in the changes only: stock,
MegaMoE, MegaMoE with prefill graphs, MegaMoE with the cache, all; `benchmarks/eight_gpus.sh` runs them:

node       true widths, few layers: cold prompts alone and in a queue, the share of the roof, second turns.
exposed    the same servers, a traced step of each length: exposed communication and idle share.
same       the small model: greedy tokens and KL against stock, every question again from the cache.
checkpoint writes what node and exposed serve, and starts nothing.

All servers start side by side, for their first requests may compile kernels for minutes. Results are written to --out
as they come, so a run that is cut short leaves what it had; servers are stopped in any case.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks import _node, _result
from benchmarks._moe_servers import (
    GPU,
    NODE_ARMS,
    REFERENCE,
    Arm,
    Report,
    Setting,
    about,
    arms_of,
    launch,
    node_chunk,
    tokens,
    went_well,
)
from benchmarks._node import prefill
from glm_sglang.tiny_model import PRESETS
from glm_sglang.tiny_model.checkpoint import write

KL_BOUND = 0.0025
WINDOW = 64  # last positions of a prompt whose distributions are compared
NEW_TOKENS = 8
# --- agreement ---


def distributions(answer: dict[str, Any]) -> list[dict[int, float]]:
    """The logprob of every token at each compared position: the prompt's last ones, then the first new one."""
    meta = answer["meta_info"]
    rows = [row for row in meta["input_top_logprobs"] if row]
    rows.append(meta["output_top_logprobs"][0])
    return [{int(token): float(logprob) for logprob, token, *_ in row} for row in rows]


def divergence(p: dict[int, float], q: dict[int, float]) -> float:
    """KL(p || q) in nats over p's tokens; NaN where q lacks one of them."""
    return sum(math.exp(lp) * (lp - q.get(token, math.nan)) for token, lp in p.items())


def ask(arm: Arm, prompts: Sequence[Sequence[int]], vocab: int) -> list[dict[str, Any]]:
    """Greedy tokens and full distributions of a batch of prompts."""
    body = {
        "input_ids": [list(ids) for ids in prompts],
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": [max(0, len(ids) - WINDOW) for ids in prompts],
        "top_logprobs_num": [vocab] * len(prompts),
    }
    answers: list[dict[str, Any]] = arm.post(body)
    return answers


def compare(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """One prompt's two answers."""
    pairs = list(zip(distributions(base), distributions(other), strict=True))
    kl = [divergence(p, q) for p, q in pairs]
    top = [max(p, key=p.__getitem__) == max(q, key=q.__getitem__) for p, q in pairs]
    return {
        "positions": len(kl),
        "kl_mean": statistics.fmean(kl),
        "kl_max": max(kl),
        "argmax_equal": sum(top),
        "tokens_equal": base["output_ids"] == other["output_ids"],
        "tokens": [base["output_ids"], other["output_ids"]],
        "cached": [answer["meta_info"].get("cached_tokens", 0) for answer in (base, other)],
    }


def questions(part: str, setting: Setting, args: argparse.Namespace) -> list[tuple[tuple[int, ...], int]]:
    """(prompt lengths asked for in one batch, seed). Layouts ask for uneven pairs: ranks that have unlike loads.
    A node's largest prompts exceed the ranks' caps together, and a chunk.
    """
    sizes: list[tuple[int, ...]] = [(size,) for size in setting.sizes]
    if part == "layouts":
        sizes += [(setting.sizes[-1], 1), (setting.sizes[-1], setting.sizes[3])]
    elif part == "same":
        sizes += [(args.ranks * setting.cap + 64,), (node_chunk(args) + setting.cap,)]
    return [(batch, seed) for batch in sizes for seed in range(args.prompts)]


def prepare_comparison(
    part: str, stack: ExitStack, args: argparse.Namespace, report: Report, folder: Path
) -> Callable[[], None]:
    """Starts the servers of a comparison, each of which answers every question; what it returns compares them."""
    setting = REFERENCE if args.reference else GPU
    shape = PRESETS[setting.preset]
    write(folder, shape, setting.dtype)
    if part == "same":
        report.put(reference=args.reference, ranks=args.ranks)
    once = questions(part, setting, args)
    wanted = once * (2 if part == "same" else 1)
    keep_s = args.speed_seconds if "speed" in args.parts.split(",") else 0.0

    def answer_all(arm: Arm) -> None:
        for at, (sizes, seed) in enumerate(wanted):
            if at == len(once):  # from here on a cache can only have it from Valkey
                _node.forget(arm)
            arm.replies.append(ask(arm, [tokens(size, seed) for size in sizes], shape.vocab))

    arms = launch(stack, report, folder, part, args, answer_all)

    def run() -> None:
        base, others = arms["stock"], [arm for arm in arms.values() if arm.name != "stock"]
        rows: list[dict[str, Any]] = []
        compared = dict.fromkeys((arm.name for arm in others), 0)
        while True:
            ended = not report.left(keep_s) or (base.done.done() and all(arm.done.done() for arm in others))
            for arm in others:
                for at in range(compared[arm.name], min(len(base.replies), len(arm.replies))):
                    sizes, seed = wanted[at]
                    for size, one, other in zip(sizes, base.replies[at], arm.replies[at], strict=True):
                        row = compare(one, other)
                        about_it = {"arm": arm.name, "size": size, "batch": sizes, "seed": seed}
                        rows.append({**about_it, "again": at >= len(once), **row})
                        report.say(
                            f"{arm.name:11} {size:5} of {sizes}: KL {row['kl_mean']:.2e} "
                            f"(max {row['kl_max']:.2e}), greedy {'equal' if row['tokens_equal'] else 'differ'}"
                        )
                    compared[arm.name] = at + 1
                    report.put(**{part: rows, **verdicts(part, rows, setting, args.ranks)})
            if ended:
                break
            time.sleep(0.5)
        fine = [arm for arm in (base, *others) if went_well(arm, report, part, keep_s)]
        complete = len(fine) == len(arms)
        report.put(
            **{f"{part}_complete": complete, f"{part}_servers": {arm.name: about(arm) for arm in fine}}
        )

    return run


def verdicts(part: str, rows: Sequence[dict[str, Any]], setting: Setting, ranks: int = 2) -> dict[str, Any]:
    """What the rows say of each arm: the worst mean KL below and above its cap, answers, equal greedy tokens.

    Ours is a rank's cap, and a rank has its share of a prompt; upstream compares the whole batch with its own.
    """
    found: dict[str, Any] = {"kl_bound": KL_BOUND}
    right: list[bool] = []
    for name in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == name]
        cap = setting.stock_cap if name == "upstream" else ranks * setting.cap
        below, above = (
            worst(row["kl_mean"] for row in mine if "kl_mean" in row and (row["size"] > cap) is over)
            for over in (False, True)
        )
        found[name] = {
            "kl_below_cap": below,
            "kl_above_cap": above,
            "answers": len(mine),
            "greedy_equal": sum(bool(row.get("tokens_equal")) for row in mine),
            # JSON has no NaN: the two above would be null, as where nothing was asked.
            "kl_undefined": sum(math.isnan(row.get("kl_mean", math.nan)) for row in mine),
        }
        if again := [row for row in mine if row.get("again")]:
            found[name]["cached_again"] = sum(row["cached"][1] for row in again)
            if "cache" in NODE_ARMS.get(name, ()):  # or nothing was said about cached pages
                right.append(found[name]["cached_again"] > 0)
        if name == "upstream":
            found["upstream_bug_shown"] = (
                below is not None and below < KL_BOUND and above is not None and not above < KL_BOUND
            )
        else:
            right += [row.get("kl_mean", math.nan) < KL_BOUND for row in mine]
    found["ok"] = bool(right) and all(right)
    return {f"{part}_verdict": found}


def worst(values: Iterable[float]) -> float | None:
    """The largest, NaN above all; None of none."""
    return max(values, key=lambda value: math.inf if math.isnan(value) else value, default=None)


# --- speed ---


def prepare_speed(
    stack: ExitStack, args: argparse.Namespace, report: Report, folder: Path
) -> Callable[[], None]:
    """Starts both paths' servers; what it returns times their prefills in turns, at each prompt length."""
    if args.reference:
        write(folder, PRESETS["cpu"], "float32")
    else:
        from benchmarks import _wide_model

        size = _wide_model.write(folder, _wide_model.true_widths(args.layers, args.experts))
        report.say(f"a checkpoint of {size / 2**30:.1f} GiB at {folder}")
    report.put(layers=args.layers, experts=args.experts, graphs=bool(args.graphs))

    def warm(arm: Arm) -> None:
        for length in args.lengths:
            prefill(arm, tokens(length, 99))

    arms = launch(stack, report, folder, "speed", args, warm)

    def run() -> None:
        running = [arm for arm in arms.values() if went_well(arm, report, "speed")]
        rows: list[dict[str, Any]] = []
        for length in args.lengths:
            times: dict[str, list[float]] = {arm.name: [] for arm in running}
            for turn in range(args.repeat + args.discard):
                if not report.left():
                    break
                for arm in running:
                    took = prefill(arm, tokens(length, 1000 + turn))
                    if turn >= args.discard:
                        times[arm.name].append(took)
            if all(times.values()):
                rows.append(speeds(length, times))
                report.say(json.dumps(rows[-1]))
                report.put(speed=rows)
        report.put(speed_servers={arm.name: about(arm) for arm in running})

    return run


def speeds(length: int, times: dict[str, list[float]]) -> dict[str, Any]:
    """One prompt length's row: medians, tokens/s, the least and the most; how many times stock's speed ours is."""
    row: dict[str, Any] = {"tokens": length}
    for name, taken in times.items():
        row[f"{name}_ms"] = round(statistics.median(taken) * 1e3, 3)
        row[f"{name}_tokens_s"] = round(length / statistics.median(taken))
        row[f"{name}_taken"] = len(taken)
        row[f"{name}_spread_ms"] = [round(min(taken) * 1e3, 3), round(max(taken) * 1e3, 3)]
    if {"stock", "megamoe"} <= times.keys():
        row["speedup"] = round(row["stock_ms"] / row["megamoe_ms"], 4)
    return row


Prepare = Callable[[ExitStack, argparse.Namespace, Report, Path], Callable[[], None]]
PARTS: dict[str, Prepare] = {
    "agreement": partial(prepare_comparison, "agreement"),
    "layouts": partial(prepare_comparison, "layouts"),
    "speed": prepare_speed,
    "node": partial(_node.prepare, "node"),
    "exposed": partial(_node.prepare, "exposed"),
    "same": partial(prepare_comparison, "same"),
    "checkpoint": _node.prepare_checkpoint,
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    build = argparse.ArgumentParser(
        prog="python -m benchmarks.moe_server", description=(__doc__ or "").splitlines()[0]
    )
    build.add_argument("--parts", default="agreement,speed", help="comma-separated (default %(default)s)")
    build.add_argument("--reference", action="store_true", help="in miniature, on the reference platform")
    build.add_argument("--graphs", action="store_true", help="with SGLang's CUDA graphs (default: eager)")
    build.add_argument("--ranks", type=int, default=2, help="GPUs of a server (default %(default)s)")
    build.add_argument("--prompts", type=int, default=2, help="prompts a size (default %(default)s)")
    build.add_argument("--layers", type=int, default=6, help="layers of the wide model (default %(default)s)")
    build.add_argument("--experts", type=int, default=64, help="its experts (default %(default)s)")
    build.add_argument(
        "--no-weights", action="store_true", help="a wide checkpoint without them, for --load-format dummy"
    )
    build.add_argument(
        "--lengths",
        type=lambda text: tuple(int(part) for part in text.split(",")),
        default=(2048, 4096, 8192, 16384, 32768),
        help="prompt lengths of the timed parts, comma-separated (default 2048 … 32768)",
    )
    build.add_argument(
        "--repeat", type=int, default=9, help="timed prefills a length and path (default %(default)s)"
    )
    build.add_argument(
        "--discard", type=int, default=2, help="and untimed ones before them (default %(default)s)"
    )
    build.add_argument(
        "--arms",
        type=lambda text: frozenset(text.split(",")),
        default=frozenset(),
        help="only these beside stock, comma-separated (default: all of a part)",
    )
    build.add_argument(
        "--moe-runner",
        default="",
        help="--moe-runner-backend of servers without MegaMoE (default: SGLang's choice)",
    )
    build.add_argument(
        "--speed-seconds", type=float, default=70.0, help="kept for timing (default %(default)s)"
    )
    build.add_argument(
        "--stagger", type=float, default=3.0, help="seconds between two starts (default %(default)s)"
    )
    build.add_argument(
        "--deadline", type=float, default=900.0, help="seconds for everything (default %(default)s)"
    )
    build.add_argument("--checkpoints", type=Path, help="keep the checkpoints in this folder")
    build.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    build.add_argument("--out", type=Path, help="write the result here after every step")
    build.add_argument(
        "--server-args", nargs=argparse.REMAINDER, default=[], help="further flags of every server, last"
    )
    _result.add_arguments(build)
    return build


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, judged. Exits with status 2 for what cannot be measured."""
    build = parser()
    args = build.parse_args(argv)
    wanted = args.parts.split(",")
    if unknown := set(wanted) - PARTS.keys():
        build.error(f"--parts names {', '.join(sorted(unknown))}, allowed: {', '.join(PARTS)}")
    if args.reference and "exposed" in wanted:
        build.error("--parts exposed traces GPUs, which --reference has none of")
    known = {name for part in wanted if part != "checkpoint" for name in arms_of(part, args)}
    if strange := args.arms - known:
        build.error(f"--arms names {', '.join(sorted(strange))}, allowed: {', '.join(sorted(known))}")
    if {"node", "exposed"} & set(wanted) and max(args.lengths) < node_chunk(args):
        build.error(f"--lengths must reach a whole chunk, {node_chunk(args)} tokens for --ranks {args.ranks}")
    return args


def main() -> int:
    """Exit status: 0 when all was measured and MegaMoE agrees with stock EP wherever that was asked, 1 otherwise."""
    args = parse()
    wanted = args.parts.split(",")
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    report = Report(args.out, args.deadline)
    with ExitStack() as stack:
        root = args.checkpoints or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="glm-sglang-"))
        )
        # Every part's servers start before the first part runs; each part's end before the next one's figures.
        started = []
        for name in wanted:
            own = stack.enter_context(ExitStack())
            started.append((name, own, PARTS[name](own, args, report, root / name)))
        for name, own, run in started:
            with own:
                try:
                    run()
                except httpx.HTTPError as error:
                    report.say(f"{name} ended early: {error!r}")
                    report.put(**{f"{name}_error": repr(error)[:1000]})
    result = _result.finish("moe_server", report.result, args, device="cpu" if args.reference else None)
    report.put(**result)
    asked = [name for name in wanted if name not in ("speed", "checkpoint")]
    found = report.result
    right = [
        found.get(f"{name}_complete") and found.get(f"{name}_verdict", {"ok": True})["ok"] for name in asked
    ]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
