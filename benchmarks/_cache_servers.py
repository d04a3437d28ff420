"""Servers with the cache off, on, and saving synchronously, on the same work: what does a save cost a prefill step?

True GLM-5.x widths, a few layers, random weights. Steps are measured in a queue of prompts that share nothing, so
that the save of each step runs under the next one; arms take turns, and none begins before all of them have saved what
they had. A load is a prompt that the device has lost and the CPU pool still has, with new tokens behind it.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks import _gpu_trace, _wide_model, gpu_idle
from benchmarks._idle_steps import Arm, prompt, traced
from benchmarks._soak_judge import Sample, at_most, grown, sample_of, total
from benchmarks._soak_load import PAGE, VOCAB, Probe
from glm_sglang.serving import Server, ServerError

CONTEXT = 180_000
DEVICE_TOKENS = 147_456  # of KV on the device: prompts of 128k and 20k tokens push out all others
POOL_GB = 12
SIZES = (4096, 16384)
QUEUE = {4096: 24, 16384: 16}  # prompts of one turn; the first and last EDGE of them are not counted
EDGE = 4
TURNS = 7
SYNC_TURNS = 2
SINGLES = 60
SHORT = 1900  # tokens: fewer than the index top-k, so an answer depends on all of them
PAUSE_S = 0.15  # between two lone prompts: the pages of 4k tokens go to Valkey meanwhile
# Kept for what comes after the steps: lone prompts and loads.
KEEP_S = 75.0
TURNS_AT_LEAST = 3
_SCRAPED_EVERY = 1.2  # seconds; a server brings its metrics up to date once a second
_SETTLES_IN = 20.0
_QUEUES = ("cache_save_queue_pages", "cache_offload_queue_pages")
SYNC = '{"linker": "SyncCacheLinker", "linker_module_path": "benchmarks._sync_linker"}'
FLAGS = (
    *("--max-total-tokens", str(DEVICE_TOKENS), "--context-length", str(CONTEXT), "--enable-metrics"),
    *("--page-size", "64", "--load-format", "auto"),
    *("--cuda-graph-backend-prefill", "breakable", "--cuda-graph-bs-prefill", str(SIZES[0])),
)
# Of a server's histograms: what its p99 and its count are called here.
_TIMES = {
    "scheduler_stall_seconds": ("scheduler_stall_p99_s_at_most", "scheduler_steps_with_work"),
    "cache_load_wait_seconds": ("load_wait_p99_s_at_most", "batches_with_loads"),
}


def write_model(folder: Path, layers: int) -> int:
    """Its bytes."""
    return _wide_model.write_for_cache(folder, layers, CONTEXT)


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


def scrape(arm: Arm) -> Sample:
    """What its server exports."""
    answer = httpx.get(arm.server.url + "/metrics", timeout=10.0, follow_redirects=True)
    return sample_of(answer.text)


def settle(arms: Sequence[Arm]) -> None:
    """Until no arm has pages on their way to the CPU pool or to Valkey, or has had them for too long (`unsettled`)."""
    ends = time.monotonic() + _SETTLES_IN
    while True:
        time.sleep(_SCRAPED_EVERY)
        late = [arm for arm in arms if (now := scrape(arm)) and any(total(now, name) for name in _QUEUES)]
        if not late:
            return
        if time.monotonic() > ends:
            for arm in late:
                arm.result["unsettled"] = arm.result.get("unsettled", 0) + 1
            return


def queue(arm: Arm, size: int, turn: int) -> float:
    """Milliseconds a step, in a queue of prompts that share nothing."""
    count = QUEUE.get(size, 24)
    prompts = [prompt(f"queue{size}.{turn}.{i}", size) for i in range(count)]
    with ThreadPoolExecutor(count) as pool:
        began = time.perf_counter()

        def one(ids: list[int]) -> float:
            arm.prefill(ids)
            return time.perf_counter() - began

        ends = sorted(pool.map(one, prompts))
    return 1e3 * (ends[-EDGE - 1] - ends[EDGE]) / (count - 2 * EDGE - 1)


def steps(found: Sequence[Arm], size: int, turn: int, all_arms: Sequence[Arm] = ()) -> None:
    """One turn of each arm, at its place in `step_ms`; the order goes round. Each begins when all arms are quiet."""
    for arm in in_turn(found, turn):
        times = arm.result.setdefault("step_ms", {}).setdefault(str(size), [])
        times += [None] * (turn + 1 - len(times))  # what has failed keeps its place
        settle(all_arms)
        times[turn] = round(queue(arm, size, turn), 3)


def in_turn(found: Sequence[Arm], turn: int) -> list[Arm]:
    """Another one first at every turn."""
    at = turn % max(1, len(found))
    return [*found[at:], *found[:at]]


def single(found: Sequence[Arm], size: int, count: int = SINGLES) -> None:
    """Client milliseconds of one prompt on an idle server, all misses; arms take turns, prompt by prompt."""
    times: dict[str, list[float]] = {arm.name: [] for arm in found}
    for i in range(count + 3):
        for arm in in_turn(found, i):
            time.sleep(PAUSE_S)
            times[arm.name].append(round(1e3 * arm.prefill(prompt(f"single{size}.{i}", size)), 3))
    for arm in found:
        kept = times[arm.name][3:]
        arm.result.setdefault("single_ms", {})[str(size)] = {
            "p50": round(statistics.median(kept), 3),
            "p90": round(sorted(kept)[int(0.9 * len(kept))], 3),
            "samples": kept,
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


def told(arm: Arm, ids: list[int]) -> Probe:
    """One token's answer, with the logprobs of the whole vocabulary."""
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": VOCAB,
    }
    answer = arm.post("/generate", body).json()
    meta = answer["meta_info"]
    logprobs = sorted(meta["output_top_logprobs"][0], key=lambda one: one[1])
    return Probe(tuple(answer["output_ids"]), tuple(one[0] for one in logprobs), int(meta["cached_tokens"]))


