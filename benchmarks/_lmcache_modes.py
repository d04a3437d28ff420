"""Runs a benchmark's measurement twice, on LMCache as it comes and as repaired, each in a process of its
own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import orjson

MODES = ("unrepaired", "repaired")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that tells a child process its mode."""
    parser.add_argument("--mode", help=argparse.SUPPRESS)


def each(
    module: str,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    args: argparse.Namespace,
    modes: tuple[str, ...] = MODES,
    more: tuple[str, ...] = (),
) -> Any:
    """In the parent: {mode: what its child measured}. In a child: prints the measurement and does not return.

    `more`: arguments that every child gets besides the parent's. Only the mode "repaired" installs the repairs; what
    another one means is the measurement's business.
    """
    if args.mode is None:
        return {mode: _child(module, mode, more) for mode in modes}
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
    if args.mode == "repaired":
        from glm_connectors import lmcache_repairs

        lmcache_repairs.install()
    print("\n" + orjson.dumps(measure(args)).decode(), flush=True)
    os._exit(0)  # a dead executor's callers and threads must not keep the process


def _child(module: str, mode: str, more: tuple[str, ...]) -> Any:
    print(f"{module}: measuring LMCache {' '.join((mode, *more))}", file=sys.stderr, flush=True)
    environment = os.environ | {"LMCACHE_LOG_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"benchmarks.{module}", *sys.argv[1:], *more, "--mode", mode]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True)
    return orjson.loads(done.stdout.splitlines()[-1])
