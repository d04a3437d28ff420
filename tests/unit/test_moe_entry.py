"""What SGLang asks about MegaMoE, and what it is told: counts, buckets, resolved arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prefill_graph import synced

from glm_sglang.errors import UsageError
from glm_sglang.moe import choice, entry, state
from glm_sglang.moe.counters import Counters
from glm_sglang.moe.facts import FIELDS
from glm_sglang.moe.hooks import HOOKS


def hooked(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """What SGLang calls in the place of `original`: the function of this room's declared hook."""
    (hook,) = (hook for hook in HOOKS if hook.target == target)
    return partial(resolve_name(hook.function), original)


@pytest.fixture
def megamoe(monkeypatch: pytest.MonkeyPatch) -> None:
    running = state.Running("megamoe", "asked for", 1, Counters(), routed=SimpleNamespace())
    monkeypatch.setattr(state, "_running", running)


COUNTS = [300, 40]  # tokens of two attention-DP ranks


def buckets(monkeypatch: pytest.MonkeyPatch, tolerates: Callable[[], bool]) -> list[int]:
    """The sizes of the graphs that two attention-DP ranks replay, by SGLang's own padding."""
    from sglang.srt.model_executor import forward_batch_info as module

    found, sizes = [], [64, 256, 512]
    for rank, tokens in enumerate(COUNTS):
        runner = synced.install(monkeypatch, sizes)
        parallel = SimpleNamespace(attn_tp_size=1, attn_dp_size=2, tp_size=2, attn_cp_size=1, num_dp_ranks=2)
        monkeypatch.setattr(module, "get_parallel", lambda parallel=parallel: parallel)
        monkeypatch.setattr(module, "dp_slot_in", lambda counts, rank=rank: rank)
        monkeypatch.setattr(module, "prefill_graph_tolerates_sum_len", tolerates)
        batch = synced.step(tokens)
        batch.global_num_tokens_cpu, batch.global_num_tokens_for_logprob_cpu = COUNTS, [1, 1]
        batch.global_num_tokens_gpu = torch.tensor(COUNTS)
        batch.prepare_mlp_sync_batch(runner)
        found.append(min(size for size in sizes if size >= batch.input_ids.shape[0]))
    return found


def test_ranks_replay_one_bucket(monkeypatch: pytest.MonkeyPatch, megamoe: None) -> None:
    """A graph holds as many kernel calls as its bucket has chunks; SGLang's own answer gives ranks unlike ones."""
    target = "sglang.srt.model_executor.forward_batch_info.prefill_graph_tolerates_sum_len"
    assert buckets(monkeypatch, lambda: True) == [512, 64]
    assert buckets(monkeypatch, hooked(target, lambda: True)) == [512, 512]


def test_sglangs_own_path_keeps_its_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_running", state.Running("stock", "", 1, Counters()))
    assert entry.one_bucket(lambda: True)
    assert not entry.one_bucket(lambda: False)


@pytest.mark.parametrize(
    ("backend", "attention_dp", "gathered"),
    [("megamoe", True, True), ("megamoe", False, False), ("deepep", True, False), ("none", True, False)],
)
def test_ranks_learn_each_others_counts(
    monkeypatch: pytest.MonkeyPatch, backend: str, attention_dp: bool, gathered: bool
) -> None:
    """Where SGLang would not gather them, MegaMoE with attention DP needs them; whatever it gathers, it gathers."""
    from sglang.srt import runtime_context
    from sglang.srt.layers.moe import utils

    asks = hooked("sglang.srt.utils.common.require_mlp_tp_gather", lambda *, moe_a2a_backend: False)
    monkeypatch.setattr(
        runtime_context, "get_parallel", lambda: SimpleNamespace(attn_dp_enabled=attention_dp)
    )
    monkeypatch.setattr(utils, "get_moe_a2a_backend", lambda: utils.MoeA2ABackend(backend))
    assert asks() is gathered
    assert asks(moe_a2a_backend=backend) is gathered
    assert entry.gathered_counts(lambda *, moe_a2a_backend: True, moe_a2a_backend=backend)


