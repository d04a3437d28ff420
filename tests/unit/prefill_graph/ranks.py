"""Two processes over gloo, each a rank with SGLang's runners: what they see of the same steps."""

from __future__ import annotations

import io
import multiprocessing
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.unit.prefill_graph.cp_rank import RANKS, Rank, Step, load

BOUND_S = 120  # of a hang; all steps take a second


def serve(
    rank: int,
    store: str,
    pipe: Connection,
    kind: type[Rank],
    buckets: Sequence[int],
    impl: str,
    without: Sequence[str],
    steps: dict[str, Step],
) -> None:
    """What this rank sees of every step (of one without context parallelism, whether it replays), or why it ended."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=BOUND_S)
    )
    try:
        here = kind(rank, buckets, impl, without)
        found: Any = (
            here.verified()
            if not steps
            else {
                name: (here.run(step, graph=False), here.run(step, graph=True))
                if step.tokens >= RANKS
                else here.replays(step)
                for name, step in steps.items()
            }
        )
    except Exception as error:
        found = (str(error), traceback.format_exc())
    answer = io.BytesIO()
    torch.save(found, answer)
    pipe.send_bytes(answer.getvalue())
    pipe.poll(BOUND_S)  # the other rank may still be in the last collective; the end is `both`'s


def both(
    store: Path,
    kind: type[Rank],
    buckets: Sequence[int],
    impl: str,
    steps: dict[str, Step],
    *,
    without: Sequence[str] = (),
) -> list[Any]:
    """Both ranks' answers, in rank order; `without` these hooks. Without steps: what --glm-verify-graphs compares."""
    load()
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=serve, args=(rank, str(store), theirs, kind, buckets, impl, without, steps)
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        answers = []
        for pipe in pipes:
            assert pipe.poll(BOUND_S), f"no answer within {BOUND_S} s"
            answers.append(torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False))
        return answers
    finally:
        for process in processes:
            process.kill()
            process.join()


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
