"""Measures stock SGLang, this fork with none of its changes, with each alone, and with all: same requests, interleaved.

    python -m benchmarks.ablation --model /models/GLM-5.3-FP8 --platform gpu --layout pair --flags "--tp 2 …" \\
        --prefill-devices 0 --decode-devices 1 --between ended --workload two_turn --turns-apart --json
    python -m benchmarks.ablation --model .bench/model --platform cpu --flags "…" --json

    python -m benchmarks.ablation … --start together --seconds 420 --case "cold: --workload long_context --lengths 4k" \\
        --case "chat: --workload two_turn --turns-apart --sessions 6 --label 'turn 2'" --json

The GPU's KV must be too small to keep the first turns (--max-total-tokens in --flags), or a cache has nothing
to do. A run that was interrupted goes on from -o. Cases are measured in turns on the same running arms; the result has
each one's analysis under `cases`, and `speedup_NAME` (all changes over stock).
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import orjson

from benchmarks import _result, workloads
from benchmarks.ab.comparison import Outcome, Plan, compare_cases, discipline
from benchmarks.ab.endpoints import SpecError
from benchmarks.ab.load import Point
from benchmarks.ab.running import Endpoint, EndpointError
from benchmarks.ab.starting import Starting
from benchmarks.ab.summary import METRICS
from benchmarks.ablation.analysis import analyse, without
from benchmarks.ablation.arms import ALL, CHANGES, NONE, STOCK, Arm, Setup, arms
from benchmarks.ablation.partial import Partial
from glm_sglang.serving import ServerError


def add_measuring(p: argparse.ArgumentParser) -> None:
    """The flags that a case may have of its own, the workload's apart."""
    p.add_argument("--metric", choices=METRICS, default="input_tokens_per_s")
    p.add_argument("--label", default="all", help="requests that count for times, e.g. 'turn 2' (all)")
    p.add_argument("--concurrency", type=int, default=2)
    p.add_argument("--rounds", type=int, default=6)
    p.add_argument("--warm-up", type=int, default=1)
    p.add_argument("--round-warm-up", type=int, default=0)


