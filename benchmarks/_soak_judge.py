"""What `cache_soak` asks of a run: nothing wrong, nothing left behind, no long stall, and that it happened at all.

A run in which nothing was evicted or given up has shown nothing, so what did not occur fails like what went wrong.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Sample = Counter[str]  # one scrape of our metrics, by name and labels

#: What a run must have met, or it is no soak: entries of its `counts`.
EXERCISED = (
    "requests",
    "aborts_before_the_first_token",
    "aborts_midway",
    "aborts_asked",
    "flushes",
    "stalls_of_valkey",
    "failed_operations_at_valkey",  # a stall that no operation has met is none
    "saved_pages",
    "device_evicted_tokens",
    "pool_evicted_pages",
    "pages_loaded_to_device",
    "load_waits",  # a stall is not judged where a load's waits are not in it
    "hit_pages_pool",
    "hit_pages_valkey",
    "pages_checked",
    "saves_read_again",
    "loads_read_back",
    "probes_cold",
    "probes_cached",
)

#: Of `counts`, what has no place in a run, whatever Valkey does.
FAULTS = ("failed_loads", "failed_copies", "failed_prefetches", "bad_values")

#: Gauges that are 0 of a server that has nothing to do. Pinned bytes have a child for each holder of a pool's slot:
#: `save` is one into which a page is being copied, `put` and `get` those on their way to Valkey and back, `wait` and
#: `load` those held for requests.
HELD = (
    "cache_pinned_bytes",
    "cache_offload_queue_pages",
    "cache_save_queue_pages",
    "cache_waiting_requests",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What may grow between the end of the warm-up and the end, and the longest stall; None: reported only."""

    memory_mib: float = 256.0
    threads: int = 8
    open_files: int = 16
    valkey_connections: int = 4
    stall_ms: float | None = 5.0


def sample_of(text: str) -> Sample:
    """Our metrics of what a server exports, and SGLang's count of evicted tokens."""
    found: Sample = Counter()
    for line in text.splitlines():
        if line.startswith(("glm_sglang:", "sglang:evicted_tokens_total")):
            name, _, value = line.rpartition(" ")
            found[name.partition(":")[2]] = float(value)  # type: ignore[assignment]
    return found


def total(sample: Sample, name: str, **labels: str) -> float:
    """Over a metric's children with these labels. 0.0 where there is none."""
    return sum(
        value
        for key, value in sample.items()
        if re.match(rf"{name}(\{{|$)", key) and all(f'{k}="{v}"' in key for k, v in labels.items())
    )


def grown(before: Sample, after: Sample, name: str, **labels: str) -> int:
    """How much a counter grew, over its children with these labels."""
    return round(total(after, name, **labels) - total(before, name, **labels))


def at_most(before: Sample, after: Sample, name: str, share: float) -> float:
    """Upper bound, in seconds, of the histogram's bucket that holds this share of what was observed between two scrapes;
    0.0 where nothing was."""
    counts: dict[float, float] = {}
    for key, value in after.items():
        if key.startswith(f"{name}_bucket"):
            bound = float(re.findall(r'le="([^"]+)"', key)[0])  # "+Inf" too
            counts[bound] = counts.get(bound, 0.0) + value - before[key]
    observed = counts.get(math.inf, 0.0)
    if not observed:
        return 0.0
    return next(bound for bound, count in sorted(counts.items()) if count >= share * observed)


def stalls(before: Sample, after: Sample) -> dict[str, Any]:
    """Milliseconds that a scheduling step spent in the cache between two scrapes, of steps with work there; `load_wait_`:
    what of it the launch of a batch waited for its loads; `hold_`: of steps that only asked whether requests may run.

    `max` is of all steps, idle ones too, and exact where the longest since the server's start lies between the two; else
    it is the larger of the two kinds', and like the quantiles the upper bound of a bucket.
    """
    found: dict[str, Any] = {"steps": grown(before, after, "scheduler_stall_seconds_count")}
    for name, metric in (
        ("", "scheduler_stall_seconds"),
        ("running_", "scheduler_stall_running_seconds"),
        ("hold_", "scheduler_hold_seconds"),
        ("hold_running_", "scheduler_hold_running_seconds"),
        ("load_wait_", "cache_load_wait_seconds"),
    ):
        for quantile, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
            found[f"{name}{quantile}"] = _ms(at_most(before, after, metric, share))
    longest = total(after, "scheduler_stall_max_seconds")
    if longest > total(before, "scheduler_stall_max_seconds"):
        found["max"] = round(1e3 * longest, 3)
    else:
        kinds = ("scheduler_stall_seconds", "scheduler_hold_seconds")
        found["max"] = _ms(max(at_most(before, after, metric, 1.0) for metric in kinds))
    return found


