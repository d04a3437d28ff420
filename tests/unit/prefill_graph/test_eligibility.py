"""When attention and indexer are captured, and which break waits for which layers' loads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_sglang.prefill_graph import eligibility
from glm_sglang.prefill_graph.eligibility import Facts, group_ends

HOPPER = Facts(backend="DeepseekSparseAttnBackend", impl="flashmla_sparse")


def test_the_default_on_hopper_is_captured() -> None:
    assert eligibility.why_not(HOPPER) == ""


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"impl": "flashmla_kv"}, "--dsa-prefill-backend flashmla_kv"),
        ({"impl": "trtllm"}, "--dsa-prefill-backend trtllm"),
        ({"ragged": True}, "--kv-cache-dtype"),
        ({"cp_size": 8}, "context parallelism"),
        ({"dp_size": 2}, "DP attention"),
        ({"draft": True}, "draft"),
        ({"topk": "torch"}, "--dsa-topk-backend torch"),
        ({"fused": False}, "SGLANG_DSA_FUSE_TOPK"),
        ({"fusion": False}, "SGLANG_DISABLE_DSA_INDEXER_FUSION"),
        ({"backend": "TritonAttnBackend"}, "TritonAttnBackend"),
        ({"sharded_kv": True}, "sharded"),
        ({"unified": True}, "--enable-unified-memory"),
        ({"hisparse": True}, "HiSparse"),
        ({"kpool": 4}, "pools 4 keys"),
        ({"dcp_size": 2}, "decode context parallelism"),
    ],
)
def test_everything_else_keeps_upstreams_breaks_and_says_why(change: dict[str, Any], word: str) -> None:
    assert word in eligibility.why_not(replace(HOPPER, **change))


def test_glm_53_waits_in_groups_of_four() -> None:
    # indexer_types of GLM-5.2 and later: full on 0, 1, 2 and then every fourth layer.
    shares = [layer >= 3 and (layer - 2) % 4 != 0 for layer in range(78)]
    ends = group_ends(shares)
    assert ends[:7] == (0, 1, 5, 5, 5, 5, 9)
    assert ends[-1] == 77
    assert sum(not share for share in shares) == 21


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_every_layer_is_waited_for_before_it_runs_and_no_later_than_its_groups_break(
    rest: list[bool],
) -> None:
    shares = [False, *rest]
    ends = group_ends(shares)
    waited = -1
    for layer, share in enumerate(shares):
        if not share:
            waited = ends[layer]
        assert waited >= layer, "its keys have arrived"
        assert waited == len(shares) - 1 or not shares[waited + 1], "and no further than the next break"
