"""A weight update that leaves an expert half loaded, on one of two gloo ranks: both say so, both wait, both go on."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from glm_kernels.mega_moe.interleave import deinterleave_gate_up
from glm_kernels.mega_moe.limits import Arch
from mega_moe_cases import checkpoint
from test_mega_moe_multirank import Pair
from test_moe_weights import parameters, same

from glm_sglang.moe import entry, state, updates
from glm_sglang.moe.counters import Counters
from glm_sglang.moe.weights import arrange

EXPERTS, LAYER = 3, 7


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    ranks = Pair(tmp_path_factory.mktemp("gloo") / "store")
    yield ranks
    ranks.close()


class Updater:
    """SGLang's manager on one rank: post-processes one layer, then closes the session."""

    def __init__(self, experts: Any, paused: bool) -> None:
        self.experts = experts
        self.tp_cpu_group = dist.group.WORLD
        self.scheduler = SimpleNamespace(_engine_paused=paused, _pause_started_at=1.0 if paused else None)
        self._session: object | None = object()

    def end(self, _: Any) -> SimpleNamespace:
        entry.arrange_weights(lambda *_: None, None, self.experts)
        self._session = None
        return SimpleNamespace(success=True, message="Success")


def on_rank(rank: int, paused: bool) -> dict[str, Any]:
    """An update of rank 1's first expert: its gate alone, then all of it."""
    first, second = checkpoint(1, EXPERTS), checkpoint(2, EXPERTS)
    experts = parameters(first)
    experts.layer_id = LAYER
    arrange(experts, Arch.SM90)
    running = state.Running("megamoe", "", 1, Counters(), routed=SimpleNamespace())  # type: ignore[arg-type]
    old = state._running, state.arch, state.active
    state._running, state.arch, state.active = running, lambda: Arch.SM90, lambda: True
    manager, found = Updater(experts, paused), {}
    try:
        half = len(first.w13[0]) // 2
        if rank == 1:
            experts.w13_weight.data[0, :half].view(torch.uint8).copy_(second.w13[0, :half].view(torch.uint8))
        answer = updates.answer(Updater.end, manager, None)
        found["half"] = (answer.success, answer.message)
        found["open"] = manager._session is not None
        found["paused"] = manager.scheduler._engine_paused
        try:
            entry.forward(lambda *_: None, SimpleNamespace(is_draft_worker=False), None)
        except RuntimeError as error:
            found["pass"] = str(error)
        if rank == 1:
            experts.w13_weight.data[0].view(torch.uint8).copy_(second.w13[0].view(torch.uint8))
        answer = updates.answer(Updater.end, manager, None)
        found["whole"] = answer.success
        found["closed"] = manager._session is None
        found["paused after"] = manager.scheduler._engine_paused
        held = [deinterleave_gate_up(rows) for rows in experts.w13_weight.data]
        found["first expert"] = same(held[0], (second if rank else first).w13[0])
        found["others"] = same(torch.stack(held[1:]), first.w13[1:])
        found["blocked"] = running.blocked
    finally:
        state._running, state.arch, state.active = old
    return found


@pytest.mark.parametrize("paused", [False, True])
def test_both_ranks_answer_alike_and_the_next_update_mends_it(pair: Pair, paused: bool) -> None:
    """A caller who has paused generation finds it paused."""
    for found in pair.results(on_rank, paused):
        success, message = found["half"]
        assert not success
        assert "rank 1, layer 7: expert 0: only parts [0] of 2 were loaded again" in message
        assert message.endswith("then end_weight_update again")
        assert (found["open"], found["paused"]) == (True, True)
        assert "experts that are not whole" in found["pass"]
        assert (found["whole"], found["closed"], found["paused after"]) == (True, True, paused)
        assert (found["first expert"], found["others"], found["blocked"]) == (True, True, "")


def test_the_first_load_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = parameters(checkpoint(1, EXPERTS))
    experts.layer_id = LAYER
    experts.w2_weight_scale_inv.data[2, 0, 0] = -1.0
    monkeypatch.setattr(state, "_running", None)
    monkeypatch.setattr(state, "arch", lambda: Arch.SM90)
    monkeypatch.setattr(state, "active", lambda: True)
    with pytest.raises(ValueError, match="local expert 2"):
        entry.arrange_weights(lambda *_: None, None, experts)


def test_sglangs_own_path_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No group, no scheduler: nothing is gathered."""
    monkeypatch.setattr(state, "_running", state.Running("stock", "", 1, Counters()))
    assert (
        updates.answer(lambda manager, request: request, SimpleNamespace(_session=None), "as it was")
        == "as it was"
    )