class Resolved:
    """SGLang's arguments once resolved, and whether its own check of them was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> None:
        from sglang.srt.arg_groups import overrides

        config = {
            "hidden_size": 6144,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        }
        values = dict.fromkeys(FIELDS) | {"tp_size": 8, "ep_size": 8, "disable_shared_experts_fusion": False}
        view = SimpleNamespace(**(values | {"moe_a2a_backend": "megamoe"} | flags))
        model = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: config))
        monkeypatch.setattr(overrides, "resolving_view", lambda _: view)
        monkeypatch.setattr(overrides, "model_config_of", lambda _: model)
        monkeypatch.setattr(entry.platform_choice, "current", lambda: SimpleNamespace(platform="cuda"))
        monkeypatch.setattr(choice, "capability", lambda platform: (9, 0))
        self.asked = 0

    def judge(self) -> None:
        entry.judge(None, self.ask)

    def ask(self, _: Any) -> None:
        self.asked += 1


def test_resolved_arguments_are_judged_by_this_room(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = Resolved(monkeypatch)
    resolved.judge()
    assert resolved.asked == 0  # SGLang would refuse chunks above the cap of some models


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"load_format": "remote"}, "--load-format is remote"),  # SGLang makes it of an address
        ({"attn_dp_size": 2, "enable_prefill_cp": True}, "--attn-dp-size is 2"),
        ({"enforce_shared_experts_fusion": True}, "--enforce-shared-experts-fusion"),
    ],
)
def test_what_resolution_made_of_the_flags_is_refused(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], named: str
) -> None:
    with pytest.raises(UsageError, match=f"MegaMoE cannot run here: {named}"):
        Resolved(monkeypatch, **flags).judge()


def test_variables_count_once_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SCHEDULER_SKIP_ALL_GATHER", "true")
    with pytest.raises(UsageError, match="SGLANG_SCHEDULER_SKIP_ALL_GATHER is true"):
        Resolved(monkeypatch, attn_dp_size=2).judge()


def test_another_backend_is_sglangs_unless_megamoe_was_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = Resolved(monkeypatch, moe_a2a_backend="deepep")
    monkeypatch.setenv("GLM_SGLANG_MOE", "stock")
    resolved.judge()
    assert resolved.asked == 1
    monkeypatch.setenv("GLM_SGLANG_MOE", "megamoe")
    with pytest.raises(UsageError, match="MegaMoE was decided, and SGLang made --moe-a2a-backend deepep"):
        resolved.judge()


@pytest.mark.parametrize(
    ("mode", "fields", "tokens"),
    [
        ("EXTEND", {"extend_num_tokens": 7}, 7),
        ("MIXED", {"extend_num_tokens": 9}, 9),
        ("DECODE", {"batch_size": 3}, 3),
        # Of two requests four drafts each: SGLang's verify passes have no extend_num_tokens.
        ("TARGET_VERIFY", {"batch_size": 2, "input_ids": torch.zeros(8, dtype=torch.int64)}, 8),
        ("IDLE", {"batch_size": 0}, 0),
    ],
)
def test_every_passs_tokens_are_counted_with_its_layers(
    monkeypatch: pytest.MonkeyPatch, mode: str, fields: dict[str, Any], tokens: int
) -> None:
    from sglang.srt import runtime_context
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    running = state.Running("stock", "", 3, Counters())
    monkeypatch.setattr(state, "_running", running)
    parallel = SimpleNamespace(attn_tp_rank=0, attn_cp_rank=0)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: parallel)
    batch = synced.blank(forward_mode=ForwardMode[mode], **fields)
    entry.forward(lambda runner, batch: None, SimpleNamespace(is_draft_worker=False), batch)
    assert running.counters.report()["stock"] == {"calls": 3, "tokens": 3 * tokens, "chunks": 0, "rows": 0}
    parallel.attn_tp_rank = 1  # the first rank has counted them
    entry.forward(lambda runner, batch: None, SimpleNamespace(is_draft_worker=False), batch)
    assert running.counters.report()["stock"]["tokens"] == 3 * tokens
