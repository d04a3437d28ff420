"""Which lists of prompts graph and eager are asked, and the sizes of a run."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks._graph_steps import PAGE, Rules, edges, pages
from benchmarks._idle_steps import prompt
from glm_sglang.prefill_graph.buckets import plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Sizes of one run, in tokens.

    prefixes, tails  cached text, and new text behind it; rests  last chunks, after one, two, three whole ones;
    together         how many requests are one list; gap_s  between two lists for one server.
    """

    chunk: int
    limit: int
    prefixes: tuple[int, ...]
    tails: tuple[int, ...]
    rests: tuple[int, ...]
    together: tuple[int, ...]
    model: tuple[str, ...]
    flags: tuple[str, ...]
    graphs: bool = True
    gap_s: float = 0.005

    @property
    def rules(self) -> Rules:
        """With the buckets that the planner makes for this chunk."""
        return Rules(plan=plan(self.chunk, dense=self.limit), chunk=self.chunk, limit=self.limit)

    @property
    def room(self) -> int:
        """Tokens of a list, in whole pages, beside which the chunk has room for a filler."""
        return self.chunk * 8 // 9 // PAGE * PAGE


GPU = Setting(
    chunk=4608,  # the largest bucket; the next ones below pad up to 4,096 and leave room for a filler
    limit=2048,
    prefixes=(64, 1000, 2048, 5000),
    tails=(100, 433, 766, 1099),
    rests=(300, 1777, 2700),
    together=(2, 3, 5, 7, 8, 12),
    model=("--preset", "gpu", "--dtype", "fp8", "--layers", "6", "--indexer-types", "FSFSSF"),
    flags=(
        "--max-prefill-tokens=9216",
        "--max-running-requests=64",
        "--max-total-tokens=262144",
        "--mem-fraction-static=0.7",
        "--cuda-graph-backend-decode=disabled",
        "--disable-custom-all-reduce",
        "--enforce-disable-flashinfer-allreduce-fusion",
        "--watchdog-timeout=400",
    ),
)
REFERENCE = Setting(
    chunk=256,
    limit=64,
    prefixes=(64, 100),
    tails=(5, 30),
    rests=(20, 100),
    together=(2, 3),
    model=("--preset", "cpu", "--dtype", "float32", "--layers", "2"),
    flags=("--max-total-tokens=16384", "--max-running-requests=16"),
    graphs=False,
    gap_s=0.05,
)


def lists(setting: Setting) -> Iterator[tuple[str, list[list[int]], list[int]]]:
    """Kind, prompts and cached prefix of every list that is not random."""
    rng = random.Random("lists")
    for tokens in edges(setting.rules.plan.buckets):
        yield "at a bucket", [prompt(f"edge{tokens}", tokens)], []
    for round_ in range(2):
        for wanted in setting.together:
            count = min(wanted, setting.room // PAGE)
            most = setting.room // count // PAGE * PAGE
            sizes = [rng.randint(1, most) for _ in range(count)]
            ids = [prompt(f"many{round_}.{wanted}.{i}", size) for i, size in enumerate(sizes)]
            yield "several requests", ids, []
    for shared in setting.prefixes:
        prefix = prompt(f"prefix{shared}", shared)
        ids = [prompt(f"tail{shared}.{tail}", tail, prefix) for tail in setting.tails]
        for one in ids:
            yield "cached prefix", [one], prefix
        yield "cached prefix, several requests", ids, prefix
        yield "cached prefix, one of several", [ids[0], prompt(f"fresh{shared}", setting.tails[-1])], prefix
    for chunks, rest in enumerate(setting.rests, 1):
        tokens = chunks * setting.chunk + rest
        yield "over several chunks", [prompt(f"long{tokens}", tokens)], []


def random_sizes(rng: random.Random, room: int) -> list[int]:
    """Tokens of the requests of one list: `room` at most in whole pages; small ones as likely as large ones, or not."""
    while True:
        count = rng.choice((1, 1, 1, 2, 3, 4, 8))
        if rng.random() < 0.5:
            sizes = [int(math.exp(rng.uniform(math.log(4), math.log(room)))) for _ in range(count)]
        else:
            sizes = [rng.randint(1, max(1, room // count)) for _ in range(count)]
        if sum(map(pages, sizes)) <= room:
            return sizes
