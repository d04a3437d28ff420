"""What `benchmarks.moe_server` asks of the article's node: cold prefills, second turns, and traced steps, arm by arm.

All servers of a part are up together and measured one at a time, with the same prompts; who is first rotates. A prompt
comes once to each server, but for what is meant to be cached. Arms are compared turn by turn: with fewer than six turns
there is a ratio and no interval. After the turns that every part must have, more follow while there is time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks import _gpu_trace, _idle_steps, _result, roofline
from benchmarks._moe_servers import GPU, REFERENCE, Arm, Report, about, launch, node_chunk, tokens, went_well
from benchmarks._turns import Ask, Series, compared, more
from glm_sglang.tiny_model import PRESETS
from glm_sglang.tiny_model.checkpoint import write
from glm_sglang.tiny_model.shape import Shape, hf_config

MODEL = "wide"
POSITIONS = 163_840  # of the model: 128k tokens and a second turn
QUEUES = 2  # turns at least, as for second turns; up to six while there is time
TURNS = 3
PUSHES = 3  # longest prompts that push everything else off the device (node_tokens)
ANSWER_S = 90.0  # longest wait once an arm is warm: one that hangs must not take the others' time
PAUSE_S = 1.0  # between two turns: a user reads
SECOND = (
    "stock",
    "cache",
    "all",
)  # arms that are asked for second turns: without a cache they are all as stock
REQUESTS = 3  # of a trace; the last one's step counts
APART_S = 0.1
SILENCE_US = 25_000.0  # between two requests of a trace; the chunks of one are closer


def wide(args: argparse.Namespace) -> Shape:
    """True widths, and every fourth layer selects keys, as GLM-5.3's do behind its first three."""
    from benchmarks import _wide_model

    kinds = "".join("S" if i % 4 else "F" for i in range(args.layers))
    shape = _wide_model.true_widths(args.layers, args.experts)
    return replace(shape, indexer_types=kinds, max_position=POSITIONS)


