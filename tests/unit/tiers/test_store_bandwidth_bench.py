"""The bandwidth benchmark moves what it says it moves: its arms check their bytes, its ratio is ours over the
faster baseline. No figure of it is a test's business.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import store_bandwidth


@pytest.mark.parametrize("tool", [None, "found"])
def test_every_arm_runs_and_the_ratio_is_against_the_faster_baseline(
    tool: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_bandwidth, "WORKING_SET", 4_000_000)
    if tool:  # not every machine has one: its figures are given, the faster one is the one with pipelining
        given = {1: 10.0, 16: 40.0}
        monkeypatch.setattr(store_bandwidth, "tool_arm", lambda *args: lambda: given[args[4]])
    found: dict[str, Any] = store_bandwidth.measure(65_536, rounds=2, amount=2_000_000, tool=tool)
    assert found["value_bytes"] == 65_536
    for way in ("set", "get"):
        arms = {"ours", "sockets", "glide", "sockets_beside_python", "glide_beside_python"}
        arms |= {"lmcache", "valkey_py", "baseline_depth_1", "baseline_depth_16"}
        assert set(found[way]["mb_per_s"]) == set(found[way]["best_mb_per_s"]) == arms
        assert len(found[way]["ratios"]) == 2
        assert all(ratio > 0 for ratio in found[way]["ratios"])
        if tool:
            assert found[way]["ratios"][-1] == pytest.approx(
                1e6 * found[way]["best_mb_per_s"]["ours"] / 40, rel=0.1
            )


def test_the_tool_that_is_named_counts_and_one_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert store_bandwidth.binary() is None
    for name in reversed(store_bandwidth.TOOLS):  # the server's own before its ancestor's
        (tmp_path / name).write_text("#!/bin/sh\necho some-benchmark 8.0.1 built just now")
        (tmp_path / name).chmod(0o755)
        assert store_bandwidth.binary() == str(tmp_path / name)
    named = str(tmp_path / "redis-benchmark")
    assert store_bandwidth.binary(named) == named
    assert store_bandwidth.version_of(named) == "some-benchmark 8.0.1"
    with pytest.raises(SystemExit, match="--tool: 'nothing' is no program"):
        store_bandwidth.binary("nothing")
