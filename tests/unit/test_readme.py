"""Figures of the README are those of the recorded runs that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
README = " ".join((ROOT / "README.md").read_text().split())


def result(name: str) -> Any:
    assert f"results/{name}.json" in README
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def test_the_largest_divergence_of_any_position() -> None:
    largest: dict[str, float] = {}
    for row in result("h200x2/moe_server")["agreement"]:
        largest[row["arm"]] = max(largest.get(row["arm"], 0.0), row["kl_max"])
    said = re.search(r"KL at most (\S+) at any position .*? megamoe has up to (\S+)\. ", README)
    assert said
    assert said[1] == f"{largest['megamoe']:.1e}".replace("e-0", "e-")
    assert said[2] == f"{largest['upstream']:.3f}"


def test_the_caches_gain_is_said_of_what_was_measured() -> None:
    found = result("cpu/ablation")
    (gain,) = (arm["speedup"] for arm in found["arms"] if arm["name"] == "3, 4 and 5 the cache")
    said = re.search(
        r"On (\w+ CPU \w+) whose .*? the cache gives (\S+) times .*? interval ([\d.]+)\D([\d.]+) \(", README
    )
    assert said
    assert {"single": "one CPU server", "pair": "a CPU pair"}[found["layout"]] == said[1]
    assert [float(word) for word in said.groups()[1:]] == [
        round(gain[k], 2) for k in ("value", "low", "high")
    ]