def write_model(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """The checkpoint of the timed parts, where it isn't there already."""
    if args.reference:
        write(folder, PRESETS["cpu"], "float32")
        return
    from benchmarks import _wide_model

    size = _wide_model.write(folder, wide(args), weights=not args.no_weights)
    report.say(f"a checkpoint of {size / 2**30:.1f} GiB at {folder}")


def prepare_checkpoint(
    stack: ExitStack, args: argparse.Namespace, report: Report, folder: Path
) -> Callable[[], None]:
    """Writes the timed parts' checkpoint and starts nothing."""
    write_model(args, report, folder.with_name(MODEL))
    return lambda: None


def prepare(
    part: str, stack: ExitStack, args: argparse.Namespace, report: Report, folder: Path
) -> Callable[[], None]:
    """Starts the part's servers; what it returns measures those that came up until the deadline."""
    model = folder.with_name(MODEL)
    write_model(args, report, model)
    shape = PRESETS["cpu"] if args.reference else wide(args)
    report.put(reference=args.reference, layers=shape.layers, experts=shape.experts)
    report.put(ranks=args.ranks, chunk=node_chunk(args), lengths=args.lengths)
    new = (REFERENCE if args.reference else GPU).turn

    def warm(arm: Arm) -> None:
        for length in args.lengths:
            ids = tokens(length, 99)
            prefill(arm, ids)
            prefill(arm, [*ids, *tokens(new, 98)])

    arms = launch(stack, report, model, part, args, warm)

    def run() -> None:
        running: dict[str, Arm] = {}
        for name, arm in arms.items():
            if went_well(arm, report, part, args.speed_seconds):
                running[name] = arm
                arm.client.timeout = ANSWER_S
            else:
                arm.server.stop()
        done = [measure(running, args, report) for measure in MEASURES[part]]
        report.put(
            **{
                f"{part}_complete": len(running) == len(arms) and all(done),
                f"{part}_servers": {arm.name: about(arm) for arm in running.values()},
            }
        )

    return run


def ask(arm: Arm, ids: Sequence[int]) -> tuple[float, int]:
    """Seconds from a prompt to its only token, and how many of its tokens were cached."""
    sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    body = {"input_ids": list(ids), "sampling_params": sampling}
    began = time.perf_counter()
    answer = arm.post(body)
    return time.perf_counter() - began, int(answer["meta_info"]["cached_tokens"])


def prefill(arm: Arm, ids: Sequence[int]) -> float:
    """Seconds from a prompt to its only token."""
    return ask(arm, ids)[0]


def queue(arm: Arm, prompts: Sequence[Sequence[int]]) -> float:
    """Seconds from prompts that come at once to the last one's token; the client's own work is in it."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        began = time.perf_counter()
        list(pool.map(partial(prefill, arm), prompts))
        return time.perf_counter() - began


def queues(length: int, args: argparse.Namespace) -> Series:
    """As many cold prompts at once as fill seconds: a turn's answer is tokens/s."""
    queued = (REFERENCE if args.reference else GPU).queued
    count = max(3, queued * args.ranks // length)

    def asks(turn: int) -> Ask:
        prompts = [tokens(length, 2000 + turn * count + i) for i in range(count)]
        return lambda arm: count * length / queue(arm, prompts)

    return Series(asks)


def alone(length: int) -> Series:
    """A lone cold prompt: a turn's answer is seconds."""

    def asks(turn: int) -> Ask:
        ids = tokens(length, 1000 + turn)
        return lambda arm: prefill(arm, ids)

    return Series(asks)


def node(running: dict[str, Arm], args: argparse.Namespace, report: Report) -> bool:
    """Prompts that share nothing, then second turns, each length's least number of turns; then more of both. False where
    time ran out before all had their least.
    """
    lone = {length: alone(length) for length in args.lengths}
    rates = {length: queues(length, args) for length in args.lengths}
    again = {length: second(length, at, args) for at, length in enumerate(args.lengths)}
    new, first = (REFERENCE if args.reference else GPU).turn, args.discard + args.repeat

    def put() -> None:
        ready = [length for length in args.lengths if len(rates[length].turns) >= QUEUES]
        rows = [cold_row(n, lone[n].answers(first, args.discard), rates[n].answers(QUEUES)) for n in ready]
        turns = [
            turn_row(n, new, again[n].answers(TURNS)) for n in args.lengths if len(again[n].turns) >= TURNS
        ]
        report.put(cold=rows, roof=roofs(args, rows), **({"second_turn": turns} if turns else {}))

    def least(series: Series, count: int) -> bool:
        return all(series.go_on(running, report) for _ in range(count))

    for length in args.lengths:
        if not least(lone[length], first) or not least(rates[length], QUEUES):
            return False
        put()
        report.say(json.dumps(report.result["cold"][-1]))
    for length in args.lengths:
        if not least(again[length], TURNS):
            return False
        put()
        report.say(json.dumps(report.result["second_turn"][-1]))
    for _ in more([one for n in args.lengths for one in (rates[n], again[n])], running, report):
        put()
    report.say(json.dumps({key: report.result[key] for key in ("cold", "second_turn")}))
    return True


def cold_row(
    length: int,
    lone: Mapping[str, Sequence[float]],
    rates: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """One length: a lone prompt's milliseconds, a queue's tokens/s, and both as times stock's speed, turn by turn."""
    row: dict[str, Any] = {"tokens": length, "arms": {}}
    for name in lone:
        if name not in rates:
            continue
        own = row["arms"][name] = {
            "ms": round(1e3 * statistics.median(lone[name]), 3),
            "spread_ms": [round(1e3 * min(lone[name]), 3), round(1e3 * max(lone[name]), 3)],
            "tokens_s": round(statistics.median(rates[name])),
            "turns_tokens_s": [round(rate) for rate in rates[name]],
        }
        if "stock" in row["arms"]:
            speeds = ([1 / seconds for seconds in lone[arm]] for arm in ("stock", name))
            own |= compared(rates["stock"], rates[name])
            own |= {key.replace("speedup", "speedup_alone"): one for key, one in compared(*speeds).items()}
    return row


def roofs(args: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The roof of the layers that run, and every arm's share of it; [] where the GPU's peaks are not known."""
    if args.reference:
        return []
    machine, _ = _result.machine()
    gpu = next((peaks for name, peaks in roofline.GPUS.items() if machine.startswith(name)), None)
    if gpu is None:
        return []
    return roof_rows(roofline.Model.from_config(hf_config(wide(args), "fp8")), gpu, args.ranks, rows)


def roof_rows(
    model: roofline.Model, gpu: roofline.Gpu, gpus: int, rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """For each length the roof in tokens/s and the share of it that each arm's queue reaches, with its interval over
    the turns.
    """
    found = []
    for row in rows:
        (point,) = roofline.points(model, gpu, gpus, [row["tokens"]], {})
        roof = point["roof_tokens_per_s"]
        shares = {name: round(arm["tokens_s"] / roof, 4) for name, arm in row["arms"].items()}
        between = {
            name: compared([roof] * len(rates), rates)["speedup_interval"]
            for name, arm in row["arms"].items()
            if (rates := arm["turns_tokens_s"])
        }
        found.append(
            {"tokens": row["tokens"], "roof_tokens_s": roof, "shares": shares, "share_intervals": between}
        )
    return found


def second(length: int, at: int, args: argparse.Namespace) -> Series:
    """A prompt again with new tokens behind it, after the device has lost it: a turn's answer is seconds and how many
    tokens were cached. at: the length's place among the others.
    """
    new = (REFERENCE if args.reference else GPU).turn

    def asks(turn: int) -> Ask:
        seed = 10_000 * (at + 1) + 100 * turn
        base, behind = tokens(length, seed), tokens(new, seed + 1)
        pushes = [tokens(max(args.lengths), seed + 2 + i) for i in range(PUSHES)]

        def ask_again(arm: Arm) -> tuple[float, int]:
            prefill(arm, base)
            time.sleep(PAUSE_S)
            for push in pushes:
                prefill(arm, push)
            return ask(arm, [*base, *behind])

        return ask_again

    return Series(asks, SECOND)


def turn_row(length: int, new: int, answers: Mapping[str, Sequence[tuple[float, int]]]) -> dict[str, Any]:
    """One length's second turns: milliseconds, the cached share of the first turn, times stock's speed turn by turn."""
    row: dict[str, Any] = {"tokens": length, "new_tokens": new, "arms": {}}
    for name, found in answers.items():
        own = row["arms"][name] = {
            "ms": round(1e3 * statistics.median(seconds for seconds, _ in found), 3),
            "turns_ms": [round(1e3 * seconds, 3) for seconds, _ in found],
            "cached_share": round(statistics.fmean(cached for _, cached in found) / length, 4),
        }
        if stock := answers.get("stock"):
            own |= compared(*([1 / seconds for seconds, _ in one] for one in (stock, found)))
    return row


def exposed(running: dict[str, Arm], args: argparse.Namespace, report: Report) -> bool:
    """One traced prompt of each length at each arm. False where one failed or time ran out."""
    rows: list[dict[str, Any]] = []
    right = True
    for length in args.lengths:
        rows.append({"tokens": length, "arms": {}})
        for name, arm in running.items():
            if not report.left():
                return False
            try:
                found = trace(arm, length, args.ranks)
            except (httpx.HTTPError, TimeoutError, ValueError) as error:
                found, right = {"error": f"{type(error).__name__}: {error}"[:300]}, False
            rows[-1]["arms"][name] = found
            shown = {key: value for key, value in found.items() if key not in ("ranks", "kernels")}
            report.say(f"{length} {name}: {json.dumps(shown)}")
            report.put(exposed=rows)
    return right


def trace(arm: Arm, length: int, ranks: int) -> dict[str, Any]:
    """Prompts one at a time, then a few at once, under the profiler. Raises ValueError for a trace without steps."""
    probe = _idle_steps.Arm(arm.name, arm.server)

    def alone() -> None:
        for i in range(REQUESTS):
            prefill(arm, tokens(length, 5000 + i))
            time.sleep(APART_S)

    def several() -> None:
        queue(arm, [tokens(length, 6000 + i) for i in range(2 * REQUESTS)])

    with tempfile.TemporaryDirectory() as folder:
        files = _idle_steps.traced(probe, Path(folder, "alone"), alone, ranks)
        found = [last_step(file) for file in files]
        files = _idle_steps.traced(probe, Path(folder, "queue"), several, ranks)
        windows = [_gpu_trace.window_idle(_gpu_trace.read([file])) for file in files]
    return trace_row(found, windows)


def last_step(file: Path) -> _gpu_trace.Step:
    """The last request of one rank's trace, all its chunks. Raises ValueError where there is none."""
    steps = _gpu_trace.steps(_gpu_trace.read([file]), SILENCE_US)
    if not steps:
        raise ValueError(f"no step in {file.name}")
    return steps[-1]


def trace_row(steps: Sequence[_gpu_trace.Step], windows: Sequence[float]) -> dict[str, Any]:
    """Medians over the ranks (`worst`: the largest), each rank's own figures, and the first rank's kernels and gaps.

    fused_share: of the step in which MegaMoE's kernel ran alone. A trace cannot tell what of it is exposed.
    """
    ranks = []
    for step in steps:
        sent, layers = _gpu_trace.communication(step), step.layers()
        ranks.append(
            {
                "exposed_share": round(sent.share(), 4),
                "communication_share": round(sent.running_us / sent.span_us, 4),
                "fused_share": round(sent.fused_us / sent.span_us, 4),
                "idle_share": round(step.idle_share, 4),
                "idle_share_layers": round(layers.idle_share if layers else 1.0, 4),
                "span_ms": round(step.span_us / 1e3, 3),
            }
        )
    row: dict[str, Any] = {key: round(statistics.median(r[key] for r in ranks), 4) for key in ranks[0]}
    return row | {
        "exposed_share_worst": max(r["exposed_share"] for r in ranks),
        "idle_share_queue": round(statistics.median(windows), 4),
        "ranks": ranks,
        "kernels": _gpu_trace.summary(steps[:1], 0),
    }


def forget(arm: Arm, within_s: float = 60.0) -> None:
    """Empties device and pool once nothing is on its way to Valkey. Raises TimeoutError."""
    waiting = ("glm_sglang:cache_offload_queue_pages", "glm_sglang:cache_save_queue_pages")
    ends = time.monotonic() + within_s
    while time.monotonic() < ends:
        time.sleep(1.1)  # a gauge's period
        lines = [line for line in arm.client.get("/metrics").text.splitlines() if line.startswith(waiting)]
        left = sum(float(line.rpartition(" ")[2]) for line in lines)
        # Refused while anything runs.
        if not left and arm.client.post("/flush_cache").status_code == 200:
            return
    raise TimeoutError(f"{arm.name}: pages still on their way to Valkey after {within_s:.0f} s")


Measure = Callable[[dict[str, Arm], argparse.Namespace, Report], bool]
MEASURES: dict[str, tuple[Measure, ...]] = {"node": (node,), "exposed": (exposed,)}
