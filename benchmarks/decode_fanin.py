"""How much of the prefill rate survives the handoff over NIXL, with one decode behind one to four prefill servers;
and how many streams one decode carries.

    python -m benchmarks.decode_fanin --model /models/GLM-5.3-FP8 --flags "--tp 1 …" --prefills 1,2,3 \\
        --prefill-devices 0,1,2 --decode-devices 3 --between ended --block 3 --prompt-tokens 16k --json

For each number of prefill servers two arms get the same prompts and answer one token: the servers with decode
behind SGLang's router, and as many aggregated servers behind the same router, where nothing is handed over.
What survives is the ratio of their input tokens per second. Both arms want the same GPUs, so that with devices only one
of them is up at a time. Then the streams: short prompts with long answers through the pair, several waves of as many at
once as is asked. Some of those wait or are prefilled: how many were decoding on average is counted. Decode carries so
many where 99 of 100 events with tokens come within `--itl-limit-ms`, up to the first number for which they do not.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _result
from benchmarks.ab.comparison import Outcome, Plan, compare_cases, discipline
from benchmarks.ab.endpoints import Spec, SpecError
from benchmarks.ab.load import Point
from benchmarks.ab.running import Between, Endpoint, EndpointError, served_on
from benchmarks.ab.starting import Starting
from benchmarks.ab.summary import ALL, aligned, speedup, summarise
from benchmarks.workloads.catalogue import tokens
from benchmarks.workloads.conversations import LongContext
from benchmarks.workloads.text import Text
from glm_sglang.serving import ServerError

DIRECT, PAIR = "without handoff", "through the handoff"
_ROUTER = (
    "--host 127.0.0.1 --port {port} --prometheus-port {port:metrics} --worker-startup-check-interval 1 "
    "--log-level warn"
)


def server(model: str, flags: str, devices: str | None, more: str = "") -> str:
    """A server's command line."""
    env = f"env CUDA_VISIBLE_DEVICES={devices} " if devices else ""
    command = f"python -m glm_sglang.launch_server --model-path {shlex.quote(model)} --host 127.0.0.1"
    return f"{env}{command} --port {{port}} {flags} {more}".strip()


def pair(
    model: str, flags: str, decode_flags: str, devices: Sequence[str], decode_devices: str | None
) -> Spec:
    """Prefill servers (one an entry of `devices`, "" for no choice), one decode, a router."""
    processes = {}
    workers = []
    for i, device in enumerate(devices):
        boot = f"--disaggregation-mode prefill --disaggregation-bootstrap-port {{port:boot{i}}}"
        processes[f"prefill{i}"] = server(model, flags, device, boot)
        workers.append(f"--prefill {{url:prefill{i}}} {{port:boot{i}}}")
    mode = "--disaggregation-mode decode --disaggregation-transfer-backend nixl"
    processes["decode"] = server(model, decode_flags, decode_devices, mode)
    route = f"python -m glm_sglang.router --pd-disaggregation {' '.join(workers)} --decode {{url:decode}}"
    # In turn, as without handoff: every server gets its share of the work, and of the warm-up.
    processes["router"] = f"{route} --prefill-policy round_robin {_ROUTER}"
    flush = tuple(name for name in processes if name != "router")
    return Spec(PAIR, processes=processes, flush=flush, ready={"router": "/readiness"})


def direct(model: str, flags: str, devices: Sequence[str]) -> Spec:
    """As many aggregated servers behind the same router."""
    processes = {f"server{i}": server(model, flags, device) for i, device in enumerate(devices)}
    urls = " ".join(f"{{url:{name}}}" for name in processes)
    flush = tuple(processes)
    processes["router"] = f"python -m glm_sglang.router --worker-urls {urls} --policy round_robin {_ROUTER}"
    return Spec(DIRECT, processes=processes, flush=flush, ready={"router": "/readiness"})


def decoding(records: Sequence[dict[str, Any]]) -> float:
    """Mean number of streams between their first token and their last, over the time of all rounds: what all of them
    spent there, a second of the rounds (Little's law).
    """
    spent = sum(gap for record in records for gaps in record["itls"] for gap in gaps)
    return float(spent / sum(record["duration"] for record in records))


