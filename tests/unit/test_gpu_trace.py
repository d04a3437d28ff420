"""Reading profiler traces: idle shares and their places, on traces whose answers are known by construction."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks import _gpu_trace
from benchmarks._gpu_trace import Interval, Step, Trace


def event(name: str, cat: str, ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur}


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_bytes(gzip.compress(orjson.dumps({"traceEvents": events})))
    return path


def test_overlapping_streams_count_once() -> None:
    # 0-10 and 5-20 overlap; 20-30 nothing; 30-40: 30 of 40 busy.
    step = Step([Interval(0, 10, "a"), Interval(5, 20, "b"), Interval(30, 40, "c")])
    assert step.span_us == 40
    assert step.busy_us == 30
    assert step.idle_share == pytest.approx(0.25)
    (gap,) = step.gaps()
    assert (gap.at_us, gap.length_us, gap.before, gap.after) == (20, 10, "b", "c")


def test_a_kernel_inside_another_makes_no_gap() -> None:
    step = Step([Interval(0, 100, "long"), Interval(10, 20, "short"), Interval(100, 110, "next")])
    assert step.gaps() == []
    assert step.idle_share == 0.0


def test_steps_are_what_silence_separates(tmp_path: Path) -> None:
    kernels = [event("k", "kernel", start + i * 10, 5) for start in (0, 20_000, 50_000) for i in range(30)]
    other = [event("cpu", "cpu_op", 0, 1e6), {"ph": "i", "name": "mark", "ts": 0}]
    calls = [event("cudaLaunchKernel", "cuda_runtime", 19_000 + i, 0.5) for i in range(7)]
    waits = [event("cudaStreamSynchronize", "cuda_runtime", 20_100, 1)]
    trace = _gpu_trace.read([write(tmp_path / "t.json.gz", kernels + other + calls + waits)])
    found = _gpu_trace.steps(trace)
    assert len(found) == 3
    for step in found:
        assert step.span_us == 295
        assert step.busy_us == 150
    assert [_gpu_trace.counts(step)["launches"] for step in found] == [0, 7, 0]
    assert _gpu_trace.counts(found[1])["host_waits"] == 1
    assert _gpu_trace.counts(found[1])["kernels"] == 30


def test_the_summary_leaves_out_the_first_steps_and_names_the_gaps() -> None:
    def step(gap: float) -> Step:
        return Step([Interval(0, 100, "void first<int>(x)"), Interval(100 + gap, 200 + gap, "second")])

    result = _gpu_trace.summary([step(10_000), step(50), step(50), step(50)], discard=1)
    assert result["steps"] == 3
    assert result["idle_share"] == pytest.approx(50 / 250)
    assert result["gaps"] == [
        {"us_a_step": 50.0, "times_a_step": 1.0, "first_at": 0.4, "before": "first", "after": "second"}
    ]
    assert _gpu_trace.summary([step(1)], discard=1) == {}


def test_layers_are_what_lies_between_the_long_kernels() -> None:
    # Copies of 1 us at 0 and 500, layers from 600 to 700 and 725 to 825, sampling of 2 us at 900.
    step = Step(
        [
            Interval(0, 1, "copy"),
            Interval(500, 501, "copy"),
            Interval(600, 700, "gemm"),
            Interval(725, 825, "gemm"),
            Interval(900, 902, "argmax"),
        ]
    )
    layers = step.layers()
    assert layers is not None
    assert layers.span_us == 225
    assert layers.idle_share == pytest.approx(25 / 225)
    assert _gpu_trace.summary([step], 0)["idle_share_layers"] == pytest.approx(0.1111)
    assert Step([Interval(0, 1, "copy")]).layers() is None


def test_idle_by_tenths_shows_where_it_lies() -> None:
    steps = [Step([Interval(0, 1, "a"), Interval(100, 900, "b"), Interval(950, 1000, "c")])]
    tenths = _gpu_trace.profile_of_idle(steps, 0)
    assert tenths[0] == pytest.approx(0.099)
    assert tenths[9] == pytest.approx(0.05)
    assert sum(tenths[1:9]) == 0


def test_a_steady_window_counts_the_time_between_steps() -> None:
    device = [Interval(start, start + 75, "k") for start in range(0, 10_000, 100)]
    assert _gpu_trace.window_idle(Trace(device=device)) == pytest.approx(0.25, abs=0.01)
    assert _gpu_trace.window_idle(Trace()) == 0.0


NCCL, GEMM, MEGA = (
    "ncclDevKernel_AllGather_RING_LL(x)",
    "sm90_fp8_gemm_1d2d",
    "void deep_gemm::sm90_fp8_mega_moe_impl<8>",
)


def test_communication_is_exposed_where_nothing_computes() -> None:
    # By hand: a GEMM 0-100, a gather 80-140, a GEMM 120-200, a scatter 250-300 alone, a GEMM 300-400. The gather is alone
    # from 100 to 120, the scatter for its 50: 70 of 400; 200-250 is idle, and no communication.
    step = Step(
        [
            Interval(0, 100, GEMM),
            Interval(80, 140, NCCL),
            Interval(120, 200, GEMM),
            Interval(250, 300, "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"),
            Interval(300, 400, GEMM),
        ]
    )
    found = _gpu_trace.communication(step)
    assert (found.span_us, found.running_us, found.exposed_us, found.fused_us) == (400, 110, 70, 0)
    assert found.share() == pytest.approx(0.175)
    assert step.idle_share == pytest.approx(50 / 400)


def test_two_collectives_at_once_count_once_and_hide_nothing() -> None:
    # 0-60 and 40-100 on two streams, nothing else until a GEMM from 100 to 200: 100 of 200.
    step = Step(
        [Interval(0, 60, NCCL), Interval(40, 100, "Memcpy PtoP (Device -> Device)"), Interval(100, 200, GEMM)]
    )
    assert _gpu_trace.communication(step).share() == pytest.approx(0.5)


def test_copies_on_a_gpu_or_to_its_host_neither_hide_nor_count() -> None:
    # A gather 0-50 under a copy 0-50: exposed. A copy 50-80 alone: not communication. A GEMM 80-100.
    step = Step(
        [
            Interval(0, 50, NCCL),
            Interval(0, 50, "Memcpy HtoD (Pinned -> Device)"),
            Interval(50, 80, "Memcpy DtoD (Device -> Device)"),
            Interval(80, 100, GEMM),
        ]
    )
    found = _gpu_trace.communication(step)
    assert (found.exposed_us, found.running_us) == (50, 50)


def test_megamoes_kernel_computes_and_its_inside_comes_from_the_layers_measurement() -> None:
    # MegaMoE 0-100, the shared expert 60-140 beside it, a gather 130-160, a GEMM 160-200. Exposed in the trace: 140-160.
    # MegaMoE is alone for 60; with a tenth of it exposed, 6 more: 26 of 200.
    step = Step(
        [Interval(0, 100, MEGA), Interval(60, 140, GEMM), Interval(130, 160, NCCL), Interval(160, 200, GEMM)]
    )
    found = _gpu_trace.communication(step)
    assert (found.exposed_us, found.fused_us) == (20, 60)
    assert found.share() == pytest.approx(0.1)
    assert found.share(inside=0.1) == pytest.approx(26 / 200)


def test_a_gather_under_megamoe_is_hidden() -> None:
    step = Step([Interval(0, 100, MEGA), Interval(10, 90, NCCL)])
    assert _gpu_trace.communication(step).share() == 0.0


def test_without_communication_nothing_is_exposed() -> None:
    found = _gpu_trace.communication(Step([Interval(0, 10, GEMM), Interval(20, 30, GEMM)]))
    assert (found.share(), found.running_us) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (NCCL, "communication"),
        ("void sglang::cross_device_reduce_1stage<__nv_bfloat16, 8>(x)", "communication"),
        ("one_shot_all_reduce_kernel", "communication"),
        ("void deep_ep::intranode::dispatch<8, 768>", "communication"),
        ("Memcpy PtoP (Device -> Device)", "communication"),
        (MEGA, "fused"),
        ("void deep_gemm::sm90_mega_moe_pre_dispatch_kernel<128>", "compute"),
        ("Memcpy DtoH (Device -> Pinned)", "copy"),
        ("Memset (Device)", "copy"),
        (GEMM, "compute"),
        ("void at::native::vectorized_gather_kernel<16>", "compute"),
        ("_ep_scatter_kernel", "compute"),
        ("fused_moe_kernel", "compute"),
    ],
)
def test_kernels_are_told_apart_by_name(name: str, kind: str) -> None:
    assert _gpu_trace.kind(name) == kind


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, X>(int)", "vectorized_elementwise_kernel"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD"),
        ("sm90_fp8_gemm", "sm90_fp8_gemm"),
    ],
)
def test_names_are_cut_to_what_tells_kernels_apart(name: str, expected: str) -> None:
    assert _gpu_trace.short(name) == expected
