"""How much of a prefill step does the GPU wait: eagerly, with SGLang's own graphs, and with ours?

True GLM-5.x widths, a few layers, random weights, one GPU. Three servers, started together, measured one at
a time; the same prompts for each. Every step is one request of one chunk. `isolated` is a request on an idle
server: the idle share of its step (traced), the client's milliseconds (untraced). `saturated` is a queue of
such requests: milliseconds a step (untraced) and the idle share of the whole window (traced). Tracing slows
the host, so traced idle shares overstate; step times do not.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson

from benchmarks import _gpu_trace, _result
from glm_sglang.serving import Server, ServerError
from glm_sglang.tiny_model.shape import Shape, generation_config, hf_config
from glm_sglang.tiny_model.tokenizer import tokenizer_config, tokenizer_json

# Rows of a step, and tokens of a cached prefix before them; in order of importance: a time box may cut the rest.
SIZES = "2048,2048+14336,8192,512,16384,1024,4096"
DISCARD = 5
STEPS = 20
VOCAB = 512
TEXT_TOKENS = 250  # byte tokens: no special one, so nothing ends early
COMMON = {
    "load-format": "dummy",
    "mem-fraction-static": "0.7",  # three servers share the GPU; the next line is what sizes their pools
    "max-total-tokens": "98304",
    "chunked-prefill-size": "16384",
    "max-prefill-tokens": "16384",
    "prefill-max-requests": "1",
    "max-running-requests": "64",
    "cuda-graph-backend-decode": "disabled",
    "sampling-backend": "pytorch",
    "watchdog-timeout": "400",
}
SWITCHES = (
    "--skip-server-warmup",
    "--disable-custom-all-reduce",
    "--enforce-disable-flashinfer-allreduce-fusion",
)


def common(extra: str) -> list[str]:
    """The flags of every arm; `extra` comes last, so it wins."""
    return [*(f"--{name}={value}" for name, value in COMMON.items()), *SWITCHES, *extra.split()]


def arms(buckets: Sequence[int]) -> dict[str, list[str]]:
    """What each arm adds to the common flags; the graph arms capture the same buckets."""
    sizes = list(buckets)
    return {
        "stock": [
            *("--glm-prefill-graph", "off", "--cuda-graph-backend-prefill", "breakable"),
            *("--cuda-graph-bs-prefill", *map(str, sizes)),
        ],
        "ours": ["--glm-prefill-graph", "auto", "--glm-prefill-graph-buckets", ",".join(map(str, sizes))],
        "eager": ["--glm-prefill-graph", "off", "--cuda-graph-backend-prefill", "disabled"],
    }


def write_model(folder: Path, layers: int, shared: bool) -> None:
    """A folder with config and tokenizer, true GLM-5.x widths, no weights."""
    kinds = (
        "".join("F" if i < 3 or (i - 2) % 4 == 0 else "S" for i in range(layers)) if shared else "F" * layers
    )
    shape = Shape(
        layers=layers,
        indexer_types=kinds,
        hidden=6144,
        heads=64,
        q_lora_rank=2048,
        intermediate=12288,
        moe_intermediate=2048,
        experts=16,
        experts_per_token=8,
        index_topk=2048,
        vocab=VOCAB,
        max_position=65536,
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in {
        "config.json": hf_config(shape, "fp8"),
        "generation_config.json": generation_config(),
        "tokenizer_config.json": tokenizer_config(shape.max_position),
    }.items():
        (folder / name).write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2))
    (folder / "tokenizer.json").write_text(tokenizer_json())


@dataclass(frozen=True, slots=True)
class Case:
    """A step of `rows` new tokens behind `prefix` cached ones: "2048" or "2048+14336"."""

    rows: int
    prefix: int = 0

    @classmethod
    def of(cls, text: str) -> Case:
        """Raises ValueError for anything but one or two whole numbers."""
        return cls(*map(int, text.split("+")))

    def __str__(self) -> str:
        return f"{self.rows}+{self.prefix}" if self.prefix else str(self.rows)

    def prompt(self, seed: object) -> list[int]:
        """A prompt of its own for each seed, behind the case's prefix."""
        return [*prompt("prefix", self.prefix), *prompt(f"{self}.{seed}", self.rows)]


@dataclass
class Arm:
    """One server and what was measured on it."""

    name: str
    server: Server
    result: dict[str, Any] = field(default_factory=dict)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """POST; raises for an answer that is not 200."""
        answer = httpx.post(self.server.url + path, json=body, timeout=300.0)  # the first of a shape compiles
        answer.raise_for_status()
        return answer

    def prefill(self, ids: list[int]) -> float:
        """Seconds until a prompt's first token."""
        began = time.perf_counter()
        sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        self.post("/generate", {"input_ids": ids, "sampling_params": sampling})
        return time.perf_counter() - began


def prompt(seed: str, tokens: int, prefix: Sequence[int] = ()) -> list[int]:
    """Random bytes, the same for the same seed, behind a prefix."""
    return [*prefix, *random.Random(seed).choices(range(TEXT_TOKENS), k=tokens)]


