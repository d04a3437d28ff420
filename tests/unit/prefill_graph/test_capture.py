"""Capture bucket by bucket: what a failure costs, what ranks agree on, what is said."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._idle_steps import captured
from glm_sglang.prefill_graph import agreement, capture, options, whole
from glm_sglang.prefill_graph.options import Options

BUCKETS = st.lists(st.integers(1, 9), max_size=6, unique=True)


@given(st.lists(BUCKETS, min_size=1, max_size=8))
def test_ranks_agree_on_what_all_of_them_hold(held: list[list[int]]) -> None:
    gathered: list[Sequence[int]] = list(held)
    kept = {agreement.agree(mine, lambda _: gathered) for mine in held}
    assert len(kept) == 1, "every rank keeps the same"
    (common,) = kept
    assert list(common) == sorted(common)
    for bucket in range(1, 10):
        assert (bucket in common) == all(bucket in mine for mine in held)


@given(BUCKETS)
def test_alone_a_rank_keeps_what_it_captured(held: list[int]) -> None:
    gather = agreement.gather_over(SimpleNamespace(world_size=1))
    assert agreement.agree(held, gather) == tuple(sorted(held))


class Key(NamedTuple):
    """SGLang's ShapeKey."""

    size: int


class Backend:
    """An attention backend, which may have an arena."""


class Runner:
    """As much of a PrefillCudaGraphRunner as capture touches; `broken` buckets raise."""

    prefill_backend_name = "breakable"

    def __init__(self, broken: Sequence[int] = ()) -> None:
        self.broken = set(broken)
        self.backend = SimpleNamespace(_graphs={})
        self.capture_num_tokens = [64, 128, 256]
        self.max_num_tokens = 256
        config = SimpleNamespace(hf_config=SimpleNamespace(num_hidden_layers=4))
        self.attn_backend = Backend()
        self.model_runner = SimpleNamespace(model_config=config, attn_backend=self.attn_backend)

    def original(self, runner: Any, size: int, **kwargs: Any) -> None:
        if size in self.broken:
            raise MemoryError("out of\n memory")
        self.backend._graphs[Key(size)] = SimpleNamespace(_break_fns=[None] * 3, glm_breaks_moved=4)

    def capture(self) -> None:
        for size in reversed(self.capture_num_tokens):
            capture.one_bucket(self.original, self, size)
        capture.all_buckets(None, self)


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> Any:
    def choose(chosen: Any, world: int = 1) -> None:
        monkeypatch.setattr(options, "current", lambda: Options(mode=chosen))
        monkeypatch.setattr(agreement, "ranks", lambda: SimpleNamespace(world_size=world))

    return choose


def test_a_bucket_that_fails_is_named_and_the_others_serve(
    mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    mode("auto")
    runner = Runner(broken=[256])
    with caplog.at_level(logging.INFO):
        runner.capture()
    assert runner.capture_num_tokens == [64, 128]
    assert runner.max_num_tokens == 128
    assert "bucket of 256 tokens cannot be captured" in caplog.text
    assert "MemoryError: out of memory" in caplog.text
    assert "2 buckets from 64 to 128 tokens" in caplog.text
    assert "3 breaks in 4 layers (0.75 a layer) instead of SGLang's 7 (1.75)" in caplog.text


def test_the_line_is_what_gpu_idle_reads_of_a_log(
    mode: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    mode("auto")
    with caplog.at_level(logging.INFO):
        Runner().capture()
    (line,) = [record.getMessage() for record in caplog.records if "breaks in" in record.getMessage()]
    log = tmp_path / "server.log"
    log.write_text(f"[2026-12-01 06:33:53] {line}\n")
    assert captured(log)["log"] == [f"[2026-12-01 06:33:53] {line}"]


def test_where_every_bucket_fails_nothing_replays(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    mode("auto")
    runner = Runner(broken=[64, 128, 256])
    with caplog.at_level(logging.INFO):
        runner.capture()
    assert runner.capture_num_tokens == []
    assert runner.max_num_tokens == 0
    assert "no bucket was captured" in caplog.text


def test_strict_ends_the_start_and_names_bucket_and_flag(mode: Any) -> None:
    mode("strict")
    with pytest.raises(RuntimeError, match=r"128 tokens cannot be captured.*--glm-prefill-graph is strict"):
        Runner(broken=[128]).capture()


def test_beside_other_ranks_a_failure_ends_the_start(mode: Any) -> None:
    mode("auto", world=8)
    with pytest.raises(RuntimeError, match=r"128 tokens.*--glm-prefill-graph-buckets"):
        Runner(broken=[128]).capture()


def test_off_leaves_upstreams_failure_as_it_is(mode: Any) -> None:
    mode("off")
    with pytest.raises(MemoryError):
        Runner(broken=[128]).capture()


def test_a_bucket_that_another_rank_lacks_is_left_out(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mode("auto")
    monkeypatch.setattr(agreement, "gather_over", lambda group: lambda mine: [mine, [64, 256]])
    runner: Any = Runner()
    runner.capture()
    assert runner.capture_num_tokens == [64, 256]
    assert list(runner.glm_report.failed) == [128]


def test_a_dense_graph_that_another_rank_lacks_is_replayed_by_nobody(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode("auto", world=2)
    others = iter([[64, 128, 256], [64]])  # buckets, and of those the ones with a dense graph
    monkeypatch.setattr(agreement, "gather_over", lambda group: lambda mine: [mine, next(others)])
    runner = Runner()
    arena = SimpleNamespace(dense_buckets={64, 128})
    monkeypatch.setitem(whole._arenas, runner.attn_backend, arena)
    runner.capture()
    assert runner.capture_num_tokens == [64, 128, 256]
    assert arena.dense_buckets == {64}


def test_ranks_agree_on_dense_graphs_also_where_one_has_no_arena(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective: each rank has to take part in it as often as the others."""
    mode("auto", world=2)
    said: list[list[int]] = []

    def gather(mine: Sequence[int]) -> list[Sequence[int]]:
        said.append(list(mine))
        return [mine]

    monkeypatch.setattr(agreement, "gather_over", lambda group: gather)
    Runner().capture()
    assert said == [[64, 128, 256], []]
