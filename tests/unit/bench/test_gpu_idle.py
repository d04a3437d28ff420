"""`benchmarks.gpu_idle` without a GPU: what fits together, how often a case is asked, and whose servers are up when."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks import _fit, _gpu_trace, _idle_steps, _wide_model, gpu_idle
from benchmarks._gpu_trace import Interval, Trace
from benchmarks._idle_steps import Arm, Case, Counts
from glm_sglang import command_line
from glm_sglang.serving import ServerError

H200 = ("--gpu-gib", "139.8")  # 143,168 MiB, as NVML says
DEEP = ("--layers", "78", "--experts", "8", "--shared-indexer")


def test_the_weights_are_those_of_a_checkpoint_and_the_absorbed_halves(tmp_path: Path) -> None:
    """Counted from transformers' tensors; E4M3 and a float for 128 × 128 where the config converts, BF16 elsewhere."""
    config = gpu_idle.model_config(7, shared=True, experts=8)
    kept = config["quantization_config"]["modules_to_not_convert"]
    (tmp_path / "config.json").write_bytes(orjson.dumps(config))
    expected = 0
    for tensors in _wide_model.tensor_shapes(tmp_path).values():
        for name, size in tensors.items():
            module = name.removesuffix(".weight")
            if name.endswith("e_score_correction_bias"):
                expected += 4 * size.numel()
            elif len(size) < 2 or module in kept or "embed_tokens" in name:
                expected += 2 * size.numel()
            else:
                expected += size.numel() + 4 * math.prod(math.ceil(n / 128) for n in size)
            if name.endswith("kv_b_proj.weight"):
                expected += 2 * size.numel()
    assert _fit.weight_bytes(config) == expected


def test_the_published_model_is_as_large_as_its_parameters_say() -> None:
    """78 layers of GLM-5.3 with 256 experts: about 744 billion parameters, 40 billion of them met by a token."""
    config = gpu_idle.model_config(78, shared=True, experts=256)
    assert config["indexer_types"].count("full") == 21
    assert 0.72e12 < _fit.weight_bytes(config) < 0.78e12


def test_kv_is_a_latent_of_every_layer_and_an_index_key_of_some() -> None:
    config = gpu_idle.model_config(78, shared=True, experts=8)
    assert _fit.kv_bytes(config, 1000) == 1000 * (78 * 1152 + 21 * 132)


def test_a_wave_takes_who_still_fits_in_order() -> None:
    needs = {"a": 50, "b": 40, "c": 60, "d": 10, "e": 31}
    assert _fit.waves(needs, 100) == [["a", "b"], ["c", "d"], ["e"]]
    assert _fit.waves(needs, 100, at_once=1) == [["a"], ["b"], ["c"], ["d"], ["e"]]
    assert _fit.waves(needs, 120, at_once=2) == [["a", "b"], ["c", "d"], ["e"]]