def cases(args: argparse.Namespace) -> dict[str, argparse.Namespace]:
    """The flags of each case by its name; without --case one, called "". Raises SpecError."""
    if not args.case:
        return {"": args}
    found: dict[str, argparse.Namespace] = {}
    for text in args.case:
        name, colon, flags = text.partition(":")
        if not colon or not re.fullmatch(r"[a-z0-9_]+", name) or name in found:
            raise SpecError(
                f'--case is {text!r}; it must be "NAME: FLAGS", NAME of a-z, 0-9 and _, each only once'
            )
        p = argparse.ArgumentParser(prog=f"--case {name}", add_help=False)
        add_measuring(p)
        workloads.add_arguments(p)
        # What it does not give is taken from the command's own flags.
        found[name] = p.parse_args(shlex.split(flags), argparse.Namespace(**vars(args)))
    return found


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
    p.add_argument(
        "--moe-runner", default="", help="--moe-runner-backend where MegaMoE is off, of stock SGLang too"
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
    p.add_argument(
        "--arms",
        nargs="+",
        default=[],
        choices=[NONE, *(c.name for c in CHANGES if c.on), ALL],
        help="only these beside stock (all)",
    )
    p.add_argument(
        "--also",
        action="append",
        type=lambda text: text.split(","),
        default=[],
        metavar="CHANGE,CHANGE",
        help="an arm with these changes together, besides; it speaks for all where all cannot start",
    )
    p.add_argument(
        "--graphs",
        choices=("auto", "strict"),
        default="auto",
        help="how prefill graphs are asked for; strict: also under prefill CP (auto)",
    )
    p.add_argument(
        "--stock-path",
        type=Path,
        help="a folder of packages that stock SGLang's prefill finds first: the sgl-deep-gemm that it pins",
    )
    p.add_argument(
        "--share-decode", action="store_true", help="one decode for all arms (pair, --between running)"
    )
    p.add_argument(
        "--start",
        choices=("one-by-one", "together"),
        default="one-by-one",
        help="together: side by side, warmed side by side; an arm that fails is left out (one-by-one)",
    )
    p.add_argument("--start-seconds", type=float, default=1800.0, help="longest wait for a server (1800)")
    p.add_argument(
        "--case",
        action="append",
        default=[],
        metavar='"NAME: FLAGS"',
        help="a case of its own on the same running arms: flags of the workload, --concurrency, --rounds, --metric, "
        "--label, --warm-up, --round-warm-up; what it leaves out is as without it. Several times: several cases",
    )
    p.add_argument(
        "--seconds", type=float, help="from the start of this command, after which no further round begins"
    )
    p.add_argument(
        "--partial",
        type=Path,
        help="write the result so far to this file after every round, and before the servers are stopped",
    )
    add_measuring(p)
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
    """What every arm has in common. Raises SpecError."""
    if args.share_decode and args.layout != "pair":
        raise SpecError(f"--share-decode with --layout {args.layout}; it needs --layout pair")
    devices = {"env": args.prefill_devices, "decode_env": args.decode_devices}
    stock = {}
    if args.stock_path is not None:
        if not args.stock_path.is_dir():
            raise SpecError(f"--stock-path is {args.stock_path}; it must be a folder")
        present = os.environ.get("PYTHONPATH")
        stock["PYTHONPATH"] = os.pathsep.join(filter(None, (str(args.stock_path.resolve()), present)))
    return Setup(
        model=args.model,
        layout=args.layout,
        platform=args.platform,
        flags=args.flags,
        decode_flags=args.decode_flags,
        stock_flags=args.stock_flags,
        own_flags=args.own_flags,
        stock_env=stock,
        values={"cache": args.cache_url},
        graphs=args.graphs,
        share_decode=args.share_decode,
        moe_runner=args.moe_runner,
        **{name: {"CUDA_VISIBLE_DEVICES": value} if value else {} for name, value in devices.items()},
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs every arm that can run. Raises the errors that `main` turns into one message."""
    began = time.monotonic()
    if args.platform == "cpu":
        os.environ.setdefault("GLM_SGLANG_PLATFORM", "reference")
    wanted = cases(args)
    planned = arms(setup(args), args.changes, also=args.also, named=args.arms)
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    endpoints = [
        Endpoint(arm.spec, args.logs, ready_timeout_s=args.start_seconds) for arm in planned if arm.spec
    ]
    starting = Starting(args.between, args.start == "together", STOCK)

    def left() -> bool:
        return args.seconds is None or time.monotonic() - began < args.seconds

    def so_far(outcome: Outcome) -> dict[str, Any]:
        silent = argparse.Namespace(json=False, save=False)
        return finish(result(args, wanted, planned, endpoints, outcome), args.platform, silent)

    partial = Partial(args.partial, so_far)
    makes = {name: maker(args, own) for name, own in wanted.items()}
    found = compare_cases(
        endpoints, args.bytes_per_token, args.text, makes, starting, left, partial.note, partial.write
    )
    return result(args, wanted, planned, endpoints, found)


def finish(found: dict[str, Any], platform: str, how: argparse.Namespace) -> dict[str, Any]:
    """`_result.finish` of an ablation, printed and saved as `how` says."""
    return _result.finish("ablation", found, how, device="cpu" if platform == "cpu" else None)


def maker(args: argparse.Namespace, own: argparse.Namespace) -> Callable[[float], Plan]:
    """From the bytes of a token to a case's plan."""

    def make(bytes_per_token: float) -> Plan:
        return Plan(
            workloads.build(own, own.bytes_per_token or bytes_per_token),
            [Point(concurrency=own.concurrency)],
            own.rounds,
            args.output,
            warm_up=own.warm_up,
            round_warm_up=own.round_warm_up,
            between=args.between,
            seed=own.seed,
            block=args.block,
        )

    return make


def result(
    args: argparse.Namespace,
    wanted: Mapping[str, argparse.Namespace],
    planned: Sequence[Arm],
    endpoints: Sequence[Endpoint],
    outcome: Outcome,
) -> dict[str, Any]:
    """What is known so far."""
    measured = without(planned, outcome.left_out)
    kept = [endpoint for endpoint in endpoints if endpoint.spec.name not in outcome.left_out]
    about = {
        "model": model_facts(args),
        "endpoints": {e.spec.name: {**e.spec.describe(), "about": e.about} for e in kept},
        "discipline": discipline(next(iter(outcome.plans.values())), kept),
        "records": args.output.name,
        "environment": environment(),
        "reused_rounds": outcome.reused,
        "lost_rounds": outcome.lost,
    }
    if args.stock_path is not None:
        about["baseline_versions"] = packages(args.stock_path)
    found: dict[str, dict[str, Any]] = {}
    for name, own in wanted.items():
        workload = outcome.plans[name].workload
        found[name] = {
            "workload": workload.name,
            "parameters": workload.parameters(),
            "concurrency": own.concurrency,
            "rounds": own.rounds,
            **analyse(measured, outcome.records[name], own.metric, own.label),
        }
    if not args.case:
        return {"layout": args.layout, **found[""], **about}
    left_out = list(dict.fromkeys(line for one in found.values() for line in one.pop("not_measured")))
    left_out += [
        f"ablation, {name}: {one['rounds_measured']} of {one['rounds']} rounds in the time"
        for name, one in found.items()
        if one["rounds_measured"] < one["rounds"]
    ]
    return {
        "layout": args.layout,
        "baseline": STOCK,
        **headline(found),
        "answer": " ".join(f"{name}: {one['answer']}" for name, one in found.items()),
        "cases": found,
        "not_measured": left_out,
        **about,
    }


def model_facts(args: argparse.Namespace) -> dict[str, Any]:
    """What of the model a figure depends on; {} where its config.json cannot be read."""
    try:
        config = orjson.loads((Path(args.model) / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    names = {
        "layers": "num_hidden_layers",
        "dense_layers": "first_k_dense_replace",
        "experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok",
        "hidden": "hidden_size",
    }
    found = {name: config[key] for name, key in names.items() if key in config}
    dummy = re.search(r"--load-format[ =]dummy\b", args.flags)
    if kinds := config.get("indexer_types"):
        found["indexers"] = kinds.count("full")
    return found | {
        "weights": "dummy: nearly all zeros, every token at the same experts" if dummy else "a checkpoint's"
    }


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that SGLang's servers read, folders apart: what they are here, every arm inherits."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith("SGLANG_") and "/" not in value
    }


def headline(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """`speedup_NAME` of each case (over stock; None where it was not measured), its interval, verdict and arm: all."""
    values: dict[str, Any] = {}
    for name, one in found.items():
        speedup = one["speedup"] or {}
        values[f"speedup_{name}"] = speedup.get("value")
        values[f"speedup_{name}_interval"] = [speedup.get("low"), speedup.get("high")]
        values[f"speedup_{name}_says"] = speedup.get("says", "not measured")
        values[f"speedup_{name}_arm"] = speedup.get("arm")
    return values


def packages(folder: Path) -> dict[str, str]:
    """The packages in a folder, by name, and their versions."""
    return {found.metadata["Name"]: found.version for found in metadata.distributions(path=[str(folder)])}


def show(found: Mapping[str, Any]) -> None:
    """One case's arms, for the person who waits."""
    for row in found["arms"]:
        state = row["state"].splitlines()[0]
        shown = f"{row['speedup']['value']:.3f}× {row['speedup']['says']}" if row["speedup"] else state
        print(
            f"{row['name']:22} {shown}   (the article: {row['article'] or 'says nothing'})", file=sys.stderr
        )


def main() -> int:
    """Exit status: 0, 1 when an arm failed, 2 for the flags."""
    args = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if args.plan:
            plan(args)
            return 0
        found = measure(args)
    except SpecError as error:
        print(error, file=sys.stderr)
        return 2
    except (EndpointError, ServerError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nstopped; the same command goes on from {args.output}", file=sys.stderr)
        return 130
    for name, one in found.get("cases", {"": found}).items():
        if name:
            print(f"{name}: {one['rounds_measured']} of {one['rounds']} rounds", file=sys.stderr)
        show(one)
    print(found["answer"], file=sys.stderr)
    finish(found, args.platform, args)
    return 0


def plan(args: argparse.Namespace) -> None:
    """Prints the arms, their commands and the cases. Raises SpecError."""
    for arm in arms(setup(args), args.changes, also=args.also, named=args.arms):
        print(f"{arm.name}: {arm.state}")
        for name, command in ({**arm.spec.processes, **arm.spec.shared} if arm.spec else {}).items():
            print(f"  {name}: {command}")
    for name, own in cases(args).items():
        if name:
            workload = maker(args, own)(args.bytes_per_token or 4.0).workload
            print(f"case {name}: {workload.name} {workload.parameters()}")


if __name__ == "__main__":
    sys.exit(main())
