"""Reads a torch profiler trace of a server's scheduler: GPU steps, their idle time, and where it lies.

Idle of a step is 1 − |union of its kernel, copy and memset intervals on all streams| / span, where the span
runs from the start of the first to the end of the last. Steps are told apart by the silence between them, so
requests must come one at a time.

Exposed communication of a step is the share of the same span in which a GPU sent or received and computed nothing.
"""

from __future__ import annotations

import bisect
import gzip
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

SILENCE_US = 8_000.0  # between two steps; a gap inside a step is shorter
LAYER_US = (
    20.0  # kernels of layers take at least so long; what the scheduler asks for before and after does not
)
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_HOST = frozenset({"cuda_runtime", "cuda_driver"})
_WAITS = re.compile(r"(Stream|Event|Device|Ctx)Synchronize|cudaMemcpy(?!.*Async)")
# Between GPUs: NCCL, the collectives of SGLang, FlashInfer, PyTorch and DeepEP, and copies over NVLink.
_BETWEEN_GPUS = re.compile(
    r"^nccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device_reduce|multimem|deep_ep::|nvshmem"
    r"|barrier_kernel|Memcpy PtoP",
    re.IGNORECASE,
)
# MegaMoE's kernel sends, multiplies and receives in one; what prepares its input (`…_pre_dispatch`) stays on its GPU.
_FUSED = re.compile(r"mega_moe(?!_pre_dispatch)")
_NOISE = re.compile(r"<.*|\(.*|^void |^at::native::|\banonymous namespace\b::")


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """Something on a device or in a CUDA call, in microseconds of the trace's clock."""

    start: float
    end: float
    name: str


@dataclass(slots=True)
class Trace:
    """The device's intervals and the host's CUDA calls, each sorted by start."""

    device: list[Interval] = field(default_factory=list)
    host: list[Interval] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Gap:
    """Idle device time between two intervals: `at_us` after the step's start, between kernels by name."""

    at_us: float
    length_us: float
    before: str
    after: str


@dataclass(slots=True)
class Step:
    """One forward pass on the device."""

    intervals: list[Interval]
    calls: list[Interval] = field(default_factory=list)

    @property
    def span_us(self) -> float:
        """From the start of the first interval to the end of the last."""
        return max(i.end for i in self.intervals) - self.intervals[0].start

    @property
    def busy_us(self) -> float:
        """The length of the union of all intervals."""
        return self.span_us - sum(gap.length_us for gap in self.gaps())

    @property
    def idle_share(self) -> float:
        """0 where some stream always worked, 1 where none did."""
        return 1.0 - self.busy_us / self.span_us if self.span_us > 0 else 0.0

    def layers(self) -> Step | None:
        """From the first to the last kernel of the layers: without the scheduler's preparation and the sampling."""
        long = [i for i, interval in enumerate(self.intervals) if interval.end - interval.start >= LAYER_US]
        return Step(self.intervals[long[0] : long[-1] + 1]) if long else None

    def gaps(self) -> list[Gap]:
        """Every moment at which nothing ran, in order."""
        found: list[Gap] = []
        began, last = self.intervals[0].start, self.intervals[0]
        for interval in self.intervals[1:]:
            if interval.start > last.end:
                found.append(
                    Gap(last.end - began, interval.start - last.end, short(last.name), short(interval.name))
                )
            if interval.end > last.end:
                last = interval
        return found


def short(name: str) -> str:
    """A kernel's name without return type, template arguments and namespaces that every kernel has."""
    return _NOISE.sub("", _NOISE.sub("", name)).strip() or name[:60]


Kind = Literal["communication", "fused", "copy", "compute"]


def kind(name: str) -> Kind:
    """What a device interval does. `copy`: within a GPU, or between it and its host, which is neither of the others."""
    if _FUSED.search(name):
        return "fused"
    if _BETWEEN_GPUS.search(name):
        return "communication"
    return "copy" if name.startswith(("Memcpy", "Memset")) else "compute"


@dataclass(frozen=True, slots=True)
class Communication:
    """A step's communication, in microseconds of one GPU.

    running   some communication kernel or NVLink copy ran, whatever ran beside it.
    exposed   the part of it in which no compute kernel ran; waiting for a late peer is in it.
    fused     MegaMoE's kernel ran and no other compute kernel did. It counts as computing: a trace cannot look inside.
    """

    span_us: float
    running_us: float
    exposed_us: float
    fused_us: float

    def share(self, inside: float = 0.0) -> float:
        """Exposed over span. `inside`: the share of MegaMoE's kernel that is exposed, from a measurement of the layer
        (`exposed_share` of `benchmarks.moe_layer`); 0 gives what the trace shows.
        """
        return (self.exposed_us + inside * self.fused_us) / self.span_us if self.span_us > 0 else 0.0


def communication(step: Step) -> Communication:
    """How long a step communicated, and how much of that no computing hid."""
    by_kind: dict[Kind, list[Interval]] = {"communication": [], "fused": [], "copy": [], "compute": []}
    for interval in step.intervals:
        by_kind[kind(interval.name)].append(interval)
    sent, fused, computed = by_kind["communication"], by_kind["fused"], by_kind["compute"]
    working = _union_us(fused + computed)
    return Communication(
        span_us=step.span_us,
        running_us=_union_us(sent),
        exposed_us=_union_us(sent + fused + computed) - working,
        fused_us=working - _union_us(computed),
    )


def _union_us(intervals: Sequence[Interval]) -> float:
    return Step(sorted(intervals)).busy_us if intervals else 0.0


