"""One line of JSON for a round at an endpoint, with every field of `sglang.bench_serving --output-details` (sglang
0.5.23), so that what reads its files reads these. What it has no field for is under `glm_ab`. Written by Python's
json, as there: a closed loop's `request_rate` is Infinity, which is no JSON to orjson.

While a round is under way the file ends with a line that says so (`glm_ab_asking`), which the round's own line replaces.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.ab.client import Sample
from benchmarks.ab.load import Point, Round


def fingerprint(*parts: Any) -> str:
    """Names what was asked of whom; a round is done when a line with its fingerprint is in the file."""
    return hashlib.sha256(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS, default=str)).hexdigest()[:16]


def latencies(name: str, seconds: Iterable[float], stages: tuple[str, ...]) -> dict[str, float]:
    """mean_, median_, p99_ … {name}_ms as bench_serving names them; 0 where there is no value, as there."""
    values = np.array(list(seconds) or [0.0]) * 1e3
    found = {"mean": values.mean(), "std": values.std()}
    found |= {f"p{q}": np.percentile(values, q) for q in (50, 90, 95, 99)}
    found["median"] = found["p50"]
    return {f"{stage}_{name}_ms": round(float(found[stage]), 4) for stage in stages}


#: Fields of other data sets, of speculation and of a tokenizer on our side: nothing here has a value for them.
_WITHOUT_VALUE = (
    *("sharegpt_output_len", "random_input_len", "random_output_len", "random_range_ratio"),
    *(
        "total_output_tokens_retokenized",
        "accept_length",
        "max_output_tokens_per_s",
        "max_concurrent_requests",
    ),
)
#: What bench_serving leaves empty, too, where answers do not say which tier had a cached token: ours are not asked to.
_TIERS = ("device_cached_tokens", "host_cached_tokens", "storage_cached_tokens", "storage_backend")
_ASKING = "glm_ab_asking"
_STAGES = ("mean", "median", "std", "p90", "p95", "p99")


def line(
    endpoint: str,
    workload: str,
    point: Point,
    number: int,
    position: int,
    mark: str,
    result: Round,
    about: dict[str, Any],
    asked: str = "",
    texts: str = "",
) -> dict[str, Any]:
    """The record of one round at one endpoint; `position`: how many endpoints were asked before it; `asked`: the
    round's name at all endpoints; `texts`: the salt of its texts.
    """
    samples = [sample for session in result.samples for sample in session]
    good = [sample for sample in samples if not sample.error]
    total_in, total_out = sum(s.prompt_tokens for s in good), sum(s.output_tokens for s in good)
    seconds = max(result.seconds, 1e-9)
    counts_cached = any(s.cached_tokens is not None for s in good)
    cached = sum(s.cached_tokens or 0 for s in good)
    return {
        "tag": endpoint,
        "backend": "openai",
        "dataset_name": workload,
        **dict.fromkeys(_WITHOUT_VALUE),
        **point.describe(),
        "server_info": about,
        "duration": result.seconds,
        "completed": len(good),
        "total_input_tokens": total_in,
        "total_input_text_tokens": total_in,
        "total_input_vision_tokens": 0,
        "total_output_tokens": total_out,
        "request_throughput": len(good) / seconds,
        "input_throughput": total_in / seconds,
        "output_throughput": total_out / seconds,
        "total_throughput": (total_in + total_out) / seconds,
        **latencies("e2e_latency", (s.e2e for s in good), _STAGES),
        **latencies("ttft", (s.ttft for s in good), _STAGES),
        **latencies("tpot", (s.tpot for s in good if s.tpot is not None), _STAGES),
        **latencies("itl", (gap for s in good for gap in s.itls), _STAGES),
        "concurrency": sum(s.e2e for s in good) / seconds,
        "cache_report": {
            "total_prompt_tokens": total_in,
            "total_cached_tokens": cached,
            "cache_hit_rate_pct": round(100 * cached / max(1, total_in), 2),
            **dict.fromkeys(_TIERS),
        }
        if counts_cached
        else None,
        "input_lens": [s.prompt_tokens for s in samples],
        "output_lens": [s.output_tokens for s in samples],
        "ttfts": [round(s.ttft, 6) for s in samples],
        "itls": [[round(gap, 6) for gap in s.itls] for s in samples],
        "generated_texts": [s.text for s in samples],
        "errors": [s.error for s in samples],
        "cached_tokens": [s.cached_tokens for s in samples],
        "cached_tokens_details": [None] * len(samples),
        "glm_ab": {
            "fingerprint": mark,
            "asked": asked,
            "texts": texts,
            "round": number,
            "position": position,
            "planned": len(samples) if result.planned is None else result.planned,
            "point": str(point),
            "labels": [s.label for s in samples],
            "keys": [f"{i}.{j}" for i, session in enumerate(result.samples) for j in range(len(session))],
            "e2es": [round(s.e2e, 6) for s in samples],
        },
    }


def samples_of(record: dict[str, Any]) -> dict[str, Sample]:
    """The samples of a record by their key (session.turn)."""
    own = record["glm_ab"]
    found = {}
    for i, key in enumerate(own["keys"]):
        found[key] = Sample(
            own["labels"][i],
            ttft=record["ttfts"][i],
            e2e=own["e2es"][i],
            itls=record["itls"][i],
            prompt_tokens=record["input_lens"][i],
            cached_tokens=record["cached_tokens"][i],
            output_tokens=record["output_lens"][i],
            text=record["generated_texts"][i],
            error=record["errors"][i],
        )
    return found


def begin(path: Path, asked: str) -> int:
    """Notes that a round is being asked, on disk when this returns: where in the file its record belongs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    at = path.stat().st_size if path.exists() else 0
    _write(path, {_ASKING: asked}, at)
    return at


def append(path: Path, record: dict[str, Any], at: int | None = None) -> None:
    """One line more, on disk when this returns; `at`: instead of the line that `begin` left there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, record, at if at is not None else path.stat().st_size if path.exists() else 0)


def _write(path: Path, row: dict[str, Any], at: int) -> None:
    path.touch()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(json.dumps(row).encode() + b"\n")
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines of ours. What an interrupt left unfinished is cut from the file: a half-written line, and a round
    that an endpoint was asked in part, at every endpoint: one that has seen some of its texts is not to get them again.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
    rows = [(line, json.loads(line)) for line in lines if line.strip()]
    cut = {row[_ASKING] for _, row in rows if _ASKING in row}
    kept = [
        (line, row)
        for line, row in rows
        if _ASKING not in row and row.get("glm_ab", {}).get("asked") not in cut
    ]
    if cut:
        print(
            f"{path}: a round was cut off; every endpoint is asked it anew, with other texts", file=sys.stderr
        )
    whole = b"".join(line for line, _ in kept)
    if len(whole) < len(data):
        beside = path.with_name(f"{path.name}.tmp")
        beside.write_bytes(whole)
        beside.replace(path)
    return [row for _, row in kept if "glm_ab" in row]
