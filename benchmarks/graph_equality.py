"""Do prefill graphs change what the model says? The same prompts to a server with graphs and to one without.

A small FP8 checkpoint of GLM's structure on one GPU. Prompts at every bucket, one token beside it, several requests
in one batch, behind cached prefixes, and of random lengths for the rest of the time. The eager server answers
twice: above 2,048 tokens its own selection is not repeatable to the bit, so eager against eager is the yardstick.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from benchmarks import _result
from benchmarks.gpu_idle import Arm, captured, prompt
from glm_sglang.serving import Server, ServerError
from glm_sglang.tiny_model.__main__ import main as make_model

BUCKETS = (256, 512, 1024, 2048, 3072, 4096)
NEW_TOKENS = 4
TOP = 20  # logprobs of the likeliest tokens, from which the divergence is computed
TIE = 0.05  # nats
KL_LIMIT = 0.0025  # nats, the project's bound for graph against eager
FLAGS = (
    "--chunked-prefill-size=4096",
    "--max-prefill-tokens=8192",
    "--max-running-requests=32",
    "--max-total-tokens=131072",
    "--mem-fraction-static=0.7",
    "--cuda-graph-backend-decode=disabled",
    "--sampling-backend=pytorch",
    "--skip-server-warmup",
    "--disable-custom-all-reduce",
    "--enforce-disable-flashinfer-allreduce-fusion",
    "--watchdog-timeout=400",
    "--enable-metrics",
)
_OURS = ("--glm-prefill-graph", "strict", "--glm-prefill-graph-buckets", ",".join(map(str, BUCKETS)))
ARMS = {
    "ours": [*_OURS],
    "eager": ["--glm-prefill-graph", "off", "--cuda-graph-backend-prefill", "disabled"],
    "verified": [*_OURS, "--glm-verify-graphs"],  # only has to start
}


@dataclass
class Answer:
    """Of one prompt: logprobs of its last tokens, the first new token's distribution, and the new tokens."""

    inputs: list[float]
    top: dict[int, float]
    tokens: list[int]
    gaps: list[float] = field(default_factory=list)  # first less second logprob, for each new token


def ask(arm: Arm, ids: list[int]) -> Answer:
    """One greedy answer; logprobs of at most the last 256 prompt tokens."""
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": max(0, len(ids) - 256),
        "top_logprobs_num": TOP,
    }
    meta = arm.post("/generate", body).json()["meta_info"]
    tops = meta["output_top_logprobs"]
    return Answer(
        inputs=[entry[0] for entry in meta["input_token_logprobs"] if entry[0] is not None],
        top={entry[1]: entry[0] for entry in tops[0]},
        tokens=[entry[1] for entry in meta["output_token_logprobs"]],
        gaps=[top[0][0] - top[1][0] for top in tops],
    )


def divergence(p: dict[int, float], q: dict[int, float]) -> float:
    """KL(p ‖ q) in nats over p's likeliest tokens, all others as one."""
    both = [token for token in p if token in q]
    rest_p = max(1e-9, 1 - sum(math.exp(p[t]) for t in both))
    rest_q = max(1e-9, 1 - sum(math.exp(q[t]) for t in both))
    return sum(math.exp(p[t]) * (p[t] - q[t]) for t in both) + rest_p * math.log(rest_p / rest_q)


@dataclass
class Tally:
    """Differences between two answers to each of many prompts."""

    kl: list[float] = field(default_factory=list)
    delta: list[float] = field(default_factory=list)
    other_tokens: int = 0

    def add(self, one: Answer, other: Answer) -> None:
        """Compare; a token that differs at a tie counts as the same, and what follows it is not compared."""
        self.kl.append(divergence(one.top, other.top))
        self.delta += [abs(a - b) for a, b in zip(one.inputs, other.inputs, strict=True)]
        for mine, yours, gap in zip(one.tokens, other.tokens, other.gaps, strict=True):
            if mine != yours:
                self.other_tokens += gap > TIE
                break

    def report(self) -> dict[str, Any]:
        """As JSON."""
        if not self.kl:
            return {"prompts": 0}
        return {
            "prompts": len(self.kl),
            "kl_mean": statistics.fmean(self.kl),
            "kl_max": max(self.kl),
            "logprob_delta_mean": statistics.fmean(self.delta),
            "logprob_delta_max": max(self.delta),
            "other_tokens": self.other_tokens,
        }


