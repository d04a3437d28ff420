"""The servers that `benchmarks.moe_server` compares: flags, start side by side, what they say of themselves."""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.ablation.arms import CHANGES
from glm_sglang.prefill_graph import buckets
from glm_sglang.serving import Server, ServerError, free_port

CAP = "SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK"
EAGER = ("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled")

# The article's node: prefill CP and expert parallelism over all GPUs, one change on top of the other.
NODE_PARTS = ("node", "exposed", "same")
NODE_ARMS: dict[str, tuple[str, ...]] = {
    "stock": (),
    "megamoe": ("megamoe",),
    "graphs": ("megamoe", "graphs"),
    "cache": ("megamoe", "cache"),
    "all": ("megamoe", "graphs", "cache"),
}
ROWS = 2048  # of a whole chunk, on each rank of a node

ENVIRONMENT = {
    # /health answers once the server is up, and not after a first token of its own.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    # Servers that start side by side change each other's free memory.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
}


@dataclass(frozen=True)
class Setting:
    """What differs between a GPU and the reference platform. `turn`: new tokens of a second turn; `queued`: tokens
    of a queue, for each rank.
    """

    sizes: tuple[int, ...]
    cap: int
    stock_cap: int
    chunk: int
    turn: int
    queued: int
    pool_gb: int
    preset: str
    dtype: str
    flags: tuple[str, ...]


GPU = Setting(
    sizes=(1, 63, 64, 1919, 1920, 8192),
    cap=1920,
    stock_cap=64,
    chunk=16384,
    turn=1024,
    queued=65536,
    pool_gb=8,
    preset="gpu",
    dtype="fp8",
    flags=(
        # Servers share the GPUs: the pool is bounded by tokens, the fraction leaves room for what the others take.
        *("--max-total-tokens", "131072", "--mem-fraction-static", "0.8"),
        *("--sampling-backend", "pytorch", "--watchdog-timeout", "400"),
        *("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"),
        *("--max-running-requests", "8"),
    ),
)
REFERENCE = Setting(
    sizes=(1, 63, 64, 127, 128, 512),
    cap=64,
    stock_cap=64,
    chunk=512,
    turn=128,
    queued=512,
    pool_gb=1,
    preset="cpu",
    dtype="float32",
    flags=("--context-length", "2048"),
)


@dataclass
class Arm:
    """One server under comparison; `done` ends when it has answered its first requests, or says why it did not."""

    name: str
    server: Server
    client: httpx.Client
    started: float
    done: Future[None]
    replies: list[list[dict[str, Any]]] = field(default_factory=list)

    def post(self, body: dict[str, Any]) -> Any:
        """POST /generate. Raises httpx.HTTPError."""
        response = self.client.post("/generate", json=body)
        response.raise_for_status()
        return response.json()


class Report:
    """The result so far, written whole after every step; several threads add to it."""

    def __init__(self, out: Path | None, deadline_s: float) -> None:
        self.out = out
        self.began = time.monotonic()
        self.deadline_s = deadline_s
        self.result: dict[str, Any] = {}
        self.lock = threading.Lock()

    def left(self, keep_s: float = 0.0) -> float:
        """Seconds until the deadline less what is kept for what follows, at least 0."""
        return max(0.0, self.deadline_s - keep_s - (time.monotonic() - self.began))

    def put(self, **values: Any) -> None:
        """Adds values and writes."""
        with self.lock:
            self.result |= values
            self.result["seconds"] = round(time.monotonic() - self.began, 1)
            if self.out is not None:
                self.out.parent.mkdir(parents=True, exist_ok=True)
                staging = self.out.with_suffix(".tmp")
                staging.write_text(json.dumps(self.result, indent=1))
                staging.replace(self.out)

    def say(self, text: str) -> None:
        """A line for whoever waits, with the time."""
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)


def tokens(length: int, seed: int) -> list[int]:
    """Random printable bytes as tokens."""
    draw = random.Random(f"{seed}:{length}")
    return [draw.randrange(32, 127) for _ in range(length)]


