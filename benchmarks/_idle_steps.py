"""Steps of one prompt each on a server: how long without the profiler, and how much of them the GPU waits under it."""

from __future__ import annotations

import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks import _gpu_trace
from glm_sglang.serving import Server

DISCARD = 5
STEPS = 20
ROWS = 2048  # steps of more rows are asked for less often, in proportion
LEAST = 4  # steps that count, at least
TEXT_TOKENS = 250  # byte tokens: no special one, so nothing ends early
# What an arm with the cache runs for its saves, beside the forward and after it, which is no work of the step: the kernel
# of glm_kernels.page_copy, and copies of its staging slots.
SAVES = re.compile(r"^_copy$|^Memcpy DtoH")


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


@dataclass(frozen=True, slots=True)
class Counts:
    """How many steps of a case are measured, after how many that are not."""

    steps: int = STEPS
    discard: int = DISCARD

    def of(self, case: Case) -> Counts:
        """Of a long case fewer, in proportion to its rows."""
        share = min(1.0, ROWS / case.rows)
        return Counts(max(LEAST, round(self.steps * share)), max(1, round(self.discard * share)))


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


def untraced(arm: Arm, case: Case, counts: Counts) -> dict[str, Any]:
    """Client milliseconds alone, and milliseconds a step in a queue."""
    discard = counts.discard
    alone = [arm.prefill(case.prompt(f"alone{i}")) for i in range(discard + counts.steps)]
    prompts = [case.prompt(f"queue{i}") for i in range(3 * discard + counts.steps)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        began = time.perf_counter()

        def one(ids: list[int]) -> float:
            arm.prefill(ids)
            return time.perf_counter() - began

        done = sorted(pool.map(one, prompts))
    # Responses leave in order; the first ones also pay for the arrival of the others.
    apart = [
        later - sooner for sooner, later in zip(done[discard:-discard], done[discard + 1 :], strict=False)
    ]
    return {
        "steps": counts.steps,
        "client_ms": percentile(alone[discard:]),
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


def own_work(trace: _gpu_trace.Trace, arm: str) -> _gpu_trace.Trace:
    """Without what the cache's arm saves by: its last copies come after the step, and are none of its work."""
    if arm == "cached":
        trace.device = [one for one in trace.device if not SAVES.search(one.name)]
    return trace


def trace_case(arm: Arm, case: Case, counts: Counts) -> dict[str, Any]:
    """Idle shares of steps alone, and of a queue."""
    discard = counts.discard
    prompts = [case.prompt(f"window{i}") for i in range(counts.steps + LEAST)]

    def alone() -> None:
        for i in range(discard + counts.steps):
            arm.prefill(case.prompt(f"traced{i}"))
            time.sleep(0.03)

    def queue() -> None:
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(arm.prefill, prompts))

    with tempfile.TemporaryDirectory() as folder:
        lone = own_work(_gpu_trace.read(traced(arm, Path(folder, "alone"), alone)), arm.name)
        window = own_work(_gpu_trace.read(traced(arm, Path(folder, "queue"), queue)), arm.name)
    found = _gpu_trace.steps(lone)
    result = _gpu_trace.summary(found, discard)
    if not result or not window.device:
        raise RuntimeError(
            f"the traces have {len(found)} steps, {discard} of them to be left out, and {len(window.device)} kernels of "
            "the queue: nothing to take a share of"
        )
    result["idle_ms_by_tenth"] = _gpu_trace.profile_of_idle(found, discard)
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


def captured(log: Path, alone: bool = False) -> dict[str, Any]:
    """What the log says of the capture: seconds and GB, and our own lines about breaks and memory.

    SGLang's GB are by how much less of the GPU is free than before: those of this server only where it captured `alone`,
    while no other server on the GPU was starting.
    """
    text = log.read_text(errors="replace")
    lines = [line[:300] for line in text.splitlines() if "server_args" not in line]
    ends = [line for line in lines if re.search(r"Capture .*prefill.*end", line, re.IGNORECASE)]
    ours = [line for line in lines if "prefill graph" in line.lower()]
    numbers = re.search(r"elapsed=([\d.]+).*?mem.*?usage=([\d.]+)", ends[-1]) if ends else None
    found = {
        "capture_seconds": float(numbers[1]) if numbers else None,
        "capture_gb": float(numbers[2]) if numbers and alone else None,
        "log": [*ends[-2:], *ours[-16:]],
    }
    if numbers and not alone:
        found["capture_gb_unknown"] = (
            "other servers were starting on the same GPU, whose memory is in SGLang's figure"
        )
    return found
