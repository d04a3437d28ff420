"""--glm-verify-graphs in two ranks, over SGLang's own capture batches, padding and runners: nothing differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm_sglang.prefill_graph import buckets
from tests.unit.prefill_graph.cp_kernels import PAGE
from tests.unit.prefill_graph.cp_rank import RANKS, TOPK, Rank
from tests.unit.prefill_graph.ranks import both
from tests.unit.prefill_graph.tp_rank import TensorParallelRank


@pytest.mark.parametrize("impl", ["flashmla_sparse", "flashmla_kv"])
@pytest.mark.parametrize(("kind", "cp_size"), [(Rank, RANKS), (TensorParallelRank, 1)])
def test_every_bucket_full_and_one_row_short(
    tmp_path: Path, kind: type[Rank], cp_size: int, impl: str
) -> None:
    plan = (TOPK, *buckets.plan(128, cp_size=cp_size).buckets)
    for answer in both(tmp_path / "store", kind, plan, impl, {}):
        assert isinstance(answer, list), answer[1]
        steps = [(bucket, tokens, 0) for bucket in plan for tokens in (bucket - 1, bucket)]
        steps.insert(2, (TOPK, TOPK, PAGE))  # fresh, its rows select all of their keys
        assert [(bucket, tokens, prefix) for bucket, tokens, prefix, _ in answer] == steps
        assert max(kl for *_, kl in answer) < 1e-9
