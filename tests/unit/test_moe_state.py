"""What is set up once the weights are there: layers that could not run MegaMoE, what /server_info says, warm-up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from glm_kernels.mega_moe.limits import Arch
from mega_moe_cases import checkpoint
from test_moe_weights import parameters

from glm_sglang.moe import choice, state, warm
from glm_sglang.moe.counters import Counters
from glm_sglang.moe.weights import arrange

EXPERTS = 3


def layer(arch: Arch, **changed: Any) -> SimpleNamespace:
    """A MoE layer as a loader that arranges last leaves it."""
    experts = parameters(checkpoint(2, EXPERTS))
    arrange(experts, arch)
    plain = {"layer_id": 5, "num_fused_shared_experts": 0, "mega_shared_l1_weights": None, "experts": experts}
    return SimpleNamespace(**(plain | changed))


@pytest.fixture(params=[Arch.SM90, Arch.SM100])
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Arch:
    monkeypatch.setattr(state, "arch", lambda: request.param)
    found: Arch = request.param
    return found


def test_a_layer_that_was_arranged_last_is_taken(arch: Arch) -> None:
    state._check(layer(arch))


def test_weights_written_after_they_were_arranged_are_refused(arch: Arch) -> None:
    """What `--load-format sharded_state`, `presharded` and `remote` do: an empty model is arranged, bytes come after."""
    late, loaded = layer(arch), checkpoint(1, EXPERTS)
    late.experts.w13_weight.data.view(torch.uint8).copy_(loaded.w13.view(torch.uint8))
    late.experts.w2_weight.data.view(torch.uint8).copy_(loaded.w2.view(torch.uint8))
    assert loaded.w13_scale is not None
    late.experts.w13_weight_scale_inv.data.copy_(loaded.w13_scale)
    late.experts.w2_weight_scale_inv.data.copy_(loaded.w2_scale)
    with pytest.raises(RuntimeError, match=f"{EXPERTS} experts of layer 5 were written after"):
        state._check(late)


def test_parameters_that_moved_are_refused(arch: Arch) -> None:
    """`model.to(device)` after arranging: the kernel would read the memory that they left."""
    moved = layer(arch)
    moved.experts.w13_weight.data = moved.experts.w13_weight.data.clone()
    with pytest.raises(RuntimeError, match="were written after"):
        state._check(moved)


def test_other_layers_are_refused(arch: Arch) -> None:
    unarranged = parameters(checkpoint(2, EXPERTS))
    unarranged.quant_method = None
    for changed, named in (
        ({"num_fused_shared_experts": 1}, "--disable-shared-experts-fusion"),
        ({"mega_shared_l1_weights": ()}, "FUSE_SHARED_EXPERTS"),
        ({"experts": unarranged}, "no FP8 blocks"),
    ):
        with pytest.raises(RuntimeError, match=named):
            state._check(layer(arch, **changed))


def test_server_info_says_path_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    decision = choice.Decision("stock", "no expert parallelism is asked for (--ep-size)")
    monkeypatch.setattr(state, "_running", None)
    monkeypatch.setattr(choice, "handed_down", lambda: decision)
    monkeypatch.setattr(state, "moe_layers", lambda model: iter(()))
    monkeypatch.setattr(state, "active", lambda: False)
    report = state.set_up(None).report()
    assert (report["path"], report["reason"]) == (decision.path, decision.reason)


def test_a_model_without_such_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--model-impl transformers` and ModelOpt's own models would run something else under MegaMoE's name."""
    monkeypatch.setattr(state, "active", lambda: True)
    with pytest.raises(RuntimeError, match="Linear has no MoE layers"):
        state.set_up(torch.nn.Linear(1, 1))


def test_every_kernel_is_compiled_with_no_rows_at_each_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks call the same bounds in the same order, whatever they hold; the largest is the capacity."""
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, *, dtype, device: empty(shape, dtype=dtype))

    class Kernel:
        buffer = SimpleNamespace(hidden=16, num_topk=2)

        def __call__(self, experts: Any, rows: Any, out: Any, *, bound: int, **_: Any) -> None:
            assert rows.ids.shape == rows.weights.shape == (0, 2)
            assert out.shape == (0, 16)
            calls.append((len(rows.x), bound))

    warm.compile_kernels(SimpleNamespace(kernel=Kernel(), capacity=24), None)  # type: ignore[arg-type]
    assert calls == [(0, 1), (0, 2), (0, 4), (0, 8), (0, 16), (0, 24)]
    assert warm.bounds(32) == [1, 2, 4, 8, 16, 32]
    assert warm.bounds(1) == [1]


def test_counts_of_a_path_are_there_before_its_first_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from prometheus_client import REGISTRY

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    counters = Counters()
    counters.publish()
    try:

        def value(name: str, path: str) -> float | None:
            return REGISTRY.get_sample_value(f"glm_sglang:moe_{name}_total", {"path": path})

        for name in ("calls", "tokens", "chunks", "rows"):
            assert [value(name, path) for path in ("megamoe", "megamoe-graph", "stock")] == [0, 0, 0]
        counters.layer(rows=7, chunks=2)
        counters.close(path="megamoe", layers=1, tokens=6)
        assert [value(name, "megamoe") for name in ("calls", "tokens", "chunks", "rows")] == [1, 6, 2, 7]
    finally:
        for metric in counters.metrics.values():
            REGISTRY.unregister(metric)


def test_without_metrics_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """prometheus_client decides for its multi-process mode when it is imported."""
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    counters = Counters()
    counters.publish()
    counters.layer(rows=1, chunks=1)
    counters.close(path="megamoe", layers=1, tokens=1)
    assert counters.metrics == {}
