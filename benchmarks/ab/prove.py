"""Proofs about the harness itself, against a server that computes nothing, in a process of its own.

`--prove-client`: how fast the client is when nothing else is slow, how much later than the server it sees a first
token, and so up to how many streams it adds little to what it measures (on one machine with the server, which takes its
share of the cores). `--prove-statistics`: one server under three names at two loads, 20 times with other seeds: in at
least 19 none of the verdicts may be wrong; and a server that really is slower must be told from it.
"""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from benchmarks.ab.client import Client, Sample
from benchmarks.ab.comparison import Comparison, Plan, run_async
from benchmarks.ab.endpoints import Spec
from benchmarks.ab.load import Point, run_round
from benchmarks.ab.null_server import BYTES_PER_TOKEN
from benchmarks.ab.running import Endpoint
from benchmarks.ab.statistics import CONFIDENCE
from benchmarks.ab.summary import ALL, HOLDS, aligned, by_round, summarise
from benchmarks.workloads import Load, Session
from benchmarks.workloads.conversations import TwoTurn
from benchmarks.workloads.model import chat
from benchmarks.workloads.text import Text
from glm_sglang.serving import Process, free_port

ENOUGH_REQUESTS_PER_S = 5000.0
ENOUGH_INPUT_TOKENS_PER_S = 1e6
#: "Adds little": a first token is seen late by a tenth of the server's time at the median, by half of it at p99.
LATE_P50_MS, LATE_P99_MS = 2.0, 10.0
#: So many streams must be carried: the highest concurrency that this project's own comparisons ask for.
ENOUGH_STREAMS = 16
STREAMS = (1, 4, 16, 32, 64, 128, 256, 512)
_TTFT_S, _ITL_S, _TOKENS = 0.020, 0.010, 16
_TRIALS = 20
_RIGHT = 19
_SLOWER = 1.3
#: Trials A against A: names of one server, the first the baseline, loads, and rounds at each.
EQUAL = ("a", "again", "and again")
POINTS = (Point(concurrency=2), Point(concurrency=4))
ROUNDS = 8