def cases(seconds: float) -> Iterator[tuple[str, list[list[int]]]]:
    """Batches of prompts by kind; those of one batch are sent at once."""
    for bucket in BUCKETS:
        for tokens in (bucket - 1, bucket, bucket + 1):
            yield "at a bucket", [prompt(f"edge{tokens}", tokens)]
    for round_ in range(6):
        rng = random.Random(f"batch{round_}")
        yield "several requests", [prompt(f"many{round_}.{i}", rng.randrange(1, 900)) for i in range(8)]
    for shared in (64, 1000, 2048, 5000):
        prefix = prompt(f"prefix{shared}", shared)
        yield "fills the cache", [prefix]
        yield "cached prefix", [prompt(f"tail{shared}.{i}", 100 + 333 * i, prefix) for i in range(4)]
    yield "over several chunks", [prompt(f"long{i}", 9000 + 1777 * i) for i in range(3)]
    ends = time.monotonic() + seconds
    rng = random.Random("lengths")
    number = 0
    while time.monotonic() < ends:
        sizes = [int(math.exp(rng.uniform(0, math.log(6000)))) for _ in range(rng.choice((1, 1, 2, 4)))]
        yield "random lengths", [prompt(f"random{number}.{i}", size) for i, size in enumerate(sizes)]
        number += 1


def compare(ours: Arm, eager: Arm, seconds: float, note: Any) -> dict[str, Any]:
    """Ask both; returns tallies by kind of case, of graph against eager and of eager against itself."""
    graph: dict[str, Tally] = {}
    floor: dict[str, Tally] = {}
    began = 0
    with ThreadPoolExecutor(16) as pool:
        for kind, prompts in cases(seconds):
            answers = [
                list(pool.map(lambda ids, arm=arm: ask(arm, ids), prompts)) for arm in (ours, eager, eager)
            ]
            for mine, yours, again in zip(*answers, strict=True):
                graph.setdefault(kind, Tally()).add(mine, yours)
                floor.setdefault(kind, Tally()).add(again, yours)
            began += 1
            if began % 10 == 0:
                note(_reports(graph, floor))
    return _reports(graph, floor)


def headline(graph: dict[str, Tally]) -> dict[str, Any]:
    """Over all prompts: whether graphs may serve."""
    kl = [value for tally in graph.values() for value in tally.kl]
    other = sum(tally.other_tokens for tally in graph.values())
    mean = statistics.fmean(kl) if kl else None
    return {
        "prompts": len(kl),
        "kl_mean": mean,
        "other_tokens": other,
        "equal": mean is not None and mean < KL_LIMIT and other == 0,
    }


def _reports(graph: dict[str, Tally], floor: dict[str, Tally]) -> dict[str, Any]:
    return {
        **headline(graph),
        "graph_against_eager": {kind: tally.report() for kind, tally in graph.items()},
        "eager_against_eager": {kind: tally.report() for kind, tally in floor.items()},
    }


def eager_steps(arm: Arm) -> dict[str, float]:
    """`glm_sglang:prefill_graph_eager_total` by reason, from /metrics."""
    import httpx

    found: dict[str, float] = {}
    for line in httpx.get(arm.server.url + "/metrics", timeout=20.0).text.splitlines():
        if line.startswith(("glm_sglang:prefill_graph_eager_total{", "sglang:cuda_graph_passes_total{")):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _result.add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=60.0, help="time for prompts of random lengths")
    parser.add_argument("--start-seconds", type=float, default=300.0)
    parser.add_argument("--out", default="", help="folder for partial results and logs")
    parser.add_argument("--extra", default="", help="further server flags for both")
    args = parser.parse_args(argv)
    out = Path(args.out or tempfile.mkdtemp(prefix="graph-equality-"))
    out.mkdir(parents=True, exist_ok=True)
    model = Path(tempfile.mkdtemp(prefix="graph-equality-model-"), "model")
    if make_model(
        [str(model), "--preset", "gpu", "--dtype", "fp8", "--layers", "6", "--indexer-types", "FSFSSF"]
    ):
        return 1
    flags = [*FLAGS, *args.extra.split()]
    arms = [
        Arm(name, Server(model, [*flags, *own], name=name, log=out / f"{name}.log"))
        for name, own in ARMS.items()
    ]
    result: dict[str, Any] = {}

    def note(partial: dict[str, Any]) -> None:
        (out / "graph_equality.json").write_bytes(orjson.dumps(result | partial, option=orjson.OPT_INDENT_2))

    def up(arm: Arm) -> bool:
        try:
            arm.server.wait_ready()
        except ServerError as error:
            result.setdefault("not_up", {})[arm.name] = str(error)[-4000:]
        note({})
        return arm.name not in result.get("not_up", {})

    try:
        for arm in arms:
            arm.server.ready_timeout_s = args.start_seconds
            arm.server.ready_path = "/model_info"
            arm.server.start()
            time.sleep(2.0)
        ours, eager, verified = arms
        if up(ours) & up(eager):
            result["capture"] = captured(ours.server.log)
            result |= compare(ours, eager, args.seconds, note)
            result["eager_steps"] = eager_steps(ours)
            note({})
        up(verified)
        result["verified"] = [line for line in captured(verified.server.log)["log"] if "verified" in line]
    finally:
        for arm in arms:
            arm.server.stop()
    note({})
    _result.finish("graph_equality", result, args)
    return 1 if "not_up" in result else 0


if __name__ == "__main__":
    sys.exit(main())
