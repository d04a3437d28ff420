"""What this project measures: every question has a line on the page that no result answers it, until one does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """In words; `changes`: which of the article's five it is about."""

    words: str
    changes: tuple[int, ...] = ()

    def __str__(self) -> str:
        if not self.changes:
            return self.words
        numbers = ", ".join(map(str, self.changes))
        return f"{self.words} (change{'s' if len(self.changes) > 1 else ''} {numbers} of the article)"


_ALL = (1, 2, 3, 4, 5)
#: By kind of result, or by the question that a result names.
QUESTIONS: dict[str, Question] = {
    "ab": Question("requests to endpoints side by side"),
    "ablation": Question("each of the five changes alone, all, none", _ALL),
    "node": Question("all five changes on eight GPUs", _ALL),
    "roofline": Question("the share of the hardware's roof"),
    "accuracy": Question("the same answers as stock"),
    "decode_fanin": Question("what survives the handoff to decode, and how many streams one decode carries"),
    "moe_layer": Question("the MegaMoE layer against all-gather, GEMMs, reduce-scatter", (1,)),
    "moe_server": Question("a server's prefill with MegaMoE, and its answers against stock's", (1,)),
    "gpu_idle": Question("how much of a prefill step the GPU waits, with and without graphs", (2,)),
    "graph_equality": Question("the same answers from prefill graphs", (2,)),
    "executor_survival": Question("workers that outlive cancelled callers", (3,)),
    "executor_cascade": Question("what one stall of the store costs callers, request by request", (3,)),
    "stalled_valkey": Question("hits of second turns while Valkey stalls", (3,)),
    "stalled_valkey_sweep": Question("the same by length of the stalls, arrivals and deadline", (3,)),
    "async_save": Question("what saving pages costs a prefill step, and what loading them saves", (4,)),
    "cache_soak": Question("a cache that stays right and lets go of everything under mixed load", (3, 4, 5)),
    "lookup_latency": Question("what a cache lookup costs", (5,)),
    "store_bandwidth": Question("bytes a second into and out of Valkey"),
    "sibling_gets": Question("what ranks gain by getting each page once and copying the others'"),
    "page_cost": Question("interpreter time that a page costs the scheduler's thread"),
    "oracle": Question("tokens and logprobs against transformers"),
    "ab_client": Question("up to how many streams the client adds little"),
    "ab_statistics": Question("a server against itself: how often a verdict is wrong"),
    "ab_coverage": Question("how often an interval of a few rounds holds the truth"),
    "demo": Question("what a newcomer gets from `make demo`, and how soon"),
    "demo_restart_valkey": Question(
        "`make demo` whose Valkey restarts between the turns: hits from the CPU pool", (3,)
    ),
    "demo_restart_prefill": Question(
        "`make demo` whose prefill restarts between the turns: hits from Valkey", (3,)
    ),
    "make_test": Question("`make test` in a fresh clone"),
}
