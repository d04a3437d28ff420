"""The flags, as the launcher and every process read them."""

from __future__ import annotations

import pytest

from glm_sglang import own_flags, settings
from glm_sglang.errors import UsageError
from glm_sglang.prefill_graph import options
from glm_sglang.prefill_graph.options import Options

MODE, BUCKETS, VERIFY = (
    variable.name
    for variable in (settings.PREFILL_GRAPH, settings.PREFILL_GRAPH_BUCKETS, settings.VERIFY_GRAPHS)
)


def test_flags_reach_the_processes_through_the_environment() -> None:
    environ: dict[str, str] = {}
    own_flags.hand_down(
        {"glm_prefill_graph": "strict", "glm_prefill_graph_buckets": "512,64", "glm_verify_graphs": True},
        environ,
    )
    assert options.read(environ) == Options(mode="strict", buckets=(64, 512), verify=True)


def test_a_mode_that_does_not_exist_is_refused_by_its_flag() -> None:
    with pytest.raises(UsageError, match="--glm-prefill-graph is 'on', allowed: auto, strict, off"):
        own_flags.hand_down({"glm_prefill_graph": "on"}, {})


@pytest.mark.parametrize(
    ("environ", "flag"),
    [({MODE: "strict"}, "--glm-prefill-graph strict"), ({MODE: "auto", VERIFY: "1"}, "--glm-verify-graphs")],
)
def test_graphs_that_must_be_are_refused_where_none_can_be(environ: dict[str, str], flag: str) -> None:
    assert options.judge("cuda", environ) == options.read(environ)
    with pytest.raises(UsageError, match=f"{flag} needs a GPU"):
        options.judge("reference", environ)


def test_without_our_graphs_there_is_nothing_to_verify() -> None:
    for environ in ({VERIFY: "1"}, {VERIFY: "1", MODE: "off"}):
        with pytest.raises(UsageError, match="--glm-prefill-graph is off; give auto or strict"):
            options.judge("cuda", environ)


@pytest.mark.parametrize("platform", ["cuda", "reference"])
def test_buckets_without_our_graphs_are_said_to_be_unused(
    caplog: pytest.LogCaptureFixture, platform: str
) -> None:
    options.judge(platform, {BUCKETS: "512", MODE: "auto"})
    assert caplog.text == ""
    options.judge(platform, {BUCKETS: "512"})
    assert "--glm-prefill-graph-buckets is not used" in caplog.text


def test_auto_and_off_are_fine_everywhere() -> None:
    for mode in ("auto", "off"):
        assert options.judge("reference", {MODE: mode}).mode == mode


def test_bad_buckets_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(UsageError, match="--glm-prefill-graph-buckets"):
        options.judge("reference", {BUCKETS: "2k"})