def launch(
    stack: ExitStack,
    report: Report,
    model: Path,
    part: str,
    args: argparse.Namespace,
    first: Callable[[Arm], None],
) -> dict[str, Arm]:
    """Starts a part's servers side by side and returns at once; each is handed to `first`, in its own thread, once up.

    The first requests compile kernels, for minutes on a machine that has none yet: the servers do it together.
    """
    arms: dict[str, Arm] = {}
    pool = stack.enter_context(_Waiters())
    for name, options in asked(part, args).items():
        log = args.logs / f"{part}-{name}.log" if args.logs else None
        server = Server(
            model,
            [*options["flags"], *args.server_args],
            port=free_port(),
            module=options.get("module", "glm_sglang.launch_server"),
            env={**ENVIRONMENT, **options.get("env", {})},
            name=name,
            log=log,
            ready_timeout_s=report.left(),
        )
        stack.callback(server.stop)
        server.start()
        client = stack.enter_context(
            httpx.Client(base_url=server.url, timeout=report.left(), trust_env=False, follow_redirects=True)
        )
        arm = arms[name] = Arm(name, server, client, time.monotonic(), Future())
        arm.done = pool.submit(_begin, arm, report, part, first)
        time.sleep(args.stagger)
    return arms


class _Waiters(ThreadPoolExecutor):
    """Threads that wait for servers. Leaving does not wait for them: the servers' end ends them."""

    def __exit__(self, *_: object) -> None:
        self.shutdown(wait=False, cancel_futures=True)


def _begin(arm: Arm, report: Report, part: str, first: Callable[[Arm], None]) -> None:
    arm.server.wait_ready()
    up = time.monotonic() - arm.started
    report.say(f"{part} {arm.name} is up after {up:.0f} s")
    first(arm)
    answered = time.monotonic() - arm.started
    report.say(f"{part} {arm.name} has answered after {answered:.0f} s")
    report.put(**{f"{part}_{arm.name}_start_s": [round(up, 1), round(answered, 1)]})


def went_well(arm: Arm, report: Report, part: str, keep_s: float = 0.0) -> bool:
    """Waits for an arm's first requests until the deadline; what goes wrong is in the result."""
    try:
        arm.done.result(timeout=report.left(keep_s))
        return True
    except (ServerError, httpx.HTTPError, TimeoutError, ValueError, KeyError, RuntimeError) as error:
        lines = str(error).splitlines()[:25] or [repr(error)]
        report.say(f"{part} {arm.name} does not answer: {lines[0]}")
        report.put(**{f"{part}_{arm.name}_failed": lines})
        return False


def flags_of(args: argparse.Namespace) -> list[str]:
    """Flags of every server."""
    setting = REFERENCE if args.reference else GPU
    graphs = () if args.reference or args.graphs else EAGER
    common = [*graphs, *setting.flags, "--chunked-prefill-size", str(setting.chunk)]
    common += ["--tp-size", str(args.ranks)]
    return [*common, "--skip-server-warmup", "--disable-radix-cache", "--enable-metrics"]


