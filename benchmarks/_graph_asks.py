"""Lists of prompts as prefill steps that are known beforehand, and the check that a server's log has those steps.

One /generate call with a list of `input_ids` is one message to the scheduler, which takes all of a list before it makes
a batch. So an idle server, or one that is at work on one other list, makes one step of a list that fits a chunk; two
lists that reach an idle server at once would be one step, so there is a gap between them.
Nothing is assumed of it: each window of asks is held against the batch lines that the server logged meanwhile.

Every ask has a cache key of its own, so the same prompts are new each time, and a prefix is cached where the same key
has asked it before. UPSTREAM: TokenizerManager._should_use_batch_tokenization, Scheduler.handle_batch_generate_request,
GenerateReqInput.extra_key, SchedulerMetricsReporter.report_prefill_stats.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from benchmarks._graph_steps import PAGE, Request, Rules, Step, beside_filler, logprob_rows, rows
from benchmarks._graph_tallies import Answer, answer
from benchmarks._idle_steps import prompt
from glm_sglang.serving import Server

TOP = 20  # logprobs of the likeliest tokens, from which the divergence is computed
LOG_SECONDS = 5.0  # until a batch's line is in the log: it is written behind the answers
# Of a batch line: requests, new and cached tokens, whether a graph ran.
_LINE = re.compile(
    r"Prefill batch\b.*?#new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+),.* graph: (\w+)"
)
_numbers = itertools.count()


class Seen(NamedTuple):
    """A step as the log has it."""

    requests: int
    new: int
    cached: int

    @classmethod
    def of(cls, step: Step, continued: bool = False) -> Seen:
        """As this step will be logged; of a chunked prompt's later chunks what is cached doesn't count."""
        counted = step[1:] if continued else step
        return cls(len(step), rows(step), sum(request.prefix for request in counted))


def logged(text: str) -> list[tuple[Seen, bool]]:
    """Prefill steps in a server's log, and whether each replayed a graph."""
    return [
        (Seen(*map(int, (requests, new, cached))), graph == "True")
        for requests, new, cached, graph in _LINE.findall(text)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Prompts of one list, some of them behind a `prefix` that was asked before.

    keep  last rows of each prompt of which logprobs are asked; new_tokens  greedy ones of each prompt.
    """

    number: int
    kind: str
    prompts: tuple[tuple[int, ...], ...]
    prefix: tuple[int, ...] = ()
    keep: int = 64
    new_tokens: int = 4

    @property
    def requests(self) -> tuple[Request, ...]:
        """The list as the scheduler gets it: of the prefix whole pages are cached."""
        held = len(self.prefix) // PAGE * PAGE
        cached = [held if held and ids[: len(self.prefix)] == self.prefix else 0 for ids in self.prompts]
        return tuple(Request(len(ids) - held, held) for ids, held in zip(self.prompts, cached, strict=True))


@dataclass(slots=True)
class Served:
    """A server, and what its log said so far. `gap_s`: between two lists, until the first one is no longer waiting."""

    name: str
    server: Server
    gap_s: float = 0.0
    client: httpx.Client = field(init=False)
    read_to: int = 0
    filled: bool = False  # the fillers' prefix was asked
    filling: threading.Lock = field(default_factory=threading.Lock)
    sending: threading.Lock = field(default_factory=threading.Lock)
    sent: float = 0.0
    made: int = 0  # steps logged
    replayed: int = 0  # of these

    def __post_init__(self) -> None:
        self.client = httpx.Client(timeout=300.0, trust_env=False)  # the first of a shape compiles

    def generate(
        self, prompts: Sequence[Sequence[int]], key: Sequence[str], starts: Sequence[int], new: Sequence[int]
    ) -> list[dict[str, Any]]:
        """meta_info of each prompt of one call. Raises for an answer that is not 200."""
        body = {
            "input_ids": [list(ids) for ids in prompts],
            "sampling_params": [
                {"temperature": 0, "max_new_tokens": count, "ignore_eos": True} for count in new
            ],
            "return_logprob": True,
            "logprob_start_len": list(starts),
            "top_logprobs_num": TOP,
            "extra_key": list(key),
        }
        with self.sending:
            time.sleep(max(0.0, self.sent + self.gap_s - time.monotonic()))
            self.sent = time.monotonic()
        found = self.client.post(self.server.url + "/generate", json=body)
        found.raise_for_status()
        return [each["meta_info"] for each in found.json()]

    def steps(self, expected: int) -> list[tuple[Seen, bool]]:
        """Those logged since the last call, once there are as many as expected, or after a wait."""
        ends = time.monotonic() + LOG_SECONDS
        while True:
            with self.server.log.open("rb") as log:
                log.seek(self.read_to)
                data = log.read()
            data = data[: data.rfind(b"\n") + 1]
            found = logged(data.decode(errors="replace"))
            if len(found) >= expected or time.monotonic() > ends:
                self.read_to += len(data)
                self.made += len(found)
                self.replayed += sum(graph for _, graph in found)
                return found
            time.sleep(0.01)


@dataclass(slots=True)
class Ask:
    """One case for one server, with or without company; afterwards its answers and the steps that it must have made."""

    case: Case
    arm: Served
    filler: Request | None = None
    answers: list[Answer] = field(default_factory=list)
    expected: list[Seen] = field(default_factory=list)
    sure: bool = False  # the log has these steps, and no others that they could be
    graph: bool = False  # of the last step

    def run(self, rules: Rules) -> None:
        """Ask; first the prefixes that must be cached."""
        case, number = self.case, next(_numbers)
        key = f"ask{number}"
        if case.prefix:
            self._fill(rules, key, case.prefix)
        requests = list(case.requests)
        prompts: list[Sequence[int]] = list(case.prompts)
        keys, new = [key] * len(prompts), [case.new_tokens] * len(prompts)
        kept = logprob_rows([request.new for request in requests], case.keep)
        if self.filler is not None:
            if self.filler.prefix:
                with self.arm.filling:
                    if not self.arm.filled:
                        self._fill(rules, "filler", prompt("filler", self.filler.prefix))
                        self.arm.filled = True
            text = prompt(f"filler{number}", self.filler.new)
            prompts.append([*prompt("filler", self.filler.prefix), *text])
            requests.append(self.filler)
            keys.append("filler")
            new.append(1)
            kept = [*beside_filler(kept), 1]
        starts = [len(ids) - count for ids, count in zip(prompts, kept, strict=True)]
        found = self.arm.generate(prompts, keys, starts, new)
        self._expect(rules, requests)
        self.answers = [answer(meta) for meta in found[: len(case.prompts)]]

    def _fill(self, rules: Rules, key: str, ids: Sequence[int]) -> None:
        self.arm.generate([ids], [key], [len(ids) - 1], [1])
        self._expect(rules, [Request(len(ids))])

    def _expect(self, rules: Rules, requests: Sequence[Request]) -> None:
        steps = rules.steps(requests)
        self.expected += [Seen.of(step, continued=number > 0) for number, step in enumerate(steps)]


def run(asks: Sequence[Ask], rules: Rules, lanes: int) -> None:
    """All of them, each server's in their order, at most `lanes` at once for each; then hold them against the logs."""
    by_arm: dict[str, list[Ask]] = defaultdict(list)
    for ask in asks:
        by_arm[ask.arm.name].append(ask)
    pools = [ThreadPoolExecutor(lanes) for _ in by_arm]
    try:
        running = [
            pool.submit(ask.run, rules)
            for pool, own in zip(pools, by_arm.values(), strict=True)
            for ask in own
        ]
        for future in running:
            future.result()
    finally:
        for pool in pools:
            pool.shutdown(cancel_futures=True)
    for own in by_arm.values():
        check(own, own[0].arm.steps(sum(len(ask.expected) for ask in own)))


def check(asks: Iterable[Ask], steps: Sequence[tuple[Seen, bool]]) -> None:
    """Mark which asks made their steps. Two lists in one step are a step that nobody expects, and both lack theirs.

    Of asks that expect the same step all are sure or none is; so are those of a step that both replayed and did not.
    """
    asks = list(asks)
    expected = Counter(step for ask in asks for step in ask.expected)
    found: dict[Seen, list[bool]] = defaultdict(list)
    for step, graph in steps:
        found[step].append(graph)
    for ask in asks:
        ask.sure = bool(ask.expected) and all(len(found[step]) == expected[step] for step in ask.expected)
        last = found[ask.expected[-1]] if ask.expected else []
        ask.graph = bool(last) and all(last)
        ask.sure = ask.sure and len(set(last)) == 1
        if not ask.sure and ask.filler is not None and ask.filler.prefix:
            ask.arm.filled = False  # the pool may have lost it