def percentile(values: Sequence[float]) -> float:
    """The median in milliseconds."""
    return round(1e3 * statistics.median(values), 3)


def untraced(arm: Arm, case: Case) -> dict[str, Any]:
    """Client milliseconds alone, and milliseconds a step in a queue."""
    alone = [arm.prefill(case.prompt(f"alone{i}")) for i in range(DISCARD + STEPS)]
    prompts = [case.prompt(f"queue{i}") for i in range(3 * DISCARD + STEPS)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        began = time.perf_counter()

        def one(ids: list[int]) -> float:
            arm.prefill(ids)
            return time.perf_counter() - began

        done = sorted(pool.map(one, prompts))
    # Responses leave in order; the first ones also pay for the arrival of the others.
    apart = [
        later - sooner for sooner, later in zip(done[DISCARD:-DISCARD], done[DISCARD + 1 :], strict=False)
    ]
    return {
        "client_ms": percentile(alone[DISCARD:]),
        "step_ms_saturated": round(1e3 * statistics.mean(apart), 3),
    }


def traced(arm: Arm, folder: Path, run: Callable[[], None], ranks: int = 1, **more: Any) -> list[Path]:
    """The trace files of what happens while `run` runs, one for each of `ranks`; `more` goes into the profile request."""
    folder.mkdir(parents=True, exist_ok=True)
    arm.post("/start_profile", {"output_dir": str(folder), "activities": ["GPU"], **more})
    run()
    arm.post("/stop_profile", {})
    began, seen = time.monotonic(), -1
    while time.monotonic() - began < 60:
        files = sorted(folder.rglob("*.json*"))
        size = sum(file.stat().st_size for file in files)
        if len(files) >= ranks and size == seen and size > 0:
            return files
        seen = size
        time.sleep(0.5)
    raise TimeoutError(f"{arm.name}: {len(files)} of {ranks} traces in {folder} after 60 s")


def trace_case(arm: Arm, case: Case) -> dict[str, Any]:
    """Idle shares of steps alone, and of a queue."""
    prompts = [case.prompt(f"window{i}") for i in range(24)]

    def alone() -> None:
        for i in range(DISCARD + STEPS):
            arm.prefill(case.prompt(f"traced{i}"))
            time.sleep(0.03)

    def queue() -> None:
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(arm.prefill, prompts))

    with tempfile.TemporaryDirectory() as folder:
        found = _gpu_trace.steps(_gpu_trace.read(traced(arm, Path(folder, "alone"), alone)))
        window = _gpu_trace.read(traced(arm, Path(folder, "queue"), queue))
    result = _gpu_trace.summary(found, DISCARD)
    result["idle_ms_by_tenth"] = _gpu_trace.profile_of_idle(found, DISCARD)
    result["idle_share_saturated"] = _gpu_trace.window_idle(window)
    return result


def keep_detail(arm: Arm, case: Case, folder: Path) -> list[str]:
    """A trace of three steps with the host's operators and Python's calls, left for a person to read."""

    def few() -> None:
        for i in range(3):
            arm.prefill(case.prompt(f"detail{i}"))
            time.sleep(0.03)

    files = traced(arm, folder, few, activities=["CPU", "GPU"], with_stack=True)
    return [f"{file.name}: {file.stat().st_size >> 10} KiB" for file in files]


def captured(log: Path) -> dict[str, Any]:
    """What the log says of the capture: seconds and GB, and our own lines about breaks and memory."""
    text = log.read_text(errors="replace")
    lines = [line[:300] for line in text.splitlines() if "server_args" not in line]
    ends = [line for line in lines if re.search(r"Capture .*prefill.*end", line, re.IGNORECASE)]
    ours = [line for line in lines if "prefill graph" in line.lower()]
    numbers = re.search(r"elapsed=([\d.]+).*?mem.*?usage=([\d.]+)", ends[-1]) if ends else None
    return {
        "capture_seconds": float(numbers[1]) if numbers else None,
        "capture_gb": float(numbers[2]) if numbers else None,
        "log": [*ends[-2:], *ours[-16:]],
    }


@dataclass
class Box:
    """Measures one thing after another until its time is over; what came too late or failed is listed by name."""

    seconds: float
    note: Callable[[], None]
    ends: float = 0.0

    def run(self, arm: Arm, part: str, case: Case, work: Callable[[Arm, Case], Any]) -> None:
        """`arm.result[part][case] = work(arm, case)`."""
        self.ends = self.ends or time.monotonic() + self.seconds
        if time.monotonic() > self.ends:
            arm.result.setdefault("skipped", []).append(f"{part} {case}")
            return
        try:
            arm.result.setdefault(part, {})[str(case)] = work(arm, case)
        except Exception as error:  # whatever it is, what was measured before it must survive
            arm.result.setdefault("failed", {})[f"{part} {case}"] = f"{type(error).__name__}: {error}"[:300]
        self.note()


