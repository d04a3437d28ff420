"""How much of a prefill step does the GPU wait: eagerly, with SGLang's own graphs, with ours, with ours and the cache?

    python -m benchmarks.gpu_idle --json
    python -m benchmarks.gpu_idle --layers 78 --experts 8 --shared-indexer --arms stock,ours --sizes 2048,8192 --json

True GLM-5.x widths, random weights, one GPU. As many servers as fit are up together (`--plan` says which), measured one
at a time; the same prompts for each. Every step is one request of one chunk. `isolated` is a request on an idle
server: the idle share of its step (traced), the client's milliseconds (untraced). `saturated` is a queue of
such requests: milliseconds a step (untraced) and the idle share of the whole window (traced). Tracing slows
the host, so traced idle shares overstate; step times do not. What a step costs the host once weighs less the more
layers there are: GLM-5.3 has 78, of which a GPU of eight has whole layers and 32 experts in each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import orjson

from benchmarks import _fit, _result
from benchmarks._idle_steps import (
    DISCARD,
    ROWS,
    STEPS,
    Arm,
    Case,
    Counts,
    captured,
    keep_detail,
    trace_case,
    untraced,
)
from glm_sglang.serving import Server, ServerError, stop_together
from glm_sglang.tiny_model.shape import Shape, generation_config, hf_config
from glm_sglang.tiny_model.tokenizer import tokenizer_config, tokenizer_json

# Rows of a step, and tokens of a cached prefix before them; in order of importance: a time box may cut the rest.
SIZES = "2048,2048+14336,8192,512,16384,1024,4096"
VOCAB = 512
POOL_GIB = 8  # of the arm with the cache
NOTES = [
    "dummy weights (--load-format dummy) are zeros but for two in a hundred: clocks stay higher than with real ones",
    "dummy routers send every token to the same 8 experts; where a layer has 8, no router would do otherwise",
    "a step of n rows has the FLOP of n local rows on a GPU of a node under even routing: 8 expert rows each",
]
COMMON = {
    "load-format": "dummy",
    "mem-fraction-static": "0.7",  # several servers share the GPU; the next line is what sizes their pools
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
    ours = ["--glm-prefill-graph", "auto", "--glm-prefill-graph-buckets", ",".join(map(str, sizes))]
    return {
        "stock": [
            *("--glm-prefill-graph", "off", "--cuda-graph-backend-prefill", "breakable"),
            *("--cuda-graph-bs-prefill", *map(str, sizes)),
        ],
        "ours": ours,
        "eager": ["--glm-prefill-graph", "off", "--cuda-graph-backend-prefill", "disabled"],
        "cached": [*ours, "--glm-cache-url", "embedded://", "--glm-cache-pool-gb", str(POOL_GIB)],
    }


def model_config(layers: int, shared: bool, experts: int = 16) -> dict[str, Any]:
    """config.json of true GLM-5.x widths. `shared`: GLM-5.3's layers, three dense ones and an indexer in every fourth."""
    kinds = (
        "".join("F" if i < 3 or (i - 2) % 4 == 0 else "S" for i in range(layers)) if shared else "F" * layers
    )
    shape = Shape(
        layers=layers,
        dense_layers=min(3, layers - 1) if shared else 1,
        indexer_types=kinds,
        hidden=6144,
        heads=64,
        q_lora_rank=2048,
        intermediate=12288,
        moe_intermediate=2048,
        experts=experts,
        experts_per_token=8,
        index_topk=2048,
        vocab=VOCAB,
        max_position=65536,
    )
    return hf_config(shape, "fp8")


def write_model(folder: Path, layers: int, shared: bool, experts: int = 16) -> None:
    """A folder with config and tokenizer, no weights."""
    config = model_config(layers, shared, experts)
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in {
        "config.json": config,
        "generation_config.json": generation_config(),
        "tokenizer_config.json": tokenizer_config(config["max_position_embeddings"]),
    }.items():
        (folder / name).write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2))
    (folder / "tokenizer.json").write_text(tokenizer_json())


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
    """Everything of servers that are up together, most important first."""

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
        counts = Counts(args.steps, args.discard).of(case)
        for arm in found:
            box.run(arm, "untraced", case, partial(untraced, counts=counts))
        for arm in found:
            box.run(arm, "traced", case, partial(trace_case, counts=counts))
        if args.detail and number == 0:
            for arm in found:
                box.run(
                    arm, "detail", case, lambda arm, case: keep_detail(arm, case, out / "detail" / arm.name)
                )
    for arm in found:
        text = arm.server.log.read_text(errors="replace")
        arm.result["steps_logged"] = {word: text.count(f"graph: {word}") for word in ("True", "False")}


