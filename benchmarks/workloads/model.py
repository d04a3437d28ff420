"""A workload: sessions of turns, the same for every endpoint, other ones in every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Turn:
    """One request, less the model's name.

    label: what it is compared as ("turn 1", "16k"); expected_tokens: the prompt's length as planned, in
    tokens (the endpoint's own count is what is reported).
    """

    path: str
    body: dict[str, Any]
    label: str
    expected_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow each other. `at_s`: when it starts, seconds from the round's start; None: as the load
    says.
    """

    turns: tuple[Turn, ...]
    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """What one round asks.

    prelude: sent before the clock starts and not counted (fills a cache). apart: every session's first turn
    comes before any session's second.
    """

    sessions: tuple[Session, ...]
    prelude: tuple[Turn, ...] = ()
    apart: bool = False


class Workload(Protocol):
    """A named workload. `round(n, salt)` is a function of the parameters, `n` and `salt` alone: sizes, order and arrivals
    of all but the salt, texts of all four.
    """

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        ...

    def parameters(self) -> dict[str, Any]:
        """What defines it, for the record."""
        ...

    def round(self, number: int, salt: str = "") -> Load:
        """The load of one round; rounds of other numbers or salts share no text but by chance."""
        ...

    def largest_prompt(self) -> int:
        """Tokens of the largest request with its answer: what a server's context must hold."""
        ...


def chat(messages: Sequence[dict[str, str]], answer_tokens: int, label: str, expected_tokens: int) -> Turn:
    """A chat request with a fixed number of greedy answer tokens."""
    body = {"messages": list(messages), **sampling(answer_tokens)}
    return Turn(CHAT, body, label, expected_tokens)


def sampling(answer_tokens: int) -> dict[str, Any]:
    """Greedy, exactly `answer_tokens` tokens: `ignore_eos` is an extension that SGLang and vLLM share."""
    return {"max_tokens": answer_tokens, "temperature": 0, "ignore_eos": True}
