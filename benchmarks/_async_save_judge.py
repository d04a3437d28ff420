"""What `async_save` was to reach (issue 6), against what a run has found: met, missed, or not measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

HEADER = 128  # of a page in Valkey (glm_connectors.tiers.envelope)

STEP_RATIO = 1.01
STALL_MS = 1.0
COPY_SHARE = 0.8
EXPOSED = 0.1
ADDED_MS = 1.0


def targets(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """values: a result, whole or of one part. Each target with its bound, what was found, and whether it holds: None
    where nothing was found."""
    arm = values.get("arms", {}).get("ours", {})
    found = [
        *(_most(f"step_ratio_ours_{size}", values, STEP_RATIO) for size in (4096, 16384)),
        _most("added_ms_ours_4096", values, ADDED_MS),
        _least("d2h_share_of_plain_copy", values, COPY_SHARE),
    ]
    metrics = arm.get("metrics", {})
    last = metrics.get("at_the_end") or metrics.get("after_steps") or {}
    for name in ("scheduler_stall", "load_wait"):
        p99 = last.get(f"{name}_p99_s_at_most")
        found.append(
            _most(f"{name}_p99_ms", {f"{name}_p99_ms": None if p99 is None else 1e3 * p99}, STALL_MS)
        )
    for name, shares in (*_copies(values.get("copies", {})), *_servers(values, arm, last)):
        found.append(_most(name, {name: shares}, EXPOSED if "exposed" in name else STALL_MS))
    return found


def missed(found: list[dict[str, Any]]) -> list[str]:
    """In words, those that do not hold."""
    return [
        f"{one['target']}: {one['found']:g}, to be {one['bound']}" for one in found if one["holds"] is False
    ]


def _copies(copies: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Of loads under forwards: what they exposed of the copy, and what the launching thread waited in `finish`."""
    for name, load in copies.items():
        if not name.startswith("load_") or not isinstance(load, dict):
            continue
        for case, under in load.items():
            if case.startswith("under_"):
                yield f"exposed_share_of_copy: {name} {case}", under["exposed_share_of_copy"]
                if "finish_ms" in under:
                    yield f"finish_ms: {name} {case}", under["finish_ms"]


def _servers(
    values: Mapping[str, Any], arm: Mapping[str, Any], metrics: Mapping[str, float]
) -> Iterator[tuple[str, float]]:
    """Of loads in a server: the share of a copy of that many bytes, at the rate of a load by itself."""
    pages = metrics.get("cache_saved_pages_total")
    if not pages:
        return
    page = metrics["cache_saved_bytes_total"] / pages - HEADER
    for name, load in arm.get("load", {}).items():
        alone = values.get("copies", {}).get(f"load_{name}_tokens")
        if not isinstance(alone, dict):
            continue
        copy_ms = load["tokens"] / 64 * page / alone["load_gb_s"] / 1e6
        yield f"exposed_share_of_copy: server {name}", round(load["exposed_ms"] / copy_ms, 2)


def _most(name: str, values: Mapping[str, Any], bound: float) -> dict[str, Any]:
    value = values.get(name)
    return _target(name, f"at most {bound:g}", value, None if value is None else value <= bound)


def _least(name: str, values: Mapping[str, Any], bound: float) -> dict[str, Any]:
    value = values.get(name)
    return _target(name, f"at least {bound:g}", value, None if value is None else value >= bound)


def _target(name: str, bound: str, value: float | None, holds: bool | None) -> dict[str, Any]:
    return {"target": name, "bound": bound, "found": value, "holds": holds}
