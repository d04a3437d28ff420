"""Two gloo ranks give what one rank gives, for uneven, empty and refused batches. One pair serves all."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from glm_kernels.mega_moe import (
    Arithmetic,
    ExpertWeights,
    calc_diff,
    mega_moe_reference,
    plan_for_ranks,
)
from mega_moe_cases import ROUTINGS, SCALING, Tokens, checkpoint, requantized, shard, tokens

RANKS, EXPERTS, TOP_K = 2, 6, 3
BOUND_S = 60  # of a hang; a case takes milliseconds


def weights_for(arithmetic: Arithmetic) -> ExpertWeights:
    weights = checkpoint(31, EXPERTS)
    return requantized(weights) if arithmetic is Arithmetic.SM100 else weights


def run(batch: Tokens, weights: ExpertWeights, arithmetic: Arithmetic, **options: Any) -> torch.Tensor:
    return mega_moe_reference(
        batch.x,
        batch.ids,
        batch.weights,
        weights,
        arithmetic=arithmetic,
        routed_scaling_factor=SCALING,
        **options,
    )


# --- what the ranks do: module-level functions, sent by name ---


def on_rank(rank: int, arithmetic: Arithmetic, batches: list[Tokens]) -> torch.Tensor:
    return run(batches[rank], shard(weights_for(arithmetic), rank, RANKS), arithmetic, group=dist.group.WORLD)


def in_chunks(rank: int, arithmetic: Arithmetic, batches: list[Tokens], capacity: int) -> torch.Tensor:
    """One call per chunk of a plan from all ranks' counts; a rank without tokens makes every call too."""
    mine, weights = batches[rank], shard(weights_for(arithmetic), rank, RANKS)
    plan = plan_for_ranks([len(batch.x) for batch in batches], capacity)
    shares = [mine[plan.rows(len(mine.x), chunk)] for chunk in range(plan.count)]
    assert all(len(share.x) <= capacity for share in shares)
    return torch.cat([run(share, weights, arithmetic, group=dist.group.WORLD) for share in shares])


def serve(rank: int, store: Path, pipe: Connection) -> None:
    """Answers (function, arguments) with its result or its exception, until the other end closes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=BOUND_S)
    )
    while True:
        try:
            work, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((work(rank, *arguments), None))
        except ValueError as refused:
            pipe.send((None, str(refused)))
        except Exception:
            pipe.send((None, f"crashed: {traceback.format_exc()}"))
    dist.destroy_process_group()


class Pair:
    """Both ranks, asked at once: their results and their refusals, in rank order."""

    def __init__(self, store: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, store, theirs))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def ask(self, work: Callable[..., Any], *arguments: Any) -> list[tuple[Any, str | None]]:
        for pipe in self.pipes:
            pipe.send((work, arguments))
        answers: dict[int, tuple[Any, str | None]] = {}
        while len(answers) < RANKS:
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            ready = wait(waiting, BOUND_S)
            assert ready, f"no answer within {BOUND_S} s; answered: {sorted(answers)}"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                answer = pipe.recv()
                assert not (answer[1] or "").startswith("crashed"), answer[1]
                answers[self.pipes.index(pipe)] = answer
        return [answers[rank] for rank in range(RANKS)]

    def results(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        answers = self.ask(work, *arguments)
        assert [refusal for _, refusal in answers] == [None] * RANKS
        return [result for result, _ in answers]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(BOUND_S)
            if process.is_alive():
                process.kill()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    ranks = Pair(tmp_path_factory.mktemp("gloo") / "store")
    yield ranks
    ranks.close()


@pytest.fixture(scope="module", autouse=True)
def threads_of_a_rank() -> Iterator[None]:
    """A matrix product's order of summation depends on its threads; equal bits need as many here as in a rank."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def joined(batches: list[Tokens]) -> Tokens:
    return Tokens(*(torch.cat([getattr(b, name) for b in batches]) for name in ("x", "ids", "weights")))


@pytest.mark.parametrize("arithmetic", list(Arithmetic))
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("counts", [(20, 20), (33, 5), (0, 17), (17, 0), (1, 0), (0, 0)])
def test_two_ranks_equal_one(
    pair: Pair, arithmetic: Arithmetic, routing: str, counts: tuple[int, int]
) -> None:
    """Bit for bit: an expert sees the same rows in the same order as if one rank held everything."""
    batches = [tokens(40 + r, count, EXPERTS, TOP_K, routing=routing) for r, count in enumerate(counts)]
    alone = run(joined(batches), weights_for(arithmetic), arithmetic)
    assert torch.equal(torch.cat(pair.results(on_rank, arithmetic, batches)), alone)


@pytest.mark.parametrize("arithmetic", list(Arithmetic))
def test_a_context_parallel_split_gives_the_sequences_rows(pair: Pair, arithmetic: Arithmetic) -> None:
    """CP2 + EP2: rank r holds every second token of one sequence."""
    whole = tokens(50, 37, EXPERTS, TOP_K)
    parts = pair.results(on_rank, arithmetic, [whole[slice(r, None, RANKS)] for r in range(RANKS)])
    alone = run(whole, weights_for(arithmetic), arithmetic)
    for rank, part in enumerate(parts):
        assert calc_diff(part, alone[rank::RANKS]) <= 1e-6


@pytest.mark.parametrize("arithmetic", list(Arithmetic))
@pytest.mark.parametrize("counts", [(40, 9), (0, 40), (40, 40)])
def test_chunks_give_the_whole_batch(pair: Pair, arithmetic: Arithmetic, counts: tuple[int, int]) -> None:
    batches = [tokens(60 + r, count, EXPERTS, TOP_K) for r, count in enumerate(counts)]
    whole = pair.results(on_rank, arithmetic, batches)
    for chunked, once in zip(pair.results(in_chunks, arithmetic, batches, 16), whole, strict=True):
        assert calc_diff(chunked, once) <= 1e-6


def test_one_ranks_bad_routing_ends_the_call_on_both_and_nothing_more(pair: Pair) -> None:
    batches = [tokens(70 + r, 8, EXPERTS, TOP_K) for r in range(RANKS)]
    bad = batches[1].ids.clone()
    bad[3, 1] = EXPERTS
    refused = [batches[0], Tokens(batches[1].x, bad, batches[1].weights)]
    (_, first), (_, second) = pair.ask(on_rank, Arithmetic.SM90, refused)
    assert first == "rank 1 of the EP group refused its routing: see that rank's error"
    assert second == "expert ids span [0, 6]; allowed are -1 (masked) and [0, 6)"
    alone = run(joined(batches), weights_for(Arithmetic.SM90), Arithmetic.SM90)
    assert torch.equal(torch.cat(pair.results(on_rank, Arithmetic.SM90, batches)), alone)


def test_a_group_and_an_offset_exclude_each_other() -> None:
    batch = tokens(80, 2, EXPERTS, TOP_K)
    with pytest.raises(ValueError, match="not both"):
        run(batch, weights_for(Arithmetic.SM90), Arithmetic.SM90, group=object(), expert_offset=0)