def gaps(records: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Gaps between tokens, and those that were seen. Through the router no event says how many tokens it holds, so of two
    that come together one gap is seen, the longer one: ITL is what a stream waits for the next event.
    """
    of = sum(record["total_output_tokens"] - record["completed"] for record in records)
    return {"seen": sum(len(one) for record in records for one in record["itls"]), "of": of}


def carried(streams: Sequence[dict[str, Any]], limit_ms: float) -> dict[str, Any] | None:
    """Of numbers of streams the row of the largest up to which all had a p99 of ITL within the limit, and no stream
    failed; None when the smallest has not. A larger one that was lucky does not count.
    """
    best = None
    for row in sorted(streams, key=lambda one: int(one["streams"])):
        p99 = row["itl_ms"]["p99"]
        if row["errors"] or p99 is None or p99["value"] > limit_ms:
            break
        best = row
    return best


def carried_words(streams: Sequence[dict[str, Any]], limit_ms: float) -> str:
    """How many streams one decode carries, in words."""
    best, tried = carried(streams, limit_ms), max(int(row["streams"]) for row in streams)
    said = f"Streams that one decode carries with 99 of 100 tokens within {limit_ms:g} ms: "
    if best is None:
        return f"{said}not even {min(int(row['streams']) for row in streams)}, the smallest number tried."
    return f"{said}{best['streams']} at once, {best['decoding']:.1f} of them decoding on average (at most {tried} tried)."


def survivors(arms: Sequence[dict[str, Any]]) -> str:
    """What survives, in words."""
    found = []
    for arm in arms:
        if one := arm["survives"]:
            doubt = f" ({one['says']})" if one["says"].startswith("undecided") else ""
            found.append(f"{arm['prefills']}: {one['value']:.2f}{doubt}")
        else:
            found.append(f"{arm['prefills']}: no pair of requests succeeded at both")
    return ", ".join(found)


class Bench:
    """Runs the arms one number of prefill servers after the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.size: float | None = args.bytes_per_token
        self.between = between(args)
        self.discipline: dict[str, Any] = {}
        self.device: _result.Device = None

    def plan(
        self, count: int, point: Point, work: dict[str, int], output: Path, bytes_per_token: float
    ) -> Plan:
        """Rounds for so many prefill servers, each of which is warm: the routers hand requests out in turn."""
        args = self.args
        text = Text(bytes_per_token)
        workload = LongContext(text, args.seed, work["sessions"], (work["prompt"],), work["answer"], "fan_in")
        return Plan(
            workload,
            [point],
            work["rounds"],
            output,
            warm_up=2 * count,
            round_warm_up=0,
            between=self.between,
            seed=args.seed,
            block=args.block,
        )

    def compare(
        self, count: int, specs: Sequence[Spec], works: dict[Point, dict[str, int]], output: Path
    ) -> Outcome:
        """Records by point (its words) of endpoints of so many prefill servers each, which live as long as it takes."""
        endpoints = [Endpoint(spec, self.args.logs) for spec in specs]

        def maker(point: Point, work: dict[str, int]) -> Callable[[float], Plan]:
            def make(bytes_per_token: float) -> Plan:
                self.size = bytes_per_token
                return self.plan(count, point, work, output, bytes_per_token)

            return make

        makes = {str(point): maker(point, work) for point, work in works.items()}
        found = compare_cases(endpoints, self.size, [], makes, Starting(self.between))
        self.discipline = discipline(next(iter(found.plans.values())), endpoints)
        self.device = served_on(endpoints)
        return found

    def specs(self, count: int) -> tuple[Spec, Spec]:
        """Without and with handoff, of so many prefill servers."""
        args = self.args
        devices = args.prefill_devices.split(",") if args.prefill_devices else [""] * count
        if len(devices) < count:
            raise ValueError(f"--prefill-devices names {len(devices)}; --prefills wants {count}")
        chosen = devices[:count]
        decode_flags = args.flags if args.decode_flags is None else args.decode_flags
        return (
            direct(args.model, args.flags, chosen),
            pair(args.model, args.flags, decode_flags, chosen, args.decode_devices),
        )

    def arm(self, count: int) -> dict[str, Any]:
        """What survives with so many prefill servers."""
        args = self.args
        work = {
            "sessions": args.sessions * count,
            "prompt": args.prompt_tokens,
            "answer": 1,
            "rounds": args.rounds,
        }
        output = args.output.with_suffix(f".{count}.jsonl")
        at = Point(concurrency=args.concurrency * count)
        found = self.compare(count, self.specs(count), {at: work}, output)
        records = found.records[str(at)]
        (point,) = summarise(records, [DIRECT, PAIR], DIRECT)
        of = aligned(records, [DIRECT, PAIR], str(at))
        return {
            "prefills": count,
            "direct_tokens_per_s": point["endpoints"][DIRECT]["input_tokens_per_s"],
            "pair_tokens_per_s": point["endpoints"][PAIR]["input_tokens_per_s"],
            "survives": speedup(of[DIRECT], of[PAIR]),
            "errors": sum(one["errors"] for one in point["endpoints"].values()),
        }

    def streams(self, count: int) -> list[dict[str, Any]]:
        """ITL by the number of streams that are asked at once, and how many of them were decoding."""
        args = self.args
        works = {
            Point(concurrency=number): {
                "sessions": args.stream_waves * number,
                "prompt": args.stream_prompt_tokens,
                "answer": args.stream_answer_tokens,
                "rounds": args.stream_rounds,
            }
            for number in args.streams
        }
        output = args.output.with_suffix(".streams.jsonl")
        found = self.compare(count, self.specs(count)[1:], works, output)
        rows = []
        for number, records in zip(args.streams, found.records.values(), strict=True):
            one = summarise(records, [PAIR], PAIR)[0]["endpoints"][PAIR]
            rows.append(
                {
                    "streams": number,
                    "decoding": round(decoding(records), 2),
                    "requests": one["requests"],
                    "gaps": gaps(records),
                    "itl_ms": one["by_label"][ALL]["itl_ms"],
                    "output_tokens_per_s": one["output_tokens_per_s"]["value"],
                    "errors": one["errors"],
                }
            )
        return rows


def between(args: argparse.Namespace) -> Between:
    """What an arm does while the other one is measured. Where devices are named both arms want the same ones, and a
    stopped server keeps its memory: there it ends, unless `--between` says otherwise.
    """
    named = args.prefill_devices or args.decode_devices
    chosen: Between = args.between or ("ended" if named else "paused")
    return chosen


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.decode_fanin",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--model", required=True, help="the checkpoint's folder")
    p.add_argument("--flags", default="", help="of every server")
    p.add_argument("--decode-flags", help="of decode instead (as --flags)")
    p.add_argument(
        "--prefills", type=_integers, default=[1, 2, 3, 4], help="numbers of prefill servers (1,2,3,4)"
    )
    p.add_argument(
        "--prefill-devices", help="CUDA_VISIBLE_DEVICES of each prefill server, separated by commas"
    )
    p.add_argument("--decode-devices", help="CUDA_VISIBLE_DEVICES of decode")
    p.add_argument("--prompt-tokens", type=tokens, default=4096)
    p.add_argument("--sessions", type=int, default=4, help="requests a round and prefill server (4)")
    p.add_argument("--concurrency", type=int, default=2, help="requests at once a prefill server (2)")
    p.add_argument("--rounds", type=int, default=6)
    p.add_argument("--streams", type=_integers, default=[1, 4, 16], help="streams at once (1,4,16)")
    p.add_argument("--stream-prompt-tokens", type=tokens, default=256)
    p.add_argument("--stream-answer-tokens", type=tokens, default=256)
    p.add_argument(
        "--stream-waves", type=int, default=3, help="requests a round, for each that is asked at once (3)"
    )
    p.add_argument("--stream-rounds", type=int, default=2)
    p.add_argument("--itl-limit-ms", type=float, default=100.0, help="what 99 of 100 tokens may take (100)")
    p.add_argument(
        "--between",
        choices=("paused", "running", "ended"),
        help="what an arm does while the other is measured (ended with devices, paused without)",
    )
    p.add_argument(
        "--block", type=int, default=1, help="rounds in a row at an arm; saves starts of ended ones (1)"
    )
    p.add_argument("--bytes-per-token", type=float)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--logs", type=Path)
    p.add_argument("-o", "--output", type=Path, default=Path("fanin.jsonl"), help="(fanin.jsonl)")
    _result.add_arguments(p)
    return p


def _integers(text: str) -> list[int]:
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be positive numbers")
    return values


def main() -> int:
    """Exit status: 0, 1 when a server failed, 2 for the flags."""
    args = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    try:
        arms = [bench.arm(count) for count in args.prefills]
        streams = bench.streams(max(args.prefills))
    except SpecError as error:
        print(error, file=sys.stderr)
        return 2
    except (EndpointError, ServerError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nstopped; the same command goes on from {args.output.with_suffix('')}.*", file=sys.stderr)
        return 130
    most = carried(streams, args.itl_limit_ms)
    answer = (
        f"Share of the prefill rate that survives the handoff, by prefill servers: {survivors(arms)}. "
        + carried_words(streams, args.itl_limit_ms)
    )
    print(answer, file=sys.stderr)
    absent = [f"decode_fanin: {n} prefill servers" for n in (1, 2, 3, 4) if n not in args.prefills]
    result = {
        "arms": arms,
        "streams": streams,
        "carried": most and most["streams"],
        "carried_decoding": most and most["decoding"],
        "itl_limit_ms": args.itl_limit_ms,
        "answer": answer,
        "discipline": bench.discipline,
        "not_measured": absent,
    }
    _result.finish("decode_fanin", result, args, device=bench.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
