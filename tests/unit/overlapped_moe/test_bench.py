"""The benchmark's overlapped arm and the crossover table, without a GPU."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from glm_kernels.mega_moe import Arithmetic, calc_diff, mega_moe_reference
from glm_kernels.overlapped_moe import backend, crossover, transport
from glm_kernels.overlapped_moe.crossover import Choice, Crossover, Key, Measured
from glm_kernels.overlapped_moe.crossover import Path as Way
from mega_moe_cases import checkpoint, tokens

from benchmarks import _moe_compile, _moe_overlapped, moe_layer
from benchmarks._moe_overlapped import Sweep, Variant, add_to, entries, headline, sweep
from benchmarks.moe_layer import Layer

KEY = Key("NVIDIA H200", 2, 6144, 2048, 32, 8)


# --- variants ---


def test_variants_are_read_from_text() -> None:
    found = Variant.parse("side_sms=12,shares=2:1,leave_sms=0,dispatch=nccl,combine=nccl,step_sms=8:16")
    assert (found.side_sms, found.shares, found.leave_sms, found.step_sms) == (12, (2, 1), False, (8, 16))
    assert Variant.parse("") == Variant()
    for text in _moe_overlapped.VARIANTS:
        assert Variant.parse(text) != Variant() or text == "side_sms=16"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sms=8", "--overlap has 'sms'; allowed are side_sms, step_sms"),
        ("dispatch=nccl", "go together"),
        ("rows=some", "allowed are exact, worst_case"),
    ],
)
def test_other_texts_are_refused(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=message):
        Variant.parse(text)
    assert moe_layer.main(["--dry-run", "--overlap", text]) == 2
    assert message.split(";")[0] in capsys.readouterr().err


# --- the arm, on one rank over stand-ins ---


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


class OnCpu(backend.ReferenceBackend):
    def __init__(self, plan: Any, device: torch.device, options: backend.Options) -> None:
        super().__init__(plan)


class Alone:
    """Symmetric memory of one rank."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None: ...

    def __call__(self, size: int) -> tuple[torch.Tensor, Any]:
        return torch.zeros(size, dtype=torch.uint8), self


