"""`benchmarks.graph_equality`: which company makes an eager step the graph's, what the logs must show, the verdict."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks import _graph_asks, _graph_cases, _graph_steps
from benchmarks._graph_asks import Ask, Case, Seen, Served, check, logged
from benchmarks._graph_cases import GPU, random_sizes
from benchmarks._graph_comparison import JUDGED, Comparison
from benchmarks._graph_steps import DENSE, SPARSE, Request, beside_filler, edges, pages, rows
from benchmarks._graph_tallies import KL_LIMIT, TIE, Answer, Tally, answer, divergence, verdict
from glm_sglang.prefill_graph import arena, dense
from glm_sglang.prefill_graph.buckets import plan

RULES = GPU.rules
LINE = (
    "[2026-12-01 01:19:17] Prefill batch, #new-seq: {}, #new-token: {}, #cached-token: {}, token usage: 0.01, "
    "#running-req: 0, #queue-req: 0, #pending-token: 0, cuda graph: {}, input throughput (token/s): 812.20\n"
)

requests = st.builds(
    Request,
    new=st.integers(1, 4096),
    prefix=st.integers(0, 80).map(lambda count: count * _graph_steps.PAGE),
)
steps = (
    st.lists(requests, min_size=1, max_size=12)
    .map(tuple)
    .filter(lambda step: sum(pages(one.new) for one in step) <= GPU.chunk)
)


# What the rules are held against: the product's own, and SGLang's.


@given(steps)
def test_attention_of_the_graph_is_the_one_that_the_product_chooses(step: tuple[Request, ...]) -> None:
    bucket = RULES.bucket(step)
    assume(bucket is not None)
    held = SimpleNamespace(
        dense_buckets={size for size in RULES.plan.buckets if size <= GPU.limit}, dense_limit=GPU.limit
    )
    batch = SimpleNamespace(
        batch_size=len(step),
        extend_prefix_lens_cpu=[one.prefix for one in step],
        extend_seq_lens_cpu=[one.new for one in step],
    )
    fits = dense.fits(held, batch, bucket)  # type: ignore[arg-type]
    assert RULES.graph_attention(step) == (DENSE if fits else SPARSE)


def test_constants_are_those_of_the_product_and_of_sglang() -> None:
    from sglang.srt.environ import envs
    from sglang.srt.model_executor.runner import prefill_cuda_graph_runner

    assert _graph_steps.DENSE_REQUESTS == arena.REQUESTS
    assert prefill_cuda_graph_runner._MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR == _graph_steps.PADDING
    assert envs.SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD.get() == GPU.limit


@pytest.mark.parametrize(
    ("step", "eager", "graph"),
    [
        ((Request(1920),), DENSE, DENSE),
        ((Request(2048),), DENSE, DENSE),
        ((Request(2049),), SPARSE, SPARSE),
        ((Request(100, 1024),), DENSE, SPARSE),  # a cached prefix: eager expands its keys, a graph cannot
        ((Request(100, 2048),), SPARSE, SPARSE),
        ((Request(100), Request(100, 2048)), SPARSE, SPARSE),  # one long request decides for all
        ((Request(50),) * 8, DENSE, SPARSE),  # more requests than a dense graph has
        ((Request(1500),) * 2, DENSE, SPARSE),  # above the largest bucket with a dense graph
    ],
)
def test_where_eager_and_graph_attend_otherwise(step: tuple[Request, ...], eager: str, graph: str) -> None:
    assert (RULES.eager_attention(step), RULES.graph_attention(step)) == (eager, graph)


# Fillers.


@given(steps)
def test_a_filler_makes_eager_compute_what_the_graph_does(step: tuple[Request, ...]) -> None:
    bucket = RULES.bucket(step)
    assume(bucket is not None)
    padding, room = bucket - rows(step), GPU.chunk - sum(pages(one.new) for one in step)
    turns = RULES.eager_attention(step) != RULES.graph_attention(step)
    if room < pages(padding) or (turns and not padding):
        with pytest.raises(ValueError, match=r"no row of padding|no room"):
            RULES.filler(step)
        return
    filler = RULES.filler(step)
    whole = step if filler is None else (*step, filler)
    assert rows(whole) == bucket
    assert RULES.eager_attention(whole) == RULES.graph_attention(step)
    assert RULES.steps(whole) == [whole]


@given(steps)
def test_a_filler_for_the_rows_alone_leaves_the_attention(step: tuple[Request, ...]) -> None:
    assume(RULES.bucket(step) is not None)
    try:
        filler = RULES.filler(step, attention=False)
    except ValueError:
        assume(False)
    whole = step if filler is None else (*step, filler)
    assert rows(whole) == RULES.bucket(step)
    assert RULES.eager_attention(whole) == RULES.eager_attention(step)
    assert filler is None or not filler.prefix


def test_a_step_without_a_graph_has_no_filler() -> None:
    assert RULES.bucket((Request(3),)) is None  # 8 are more than twice 3
    with pytest.raises(ValueError, match="replays no graph"):
        RULES.filler((Request(3),))


@given(st.integers(1, 20_000), st.one_of(st.none(), st.integers(1, 64)))
def test_a_long_prompt_is_cut_into_chunks_and_company_joins_the_last(tokens: int, more: int | None) -> None:
    asked = [Request(tokens)] + ([Request(more)] if more else [])
    last = pages(tokens) % GPU.chunk or GPU.chunk
    assume(more is None or last + pages(more) <= GPU.chunk)
    done = RULES.steps(asked)
    assert sum(map(rows, done)) == tokens + (more or 0)
    assert all(rows(step) == GPU.chunk for step in done[:-1])
    assert all(step[0].prefix == GPU.chunk * number for number, step in enumerate(done))
    assert len(done) == -(-tokens // GPU.chunk)
    assert more is None or done[-1][1:] == (Request(more),)


def test_a_list_that_does_not_fit_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit a step"):
        RULES.steps([Request(3000), Request(3000)])


@given(st.lists(st.integers(1, 64), min_size=1))
def test_the_head_multiplies_as_many_rows_with_a_filler_as_without(kept: list[int]) -> None:
    assume(max(kept) > 1)
    assert sum([*beside_filler(kept), 1]) == sum(kept)
    assert min(beside_filler(kept)) >= 1


def test_edges() -> None:
    assert list(edges([8, 9, 16])) == [7, 8, 9, 10, 15, 16, 17]


def test_every_list_of_a_run_is_a_step_or_ends_with_one() -> None:
    """And all but two have company: those two fill the chunk's pages."""
    alone = []
    for setting in (GPU, _graph_cases.REFERENCE):
        for kind, prompts, prefix in _graph_cases.lists(setting):
            case = Case(number=0, kind=kind, prompts=tuple(map(tuple, prompts)), prefix=tuple(prefix))
            *chunks, last = setting.rules.steps(case.requests)
            assert kind in ("over several chunks", "at a bucket") or not chunks
            if setting is GPU and setting.rules.bucket(last) is not None:
                try:
                    setting.rules.filler(last)
                except ValueError:
                    alone.append((kind, rows(last)))
    assert alone == [("at a bucket", 4097), ("at a bucket", GPU.chunk - 1)]


