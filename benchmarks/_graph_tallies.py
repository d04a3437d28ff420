"""What is made of two answers to the same prompts: divergence, other tokens, and whether graphs may serve."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TIE = 0.05  # nats: two tokens this close may change places
KL_LIMIT = 0.0025  # nats, the project's bound for graph against eager, here of the worst prompt
RULE = (
    f"graph against eager at the graph's rows and attention, every prompt: KL below {KL_LIMIT} nats, and the same greedy"
    f" tokens up to a tie of {TIE} nats"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one prompt: logprobs of its last tokens, the first new token's distribution, the new tokens.

    top     log-probability of the likeliest tokens at the first new position.
    leads   for each new token the two likeliest, as (token, logprob).
    """

    inputs: tuple[float, ...]
    top: Mapping[int, float]
    tokens: tuple[int, ...]
    leads: tuple[tuple[tuple[int, float], ...], ...]

    def gap(self, position: int) -> float:
        """First less second logprob at a new token."""
        (_, first), (_, second) = self.leads[position]
        return first - second


def answer(meta: Mapping[str, Any]) -> Answer:
    """From /generate's meta_info."""
    tops = meta["output_top_logprobs"]
    return Answer(
        inputs=tuple(entry[0] for entry in meta["input_token_logprobs"] if entry[0] is not None),
        top={entry[1]: entry[0] for entry in tops[0]},
        tokens=tuple(entry[1] for entry in meta["output_token_logprobs"]),
        leads=tuple(tuple((entry[1], entry[0]) for entry in top[:2]) for top in tops),
    )


def divergence(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    """KL(p ‖ q) in nats over p's likeliest tokens, all others as one."""
    both = [token for token in p if token in q]
    rest_p = max(1e-9, 1 - sum(math.exp(p[t]) for t in both))
    rest_q = max(1e-9, 1 - sum(math.exp(q[t]) for t in both))
    return sum(math.exp(p[t]) * (p[t] - q[t]) for t in both) + rest_p * math.log(rest_p / rest_q)


def other_token(mine: Answer, yours: Answer) -> int | None:
    """The first new position where tokens differ; what follows it has other inputs and is not compared."""
    pairs = zip(mine.tokens, yours.tokens, strict=True)
    return next((position for position, (one, other) in enumerate(pairs) if one != other), None)


@dataclass
class Tally:
    """Differences between two answers to each of many prompts; `identical`: not one bit."""

    kl: list[float] = field(default_factory=list)
    delta_sum: float = 0.0
    delta_max: float = 0.0
    deltas: int = 0
    identical: int = 0
    other_tokens: int = 0
    ties: int = 0

    def add(self, mine: Answer, yours: Answer) -> bool:
        """Compare, at the last tokens that both have logprobs of. Whether the two are identical."""
        shared = min(len(mine.inputs), len(yours.inputs))
        found = [
            abs(a - b) for a, b in zip(tail(mine.inputs, shared), tail(yours.inputs, shared), strict=True)
        ]
        found += [abs(value - yours.top[token]) for token, value in mine.top.items() if token in yours.top]
        self.kl.append(divergence(mine.top, yours.top))
        self.delta_sum += sum(found)
        self.deltas += len(found)
        self.delta_max = max(self.delta_max, *found, 0.0)
        position = other_token(mine, yours)
        if position is not None:
            tie = yours.gap(position) <= TIE
            self.ties += tie
            self.other_tokens += not tie
        same = position is None and not any(found) and mine.top.keys() == yours.top.keys()
        self.identical += same
        return same

    def report(self) -> dict[str, Any]:
        """As JSON."""
        if not self.kl:
            return {"prompts": 0}
        return {
            "prompts": len(self.kl),
            "identical": self.identical,
            "kl_mean": statistics.fmean(self.kl),
            "kl_max": max(self.kl),
            "logprob_delta_mean": self.delta_sum / max(1, self.deltas),
            "logprob_delta_max": self.delta_max,
            "other_tokens": self.other_tokens,
            "ties": self.ties,
        }


def tail(values: Sequence[float], count: int) -> Sequence[float]:
    """The last `count`, also where that is none."""
    return values[len(values) - count :]


def together(tallies: Iterable[Tally]) -> Tally:
    """All in one."""
    found = Tally()
    for tally in tallies:
        found.kl += tally.kl
        found.delta_sum += tally.delta_sum
        found.delta_max = max(found.delta_max, tally.delta_max)
        found.deltas += tally.deltas
        found.identical += tally.identical
        found.other_tokens += tally.other_tokens
        found.ties += tally.ties
    return found


def verdict(tallies: Iterable[Tally]) -> dict[str, Any]:
    """Of graph against eager at the graph's rows and attention: whether graphs may serve; None if nothing was asked."""
    found = together(tallies)
    if not found.kl:
        return {"prompts": 0, "equal": None, "rule": RULE}
    return {
        **found.report(),
        "equal": max(found.kl) < KL_LIMIT and found.other_tokens == 0,
        "rule": RULE,
    }
