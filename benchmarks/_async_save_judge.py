"""What `async_save` was to reach (issue 6), against what a run has found: met, missed, or not judged, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

HEADER = 128  # of a page in Valkey (glm_connectors.tiers.envelope)

STEP_RATIO = 1.01
STALL_MS = 1.0
COPY_SHARE = 0.8
EXPOSED = 0.1
ADDED_MS = 1.0
ANSWER_SHARE = 0.5  # of what one wrong page makes of an answer

_UNDER = re.compile(r"(scattered_)?under_a_forward_of_\d+_ms")
_ALL_OF_IT = "of the server's whole life: warm-up, loads and traces too"


def targets(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """values: a result, whole or of one part. Each target with its bound, what was found, and whether it holds: None
    where nothing was found, or it is not judged (`why`)."""
    arm = values.get("arms", {}).get("ours", {})
    metrics = arm.get("metrics", {})
    whole = metrics.get("at_the_end") or {}
    return [
        *(
            _most(f"step_ratio_ours_{size}", values.get(f"step_ratio_ours_{size}"), STEP_RATIO)
            for size in (4096, 16384)
        ),
        _most("added_ms_ours_4096", values.get("added_ms_ours_4096"), ADDED_MS),
        _least("d2h_share_of_plain_copy", values.get("d2h_share_of_plain_copy"), COPY_SHARE),
        *(
            target
            for name, part in (("scheduler_stall", "steps"), ("load_wait", "loads"))
            for target in (
                _most(f"{name}_p99_ms: {part}", _p99(metrics.get(part), name), STALL_MS),
                _most(f"{name}_p99_ms: at the end", _p99(whole, name), STALL_MS, why=_ALL_OF_IT),
            )
        ),
        *_copies(values.get("copies", {})),
        *_servers(values, arm, whole or metrics.get("loads") or metrics.get("steps") or {}),
    ]


def missed(found: list[dict[str, Any]]) -> list[str]:
    """In words, those that do not hold."""
    return [
        f"{one['target']}: {one['found']:g}, to be {one['bound']}" for one in found if one["holds"] is False
    ]


def _p99(metrics: Mapping[str, Any] | None, name: str) -> float | None:
    p99 = (metrics or {}).get(f"{name}_p99_s_at_most")
    return None if p99 is None else 1e3 * p99


def _copies(copies: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Of loads under forwards: what they exposed of the copy, and what the launching thread waited in `finish`."""
    for name, load in copies.items():
        if not name.startswith("load_") or not isinstance(load, dict):
            continue
        for case, under in load.items():
            if (match := _UNDER.fullmatch(case)) is None:
                continue
            copy_ms, forward_ms = _copy_ms(load, match[1] or ""), under.get("forward_alone_ms")
            why = ""
            if copy_ms and forward_ms and copy_ms > forward_ms:
                why = f"impossible: the copy takes {copy_ms:.0f} ms, the forward over it {forward_ms:.0f}"
            exposed = under["exposed_share_of_copy"]
            yield _most(f"exposed_share_of_copy: {name} {case}", exposed, EXPOSED, why=why)
            if "finish_ms" in under:
                yield _most(f"finish_ms: {name} {case}", under["finish_ms"], STALL_MS)


def _copy_ms(load: Mapping[str, Any], place: str) -> float | None:
    rate, size = load.get(f"load_{place}gb_s"), load.get("gigabytes")
    return 1e3 * float(size) / float(rate) if rate and size else None


def _servers(
    values: Mapping[str, Any], arm: Mapping[str, Any], metrics: Mapping[str, float]
) -> Iterator[dict[str, Any]]:
    """Of loads in a server: the share of a copy of that many bytes, at the rate of a load by itself, of this run or as it
    was stated; and whether the answer after a load is the one before."""
    pages = metrics.get("cache_saved_pages_total")
    page = metrics["cache_saved_bytes_total"] / pages - HEADER if pages else None
    for name, load in arm.get("load", {}).items():
        target = f"exposed_share_of_copy: server {name}"
        alone = values.get("copies", {}).get(f"load_{name}_tokens")
        measured = alone.get("load_gb_s") if isinstance(alone, dict) else None
        rate = measured or values.get("copy_gb_s_stated")
        if page is None or not rate:
            missing = "the bytes of a page" if page is None else "the rate of a copy by itself"
            yield _most(target, None, EXPOSED, why=f"{missing} is not known")
        else:
            copy_ms = load["tokens"] / 64 * page / rate / 1e6
            samples = load.get("samples_ms", {})
            noise = max((max(times) - min(times) for times in samples.values() if times), default=0.0)
            why = ""
            if EXPOSED * copy_ms < noise:
                why = f"the bound is {EXPOSED * copy_ms:.2f} ms, equal samples are {noise:.2f} ms apart"
            more = {
                "copy_ms": round(copy_ms, 2),
                "copy_gb_s": rate,
                "copy_gb_s_is": "of this run" if measured else "stated",
                "exposed_ms": load["exposed_ms"],
                "samples_ms": samples,
            }
            yield _most(target, round(load["exposed_ms"] / copy_ms, 2), EXPOSED, why=why, **more)
        if answer := load.get("answer"):
            other, cached = answer["one_other_page"], answer["cached"]
            why = (
                ""
                if cached and other
                else f"{cached} tokens came from the cache; one page moves it by {other:g}"
            )
            share = round(answer["apart"] / other, 4) if other else None
            yield _most(f"answer_apart_of_a_wrong_page: server {name}", share, ANSWER_SHARE, why=why)


def _most(name: str, value: float | None, bound: float, why: str = "", **more: Any) -> dict[str, Any]:
    return _target(name, f"at most {bound:g}", value, None if value is None else value <= bound, why, **more)


def _least(name: str, value: float | None, bound: float) -> dict[str, Any]:
    return _target(name, f"at least {bound:g}", value, None if value is None else value >= bound, "")


def _target(
    name: str, bound: str, value: float | None, holds: bool | None, why: str, **more: Any
) -> dict[str, Any]:
    told = {"target": name, "bound": bound, "found": value, "holds": None if why else holds}
    return {**told, **({"why": why} if why else {}), **more}