def test_random_lists_leave_room_for_every_filler() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        step = tuple(map(Request, random_sizes(rng, GPU.room)))
        assert RULES.steps(step) == [step]
        if RULES.bucket(step) not in (None, rows(step)):
            RULES.filler(step)


# Steps in the log.


def test_batch_lines_with_and_without_a_reason() -> None:
    text = "noise\n" + LINE.format(2, 700, 64, "True") + "Decode batch, #running-req: 1\n"
    text += LINE.format(1, 3, 0, "False (more padding than rows: 3 tokens in a bucket of 8)")
    assert logged(text) == [(Seen(2, 700, 64), True), (Seen(1, 3, 0), False)]


def test_a_log_is_read_on_from_its_last_whole_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_graph_asks, "LOG_SECONDS", 0.0)
    log, line = tmp_path / "log", LINE.format(1, 100, 0, "True")
    arm = Served("ours", SimpleNamespace(log=log))  # type: ignore[arg-type]
    log.write_text(line + line[:70])
    assert arm.steps(2) == [(Seen(1, 100, 0), True)]
    log.write_text(line + line.replace("True", "False (LoRA)"))
    assert arm.steps(1) == [(Seen(1, 100, 0), False)]
    assert (arm.made, arm.replayed) == (2, 1)


def ask(*sizes: int, number: int = 0, prefix: int = 0, **more: Any) -> Ask:
    ids = tuple((1,) * (prefix + size) for size in sizes)
    case = Case(number=number, kind="k", prompts=ids, prefix=(1,) * prefix, **more)
    return Ask(case, SimpleNamespace(filled=True), expected=[Seen(len(sizes), sum(sizes), prefix)])  # type: ignore[arg-type]


def test_two_lists_in_one_step_are_noticed_and_others_are_not_blamed() -> None:
    asks = [ask(100), ask(20, 30), ask(7)]
    check(asks, [(Seen(3, 150, 0), True), (Seen(1, 7, 0), False)])
    assert [one.sure for one in asks] == [False, False, True]
    assert asks[2].graph is False


