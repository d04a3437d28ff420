"""Compares endpoints: the same requests to each, in interleaved rounds; TTFT, ITL, end-to-end, input tokens/s, cached
tokens, errors; ratios pair by pair with their intervals.

    python -m benchmarks.ab --url ours=http://10.0.0.1:30000 --url stock=http://10.0.0.2:30000 \\
        --workload two_turn --prompt-tokens 16k --concurrency 1,4,16 --rounds 10 -o two_turn.jsonl --json
    python -m benchmarks.ab --config endpoints.yaml --set model=/models/GLM-5.3-FP8 …
    python -m benchmarks.ab --prove-client --json

The first endpoint is the baseline unless --baseline names another. A run that was interrupted goes on where
it was when started again with the same flags and the same -o.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import _result, workloads
from benchmarks.ab import comparison, prove
from benchmarks.ab import endpoints as described
from benchmarks.ab.comparison import Plan, discipline
from benchmarks.ab.load import Point
from benchmarks.ab.running import Endpoint, EndpointError, served_on
from benchmarks.ab.statistics import CONFIDENCE, FEWEST_ROUNDS, fewest_rounds
from benchmarks.ab.summary import ALL, METRICS, summarise
from benchmarks.workloads.text import BYTES_PER_TOKEN
from glm_sglang.serving import ServerError


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.ab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--prove-client", action="store_true", help="measure the client against a null server")
    p.add_argument("--prove-statistics", action="store_true", help="A against A, 20 times (null servers)")
    p.add_argument(
        "--url", action="append", default=[], metavar="NAME=URL", help="an endpoint that runs already"
    )
    p.add_argument("--config", type=Path, help="endpoints in YAML (see benchmarks/ab/endpoints.py)")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="fills {KEY} in --config")
    p.add_argument("--only", nargs="+", metavar="NAME", help="only these endpoints of --config")
    p.add_argument("--baseline", help="the endpoint that others are compared with (the first)")
    p.add_argument(
        "--rounds",
        type=int,
        default=8,
        help=f"{FEWEST_ROUNDS} at least for a verdict, {fewest_rounds(4)} for four: a sweep has one for each endpoint "
        "and point (8)",
    )
    p.add_argument("--concurrency", type=_integers, help="sessions at once; several: a sweep (1)")
    p.add_argument("--rate", type=_floats, help="sessions a second instead, Poisson; several: a sweep")
    p.add_argument(
        "--warm-up",
        type=int,
        default=2,
        help="sessions that don't count after a start and at a new point; as many as are asked at once, where that is "
        "more; 0: none (2)",
    )
    p.add_argument("--round-warm-up", type=int, default=1, help="the same before every further round (1)")
    p.add_argument(
        "--between",
        choices=("paused", "running", "ended"),
        default="paused",
        help="what started endpoints do while another one is measured (paused: SIGSTOP)",
    )
    p.add_argument(
        "--block", type=int, default=1, help="rounds in a row at an endpoint; saves starts of ended ones (1)"
    )
    p.add_argument("--no-flush", action="store_true", help="endpoints by --url have no way to be flushed")
    p.add_argument("--no-continuous-usage", action="store_true", help="for endpoints that reject the option")
    p.add_argument(
        "-o", "--output", type=Path, default=Path("ab.jsonl"), help="records, one a round (ab.jsonl)"
    )
    p.add_argument("--logs", type=Path, help="keep the logs of started endpoints in this folder")
    p.add_argument(
        "--name", default="ab", help="the result's name: benchmarks/results/MACHINE/NAME.json (ab)"
    )
    workloads.add_arguments(p)
    _result.add_arguments(p)
    return p


def _integers(text: str) -> list[int]:
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be positive numbers")
    return values


def _floats(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if min(values) <= 0:
        raise argparse.ArgumentTypeError(f"{text} must be positive numbers")
    return values


def specs(args: argparse.Namespace) -> tuple[list[described.Spec], list[str]]:
    """The endpoints that the flags name, and why some of them are left out. Raises SpecError."""
    found = [described.parse_url(text) for text in args.url]
    if args.no_flush:
        found = [described.Spec(spec.name, url=spec.url, flush=None) for spec in found]
    absent: list[str] = []
    if args.config is not None:
        values = dict(text.partition("=")[::2] for text in args.set)
        more, absent = described.load(args.config, values)
        found += [spec for spec in more if not args.only or spec.name in args.only]
    names = [spec.name for spec in found]
    if len(found) < 2:
        raise described.SpecError(f"endpoints: {names}; --url and --config must give at least two to compare")
    if len(set(names)) < len(names):
        raise described.SpecError(f"endpoints: {names}; every name must be another one")
    if args.baseline and args.baseline not in names:
        raise described.SpecError(f"--baseline is {args.baseline}; allowed: {', '.join(names)}")
    return found, absent


def points(args: argparse.Namespace) -> list[Point]:
    """The sweep. Raises SpecError for two kinds of load at once."""
    if args.rate and args.concurrency:
        raise described.SpecError("--rate and --concurrency exclude each other")
    if args.rate:
        return [Point(rate=rate) for rate in args.rate]
    if args.workload == "mooncake" and not args.concurrency:
        return [Point()]
    return [Point(concurrency=n) for n in args.concurrency or [1]]


def compare(args: argparse.Namespace) -> tuple[dict[str, Any], _result.Device]:
    """The result, and what it was measured on. Raises the errors that `main` turns into one message."""
    found, absent = specs(args)
    baseline = args.baseline or found[0].name
    try:
        workloads.build(args, BYTES_PER_TOKEN)  # before anything starts
    except (OSError, ValueError) as error:
        raise described.SpecError(str(error)) from None
    sweep = points(args)
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    endpoints = [Endpoint(spec, args.logs) for spec in found]

    def make(bytes_per_token: float) -> Plan:
        return Plan(
            workloads.build(args, bytes_per_token),
            sweep,
            args.rounds,
            args.output,
            warm_up=args.warm_up,
            round_warm_up=args.round_warm_up,
            between=args.between,
            continuous_usage=not args.no_continuous_usage,
            seed=args.seed,
            block=args.block,
        )

    plan, records = comparison.compare(endpoints, args.bytes_per_token, args.text, make, args.between)
    workload = plan.workload
    result = {
        "kind": "ab",
        "workload": workload.name,
        "parameters": workload.parameters(),
        "rounds": args.rounds,
        "confidence": CONFIDENCE,
        "baseline": baseline,
        "endpoints": {e.spec.name: {**e.spec.describe(), "about": e.about} for e in endpoints},
        "discipline": discipline(plan, endpoints),
        "points": summarise(records, [spec.name for spec in found], baseline),
        "records": args.output.name,
        "not_measured": absent,
    }
    show(result)
    return result, served_on(endpoints)


def show(result: dict[str, Any]) -> None:
    """The result as a table for a terminal."""
    console = Console(stderr=True)
    for point in result["points"]:
        judged = point["verdict"]["of"]["metric"]
        table = Table(title=f"{result['workload']}, {point['point']}, {point['rounds']} rounds")
        for name in (
            "endpoint",
            "",
            "TTFT p50/p99 ms",
            "ITL p50/p99 ms",
            "e2e p50 ms",
            "cached",
            "input tokens/s",
        ):
            table.add_column(name, justify="left" if name in ("endpoint", "") else "right")
        table.add_column("TTFT speed-up")
        table.add_column(f"verdict: {METRICS[judged]}")
        table.add_column("errors", justify="right")
        for name, one in point["endpoints"].items():
            for label, times in one["by_label"].items():
                compared = point["speedups"].get(name, {"by_label": {}})
                speedups = compared["by_label"]
                verdict = compared.get(judged) or speedups.get(ALL, {}).get(judged)
                table.add_row(
                    name if label == ALL else "",
                    label,
                    "/".join(_ms(times["ttft_ms"][q]) for q in ("median", "p99")),
                    "/".join(_ms(times["itl_ms"][q]) for q in ("median", "p99")),
                    _ms(times["e2e_ms"]["median"]),
                    "" if times["cached_share"] is None else f"{times['cached_share']:.0%}",
                    _ms(one["input_tokens_per_s"]) if label == ALL else "",
                    _interval(speedups.get(label, {}).get("ttft")),
                    _speedup(verdict) if label == ALL else "",
                    str(one["errors"]) if label == ALL else "",
                )
        console.print(table)
    for line in result["discipline"].items():
        console.print(f"[dim]{line[0]}: {line[1]}", highlight=False)


def _ms(interval: dict[str, Any] | None) -> str:
    return "" if interval is None else f"{interval['value']:.1f}"


def _speedup(found: dict[str, Any] | None) -> str:
    if not found:
        return ""
    return f"{_interval(found)} {found['says']}"


def _interval(found: dict[str, Any] | None) -> str:
    if not found:
        return ""
    between = "" if found["low"] is None else f" [{found['low']:.3f}, {found['high']:.3f}]"
    return f"{found['value']:.3f}{between}"


def main() -> int:
    """Exit status: 0 when done (or proven), 1 when a proof failed or an endpoint, 2 for the flags."""
    args = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if args.prove_client or args.prove_statistics:
            question = "ab_client" if args.prove_client else "ab_statistics"
            proof = prove.prove_client() if args.prove_client else prove.prove_statistics()
            if answer := proof.get("answer"):
                print(answer, file=sys.stderr)
            _result.finish(question, proof, args, module="benchmarks.ab", device="cpu")
            return 0 if proof["ok"] else 1
        result, device = compare(args)
        _result.finish(args.name, result, args, module="benchmarks.ab", device=device)
    except described.SpecError as error:
        print(error, file=sys.stderr)
        return 2
    except (EndpointError, ServerError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nstopped; the same command goes on from {args.output}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