@contextmanager
def null_server(**flags: object) -> Iterator[str]:
    """Its URL while it runs; `ttft_ms=20` is --ttft-ms 20."""
    port = free_port()
    words = [word for key, value in flags.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    argv = [sys.executable, "-m", "benchmarks.ab.null_server", "--port", str(port), *words]
    root = str(Path(__file__).resolve().parents[2])
    server = Process(
        "null-server",
        argv,
        host="127.0.0.1",
        port=port,
        ready_path="/v1/models",
        ready_timeout_s=30,
        env={"PYTHONPATH": root},
    )
    with server:
        yield server.url


def _load(requests: int, prompt_tokens: int, answer_tokens: int) -> Load:
    text = Text(BYTES_PER_TOKEN)
    # Few different texts: making them is not what is measured.
    turns = [
        chat([{"role": "user", "content": text.draw(prompt_tokens, i)}], answer_tokens, "null", prompt_tokens)
        for i in range(min(requests, 64))
    ]
    return Load(tuple(Session((turns[i % len(turns)],)) for i in range(requests)))


def _measure(url: str, load: Load, point: Point, connections: int) -> tuple[list[Sample], float]:
    async def work() -> tuple[list[Sample], float]:
        async with Client(url, "null") as client:
            # The first round opens the connections.
            await run_round(client, Load(load.sessions[:connections]), Point(connections), "warm")
            result = await run_round(client, load, point, "measure")
            return [s for session in result.samples for s in session], result.seconds

    samples, seconds = run_async(work())
    if wrong := next((s.error for s in samples if s.error), ""):
        raise RuntimeError(f"the null server answered with an error: {wrong}")
    return samples, seconds


def _rates(url: str, requests: int, prompt_tokens: int, concurrency: int) -> dict[str, Any]:
    samples, seconds = _measure(url, _load(requests, prompt_tokens, 1), Point(concurrency), concurrency)
    return {
        "requests": requests,
        "concurrency": concurrency,
        "prompt_tokens": prompt_tokens,
        "requests_per_s": round(requests / seconds, 1),
        "input_tokens_per_s": round(sum(s.prompt_tokens for s in samples) / seconds),
    }


def prove_client() -> dict[str, Any]:
    """Rates with small and with long prompts, and the client's own share of a first token's time."""
    with null_server() as url:
        sizes = ((6000, 64, 32), (2000, 4096, 32), (200, 131072, 8))
        rates = [_rates(url, *size) for size in sizes]
    delays = []
    with null_server(ttft_ms=_TTFT_S * 1e3, itl_ms=_ITL_S * 1e3) as url:
        for streams in STREAMS:
            # Arrivals at which so many streams are under way (Little's law).
            point = Point(rate=streams / (_TTFT_S + (_TOKENS - 1) * _ITL_S))
            samples, _ = _measure(url, _load(max(60, 8 * streams), 1024, _TOKENS), point, streams)
            late = np.array([s.ttft - _TTFT_S for s in samples]) * 1e3
            p50, p99 = np.quantile(late, (0.5, 0.99)).tolist()
            delays.append(
                {"streams": streams, "ttft_late_p50_ms": round(p50, 3), "ttft_late_p99_ms": round(p99, 3)}
            )
    return judged(rates, delays)


def judged(rates: Sequence[Mapping[str, Any]], delays: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures, and whether they are enough: either rate, and the delays up to ENOUGH_STREAMS streams."""
    best_requests = max(r["requests_per_s"] for r in rates)
    best_tokens = max(r["input_tokens_per_s"] for r in rates)
    carried = 0
    for one in delays:  # up to the first that is late: a larger number that was lucky does not count
        if one["ttft_late_p50_ms"] > LATE_P50_MS or one["ttft_late_p99_ms"] > LATE_P99_MS:
            break
        carried = one["streams"]
    fast = best_requests >= ENOUGH_REQUESTS_PER_S or best_tokens >= ENOUGH_INPUT_TOKENS_PER_S
    return {
        "rates": list(rates),
        "delays": list(delays),
        "requests_per_s": best_requests,
        "input_tokens_per_s": best_tokens,
        "streams": carried,
        "enough": {
            "requests_per_s": ENOUGH_REQUESTS_PER_S,
            "or_input_tokens_per_s": ENOUGH_INPUT_TOKENS_PER_S,
            "streams": ENOUGH_STREAMS,
            "ttft_late_p50_ms": LATE_P50_MS,
            "ttft_late_p99_ms": LATE_P99_MS,
        },
        "answer": f"Up to {carried} streams at once a first token is seen at most {LATE_P50_MS:g} ms late at the median "
        f"and {LATE_P99_MS:g} ms at p99 (of {max(one['streams'] for one in delays)} tried); "
        f"{best_requests:,.0f} small requests/s, {best_tokens:,.0f} input tokens/s.",
        "ok": fast and carried >= ENOUGH_STREAMS,
    }


def _trial(urls: dict[str, str], seed: int, folder: Path) -> list[dict[str, Any]]:
    """The records of all rounds, which `folder`/`seed`.jsonl has, too."""
    workload = TwoTurn(Text(BYTES_PER_TOKEN), seed, 6, 128, 32, 4, False)
    endpoints = [Endpoint(Spec(name, url=url, flush=None)) for name, url in urls.items()]
    for endpoint in endpoints:
        endpoint.start()
    plan = Plan(
        workload,
        POINTS,
        ROUNDS,
        folder / f"{seed}.jsonl",
        warm_up=1,
        round_warm_up=0,
        between="running",
        seed=seed,
    )
    return Comparison(plan, endpoints, quiet=True).run()


def equal_trial(seed: int, folder: Path) -> list[dict[str, Any]]:
    """The records of a server under the names EQUAL, with other times for each (a process each, for each its seed)."""
    with ExitStack() as stack:
        urls = {
            name: stack.enter_context(null_server(ttft_ms=8, itl_ms=2, spread=0.3, seed=3 * seed + i))
            for i, name in enumerate(EQUAL)
        }
        return _trial(urls, seed, folder)


def log_ratios(rows: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Of the input rate, round by round, of every endpoint after the first at every point: what verdicts are made of."""
    found = []
    for point in map(str, POINTS):
        of = aligned(rows, EQUAL, point)
        for name in EQUAL[1:]:
            ratios = by_round(of[EQUAL[0]], of[name], "input_tokens_per_s", ALL)
            found.append([round(math.log(value), 4) for values in ratios for value in values])
    return found


def said(points: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Whatever a result says of two endpoints: its verdicts, and its remarks."""
    verdicts: list[dict[str, Any]] = []
    remarks: list[dict[str, Any]] = []
    for point in points:
        of = point["verdict"]["of"]
        for found in point["speedups"].values():
            ratios = {("input_tokens_per_s", ALL): found["input_tokens_per_s"]}
            for label, metrics in found["by_label"].items():
                ratios |= {(metric, label): one for metric, one in metrics.items()}
            for key, one in ratios.items():
                if one is not None:
                    (verdicts if key == (of["metric"], of["label"]) else remarks).append(one)
    return verdicts, remarks


def wrong(points: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Of equal endpoints: the verdicts, those that see a difference, the remarks, those whose interval leaves 1 out."""
    verdicts, remarks = said(points)
    return {
        "verdicts": len(verdicts),
        "wrong": sum(one["says"] != "no difference" for one in verdicts),
        "remarks": len(remarks),
        "remarks_apart": sum(one["says"] != HOLDS for one in remarks),
    }


def prove_statistics() -> dict[str, Any]:
    """20 trials A against A, and one against a server whose first token takes 30 % longer. `chance_at_95`: how often 20
    trials have so many right, where each is with a probability of 95 %.
    """
    folder = Path(tempfile.mkdtemp(prefix="glm-sglang-ab-"))
    trials: list[dict[str, Any]] = []
    try:
        for seed in range(_TRIALS):
            rows = equal_trial(seed, folder)
            points = summarise(rows, EQUAL, EQUAL[0])
            intervals = [[v["low"], v["high"]] for v in said(points)[0]]
            trials.append({**wrong(points), "intervals": intervals, "log_ratios": log_ratios(rows)})
            print(f"trial {seed}: {trials[-1]}", file=sys.stderr, flush=True)
        with (
            null_server(ttft_ms=16, itl_ms=2, spread=0.1, seed=100) as a,
            null_server(ttft_ms=16 * _SLOWER, itl_ms=2, spread=0.1, seed=101) as b,
        ):
            points = summarise(_trial({"a": a, "slower": b}, 100, folder), ("a", "slower"), "a")
    finally:
        shutil.rmtree(folder)
    right = sum(not trial["wrong"] for trial in trials)
    slower, _ = said(points)
    apart = sum(bool(trial["remarks_apart"]) for trial in trials)
    return {
        "trials": trials,
        "right": right,
        "of": _TRIALS,
        "chance_at_95": round(float(stats.binom.sf(_RIGHT - 1, _TRIALS, CONFIDENCE)), 3),
        "slower": {
            "first_token_speedup": round(1 / _SLOWER, 4),
            "seen": points[-1]["speedups"]["slower"]["by_label"][ALL]["ttft"],
            "verdicts": slower,
        },
        "answer": f"A against A: all verdicts right in {right} of {_TRIALS} trials of {trials[0]['verdicts']} each. Of "
        f"the {trials[0]['remarks']} further intervals, which are no verdicts, one at least leaves 1 out in {apart}.",
        "ok": right >= _RIGHT and all(one["says"] == "slower" for one in slower),
    }