def _ms(seconds: float) -> float | None:
    """None above the last bucket: JSON has no infinity."""
    return None if math.isinf(seconds) else round(1e3 * seconds, 3)


def left_behind(sample: Sample, requests: int, device_tokens: int) -> dict[str, float]:
    """What an idle server still holds, by name; {} where it holds nothing."""
    values: dict[str, float] = {"requests": requests, "device_tokens_in_use": device_tokens}
    for key, value in sample.items():
        if key.partition("{")[0] in HELD:
            values[re.sub(r'(,?rank="[^"]*",?)', "", key).replace("{}", "")] = value
    return {name: value for name, value in values.items() if value}


def verdict(found: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """`failed`: each condition that does not hold, with its numbers. `not_exercised`: what did not happen. `not_judged`:
    what the run cannot tell. `passed`.

    Probes are not judged where cold ones scatter as far as half a wrong page would move them: on a GPU an FP8 product
    rounds by its company in the step. The pages' bytes are, all of them (`wrong_bytes`).

    found: `counts`, `wrong_bytes` (pages), `probes_wrong`, `failed_requests`, `left_behind`, `growth` (of what `Limits`
    bounds), `sglang_complaints` (log lines), `server_alive`, `stall_ms` (of `stalls`), `probe` (`bound`: how far an
    answer may be from the first; `other_page`: how far one wrong page moves it, at least; `cold`: how far cold ones are).
    """
    failed: list[str] = []
    probe = found["probe"]
    scatters = 0.0 < probe["bound"] <= probe["cold"]
    for name in ("wrong_bytes", "probes_wrong", "failed_requests"):
        if found[name] and not (scatters and name == "probes_wrong"):
            failed.append(f"{name}: {found[name]}, allowed 0")
    counts = found["counts"]
    failed += [f"{name}: {counts[name]}, allowed 0" for name in FAULTS if counts.get(name)]
    loaded, checked = counts.get("pages_loaded_to_device", 0), counts.get("pages_checked", 0)
    if checked < loaded:
        failed.append(f"{loaded} pages were loaded, {checked} checked")
    moves = f"one wrong page moves it by {probe['other_page']:.2g}, computing it again by {probe['cold']:.2g}"
    if not probe["bound"]:
        failed.append(f"the probe is blind: {moves}")
    for name, value in found["left_behind"].items():
        failed.append(f"leaks: {name} is {value:g} of an idle server")
    for name in ("memory_mib", "threads", "open_files", "valkey_connections"):
        bound = getattr(limits, name)
        if found["growth"][name] > bound:
            failed.append(
                f"leaks: {name} grew by {found['growth'][name]:g} after the warm-up, allowed {bound:g}"
            )
    if found["sglang_complaints"]:
        failed.append(f"leaks: SGLang's own check says {found['sglang_complaints'][0]!r}")
    if not found["server_alive"]:
        failed.append("the server ended")
    longest = found["stall_ms"]["max"]
    if limits.stall_ms is not None and (longest is None or longest > limits.stall_ms):
        failed.append(f"stall_ms_max: {longest}, allowed {limits.stall_ms:g}")
    missing = [name for name in EXERCISED if not counts.get(name)]
    failed += [f"not exercised: {name}" for name in missing]
    return {
        "passed": not failed,
        "failed": failed,
        "not_exercised": missing,
        "not_judged": [f"probes: {moves}"] if scatters else [],
    }
