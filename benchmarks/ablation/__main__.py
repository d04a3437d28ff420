"""Measures stock SGLang, this fork with none of its changes, with each alone, and with all: same requests, interleaved.

    python -m benchmarks.ablation --model /models/GLM-5.3-FP8 --platform gpu --layout pair --flags "--tp 2 …" \\
        --prefill-devices 0 --decode-devices 1 --between ended --workload two_turn --turns-apart --json
    python -m benchmarks.ablation --model .bench/model --platform cpu --flags "…" --json

The GPU's KV must be too small to keep the first turns (--max-total-tokens in --flags), or a cache has nothing
to do. A run that was interrupted goes on from -o.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

from benchmarks import _result, workloads
from benchmarks.ab.comparison import Plan, compare, discipline
from benchmarks.ab.endpoints import SpecError
from benchmarks.ab.load import Point
from benchmarks.ab.running import Endpoint, EndpointError
from benchmarks.ablation.analysis import METRICS, analyse
from benchmarks.ablation.arms import CHANGES, Setup, arms
from glm_sglang.serving import ServerError


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.ablation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--model", required=True, help="the checkpoint's folder")
    p.add_argument("--platform", choices=("cpu", "gpu"), required=True)
    p.add_argument(
        "--layout", choices=("single", "pair"), default="single", help="pair: with decode attached"
    )
    p.add_argument("--flags", default="", help="of prefill (or the one server), in every arm")
    p.add_argument("--decode-flags", default="", help="of decode, in every arm")
    p.add_argument("--stock-flags", default="", help="besides, of stock SGLang: its best ones")
    p.add_argument(
        "--own-flags", default="", help="besides, of every arm but stock: --glm-cache-pool-gb 64, …"
    )
    p.add_argument("--prefill-devices", help="CUDA_VISIBLE_DEVICES of prefill")
    p.add_argument("--decode-devices", help="CUDA_VISIBLE_DEVICES of decode")
    p.add_argument(
        "--cache-url",
        default="embedded://",
        help="of the cache's arm (embedded://; others only with --changes cache, for two arms would share it)",
    )
    p.add_argument(
        "--changes", nargs="+", default=[], choices=[c.name for c in CHANGES if c.on], help="only these"
    )
    p.add_argument("--metric", choices=METRICS, default="input_tokens_per_s")
    p.add_argument("--label", default="all", help="requests that count for times, e.g. 'turn 2' (all)")
    p.add_argument("--concurrency", type=int, default=2)
    p.add_argument("--rounds", type=int, default=6)
    p.add_argument("--warm-up", type=int, default=1)
    p.add_argument("--round-warm-up", type=int, default=0)
    p.add_argument("--between", choices=("paused", "running", "ended"), default="paused")
    p.add_argument(
        "--block", type=int, default=1, help="rounds in a row at an arm; saves starts of ended ones (1)"
    )
    p.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    p.add_argument("-o", "--output", type=Path, default=Path("ablation.jsonl"), help="(ablation.jsonl)")
    p.add_argument("--plan", action="store_true", help="print the arms and their commands; start nothing")
    workloads.add_arguments(p)
    _result.add_arguments(p)
    return p


def setup(args: argparse.Namespace) -> Setup:
    """What every arm has in common."""
    devices = {"env": args.prefill_devices, "decode_env": args.decode_devices}
    return Setup(
        model=args.model,
        layout=args.layout,
        platform=args.platform,
        flags=args.flags,
        decode_flags=args.decode_flags,
        stock_flags=args.stock_flags,
        own_flags=args.own_flags,
        values={"cache": args.cache_url},
        **{name: {"CUDA_VISIBLE_DEVICES": value} if value else {} for name, value in devices.items()},
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs every arm that can run. Raises the errors that `main` turns into one message."""
    if args.platform == "cpu":
        os.environ.setdefault("GLM_SGLANG_PLATFORM", "reference")
    planned = arms(setup(args), args.changes)
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    endpoints = [Endpoint(arm.spec, args.logs) for arm in planned if arm.spec]

    def make(bytes_per_token: float) -> Plan:
        return Plan(
            workloads.build(args, bytes_per_token),
            [Point(concurrency=args.concurrency)],
            args.rounds,
            args.output,
            warm_up=args.warm_up,
            round_warm_up=args.round_warm_up,
            between=args.between,
            seed=args.seed,
            block=args.block,
        )

    plan, records = compare(endpoints, args.bytes_per_token, args.text, make, args.between)
    workload = plan.workload
    return {
        "workload": workload.name,
        "parameters": workload.parameters(),
        "layout": args.layout,
        "rounds": args.rounds,
        **analyse(planned, records, args.metric, args.label),
        "endpoints": {e.spec.name: {**e.spec.describe(), "about": e.about} for e in endpoints},
        "discipline": discipline(plan, endpoints),
        "records": args.output.name,
    }


def main() -> int:
    """Exit status: 0, 1 when an arm failed, 2 for the flags."""
    args = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if args.plan:
        for arm in arms(setup(args), args.changes):
            print(f"{arm.name}: {arm.state}")
            for name, command in (arm.spec.processes if arm.spec else {}).items():
                print(f"  {name}: {command}")
        return 0
    try:
        result = measure(args)
    except SpecError as error:
        print(error, file=sys.stderr)
        return 2
    except (EndpointError, ServerError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nstopped; the same command goes on from {args.output}", file=sys.stderr)
        return 130
    for row in result["arms"]:
        shown = f"{row['speedup']['value']:.3f}× {row['speedup']['says']}" if row["speedup"] else row["state"]
        print(
            f"{row['name']:22} {shown}   (the article: {row['article'] or 'says nothing'})", file=sys.stderr
        )
    print(result["answer"], file=sys.stderr)
    _result.finish("ablation", result, args, device="cpu" if args.platform == "cpu" else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
