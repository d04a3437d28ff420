"""What a newcomer gets: `make demo` or `make test` in a fresh clone and an empty environment, timed.

    python -m benchmarks.newcomer demo --save --json      # `make demo`, twice: set-up and all, then set up
    python -m benchmarks.newcomer restarts --save --json  # `make demo` with DEMO_RESTART=valkey, then =prefill
    python -m benchmarks.newcomer test --save --json      # `make test`, set up before by `make lint`

The clone is of HEAD, in a new folder; its only variables are PATH and HOME, which is new as well.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson

from benchmarks import _result

ROOT = Path(__file__).resolve().parent.parent
_SUMMARY = re.compile(r"^=+ (.*\b(?:passed|failed|error)\b.*) =+$")


def make(target: str, clone: Path, home: Path, **environment: str) -> dict[str, Any]:
    """Runs a target there: its exit status, seconds, and pytest's last lines; its output goes to standard error."""
    began = time.monotonic()
    summaries = []
    with subprocess.Popen(
        ["make", target],
        cwd=clone,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            if found := _SUMMARY.match(line.strip()):
                summaries.append(found[1])
    result = {"target": target, "status": process.returncode, "seconds": round(time.monotonic() - began, 1)}
    return result | ({"tests": summaries} if summaries else {})


def python(clone: Path) -> str:
    """The version of the interpreter that set-up found; "" where it failed."""
    command = [str(clone / ".venv" / "bin" / "python"), "--version"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()


def measure(kind: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Clones HEAD into `folder` and runs what `kind` names. Returns what `main` saves, by `kind` or by what restarts."""
    clone, home = folder / "clone", folder / "home"
    home.mkdir(parents=True)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    head = ["git", "-C", str(clone), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
    if kind == "test":
        runs = [make("lint", clone, home), make("test", clone, home)]  # the first sets up
        found = {"commit": commit, "python": python(clone), "runs": runs, "seconds": runs[-1]["seconds"]}
        return {kind: found}
    asked: dict[str, list[dict[str, str]]] = {kind: [{}, {}]}
    if kind == "restarts":
        asked = {what: [{"DEMO_RESTART": what}] for what in ("valkey", "prefill")}
    return {name: _demos(clone, home, commit, environments) for name, environments in asked.items()}


def _demos(clone: Path, home: Path, commit: str, environments: list[dict[str, str]]) -> dict[str, Any]:
    """`make demo` in each of these environments, and what the last has reported."""
    report = clone / "demo-report.json"
    report.unlink(missing_ok=True)
    runs = [make("demo", clone, home, **environment) | environment for environment in environments]
    said = orjson.loads(report.read_bytes()) if report.exists() else {}
    return {"commit": commit, "python": python(clone), "runs": runs, **said}


def main() -> int:
    """Exit status: 0, 1 where a target failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.newcomer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=("demo", "restarts", "test"))
    parser.add_argument(
        "--folder", type=Path, help="an empty folder for the clone, kept (one that goes again)"
    )
    _result.add_arguments(parser)
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="newcomer-"))
    try:
        results = measure(args.kind, folder)
    finally:
        if args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    for name, result in results.items():
        if args.kind == "restarts":
            restarted = "demo_restart_valkey" if name == "valkey" else "demo_restart_prefill"
            _result.finish(restarted, result, args, module="benchmarks.newcomer", device="cpu")
            continue
        question = "demo" if args.kind == "demo" else "make_test"
        _result.finish(question, result, args, module="benchmarks.newcomer", device="cpu")
    return int(any(run["status"] for result in results.values() for run in result["runs"]))


if __name__ == "__main__":
    sys.exit(main())