@pytest.mark.parametrize("text", [*_moe_overlapped.VARIANTS, "dispatch=nccl,combine=nccl", "rows=worst_case"])
def test_the_arm_computes_the_layer_and_each_part_runs(
    text: str, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks._moe_arms import ROUTED_SCALING, Batch

    monkeypatch.setattr(backend, "CudaBackend", OnCpu)
    monkeypatch.setattr(transport, "cuda_symmetric_memory", Alone)
    weights, given = checkpoint(3, 6, 256, 128), tokens(4, 200, 6, 2, hidden=256)
    given.ids[150:] = -1
    batch = Batch(given.x, given.ids, given.weights, 150)
    shape = Layer(hidden=256, intermediate=128, experts=6, top_k=2, ranks=1)
    arm = _moe_overlapped.overlapped(batch, weights, shape, group, Variant.parse(text))
    arm.run()
    want = mega_moe_reference(
        given.x,
        given.ids,
        given.weights,
        weights,
        arithmetic=Arithmetic.SM90,
        routed_scaling_factor=ROUTED_SCALING,
    )
    assert calc_diff(arm.out, want) <= 1e-3
    assert {"quantise", "place", "gemms", "gemms_all_sms", "swiglu", "finish"} <= arm.parts.keys()
    once = arm.out.clone()
    for part in arm.parts.values():
        part()
    assert torch.equal(arm.out, once)
    assert arm.facts["overflow"]() == 0
    json.dumps({**arm.facts, "overflow": 0})


# --- the sweep ---


def arm_of(variant: Variant) -> Any:
    return Namespace(variant=variant, parts={"gemms": None})


def timed(arm: Any) -> dict[str, Any]:
    if arm.variant.order == "own_first":
        raise RuntimeError("no kernel image\nat line 7")
    return {
        "ms": 4.0 + arm.variant.side_sms / 100,
        "calc_diff": 2e-4,
        "overflow": lambda: int(arm.variant.side_sms == 0),
        "parts_ms": dict.fromkeys(arm.parts, 1.0),
    }


def test_the_fastest_variant_is_the_arm_and_failures_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    variants = ("side_sms=16", "side_sms=12", "order=own_first", "side_sms=0")
    found = sweep(variants, arm_of, timed, print)
    assert found.best == "side_sms=12"
    assert found.failed == {
        "order=own_first": "RuntimeError: no kernel image",
        "side_sms=0": "RuntimeError: the plan's rows did not suffice: the routing was another than the plan's",
    }
    assert found.alive
    size: dict[str, Any] = {
        "tokens": 8192,
        "gemms_ms": 4.0,
        "arms": {"gathered": {"ms": 5.15}, "megamoe": {"ms": 4.532}},
    }
    add_to(size, found)
    arm = size["arms"]["overlapped"]
    assert arm["parts_ms"] == {"gemms": 1.0}
    assert arm["variants_ms"] == {"side_sms=16": 4.16, "side_sms=12": 4.12}
    assert (arm["exposed_ms"], arm["exposed_share"]) == (0.12, 0.0291)
    assert (size["speedup_overlapped"], size["overlapped_over_megamoe"]) == (1.25, 1.1)
    assert headline([size], 8192) == {"speedup_overlapped": 1.25, "min_speedup_overlapped": 1.25}


def test_a_dead_gpu_ends_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    def dead() -> None:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", dead)
    found = sweep(("order=own_first", "side_sms=16"), arm_of, timed, print)
    assert not found.alive
    assert found.measured == {}
    size: dict[str, Any] = {"tokens": 64, "arms": {}}
    add_to(size, found)
    assert size == {"tokens": 64, "arms": {}}
    assert headline([size], 8192) == {"speedup_overlapped": None, "min_speedup_overlapped": None}


def test_no_variant_no_arm() -> None:
    assert Sweep().best is None


# --- the table ---


def measured(size: int, megamoe: float, overlapped: float, date: str = "") -> Measured:
    return Measured(KEY, size, megamoe, overlapped, {"side_sms": size // 512}, date)


TABLE = Crossover([measured(2048, 1.4, 1.5), measured(8192, 4.6, 4.4), measured(16384, 9.7, 8.8)])


@pytest.mark.parametrize(
    ("size", "way"),
    [
        (1, Way.MEGAMOE),  # below what was measured
        (2048, Way.MEGAMOE),  # lost
        (4096, Way.MEGAMOE),  # between lost and won
        (8192, Way.OVERLAPPED),
        (12000, Way.OVERLAPPED),  # between two that it won
        (16384, Way.OVERLAPPED),
        (16385, Way.MEGAMOE),  # above
    ],
)
def test_choice_follows_what_was_measured(size: int, way: Way) -> None:
    assert TABLE.choose(KEY, size).path is way


def test_options_are_those_of_the_nearest_size() -> None:
    assert TABLE.choose(KEY, 12000) == Choice(Way.OVERLAPPED, {"side_sms": 16})
    assert TABLE.choose(KEY, 13000) == Choice(Way.OVERLAPPED, {"side_sms": 32})


def test_another_gpu_group_or_shape_was_not_measured() -> None:
    for name, value in (("gpu", "NVIDIA H100"), ("ranks", 4), ("experts_a_rank", 16), ("top_k", 4)):
        other = Key(**{**KEY.__dict__, name: value})
        assert TABLE.choose(other, 8192) == Choice(Way.MEGAMOE)
    assert Crossover().choose(KEY, 8192) == Choice(Way.MEGAMOE)


def test_less_than_a_hundredth_is_no_win() -> None:
    assert measured(1, 1.0, 0.991).winner is Way.MEGAMOE
    assert measured(1, 1.0, 0.989).winner is Way.OVERLAPPED


OPTIONS = {"side_sms": 16, "rows": "worst_case"}


def result() -> dict[str, Any]:
    arms = {
        "megamoe": {"ms": 4.6},
        "overlapped": {"ms": 4.4, "options": OPTIONS},
    }
    return {
        "layer": {"hidden": 6144, "intermediate": 2048, "experts": 64, "top_k": 8, "ranks": 2},
        "routing": "random",
        "uneven": False,
        "machine": {"gpu": "NVIDIA H200"},
        "date": "2026-12-01",
        "sizes": [{"tokens": 8192, "arms": arms}, {"tokens": 64, "arms": {"megamoe": {"ms": 1}}}],
    }


def test_results_become_entries_and_later_ones_replace_earlier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entries(result()) == [Measured(KEY, 8192, 4.6, 4.4, OPTIONS, "2026-12-01")]
    exact = result()
    exact["sizes"][0]["arms"]["overlapped"]["options"] = {**OPTIONS, "rows": "exact"}
    assert entries(exact) == []  # the host counted its rows outside the time
    assert entries({**result(), "routing": "skewed"}) == entries({**result(), "uneven": True}) == []
    file, saved = tmp_path / "crossover.json", tmp_path / "moe_layer.json"
    monkeypatch.setattr(crossover, "TABLE", file)
    saved.write_text(json.dumps(result()))
    assert moe_layer.main(["--crossover", str(saved)]) == 0
    assert capsys.readouterr().out == "NVIDIA H200 EP2, 8192 tokens a rank: overlapped\n"
    assert Crossover.load().choose(KEY, 8192).path is Way.OVERLAPPED
    later = result()
    later["sizes"][0]["arms"]["overlapped"]["ms"] = 4.7
    saved.write_text(json.dumps(later))
    assert moe_layer.main(["--crossover", str(saved)]) == 0
    assert [entry.overlapped_ms for entry in Crossover.load().entries] == [4.7]
    file.write_text('[{"tokens": 1}]')
    with pytest.raises(ValueError, match="--crossover"):
        Crossover.load()


def test_the_shipped_table_can_be_read() -> None:
    assert all(entry.megamoe_ms > 0 for entry in Crossover.load().entries)


# --- what is compiled ahead ---


def test_rows_that_the_gemms_will_have_under_even_routing() -> None:
    """8,192 tokens a rank: 32,768 pairs of own and of peers' tokens; halves have 512 of each expert, whole tiles."""
    shape = Layer(hidden=6144, intermediate=2048, experts=64, top_k=8, ranks=2)
    variants = [
        Variant.parse(text) for text in ("side_sms=16", "side_sms=12,shares=3:1", "step_sms=8,leave_sms=0")
    ]
    assert _moe_compile.rows_by_side_sms(shape, (8192,), variants) == {
        0: (16_384, 32_768, 65_536),
        12: (8192, 24_576, 32_768),
        16: (16_384, 32_768),
    }