def measure(args: argparse.Namespace, found: Sequence[Arm], out: Path, note: Callable[[], None]) -> None:
    """Everything, most important first."""

    def warm(arm: Arm) -> None:
        for case in args.sizes:
            try:
                seconds = [round(arm.prefill(case.prompt(f"warm{i}")), 3) for i in range(3)]
            except httpx.HTTPError as error:
                arm.result.setdefault("failed", {})[f"warm {case}"] = f"{type(error).__name__}: {error}"[:300]
                return
            arm.result.setdefault("warm_s", {})[str(case)] = seconds

    with ThreadPoolExecutor(
        len(found) or 1
    ) as pool:  # every shape runs before anything is measured: kernels compile
        list(pool.map(warm, found))
    note()
    time.sleep(max(0.0, args.not_before - time.monotonic()))
    box = Box(args.seconds, note)
    for number, case in enumerate(args.sizes):
        for arm in found:
            box.run(arm, "untraced", case, untraced)
        for arm in found:
            box.run(arm, "traced", case, trace_case)
        if args.detail and number == 0:
            for arm in found:
                box.run(
                    arm, "detail", case, lambda arm, case: keep_detail(arm, case, out / "detail" / arm.name)
                )
    for arm in found:
        text = arm.server.log.read_text(errors="replace")
        arm.result["steps_logged"] = {word: text.count(f"graph: {word}") for word in ("True", "False")}


def headline(found: list[Arm]) -> dict[str, Any]:
    """The figures that the targets name."""
    result: dict[str, Any] = {}
    by_name = {arm.name: arm.result for arm in found}
    for size in ("2048", "2048+14336", "8192"):
        for name, values in by_name.items():
            if share := values.get("traced", {}).get(size, {}).get("idle_share"):
                result[f"idle_share_{size}_{name}"] = share
        ours, stock = (by_name.get(n, {}).get("untraced", {}).get(size) for n in ("ours", "stock"))
        if ours and stock:
            for key in ("client_ms", "step_ms_saturated"):
                result[f"{key}_{size}_over_stock"] = round(ours[key] / stock[key], 4)
    return result


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _result.add_arguments(parser)
    parser.add_argument("--arms", default="stock,ours,eager")
    parser.add_argument("--sizes", default=SIZES, help="ROWS or ROWS+PREFIX, separated by commas")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--shared-indexer", action="store_true", help="GLM-5.3's pattern of indexer layers")
    parser.add_argument("--quiet-seconds", type=float, default=0.0, help="measure no earlier after the start")
    parser.add_argument("--seconds", type=float, default=420.0, help="time box once the servers are up")
    parser.add_argument("--start-seconds", type=float, default=300.0, help="longest wait for the servers")
    parser.add_argument("--out", default="", help="folder for partial results, logs and traces")
    parser.add_argument(
        "--detail", action="store_true", help="keep a trace with Python's calls of the first size"
    )
    parser.add_argument(
        "--one-by-one", action="store_true", help="start a server when the one before it is up"
    )
    parser.add_argument("--extra", default="", help="further server flags for every arm")
    parser.add_argument("--model", default="", help="a checkpoint instead of random weights of true widths")
    args = parser.parse_args(argv)
    args.sizes = [Case.of(text) for text in args.sizes.split(",")]
    args.not_before = time.monotonic() + args.quiet_seconds
    args.arms = args.arms.split(",")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    out = Path(args.out or tempfile.mkdtemp(prefix="gpu-idle-"))
    out.mkdir(parents=True, exist_ok=True)
    model = Path(args.model or tempfile.mkdtemp(prefix="gpu-idle-model-"))
    if not args.model:
        write_model(model, args.layers, args.shared_indexer)
    flags = arms(sorted({case.rows for case in args.sizes}))
    found: list[Arm] = []
    result: dict[str, Any] = {"model": {"layers": args.layers, "shared_indexer": args.shared_indexer}}

    def note() -> None:
        result["arms"] = {arm.name: arm.result for arm in found}
        (out / "gpu_idle.json").write_bytes(
            orjson.dumps(result | headline(found), option=orjson.OPT_INDENT_2)
        )

    starting = [
        Arm(name, Server(model, [*common(args.extra), *flags[name]], name=name, log=out / f"{name}.log"))
        for name in args.arms
    ]
    try:
        began = time.monotonic()
        for arm in starting:
            arm.server.ready_timeout_s = args.start_seconds
            arm.server.ready_path = (
                "/model_info"  # /health answers when a token was made: it compiles eager kernels
            )
            if not args.one_by_one:
                arm.server.start()
                time.sleep(3.0)
        for arm in starting:
            if args.one_by_one:
                arm.server.start()
            try:
                arm.server.wait_ready()
                arm.result["up_seconds"] = round(time.monotonic() - began, 1)
                found.append(arm)
            except ServerError as error:
                result.setdefault("not_up", {})[arm.name] = str(error)[-3000:]
            note()
        for arm in found:
            arm.result["capture"] = captured(arm.server.log)
        measure(args, found, out, note)
        note()
        final = {key: value for key, value in result.items() if key != "arms"}
        _result.finish("gpu_idle", {**headline(found), **final, "arms": result.get("arms", {})}, args)
    finally:
        for arm in starting:
            arm.server.stop()
    print(f"partial results, logs and traces: {out}", file=sys.stderr)
    return 0 if len(found) == len(starting) else 1


if __name__ == "__main__":
    sys.exit(main())
