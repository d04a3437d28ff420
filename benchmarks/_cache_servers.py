"""Servers with the cache off, on, and saving synchronously, on the same work: what does a save cost a prefill step?

True GLM-5.x widths, a few layers, random weights. Steps are measured in a queue of prompts that share nothing, so
that the save of each step runs under the next one; arms take turns. A load is a prompt that the device has lost and the
CPU pool still has, with new tokens behind it.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import orjson

from benchmarks import _gpu_trace, gpu_idle
from benchmarks._idle_steps import Arm, prompt, traced
from glm_sglang.serving import Server, ServerError

CONTEXT = 180_000
DEVICE_TOKENS = 147_456  # of KV on the device: prompts of 128k and 20k tokens push out all others
POOL_GB = 12
SIZES = (4096, 16384)
QUEUE = 24  # prompts of one turn; the first and last EDGE of them are not counted
EDGE = 4
TURNS = 3
SYNC = '{"linker": "SyncCacheLinker", "linker_module_path": "benchmarks._sync_linker"}'
FLAGS = (
    *("--max-total-tokens", str(DEVICE_TOKENS), "--context-length", str(CONTEXT), "--enable-metrics"),
    *("--page-size", "64"),
    *("--cuda-graph-backend-prefill", "breakable", "--cuda-graph-bs-prefill", str(SIZES[0])),
)
# Of a server's histograms: what its p99 and its count are called here.
_TIMES = {
    "scheduler_stall_seconds": ("scheduler_stall_p99_s_at_most", "scheduler_steps_with_work"),
    "cache_load_wait_seconds": ("load_wait_p99_s_at_most", "batches_with_loads"),
}
_SAMPLE = re.compile(r"^(glm_sglang:[a-z_]+)(?:\{([^}]*)\})? (\S+)$")


def write_model(folder: Path, layers: int) -> None:
    """gpu_idle's model with room for long prompts."""
    gpu_idle.write_model(folder, layers, shared=False)
    for name, key in (
        ("config.json", "max_position_embeddings"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        path = folder / name
        values = orjson.loads(path.read_bytes())
        values[key] = CONTEXT
        path.write_bytes(orjson.dumps(values))


def arm_flags(url: str) -> dict[str, list[str]]:
    """What each arm adds to the common flags."""
    return {
        "off": [],
        "ours": ["--glm-cache-url", url, "--glm-cache-pool-gb", str(POOL_GB)],
        "sync": [
            "--enable-unified-cache-external-linker",
            *("--unified-cache-external-linker-backend", "dynamic"),
            *("--unified-cache-external-linker-config", SYNC),
        ],
    }


def start(
    flags: Mapping[str, Sequence[str]], model: Path, out: Path, limit_s: float
) -> tuple[list[Arm], dict[str, str]]:
    """Starts an arm for each entry, side by side; (those that are up, why the others are not).

    limit_s: seconds from its own start in which each must be up.
    """
    starting = []
    for name, own in flags.items():
        env = {
            "GLM_SGLANG_CACHE_POOL_GB": str(POOL_GB)
        }  # the linker of `sync` reads it; no flag sets it there
        server = Server(
            model,
            [*gpu_idle.common(""), *FLAGS, *own],
            name=name,
            log=out / f"{name}.log",
            env=env,
            ready_timeout_s=limit_s,
        )
        server.start()
        starting.append(Arm(name, server))
        time.sleep(2.0)
    up: list[Arm] = []
    failed: dict[str, str] = {}
    for arm in starting:
        try:
            arm.server.wait_ready()
            up.append(arm)
        except ServerError as error:
            failed[arm.name] = str(error)[-2500:]
            arm.server.stop()
    return up, failed


def queue(arm: Arm, size: int, turn: int) -> float:
    """Milliseconds a step, in a queue of prompts that share nothing."""
    prompts = [prompt(f"queue{size}.{turn}.{i}", size) for i in range(QUEUE)]
    with ThreadPoolExecutor(QUEUE) as pool:
        began = time.perf_counter()

        def one(ids: list[int]) -> float:
            arm.prefill(ids)
            return time.perf_counter() - began

        ends = sorted(pool.map(one, prompts))
    return 1e3 * (ends[-EDGE - 1] - ends[EDGE]) / (QUEUE - 2 * EDGE - 1)


def steps(found: Sequence[Arm], size: int, turn: int) -> None:
    """One turn of each arm, at its place in `step_ms`; the order goes round."""
    for arm in [*found[turn % len(found) :], *found[: turn % len(found)]]:
        times = arm.result.setdefault("step_ms", {}).setdefault(str(size), [])
        times += [None] * (turn + 1 - len(times))  # what has failed keeps its place
        times[turn] = round(queue(arm, size, turn), 3)


def single(found: Sequence[Arm], size: int, count: int = 20) -> None:
    """Client milliseconds of one prompt on an idle server, all misses; arms take turns, prompt by prompt."""
    times: dict[str, list[float]] = {arm.name: [] for arm in found}
    for i in range(count + 3):
        for arm in found:
            times[arm.name].append(1e3 * arm.prefill(prompt(f"single{size}.{i}", size)))
            time.sleep(0.02)
    for arm in found:
        kept = times[arm.name][3:]
        arm.result.setdefault("single_ms", {})[str(size)] = {
            "p50": round(statistics.median(kept), 3),
            "p90": round(sorted(kept)[int(0.9 * len(kept))], 3),
        }


def busy(arm: Arm, size: int) -> dict[str, float]:
    """Shares of a steady window in which a kernel ran, and in which a kernel or a copy did."""

    def work() -> None:
        queue(arm, size, turn=100)

    with tempfile.TemporaryDirectory() as folder:
        trace = _gpu_trace.read(traced(arm, Path(folder), work))
    kernels = _gpu_trace.Trace([i for i in trace.device if not i.name.startswith("Mem")], [])
    copies = [i for i in trace.device if i.name.startswith("Memcpy DtoH")]
    return {
        "kernels": round(1 - _gpu_trace.window_idle(kernels), 4),
        "kernels_and_copies": round(1 - _gpu_trace.window_idle(trace), 4),
        "d2h_copies": len(copies),
        "d2h_copy_ms": round(sum(i.end - i.start for i in copies) / 1e3, 2),
    }


def ask(arm: Arm, ids: list[int], tokens_out: int = 1) -> dict[str, Any]:
    """One prompt: seconds, tokens taken from a cache, tokens put out and their logprobs."""
    began = time.perf_counter()
    sampling = {"temperature": 0, "max_new_tokens": tokens_out, "ignore_eos": True}
    answer = arm.post(
        "/generate", {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
    ).json()
    meta = answer["meta_info"]
    return {
        "ms": round(1e3 * (time.perf_counter() - began), 2),
        "cached": meta["cached_tokens"],
        "ids": answer["output_ids"],
        "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
    }


def push_out(arm: Arm, seed: str) -> None:
    """Computes so much that the device has lost what it knew."""
    for size in (131_072, 20_480):
        arm.prefill(prompt(f"{seed}.{size}", size))
    time.sleep(0.5)


def load(arm: Arm, tokens: int, new: int) -> dict[str, Any]:
    """A prompt of `tokens` with `new` further ones: computed, from the device, and from the CPU pool."""
    seed = f"load{tokens}.{new}"
    base = prompt(seed, tokens)
    cold = ask(arm, base)
    time.sleep(0.5)  # until its pages are in the pool
    device = [ask(arm, [*base, *prompt(f"{seed}.device{i}", new)]) for i in range(4)][1:]
    same = [*base, *prompt(f"{seed}.same", new)]
    before = ask(arm, same, tokens_out=8)
    push_out(arm, f"{seed}.equal")
    after = ask(arm, same, tokens_out=8)
    pool = []
    for i in range(3):
        push_out(arm, f"{seed}.push{i}")
        pool.append(ask(arm, [*base, *prompt(f"{seed}.pool{i}", new)]))
    device_ms, pool_ms = (statistics.median(run["ms"] for run in runs) for runs in (device, pool))
    return {
        "tokens": tokens,
        "new_tokens": new,
        "recompute_ms": cold["ms"],
        "with_new_tokens_from_device_ms": device_ms,
        "with_new_tokens_from_pool_ms": pool_ms,
        "exposed_ms": round(pool_ms - device_ms, 2),
        "cached_tokens": {
            "from_device": [run["cached"] for run in device],
            "from_pool": [run["cached"] for run in [after, *pool]],
        },
        "same_tokens_as_before_eviction": after["ids"] == before["ids"],
        "largest_logprob_difference": max(
            abs(a - b) for a, b in zip(after["logprobs"], before["logprobs"], strict=True)
        ),
    }


def metrics(arm: Arm) -> dict[str, Any]:
    """Our numbers as the server exports them; the scheduler's stalls, and of them the waits of a launch for its loads:
    p99 as the bucket's upper bound."""
    text = httpx.get(arm.server.url + "/metrics", timeout=10.0, follow_redirects=True).text
    found: dict[str, float] = {}
    buckets: dict[str, list[tuple[float, float]]] = {name: [] for name in _TIMES}
    for line in text.splitlines():
        if not (match := _SAMPLE.match(line)):
            continue
        name, labels, value = match[1].removeprefix("glm_sglang:"), match[2] or "", float(match[3])
        if (histogram := name.removesuffix("_bucket")) != name and histogram in buckets:
            bound = re.search(r'le="([^"]+)"', labels)
            assert bound is not None
            buckets[histogram].append((float(bound[1]), value))
        elif value and ("cache_" in name or "stall" in name) and "_bucket" not in name:
            end = re.search(r'(?:end|tier|reason)="([^"]+)"', labels)
            found[f"{name}.{end[1]}" if end else name] = value
    times: dict[str, float | None] = {}
    for histogram, (p99_name, count_name) in _TIMES.items():
        ordered = sorted(buckets[histogram])
        total = ordered[-1][1] if ordered else 0.0
        times[p99_name] = next((bound for bound, count in ordered if total and count >= 0.99 * total), None)
        times[count_name] = total
    return {**times, **found}


def headline(arms: Sequence[Arm]) -> dict[str, Any]:
    """Ratios to the cache off, turn by turn, of the turns that both have had; and their median."""
    by_name = {arm.name: arm.result for arm in arms}
    result: dict[str, Any] = {}
    off = by_name.get("off", {})
    for name, found in by_name.items():
        for size, times in found.get("step_ms", {}).items():
            base = off.get("step_ms", {}).get(size, [])
            ratios = [round(a / b, 4) for a, b in zip(times, base, strict=False) if a and b]
            if ratios and name != "off":
                result[f"step_ratio_{name}_{size}"] = round(statistics.median(ratios), 4)
                result[f"step_ratios_{name}_{size}"] = ratios
        for size, times in found.get("single_ms", {}).items():
            base = off.get("single_ms", {}).get(size)
            if base and name != "off":
                result[f"added_ms_{name}_{size}"] = round(times["p50"] - base["p50"], 3)
    return result


def measure(arms: Sequence[Arm], note: Callable[[], None], seconds_left: Callable[[], float]) -> None:
    """Everything, most important first, until the time is over; what fails or is left out is in the arm's result."""

    def run(what: str, who: Sequence[Arm], work: Callable[[], Any]) -> None:
        if not who:
            return
        if seconds_left() <= 0:
            who[0].result.setdefault("skipped", []).append(what)
            return
        try:
            work()
        except (httpx.HTTPError, TimeoutError, ValueError, KeyError, AssertionError) as error:
            who[0].result.setdefault("failed", {})[what] = f"{type(error).__name__}: {error}"[:300]
        note()

    def warm(arm: Arm) -> None:
        for size in (64, *SIZES):
            for i in range(2):
                arm.prefill(prompt(f"warm{size}.{i}", size))

    def put(arm: Arm, part: str, key: str, work: Callable[[], Any]) -> None:
        value = work()
        arm.result.setdefault(part, {})[key] = value

    for arm in arms:
        run(f"warm {arm.name}", [arm], partial(warm, arm))
    pair = [arm for arm in arms if arm.name != "sync"]
    for turn in range(TURNS):
        for size in SIZES:
            some = arms if turn == 0 else pair
            run(f"steps {size} turn {turn}", some, partial(steps, some, size, turn))
    for arm in arms:
        run("metrics", [arm], partial(put, arm, "metrics", "after_steps", partial(metrics, arm)))
    ours = [arm for arm in arms if arm.name == "ours"]
    for arm in ours:
        run("load 32k", ours, partial(put, arm, "load", "32k", partial(load, arm, 32_768, 4096)))
    for size in SIZES:
        for arm in arms:
            run(f"busy {size}", [arm], partial(put, arm, "busy_share", str(size), partial(busy, arm, size)))
    run("single 4096", pair, partial(single, pair, 4096))
    for arm in ours:
        run("load 128k", ours, partial(put, arm, "load", "128k", partial(load, arm, 131_072, 4096)))
    for arm in arms:
        run("metrics", [arm], partial(put, arm, "metrics", "at_the_end", partial(metrics, arm)))