def asked(part: str, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Of a part's arms stock and those of --arms, where there are any."""
    return {n: arm for n, arm in arms_of(part, args).items() if not args.arms or n in {"stock", *args.arms}}


def arms_of(part: str, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Flags, launcher and environment of a part's servers; `stock` is what the others are compared with."""
    if part in NODE_PARTS:
        return node_arms(part, args)
    setting = REFERENCE if args.reference else GPU
    common, capped, ranks = flags_of(args), {CAP: str(setting.cap)}, str(args.ranks)
    ours = [*common, "--glm-moe", "megamoe"]
    arms: dict[str, dict[str, Any]] = {
        "stock": {"flags": [*common, "--glm-moe", "stock", "--ep-size", ranks, *runner(args)]}
    }
    if part == "agreement":
        arms["megamoe"] = {"flags": ours, "env": capped}
        arms["upstream"] = {
            "flags": [*common, "--moe-a2a-backend", "megamoe"],
            "module": "tests.e2e.tokens.stock_megamoe" if args.reference else "benchmarks._stock_megamoe",
            "env": {CAP: str(setting.stock_cap)},
        }
    elif part == "layouts":
        spread = ["--enable-prefill-cp", "--cp-strategy", "interleave", "--attn-cp-size", ranks]
        arms["megamoe-cp2"] = {"flags": [*ours, *spread], "env": capped}
        # What isn't MoE stays on each DP rank, too: gathering over DP ranks takes kernels that only CUDA has.
        own = ["--attn-dp-size", ranks, "--moe-dense-tp-size", "1", "--enable-dp-lm-head"]
        arms["megamoe-dp2"] = {"flags": [*ours, *own], "env": capped}
    else:
        arms["megamoe"] = {"flags": ours, "env": capped if args.reference else {}}
    return arms


def node_arms(part: str, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The arms of a node's part, the same flags but for the changes. No graphs on the reference platform."""
    setting = REFERENCE if args.reference else GPU
    ranks, chunk = str(args.ranks), node_chunk(args)
    common = [
        *(() if args.reference else ("--cuda-graph-backend-decode", "disabled")),
        *(*setting.flags, "--max-total-tokens", str(node_tokens(args))),
        *("--chunked-prefill-size", str(chunk), "--max-prefill-tokens", str(chunk)),
        *("--tp-size", ranks, "--ep-size", ranks),
        *("--enable-prefill-cp", "--cp-strategy", "interleave", "--attn-cp-size", ranks),
        *("--skip-server-warmup", "--enable-metrics"),
    ]
    arms: dict[str, dict[str, Any]] = {}
    for name, on in NODE_ARMS.items():
        if args.reference and "graphs" in on:
            continue
        own = switches(on)
        if "graphs" in on and part != "same":  # there the planned buckets are what is compared
            own += ["--glm-prefill-graph-buckets", ",".join(map(str, node_buckets(args)))]
        if "cache" in on:
            own += ["--glm-cache-pool-gb", str(setting.pool_gb)]
        if "megamoe" not in on:
            own += runner(args)
        capped = "megamoe" in on and (part == "same" or args.reference)
        arms[name] = {"flags": [*common, *own], "env": {CAP: str(setting.cap)} if capped else {}}
    return arms


def runner(args: argparse.Namespace) -> list[str]:
    """Which kernels compute the experts where MegaMoE does not."""
    return ["--moe-runner-backend", args.moe_runner] if args.moe_runner else []


def switches(on: Collection[str]) -> list[str]:
    """The ablation's flags with these changes on. Graphs strictly: under prefill CP they are captured no other way."""
    words = [word for change in CHANGES for word in (change.on if change.name in on else change.off)]
    return [{"{cache}": "embedded://", "auto": "strict"}.get(word, word) for word in words]


def node_chunk(args: argparse.Namespace) -> int:
    """Tokens of a whole chunk over all ranks."""
    return REFERENCE.chunk if args.reference else ROWS * int(args.ranks)


def node_tokens(args: argparse.Namespace) -> int:
    """Of KV on the device: room for two of the longest prompts, so that three push out whatever was before."""
    return 2 * max(args.lengths) + node_chunk(args)


def node_buckets(args: argparse.Namespace) -> list[int]:
    """The steps that a node's parts measure: each length's, whole chunks, and a second turn behind its cached pages."""
    chunk, unit = node_chunk(args), buckets.unit(int(args.ranks))
    steps = {chunk, GPU.turn + 64, *(min(length, chunk) for length in args.lengths)}
    return sorted({-(-step // unit) * unit for step in steps})


def about(arm: Arm) -> Any:
    """What the server says of its MoE, and its counters above 0."""
    try:
        info = arm.client.get("/server_info", timeout=10.0).json()
        lines = arm.client.get("/metrics", timeout=10.0).text.splitlines()
    except (httpx.HTTPError, ValueError) as error:
        return repr(error)[:300]
    states = info.get("internal_states") or [{}]
    return {
        "glm_moe": states[0].get("glm_moe"),
        "memory_usage": states[0].get("memory_usage"),
        "metrics": [
            line
            for line in lines
            if line.startswith(("glm_sglang:", "sglang:cuda_graph_passes_total"))
            and not re.search(r"_created|_bucket| 0\.0$", line)
        ],
    }