def test_lists_of_one_shape_are_sure_together_or_not_at_all() -> None:
    asks = [ask(100), ask(100), ask(5)]
    check(asks, [(Seen(1, 100, 0), True), (Seen(1, 100, 0), True), (Seen(1, 5, 0), True)])
    assert [(one.sure, one.graph) for one in asks] == [(True, True)] * 3
    check(asks, [(Seen(1, 100, 0), True), (Seen(2, 105, 0), True)])
    assert not any(one.sure for one in asks)
    check(asks, [(Seen(1, 100, 0), True), (Seen(1, 100, 0), False), (Seen(1, 5, 0), True)])
    assert [one.sure for one in asks] == [False, False, True]


class Scheduler(Served):
    """Answers nothing of use; keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__("fake", SimpleNamespace())  # type: ignore[arg-type]
        self.calls: list[tuple[Any, ...]] = []

    def generate(self, prompts: Any, key: Any, starts: Any, new: Any) -> list[dict[str, Any]]:
        self.calls.append((prompts, list(key), list(starts), list(new)))
        return [META for _ in prompts]


META = {
    "input_token_logprobs": [[None, 5, None], [-0.5, 6, None]],
    "output_token_logprobs": [[-0.1, 9, None]],
    "output_top_logprobs": [[[-0.1, 9, None], [-3.0, 4, None]]],
}


def test_an_ask_fills_its_prefix_then_asks_a_list_whose_head_has_as_many_rows() -> None:
    arm = Scheduler()
    prefix = tuple(range(200)) * 5  # 1000 tokens, 960 of them in whole pages
    prompts = ((*prefix, *([7] * 100)), (3,) * 50)
    case = Case(number=0, kind="k", prompts=prompts, prefix=prefix, keep=64, new_tokens=4)
    assert case.requests == (Request(140, 960), Request(50))
    filler = RULES.filler(case.requests)
    assert filler == Request(192 - 190, pages(GPU.limit + 1))
    for _ in range(2):
        one = Ask(case, arm, filler)
        one.run(RULES)
    first, long, whole, second, again = arm.calls  # the fillers' prefix is asked once
    assert (first[0], long[1]) == ([prefix], ["filler"])
    assert len(long[0][0]) == filler.prefix
    assert whole[0][:2] == list(prompts)
    assert whole[0][2][: filler.prefix] == long[0][0]
    assert whole[0][2] != again[0][2], "its new text is never cached"
    assert first[1] == [whole[1][0]] != [again[1][0]] == second[1]
    rows_of_head = [len(ids) - start for ids, start in zip(whole[0], whole[2], strict=True)]
    assert rows_of_head == [63, 50, 1]
    assert whole[3] == [4, 4, 1]
    assert one.expected == [Seen(1, 1000, 0), Seen(3, 192, 960 + filler.prefix)]


def test_what_no_filler_joins_is_asked_as_it_is() -> None:
    arm = Scheduler()
    case = Case(number=0, kind="k", prompts=((3,) * 9000,), keep=64)
    one = Ask(case, arm)
    one.run(RULES)
    assert [start for *_, (start,), _ in arm.calls] == [9000 - 64]
    assert one.expected == [Seen(1, GPU.chunk, 0), Seen(1, 9000 - GPU.chunk, 0)]


# Tallies and the verdict.


def said(*tokens: int, gap: float = 1.0, p: float = 0.5, inputs: tuple[float, ...] = (-1.0,)) -> Answer:
    leads = tuple(((token, -0.1), (99, -0.1 - gap)) for token in tokens)
    return Answer(inputs, {1: math.log(p), 2: math.log(1 - p)}, tokens, leads)


def test_divergence_of_two_coins() -> None:
    fair, loaded = said(1).top, said(1, p=0.9).top
    assert divergence(fair, fair) == pytest.approx(0.0, abs=1e-12)
    law = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert divergence(fair, loaded) == pytest.approx(law, rel=1e-6)


def test_an_answer_is_read() -> None:
    read = answer(META)
    assert (read.inputs, read.tokens, read.top) == ((-0.5,), (9,), {9: -0.1, 4: -3.0})
    assert read.gap(0) == pytest.approx(2.9)


def test_logprobs_are_compared_from_the_end() -> None:
    tally = Tally()
    assert tally.add(said(1, inputs=(-9.0, -2.0, -3.0)), said(1, inputs=(-2.0, -3.0)))
    assert (tally.delta_max, tally.identical) == (0.0, 1)
    assert not tally.add(said(1, inputs=(-2.0, -3.5)), said(1, inputs=(-9.0, -2.0, -3.0)))
    assert (tally.delta_max, tally.identical) == (0.5, 1)


@pytest.mark.parametrize(
    ("mine", "yours", "equal"),
    [
        (said(1, 2), said(1, 2), True),
        (said(1, 2), said(1, 3), False),  # another token
        (said(1, 2), said(1, 3, gap=TIE / 2), True),  # at a tie
        (said(1, 2, p=0.5), said(1, 2, p=0.6), False),  # KL 0.0204
        (said(1, 2, p=0.5), said(1, 2, p=0.51), True),  # KL 0.0002
    ],
)
def test_one_prompt_of_many_decides(mine: Answer, yours: Answer, equal: bool) -> None:
    tally = Tally()
    for _ in range(100):
        tally.add(said(1, 2), said(1, 2))
    tally.add(mine, yours)
    found = verdict([tally, Tally()])
    assert found["equal"] is equal
    assert found["prompts"] == 101
    assert found["kl_mean"] < KL_LIMIT  # the mean alone would let all of them pass


def test_nothing_asked_is_no_verdict() -> None:
    assert verdict([Tally()])["equal"] is None


def roles(**answers: Answer) -> dict[str, Ask]:
    """One prompt of 100 new tokens behind 960: eager alone attends densely, the graph sparsely."""
    found = {}
    for role, said_ in answers.items():
        found[role] = ask(100, prefix=960)
        found[role].filler = RULES.filler(found[role].case.requests) if role in ("same", "again") else None
        found[role].answers, found[role].sure, found[role].graph = [said_], True, role == "graph"
    return found


def test_eager_alone_says_something_else_but_eager_as_the_graph_does_not() -> None:
    comparison = Comparison(GPU)
    assert comparison.take(roles(graph=said(1), same=said(1), again=said(1), alone=said(2), rows=said(2)))
    found = comparison.report()
    assert found["equal"] is True
    assert found["where_eager_repeats_to_the_bit"] == {"prompts": 1, "graph_identical_too": 1}
    others = {name: by["k"]["other_tokens"] for name, by in found["by_kind"].items()}
    assert others == {
        "graph_against_eager_as_the_graph": 0,
        "eager_as_the_graph_against_itself": 0,
        "graph_against_eager_alone": 1,
        "eager_as_the_graph_against_eager_alone": 1,
        "eager_at_the_rows_against_eager_alone": 0,
    }
    assert list(found["by_attention"][JUDGED]) == ["graph sparse, eager alone dense"]
    detail = found["other_tokens_in_detail"][0]
    assert (detail["tokens"], detail["rows"], detail["bucket"], detail["cached"]) == ([1, 2], 100, 128, [960])
    assert detail["leads"]["alone"][0] == (2, -0.1)


def test_a_wrong_graph_is_not_excused_by_its_company() -> None:
    comparison = Comparison(GPU)
    comparison.take(roles(graph=said(1), same=said(2), again=said(2), alone=said(2), rows=said(2)))
    assert comparison.report()["equal"] is False
    assert comparison.report()["where_eager_repeats_to_the_bit"] == {"prompts": 1, "graph_identical_too": 0}


@pytest.mark.parametrize("what", ["another step", "no replay"])
def test_what_did_not_run_as_meant_is_told_and_not_compared(what: str) -> None:
    comparison = Comparison(GPU)
    asked = roles(graph=said(1), same=said(1))
    if what == "no replay":
        asked["graph"].graph = False
    else:
        asked["same"].sure = False
    assert not comparison.take(asked)
    assert comparison.report()["equal"] is None
    assert len(comparison.report()["steps_not_as_meant"]) == 1


def test_an_eager_step_of_the_graph_arm_is_no_graph() -> None:
    comparison = Comparison(GPU)
    case = Case(number=0, kind="k", prompts=((1, 2, 3),))
    arm = Scheduler()
    asked = comparison.asks(case, arm, arm, every_way=True)
    assert set(asked) == {"graph", "alone"}
    for one in asked.values():
        one.answers, one.sure = [said(1)], True
    assert comparison.take(asked)
    found = comparison.report()
    assert found["equal"] is None
    assert list(found["by_kind"]) == ["graph_arm_ran_eagerly_against_eager_alone"]
    assert sum(found["told_apart"].values()) == 1


def test_the_plan_of_the_run_is_the_planners() -> None:
    assert RULES.plan == plan(GPU.chunk, dense=2048)
    assert GPU.room + pages(RULES.plan.bucket(GPU.room) - GPU.room) <= GPU.chunk  # type: ignore[operator]
    assert _graph_asks.TOP > 2
