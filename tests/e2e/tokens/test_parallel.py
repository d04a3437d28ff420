"""Two ranks over gloo: tensor parallel attention and expert parallel MoE give one rank's answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from glm_sglang.oracle import Oracle
from glm_sglang.serving import Server
from tests.e2e.conftest import COMMON, PAGE, TOPK, generate, prompt

LENGTHS = (1, PAGE + 1, 3 * TOPK, 300)


@pytest.fixture(scope="module", params=["tp2", "ep2"])
def two_ranks(request: pytest.FixtureRequest, model: Path) -> Iterator[Server]:
    """A server of two processes: every matrix split (tp2), or whole experts spread over the ranks (ep2)."""
    flags = ["--tp-size", "2", *(["--ep-size", "2"] if request.param == "ep2" else [])]
    with Server(model, (*COMMON, *flags), name=request.param) as server:
        yield server


def test_tokens_equal_the_oracles(two_ranks: Server, model: Path) -> None:
    oracle = Oracle(model)
    for length in LENGTHS:
        ids = prompt(length, 900)
        assert generate(two_ranks.url, ids)["output_ids"] == oracle.greedy(ids, 8), length