def read(files: Iterable[Path]) -> Trace:
    """The device's work and the CUDA calls of Chrome traces (.json or .json.gz), merged."""
    trace = Trace()
    for file in files:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        for event in orjson.loads(data)["traceEvents"]:
            if event.get("ph") != "X":
                continue
            interval = Interval(event["ts"], event["ts"] + event["dur"], event["name"])
            if event.get("cat") in _DEVICE:
                trace.device.append(interval)
            elif event.get("cat") in _HOST:
                trace.host.append(interval)
    trace.device.sort()
    trace.host.sort()
    return trace


def steps(trace: Trace, silence_us: float = SILENCE_US, least: int = 20) -> list[Step]:
    """The trace's steps: runs of intervals without a silence, of at least `least` intervals.

    A step's CUDA calls are those issued after the step before ended and before it ended itself.
    """
    found: list[Step] = []
    current: list[Interval] = []
    end = float("-inf")
    for interval in trace.device:
        if current and interval.start - end > silence_us:
            found.append(Step(current))
            current = []
        current.append(interval)
        end = max(end, interval.end)
    if current:
        found.append(Step(current))
    starts = [call.start for call in trace.host]
    previous = float("-inf")
    for step in found:
        finish = max(i.end for i in step.intervals)
        step.calls = trace.host[bisect.bisect_left(starts, previous) : bisect.bisect_left(starts, finish)]
        previous = finish
    return [step for step in found if len(step.intervals) >= least]


def counts(step: Step) -> dict[str, int]:
    """What the host asked of CUDA in a step: kernel launches, graph launches, copies, waits."""
    names = Counter(call.name for call in step.calls)

    def total(pattern: str) -> int:
        return sum(number for name, number in names.items() if re.search(pattern, name))

    return {
        "kernels": len(step.intervals),
        "launches": total(r"LaunchKernel|LaunchCooperative"),
        "graph_launches": total(r"GraphLaunch"),
        "copies": total(r"Memcpy|Memset"),
        "host_waits": sum(number for name, number in names.items() if _WAITS.search(name)),
    }


def summary(found: Sequence[Step], discard: int) -> dict[str, Any]:
    """Medians over the steps after the first `discard`; {} where none is left."""
    kept = list(found[discard:])
    if not kept:
        return {}
    numbers = [counts(step) for step in kept]
    return {
        "steps": len(kept),
        "idle_share": round(statistics.median(step.idle_share for step in kept), 4),
        "idle_share_layers": _median_share([step.layers() for step in kept]),
        "span_ms": round(statistics.median(step.span_us for step in kept) / 1e3, 3),
        "busy_ms": round(statistics.median(step.busy_us for step in kept) / 1e3, 3),
        **{name: round(statistics.median(number[name] for number in numbers)) for name in numbers[0]},
        "gaps": _gaps(kept),
        "kernels_ms": _kernels(kept),
    }


def _median_share(parts: Sequence[Step | None]) -> float | None:
    shares = [part.idle_share for part in parts if part is not None]
    return round(statistics.median(shares), 4) if shares else None


def _gaps(kept: Sequence[Step], top: int = 14) -> list[dict[str, Any]]:
    """The places that cost most: mean idle microseconds a step between two kernels, and how often."""
    total: Counter[tuple[str, str]] = Counter()
    often: Counter[tuple[str, str]] = Counter()
    at: dict[tuple[str, str], float] = {}
    for step in kept:
        for gap in step.gaps():
            key = (gap.before, gap.after)
            total[key] += gap.length_us  # type: ignore[assignment]  # Counter's values are int by declaration
            often[key] += 1
            at.setdefault(key, gap.at_us / step.span_us)
    return [
        {
            "us_a_step": round(length / len(kept), 1),
            "times_a_step": round(often[key] / len(kept), 1),
            "first_at": round(at[key], 3),
            "before": key[0][:70],
            "after": key[1][:70],
        }
        for key, length in total.most_common(top)
    ]


def _kernels(kept: Sequence[Step], top: int = 24) -> list[dict[str, Any]]:
    total: Counter[str] = Counter()
    often: Counter[str] = Counter()
    for step in kept:
        for interval in step.intervals:
            total[short(interval.name)] += interval.end - interval.start  # type: ignore[assignment]
            often[short(interval.name)] += 1
    return [
        {
            "ms_a_step": round(length / len(kept) / 1e3, 3),
            "times": round(often[name] / len(kept), 1),
            "kernel": name[:90],
        }
        for name, length in total.most_common(top)
    ]


def profile_of_idle(found: Sequence[Step], discard: int, parts: int = 10) -> list[float]:
    """Mean idle milliseconds a step in each tenth of its span: shows head, body and tail apart."""
    kept = list(found[discard:])
    shares = [0.0] * parts
    for step in kept:
        for gap in step.gaps():
            middle = (gap.at_us + gap.length_us / 2) / step.span_us
            shares[min(parts - 1, int(middle * parts))] += gap.length_us
    return [round(share / max(1, len(kept)) / 1e3, 3) for share in shares]


def window_idle(trace: Trace, skip: float = 0.2) -> float:
    """Idle share of a trace under steady load, without the first and last `skip` of it: gaps between steps count."""
    if not trace.device:
        return 0.0
    first, last = trace.device[0].start, max(i.end for i in trace.device)
    low, high = first + skip * (last - first), last - skip * (last - first)
    inside = [i for i in trace.device if i.end > low and i.start < high]
    if not inside:
        return 1.0
    clipped = [Interval(max(i.start, low), min(i.end, high), i.name) for i in inside]
    whole = Step(sorted([Interval(low, low, ""), *clipped, Interval(high, high, "")]))
    return round(whole.idle_share, 4)