@pytest.mark.parametrize(("at_once", "named"), [(0, "c "), (2, "fewer servers at once")])
def test_what_does_not_fit_is_refused_with_what_to_change(at_once: int, named: str) -> None:
    needs = {"a": 70 << 30, "b": 60 << 30, "c": 130 << 30}
    with pytest.raises(_fit.FitError, match=named) as refused:
        _fit.waves(needs, 120 << 30, at_once)
    assert "fewer layers or experts" in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "waves"),
    [
        ((), [["stock", "ours", "eager", "cached"]]),
        ((*DEEP, "--arms", "stock,ours,eager", "--sizes", "2048,8192"), [["stock", "ours"], ["eager"]]),
        ((*DEEP, "--arms", "stock,ours", "--at-once", "1"), [["stock"], ["ours"]]),
    ],
)
def test_the_plan_says_who_is_up_together(
    flags: tuple[str, ...], waves: list[list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert gpu_idle.main([*flags, *H200, "--plan", "--out", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("together: ")]
    assert [re.findall(r"(\w+) {", line) for line in lines] == waves


def test_too_deep_a_model_starts_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_idle, "run_wave", lambda *_: pytest.fail("a server was started"))
    deep = ["--layers", "78", "--experts", "64", *H200, "--out", str(tmp_path)]
    assert gpu_idle.main(deep) == 2
    assert "fewer layers or experts" in capsys.readouterr().err


def test_every_arm_takes_its_flags_and_graphs_have_the_same_buckets() -> None:
    args = gpu_idle.parse(["--sizes", "2048,2048+14336,8192", *DEEP, "--extra=--watchdog-timeout=7"])
    assert args.tokens == 3 * 16384
    given = {
        name: command_line.parse(["--model-path", "/m", *gpu_idle.common(gpu_idle.sized(args)), *flags]).given
        for name, flags in gpu_idle.arms(args.buckets).items()
    }
    for flags in given.values():
        sizes = ("max_total_tokens", "chunked_prefill_size", "max_prefill_tokens", "watchdog_timeout")
        assert [str(flags[name]) for name in sizes] == [str(args.tokens), "8192", "8192", "7"]
    assert given["ours"]["glm_prefill_graph_buckets"] == "2048,8192"
    assert given["cached"]["glm_prefill_graph_buckets"] == "2048,8192"
    assert given["cached"]["glm_cache_url"] == "embedded://"
    assert "glm_cache_url" not in given["ours"]


def test_long_cases_are_asked_for_less_often_but_never_too_seldom() -> None:
    counts = Counts(20, 5)
    assert counts.of(Case(512)) == counts.of(Case(2048, 14336)) == counts
    assert counts.of(Case(8192)) == Counts(5, 1)
    assert Counts(8, 2).of(Case(16384)) == Counts(_idle_steps.LEAST, 1)


def test_saves_are_no_work_of_a_step() -> None:
    from glm_kernels.page_copy import kernels

    layers = [Interval(i * 100.0, i * 100.0 + 90, "gemm") for i in range(30)]
    saves = [
        Interval(3_500.0, 3_600, kernels._copy.__name__),
        Interval(3_600, 9_000, "Memcpy DtoH (Device -> Pinned)"),
    ]
    with_saves = Trace(device=[*layers, *saves])
    assert _gpu_trace.steps(_idle_steps.own_work(with_saves, "cached"))[0].span_us == 2_990
    assert _gpu_trace.steps(_idle_steps.own_work(Trace(device=[*layers, *saves]), "ours"))[0].span_us == 9_000


@pytest.mark.parametrize("lone", [0, 30])
def test_an_empty_trace_is_no_idle_share(lone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue of which nothing was traced would idle 0 %."""
    traces = [
        Trace(device=[Interval(i * 100.0, i * 100.0 + 90, "gemm") for i in range(lone)]),
        Trace(device=[]),
    ]
    monkeypatch.setattr(_idle_steps, "traced", lambda *_: [])
    monkeypatch.setattr(_gpu_trace, "read", lambda files: traces.pop(0))
    with pytest.raises(RuntimeError, match="nothing to take a share of"):
        _idle_steps.trace_case(Arm("ours", None), Case(2048), Counts(1, 0))  # type: ignore[arg-type]


class Fake:
    """A server that notes when it starts and stops; one called `bad` does not come up."""

    events: list[str] = []  # noqa: RUF012  # of all of them, in order

    def __init__(self, model: Path, args: list[str], *, name: str, log: Path) -> None:
        self.name, self.log = name, log
        log.write_text("")

    def start(self) -> None:
        self.events.append(f"start {self.name}")

    def wait_ready(self) -> None:
        if self.name == "eager":
            raise ServerError("eager ended", self.log, 1)

    def begin_to_stop(self) -> None: ...

    def stop(self) -> None:
        self.events.append(f"stop {self.name}")


def test_the_next_wave_starts_when_the_one_before_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(args: Any, found: list[Arm], out: Path, note: Any) -> None:
        for arm in found:
            Fake.events.append(f"measure {arm.name}")
            arm.result["untraced"] = {"2048": {"client_ms": 4.0, "step_ms_saturated": 3.0}}

    Fake.events.clear()
    monkeypatch.setattr(gpu_idle, "Server", Fake)
    monkeypatch.setattr(gpu_idle, "measure", measured)
    monkeypatch.setattr(gpu_idle.time, "sleep", lambda _: None)
    words = [*DEEP, *H200, "--arms", "stock,ours,cached,eager", "--sizes", "2048,8192"]
    assert gpu_idle.main([*words, "--json", "--out", str(tmp_path)]) == 1  # for eager
    assert Fake.events == [
        *("start stock", "start ours", "measure stock", "measure ours", "stop stock", "stop ours"),
        *("start cached", "start eager", "measure cached", "stop cached", "stop eager"),
    ]
    found = orjson.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["together"] == [["stock", "ours"], ["cached", "eager"]]
    assert list(found["arms"]) == ["stock", "ours", "cached"]
    assert "eager ended" in found["not_up"]["eager"]
    assert found["step_ms_saturated_2048_over_stock"] == 1.0
    assert [line for line in found["incomplete"] if "eager" in line] == ["eager: did not start"]
    assert len(found["incomplete"]) == 1 + 3 * 3  # nothing was traced, and 8192 not asked
    model = found["model"]
    assert (model["layers"], model["dense_layers"], model["experts"], model["indexers"]) == (78, 3, 8, 21)
    assert all(taken["total"] > 40 for taken in found["expected_gib"].values())


def arm(name: str, **result: Any) -> Arm:
    return Arm(name, None, result)  # type: ignore[arg-type]


def test_the_headline_names_our_idle_shares_and_keeps_a_share_of_nothing() -> None:
    ours = arm("ours", traced={"2048": {"idle_share": 0.0}, "8192": {"idle_share": 0.006}})
    found = gpu_idle.headline([ours, arm("stock", traced={"2048": {"idle_share": 0.03}})])
    assert found == {
        "idle_share_2048": 0.0,
        "idle_share_8192": 0.006,
        "idle_share_2048_ours": 0.0,
        "idle_share_2048_stock": 0.03,
        "idle_share_8192_ours": 0.006,
    }
    assert gpu_idle.headline([])["idle_share_2048"] is None


def test_what_was_not_measured_is_named_and_makes_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = {"untraced": {"2048": {}, "8192": {}}, "traced": {"2048": {}, "8192": {}}}

    def wave(args: Any, model: Path, names: list[str], out: Path, found: list[Arm], *rest: Any) -> None:
        found.extend(arm(name, **results[name]) for name in names)

    monkeypatch.setattr(gpu_idle, "run_wave", wave)
    words = [*H200, "--sizes", "2048,8192", "--arms", "stock,ours", "--out", str(tmp_path)]
    results: dict[str, dict[str, Any]] = {"stock": both, "ours": both}
    assert gpu_idle.main(words) == 0
    short = {"untraced": {"2048": {}, "8192": {}}, "traced": {"2048": {}}}
    for more, line in (
        ({"skipped": ["traced 8192"]}, "ours: traced 8192: skipped, the time was over (--seconds)"),
        ({"failed": {"traced 8192": "TimeoutError: no trace"}}, "ours: traced 8192: TimeoutError: no trace"),
        ({}, "ours: traced 8192: not measured"),
    ):
        results["ours"] = short | more
        capsys.readouterr()
        assert gpu_idle.main(words) == 1
        assert [said for said in capsys.readouterr().err.splitlines() if said.startswith("gpu_idle: ")] == [
            f"gpu_idle: {line}"
        ]
    results["ours"] = both | {"failed": {"warm 8192": "ReadTimeout: "}}
    assert gpu_idle.main(words) == 1


def test_graph_memory_is_said_only_of_a_server_that_captured_alone(tmp_path: Path) -> None:
    log = tmp_path / "ours.log"
    log.write_text(
        "Capture prefill CUDA graph end. elapsed=16.67 s, mem usage=17.52 GB, avail mem=80.00 GB.\n"
    )
    alone = _idle_steps.captured(log, alone=True)
    assert (alone["capture_seconds"], alone["capture_gb"]) == (16.67, 17.52)
    beside = _idle_steps.captured(log)
    assert (beside["capture_seconds"], beside["capture_gb"]) == (16.67, None)
    assert "other servers" in beside["capture_gb_unknown"]
    log.write_text("nothing was captured\n")
    assert "capture_gb_unknown" not in _idle_steps.captured(log)


@pytest.mark.parametrize(
    ("words", "alone"), [((), False), (("--one-by-one",), True), (("--at-once", "1"), True)]
)
def test_servers_of_a_wave_are_alone_one_by_one(
    words: tuple[str, ...], alone: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(gpu_idle, "Server", Fake)
    monkeypatch.setattr(gpu_idle, "measure", lambda *_: None)
    monkeypatch.setattr(gpu_idle, "captured", lambda log, alone: seen.append(alone))
    monkeypatch.setattr(gpu_idle.time, "sleep", lambda _: None)
    gpu_idle.main([*H200, "--arms", "stock,ours", *words, "--out", str(tmp_path)])
    assert seen == [alone, alone]
