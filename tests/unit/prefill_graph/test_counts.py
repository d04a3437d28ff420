"""The room's metrics: there from the start, and counted by one rank of those that run a step together."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

from glm_sglang.prefill_graph import counts, options, reasons
from glm_sglang.prefill_graph.capture import Report
from glm_sglang.prefill_graph.options import Options


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What a process would publish, which has published nothing so far."""
    fresh = prometheus_client.CollectorRegistry()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "set")
    monkeypatch.setattr(options, "current", lambda: Options(mode="auto"))
    for name in ("Counter", "Gauge"):
        made = getattr(prometheus_client, name)
        monkeypatch.setattr(
            prometheus_client, name, lambda *args, made=made, **kwargs: made(*args, registry=fresh, **kwargs)
        )
    for made in (counts._eager, counts._buckets, counts._breaks):
        made.cache_clear()
    yield fresh
    for made in (counts._eager, counts._buckets, counts._breaks):
        made.cache_clear()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    from sglang.srt import runtime_context

    def be(**ranks: int) -> None:
        parallel = SimpleNamespace(**({"attn_tp_rank": 0, "attn_cp_rank": 0, "pp_rank": 0} | ranks))
        monkeypatch.setattr(runtime_context, "get_parallel", lambda: parallel)

    be()
    return be


def eager(registry: Any) -> dict[str, float]:
    return {
        sample.labels["reason"]: sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "glm_sglang:prefill_graph_eager_total"
    }


def model_runner(**changes: Any) -> Any:
    report = Report(breaks={64: 1, 128: 3}, stock={64: 5, 128: 7}, failed={256: "out of memory"})
    runner = SimpleNamespace(capture_num_tokens=[64, 128], glm_report=report)
    fields = {
        "is_draft_worker": False,
        "prefill_cuda_graph_runner": runner,
        "server_args": SimpleNamespace(_glm_left_out=3),
    }
    return SimpleNamespace(**(fields | changes))


def test_every_reason_is_there_at_0_before_the_first_step(registry: Any, rank: Any) -> None:
    counts.after_capture(None, model_runner())
    assert eager(registry) == dict.fromkeys(reasons.WORDS, 0.0)
    counts.eager(reasons.PADDING)
    counts.eager(reasons.PADDING)
    assert eager(registry) == dict.fromkeys(reasons.WORDS, 0.0) | {reasons.PADDING: 2.0}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (2, 1, 3)),
        # Graphs are off: SGLang's EagerRunner.
        ({"prefill_cuda_graph_runner": object(), "server_args": SimpleNamespace()}, (0, 0, 0)),
    ],
)
def test_buckets_are_counted_by_what_became_of_them(
    registry: Any, rank: Any, changes: dict[str, Any], expected: tuple[int, ...]
) -> None:
    counts.after_capture(None, model_runner(**changes))
    found = [
        registry.get_sample_value("glm_sglang:prefill_graph_buckets", {"state": state})
        for state in ("captured", "failed", "left_out")
    ]
    assert found == list(expected)


@pytest.mark.parametrize(
    ("changes", "expected"), [({}, (3, 7)), ({"prefill_cuda_graph_runner": object()}, (0, 0))]
)
def test_breaks_are_told_beside_sglangs(
    registry: Any, rank: Any, changes: dict[str, Any], expected: tuple[int, int]
) -> None:
    counts.after_capture(None, model_runner(**changes))
    found = [
        registry.get_sample_value("glm_sglang:prefill_graph_breaks", {"of": of})
        for of in ("captured", "sglang")
    ]
    assert found == list(expected)


@pytest.mark.parametrize("ranks", [{"attn_tp_rank": 1}, {"attn_cp_rank": 3}, {"pp_rank": 1}])
def test_only_the_first_rank_of_those_that_run_a_step_counts_it(
    registry: Any, rank: Any, ranks: dict[str, int]
) -> None:
    rank(**ranks)
    counts.after_capture(None, model_runner())
    counts.eager(reasons.PADDING)
    assert eager(registry) == {}


def test_what_is_nobodys_step_is_not_counted(registry: Any, rank: Any) -> None:
    with counts.paused():
        counts.eager(reasons.PADDING)
    assert sum(eager(registry).values()) == 0
    counts.eager(reasons.PADDING)
    assert sum(eager(registry).values()) == 1


def test_a_draft_model_has_none_of_its_own(registry: Any, rank: Any) -> None:
    counts.after_capture(None, model_runner(is_draft_worker=True))
    assert eager(registry) == {}
