"""The oracle benchmark's own arithmetic: the cases it asks, how it reads a reply, what a mismatch is."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import oracle as bench
from glm_sglang.oracle import Verdict


def test_lengths_surround_the_page_and_the_topk() -> None:
    assert bench.lengths(96) == [1, 63, 64, 65, 95, 96, 97, 288]
    assert bench.lengths(64) == [1, 63, 64, 65, 192]
    assert bench.lengths(1) == [1, 2, 3, 63, 64, 65]


@pytest.mark.parametrize(("length", "pages"), [(1, 0), (64, 0), (65, 64), (128, 64), (129, 128), (288, 256)])
def test_a_prefix_hit_is_whole_pages_and_leaves_a_token(length: int, pages: int) -> None:
    assert bench.reusable(length) == pages


def test_every_length_is_asked_cold_and_cached_alone_and_batched() -> None:
    cases = list(bench.cases(96, 64))
    assert len(cases) == len(set(cases)) == 2 * (8 + 5)
    for batched in (False, True):
        asked = {(case.length, case.cached) for case in cases if case.batched is batched}
        cold = {(length, 0) for length in bench.lengths(96)}
        assert asked == cold | {(65, 64), (95, 64), (96, 64), (97, 64), (288, 256)}


def test_prompts_are_reproducible_and_share_no_page() -> None:
    prompts = [bench.prompt(length, 1) for length in bench.lengths(96)]
    assert [len(ids) for ids in prompts] == bench.lengths(96)
    assert prompts == [bench.prompt(length, 1) for length in bench.lengths(96)]
    assert len({tuple(ids[:64]) for ids in prompts}) == len(prompts)


def answer(ids: list[int], start: int, tokens: list[int]) -> dict[str, Any]:
    """As SGLang answers: logprobs from `start` on, the first of them null."""
    given = [[None if i == start else -0.5 * i, ids[i], None] for i in range(start, len(ids))]
    return {"output_ids": tokens, "meta_info": {"input_token_logprobs": given, "cached_tokens": start}}


@pytest.mark.parametrize("start", [0, 2])
def test_logprobs_are_read_at_their_positions(start: int) -> None:
    ids = [9, 8, 7, 6]
    reply = bench.read(ids, answer(ids, start, [1]))
    assert reply.logprobs == [None if i <= start else -0.5 * i for i in range(4)]
    assert reply.cached_tokens == start


def test_logprobs_of_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="token 8 at position 1, where the prompt has 5"):
        bench.read([9, 5, 7], answer([9, 8, 7], 0, [1]))


VERDICT = Verdict([None, -1.0, -2.0, -3.0], [-0.1, -0.2, -0.3], [4, 5, 6], [0.0, 0.5, 0.001])
CASE = bench.Case(chunk=64, length=4, cached=0, batched=False)


def test_differences_and_mismatches_are_counted() -> None:
    reply = bench.Reply([4, 9, 8], [None, -1.0, -2.25, -3.125], 0)
    row = bench.compare(VERDICT, CASE, reply, tie=0.02)
    assert (row["logprob_diff"], row["mean_logprob_diff"], row["logprobs"]) == (0.25, 0.125, 3)
    assert (row["mismatches"], row["ties"], row["deficits"]) == (1, 1, [0.5, 0.001])


def test_float32_has_no_ties() -> None:
    reply = bench.Reply([4, 9, 8], [None, -1.0, -2.0, -3.0], 0)
    row = bench.compare(VERDICT, CASE, reply, tie=0.0)
    assert (row["mismatches"], row["ties"]) == (2, 0)


def row(**changes: object) -> dict[str, Any]:
    base = bench.compare(VERDICT, CASE, bench.Reply([4, 5, 6], [None, -1.0, -2.0, -3.0], 0), tie=0.0)
    return {"dtype": "float32", **base, **changes}


@pytest.mark.parametrize(
    ("changes", "ok"),
    [
        ({}, True),
        ({"logprob_diff": 9e-5}, True),
        ({"logprob_diff": 2e-4}, False),
        ({"logprob_diff": float("nan")}, False),
        ({"logprob_diff": 2e-4, "dtype": "bf16"}, True),
        ({"logprob_diff": 3e-2, "dtype": "fp8"}, False),
        ({"mismatches": 1}, False),
        ({"cached_tokens": 64}, False),
        ({"cached": 64}, False),
    ],
)
def test_a_case_passes_only_within_every_bound(changes: dict[str, object], ok: bool) -> None:
    assert bench.passed(row(**changes)) is ok


def test_summary_adds_up() -> None:
    rows = [row(), row(logprob_diff=5e-5), row(dtype="bf16", mismatches=2, ties=1, logprob_diff=0.01)]
    result = bench.summary(rows)
    assert (result["cases"], result["cases_wrong"], result["token_mismatches"]) == (3, 1, 2)
    assert result["token_ties"] == {"float32": 0, "bf16": 1}
    assert result["max_logprob_diff"] == {"float32": 5e-5, "bf16": 0.01}
    assert (result["tokens_compared"], result["logprobs_compared"], result["ok"]) == (9, 9, False)
    assert bench.summary([row()])["ok"] is True