def headline(found: list[Arm]) -> dict[str, Any]:
    """The figures that the targets name; `idle_share_2048` and `idle_share_8192` are ours, None where not measured."""
    by_name = {arm.name: arm.result for arm in found}

    def share(name: str, size: str) -> float | None:
        value: float | None = by_name.get(name, {}).get("traced", {}).get(size, {}).get("idle_share")
        return value

    result: dict[str, Any] = {f"idle_share_{size}": share("ours", size) for size in ("2048", "8192")}
    for size in ("2048", "2048+14336", "8192"):
        for name in by_name:
            if (idle := share(name, size)) is not None:
                result[f"idle_share_{size}_{name}"] = idle
        ours, stock = (by_name.get(n, {}).get("untraced", {}).get(size) for n in ("ours", "stock"))
        if ours and stock:
            for key in ("client_ms", "step_ms_saturated"):
                result[f"{key}_{size}_over_stock"] = round(ours[key] / stock[key], 4)
    return result


def incomplete(args: argparse.Namespace, found: list[Arm]) -> list[str]:
    """What was to be measured and was not, with the reason: arms, cases of them, and whatever failed on the way."""
    lines = [f"{name}: did not start" for name in args.arms if name not in {arm.name for arm in found}]
    for arm in found:
        skipped, failed = arm.result.get("skipped", []), arm.result.get("failed", {})
        lines += [f"{arm.name}: {what}: skipped, the time was over (--seconds)" for what in skipped]
        lines += [f"{arm.name}: {what}: {why}" for what, why in failed.items()]
        for what in (f"{part} {case}" for case in args.sizes for part in ("untraced", "traced")):
            part, _, case = what.partition(" ")
            if case not in arm.result.get(part, {}) and what not in skipped and what not in failed:
                lines.append(f"{arm.name}: {what}: not measured")
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _result.add_arguments(parser)
    parser.add_argument(
        "--arms", default="stock,ours,eager,cached", help="of stock, ours, eager and cached (ours + cache)"
    )
    parser.add_argument("--sizes", default=SIZES, help="ROWS or ROWS+PREFIX, separated by commas")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=16, help="of a layer; every token meets the same 8")
    parser.add_argument(
        "--shared-indexer",
        action="store_true",
        help="GLM-5.3's layers: three dense, an indexer in every fourth",
    )
    parser.add_argument("--tokens", type=int, help="of KV of a server (default: three of the longest prompt)")
    parser.add_argument(
        "--at-once",
        type=int,
        default=0,
        help="servers up together, 1 for one at a time (default: all that fit)",
    )
    parser.add_argument("--gpu-gib", type=float, help="memory of the GPU (default: by NVML)")
    parser.add_argument(
        "--plan", action="store_true", help="say who is up with whom and what each takes; start nothing"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help=f"measured of a case, fewer above {ROWS} rows (default %(default)s)",
    )
    parser.add_argument("--discard", type=int, default=DISCARD, help="before them (default %(default)s)")
    parser.add_argument("--quiet-seconds", type=float, default=0.0, help="measure no earlier after the start")
    parser.add_argument(
        "--seconds", type=float, default=420.0, help="time box once servers are up, of each wave"
    )
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
    if unknown := set(args.arms) - arms(()).keys():
        parser.error(f"--arms names {', '.join(sorted(unknown))}, allowed: {', '.join(arms(()))}")
    if args.steps < 1 or args.discard < 1:
        parser.error(f"--steps is {args.steps} and --discard {args.discard}; both must be at least 1")
    args.buckets = sorted({case.rows for case in args.sizes})
    args.tokens = args.tokens or 3 * max(case.rows + case.prefix for case in args.sizes)
    return args


def sized(args: argparse.Namespace) -> str:
    """Flags of every arm that follow from the sizes: a step is never longer than the longest case."""
    chunk = args.buckets[-1]
    # The tokens bound a pool: the fraction must leave room for one, beside what other servers have taken by then.
    return (
        f"--mem-fraction-static=0.97 --max-total-tokens={args.tokens} --chunked-prefill-size={chunk} "
        f"--max-prefill-tokens={chunk} {args.extra}"
    )