def with_another_page(ids: list[int], seed: str) -> list[int]:
    """With other tokens in the last page that a cache can have."""
    end = (len(ids) - 1) // PAGE * PAGE
    return [*ids[: end - PAGE], *prompt(seed, PAGE), *ids[end:]]


def load(arm: Arm, tokens: int, new: int, samples: int) -> dict[str, Any]:
    """A prompt of `tokens` with `new` further ones: computed, from the device, and from the CPU pool.

    answer: of a short prompt, beside it; how far the one after its load is from the one before (rms of the difference of
    their logprobs), and how far another page moves it.
    """
    seed = f"load{tokens}.{new}"
    base = prompt(seed, tokens)
    cold = ask(arm, base)
    short = prompt(f"{seed}.short", SHORT)
    first = told(arm, short)
    other = told(arm, with_another_page(short, f"{seed}.other"))
    time.sleep(0.5)  # until its pages are in the pool
    device = [ask(arm, [*base, *prompt(f"{seed}.device{i}", new)]) for i in range(samples + 1)][1:]
    same = [*base, *prompt(f"{seed}.same", new)]
    before = ask(arm, same, tokens_out=8)
    push_out(arm, f"{seed}.equal")
    after = ask(arm, same, tokens_out=8)
    again = told(arm, short)
    pool = []
    for i in range(samples):
        push_out(arm, f"{seed}.push{i}")
        pool.append(ask(arm, [*base, *prompt(f"{seed}.pool{i}", new)]))
    device_ms, pool_ms = ([run["ms"] for run in runs] for runs in (device, pool))
    return {
        "tokens": tokens,
        "new_tokens": new,
        "recompute_ms": cold["ms"],
        "with_new_tokens_from_device_ms": statistics.median(device_ms),
        "with_new_tokens_from_pool_ms": statistics.median(pool_ms),
        "exposed_ms": round(statistics.median(pool_ms) - statistics.median(device_ms), 2),
        "samples_ms": {"from_device": device_ms, "from_pool": pool_ms},
        "cached_tokens": {
            "from_device": [run["cached"] for run in device],
            "from_pool": [run["cached"] for run in [after, *pool]],
        },
        "answer": {
            "cached": again.cached,
            "apart": again.apart(first),
            "one_other_page": other.apart(first),
        },
        "same_tokens_as_before_eviction": after["ids"] == before["ids"],
        "largest_logprob_difference": max(
            abs(a - b) for a, b in zip(after["logprobs"], before["logprobs"], strict=True)
        ),
    }


