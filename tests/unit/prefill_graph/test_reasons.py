"""Every eager prefill step has one reason, which is what stands in its way, in the order in which SGLang asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from glm_sglang.prefill_graph import counts, options, reasons
from glm_sglang.prefill_graph.options import Options
from glm_sglang.prefill_graph.reasons import Verdict


def runner(**changes: Any) -> Any:
    fields = {
        "capture_num_tokens": [512, 1024, 4096],
        "max_num_tokens": 4096,
        "capture_hidden_mode": 0,
        "max_context_size": None,
        "max_seq_len": None,
        "enable_cp_bcg_capture": False,
        "enable_lora": False,
        "_has_inactive_dp_rank": lambda batch: False,
        "_batch_max_context_len": lambda batch: 5000,
    }
    return SimpleNamespace(**(fields | changes))


def batch(tokens: int = 1000, **changes: Any) -> Any:
    fields = {
        "input_ids": range(tokens),
        "extend_seq_lens_cpu": [tokens],
        "global_num_tokens_cpu": None,
        "can_run_dp_prefill_cuda_graph": True,
        "input_embeds": None,
        "replace_embeds": None,
        "capture_hidden_mode": 0,
    }
    return SimpleNamespace(**(fields | changes))


@pytest.mark.parametrize(
    ("runner_", "batch_", "expected"),
    [
        (None, batch(), reasons.DISABLED),
        (SimpleNamespace(), batch(), reasons.DISABLED),  # SGLang's EagerRunner
        (runner(capture_num_tokens=[]), batch(), reasons.NOT_CAPTURED),
        (runner(), batch(4097), reasons.ABOVE_LARGEST),
        (runner(), batch(255), reasons.PADDING),
        (runner(), batch(1030), reasons.PADDING),
        (runner(), batch(input_embeds=object()), reasons.EMBEDDINGS),
        (runner(), batch(replace_embeds=object()), reasons.EMBEDDINGS),
        (runner(), batch(capture_hidden_mode=1), reasons.HIDDEN_STATES),
        (runner(max_seq_len=4999), batch(), reasons.CONTEXT),
        (runner(max_context_size=4999), batch(), reasons.CONTEXT),
        (
            runner(),
            batch(global_num_tokens_cpu=[5, 5], can_run_dp_prefill_cuda_graph=False),
            reasons.RANK_VOTE,
        ),
        (
            runner(),
            batch(5000, global_num_tokens_cpu=[5000, 5], can_run_dp_prefill_cuda_graph=False),
            reasons.ABOVE_LARGEST,
        ),
        (runner(_has_inactive_dp_rank=lambda b: True), batch(), reasons.IDLE_RANK),
        (runner(enable_lora=True), batch(), reasons.LORA),
        (runner(), batch(), reasons.OTHER),
    ],
)
def test_the_reason_is_what_stands_in_the_way(runner_: Any, batch_: Any, expected: str) -> None:
    assert reasons.find(runner_, batch_).reason == expected


@pytest.mark.parametrize(
    ("tokens", "padded_to", "expected"),
    [
        (5000, 5000, reasons.ABOVE_LARGEST),
        (100, 100, reasons.PADDING),
        (255, 256, reasons.PADDING),  # the vote is on 255 tokens, and 512 are more than twice as many
        (1000, 1000, reasons.OTHER),
    ],
)
def test_where_one_rank_votes_for_itself_its_own_reason_is_named(
    tokens: int, padded_to: int, expected: str
) -> None:
    """Tensor and expert parallelism with MegaMoE: SGLang syncs counts of one attention-DP rank, and its vote is False."""
    step = batch(
        tokens,
        input_ids=range(padded_to),
        global_num_tokens_cpu=[padded_to],
        can_run_dp_prefill_cuda_graph=False,
    )
    assert reasons.find(runner(), step).reason == expected


@pytest.mark.parametrize(("active", "expected"), [(True, reasons.CP_BUCKET), (False, reasons.CP_INACTIVE)])
def test_under_context_parallelism(monkeypatch: pytest.MonkeyPatch, active: bool, expected: str) -> None:
    monkeypatch.setattr(reasons, "_cp_active", lambda batch: active)
    assert reasons.find(runner(enable_cp_bcg_capture=True), batch()).reason == expected


def test_a_verdict_passes_for_sglangs_false_and_prints_its_reason() -> None:
    verdict = reasons.find(runner(), batch(5000))
    assert not verdict
    assert int(verdict) == int(False)
    text = "False (above the largest bucket: 5000 > 4096 tokens)"
    assert f"cuda graph: {verdict}, " == f"cuda graph: {text}, "


def test_every_reason_has_words() -> None:
    names = {value for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str)}
    assert names == set(reasons.WORDS)


class Mode:
    def __init__(self, extend: bool) -> None:
        self.extend = extend

    def is_extend_without_speculative(self) -> bool:
        return self.extend


@pytest.mark.parametrize(
    ("chosen", "extend", "replayed", "draft", "named"),
    [
        ("auto", True, False, False, True),
        ("strict", True, False, False, True),
        ("off", True, False, False, False),
        ("auto", False, False, False, False),
        ("auto", True, True, False, False),
        ("auto", True, False, True, False),
    ],
)
def test_only_eager_prefill_steps_of_the_target_model_are_named_and_counted(
    monkeypatch: pytest.MonkeyPatch, chosen: Any, extend: bool, replayed: bool, draft: bool, named: bool
) -> None:
    counted: list[str] = []
    monkeypatch.setattr(options, "current", lambda: Options(mode=chosen))
    monkeypatch.setattr(counts, "eager", counted.append)
    result = SimpleNamespace(can_run_graph=replayed)
    model_runner = SimpleNamespace(is_draft_worker=draft, prefill_cuda_graph_runner=runner())
    reasons.name_eager_step(result, model_runner, batch(5000, forward_mode=Mode(extend)))
    assert counted == ([reasons.ABOVE_LARGEST] if named else [])
    assert isinstance(result.can_run_graph, Verdict) is named