def needs(args: argparse.Namespace, config: dict[str, Any]) -> dict[str, _fit.Need]:
    """What each arm takes of the GPU."""
    chunk = args.buckets[-1]
    return {
        name: _fit.need(config, args.tokens, chunk, () if name == "eager" else args.buckets)
        for name in args.arms
    }


def plan(args: argparse.Namespace, taken: dict[str, _fit.Need]) -> list[list[str]]:
    """Who is up with whom. Raises FitError."""
    room = int(args.gpu_gib * _fit.GIB) - _fit.SPARE if args.gpu_gib else _fit.gpu_bytes()
    if not room:  # nothing is known: as it was asked
        return _fit.waves(dict.fromkeys(taken, 0), 0, args.at_once)
    return _fit.waves({name: one.total for name, one in taken.items()}, room, args.at_once)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 where something was not measured (`incomplete` of the result), 2 where the arms do not fit."""
    args = parse(argv)
    out = Path(args.out or tempfile.mkdtemp(prefix="gpu-idle-"))
    out.mkdir(parents=True, exist_ok=True)
    model = Path(args.model or tempfile.mkdtemp(prefix="gpu-idle-model-"))
    if not args.model:
        write_model(model, args.layers, args.shared_indexer, args.experts)
    config = orjson.loads((model / "config.json").read_bytes())
    taken = needs(args, config)
    try:
        together = plan(args, taken)
    except _fit.FitError as error:
        print(error, file=sys.stderr)
        return 2
    gib = {name: one.gib() for name, one in taken.items()}
    for wave in together:
        print(f"together: {', '.join(f'{name} {gib[name]}' for name in wave)} GiB", file=sys.stderr)
    if args.plan:
        return 0
    found: list[Arm] = []
    result: dict[str, Any] = {
        "model": {
            "layers": config["num_hidden_layers"],
            "dense_layers": config["first_k_dense_replace"],
            "experts": config["n_routed_experts"],
            "indexers": config["indexer_types"].count("full"),
            "shared_indexer": args.shared_indexer,
        },
        "together": together,
        "expected_gib": gib,
        "notes": [] if args.model else [*NOTES],
    }
    if "cached" in args.arms:
        result["notes"].append("cached: kernels and copies of its saves count as no work of a step")

    def note() -> None:
        result["arms"] = {arm.name: arm.result for arm in found}
        (out / "gpu_idle.json").write_bytes(
            orjson.dumps(result | headline(found), option=orjson.OPT_INDENT_2)
        )

    for wave in together:
        run_wave(args, model, wave, out, found, result, note)
    missing = incomplete(args, found)
    final = {key: value for key, value in result.items() if key != "arms"} | {"incomplete": missing}
    _result.finish("gpu_idle", {**headline(found), **final, "arms": result.get("arms", {})}, args)
    for line in missing:
        print(f"gpu_idle: {line}", file=sys.stderr)
    print(f"partial results, logs and traces: {out}", file=sys.stderr)
    return 1 if missing else 0


def run_wave(
    args: argparse.Namespace,
    model: Path,
    names: Sequence[str],
    out: Path,
    found: list[Arm],
    result: dict[str, Any],
    note: Callable[[], None],
) -> None:
    """Starts these arms, measures those that come up, which are added to `found`, and ends them."""
    flags = arms(args.buckets)
    starting = [
        Arm(name, Server(model, [*common(sized(args)), *flags[name]], name=name, log=out / f"{name}.log"))
        for name in names
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
        up = []
        for arm in starting:
            if args.one_by_one:
                arm.server.start()
            try:
                arm.server.wait_ready()
                arm.result["up_seconds"] = round(time.monotonic() - began, 1)
                up.append(arm)
                found.append(arm)
            except ServerError as error:
                result.setdefault("not_up", {})[arm.name] = str(error)[-3000:]
            note()
        alone = args.one_by_one or len(starting) == 1
        for arm in up:
            arm.result["capture"] = captured(arm.server.log, alone)
        measure(args, up, out, note)
        note()
    finally:
        stop_together([arm.server for arm in starting])


if __name__ == "__main__":
    sys.exit(main())