def metrics(after: Sample, before: Sample | None = None) -> dict[str, Any]:
    """Our numbers, of a whole life or between two scrapes (then without gauges); the scheduler's stalls, and of them the
    waits of a launch for its loads: p99 as the bucket's upper bound, None where nothing was observed."""
    since: Sample = Counter() if before is None else before
    found: dict[str, float] = {}
    for key, value in after.items():
        name = key.partition("{")[0]
        if not ("cache_" in name or "stall" in name) or name.endswith("_bucket"):
            continue
        if before is not None and not name.endswith(("_total", "_count", "_sum")):
            continue
        if moved := value - since[key]:
            end = re.search(r'(?:end|tier|reason)="([^"]+)"', key)
            found[f"{name}.{end[1]}" if end else name] = moved
    times: dict[str, float | None] = {}
    for histogram, (p99_name, count_name) in _TIMES.items():
        times[count_name] = observed = grown(since, after, f"{histogram}_bucket", le="+Inf")
        times[p99_name] = at_most(since, after, histogram, 0.99) if observed else None
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
    for part in ("skipped", "failed"):
        if left := {name: found[part] for name, found in by_name.items() if part in found}:
            result[part] = left
    return result


def measure(arms: Sequence[Arm], note: Callable[[], None], seconds_left: Callable[[], float]) -> None:
    """Everything, most important first, until the time is over; what fails or is left out is in the arm's result."""

    def run(what: str, who: Sequence[Arm], work: Callable[[], Any], keep_s: float = 0.0) -> None:
        if not who:
            return
        if seconds_left() <= keep_s:
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

    def scraped(part: str, since: dict[str, Sample] | None = None) -> dict[str, Sample]:
        """What all export now, into the results' `metrics`; with `since`, also what has moved, under the part's name."""
        found: dict[str, Sample] = {}

        def one(arm: Arm) -> None:
            found[arm.name] = scrape(arm)
            name = part if since is None else f"after_{part}"
            put(arm, "metrics", name, partial(metrics, found[arm.name]))
            if since is not None and arm.name in since:
                put(arm, "metrics", part, partial(metrics, found[arm.name], since[arm.name]))

        run(f"metrics {part}", arms, partial(settle, arms))
        for arm in arms:
            run(f"metrics {part} {arm.name}", [arm], partial(one, arm))
        return found

    for arm in arms:
        run(f"warm {arm.name}", [arm], partial(warm, arm))
    pair = [arm for arm in arms if arm.name != "sync"]
    began = scraped("before_steps")
    for turn in range(TURNS):
        for size in SIZES:
            some = arms if turn < SYNC_TURNS else pair
            keep_s = KEEP_S if turn >= TURNS_AT_LEAST else 0.0
            run(f"steps {size} turn {turn}", some, partial(steps, some, size, turn, arms), keep_s)
    scraped("steps", began)
    run("single 4096", pair, partial(single, pair, 4096))
    began = scraped("before_loads")
    for arm in [arm for arm in arms if arm.name == "ours"]:
        for name, tokens, samples in (("32k", 32_768, 5), ("128k", 131_072, 3)):
            work = partial(load, arm, tokens, 4096, samples)
            run(f"load {name}", [arm], partial(put, arm, "load", name, work))
    scraped("loads", began)
    for size in SIZES:
        for arm in arms:
            run(f"busy {size}", [arm], partial(put, arm, "busy_share", str(size), partial(busy, arm, size)))
    scraped("at_the_end")
