"""The workloads that are made here: two-turn chat, one long prompt, a shared system prompt, long agent turns."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.workloads.model import Load, Session, Turn, chat
from benchmarks.workloads.text import Text, corpus_id

_QUESTIONS = (
    "Summarise what the text above says.",
    "Which parts of the text above depend on each other, and how?",
    "What would a reader of the text above be most likely to get wrong?",
    "Give three questions that the text above answers, with the answers.",
)


def _question(seed: str) -> str:
    return random.Random(seed).choice(_QUESTIONS)


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


@dataclass(frozen=True)
class TwoTurn:
    """The article's: the second turn repeats the first turn's prompt and adds a little.

    The answer between them is written here, not the endpoint's own: so every endpoint gets the same requests.
    `apart`: all first turns of a round come before the second ones, which makes a cache hold all of them.
    """

    text: Text
    seed: int
    sessions: int
    prompt_tokens: int
    added_tokens: int
    answer_tokens: int
    apart: bool
    name: str = "two_turn"

    def parameters(self) -> dict[str, Any]:
        """See Workload."""
        return {
            "sessions": self.sessions,
            "prompt_tokens": self.prompt_tokens,
            "added_tokens": self.added_tokens,
            "answer_tokens": self.answer_tokens,
            "apart": self.apart,
            **_common(self.text, self.seed),
        }

    def largest_prompt(self) -> int:
        """See Workload."""
        return self.prompt_tokens + self.added_tokens + 2 * self.answer_tokens + 64

    def round(self, number: int, salt: str = "") -> Load:
        """See Workload."""
        return Load(tuple(self._session(number, salt, i) for i in range(self.sessions)), apart=self.apart)

    def _session(self, number: int, salt: str, index: int) -> Session:
        seed = f"{self.seed}:{self.name}:{number}:{salt}:{index}"
        document = self.text.draw(self.prompt_tokens, seed)
        messages = [_user(f"{document}\n\n{_question(seed)}")]
        first = chat(messages, self.answer_tokens, "turn 1", self.prompt_tokens)
        messages += [
            {"role": "assistant", "content": self.text.draw(self.answer_tokens, seed, "answer")},
            _user(self.text.draw(self.added_tokens, seed, "added")),
        ]
        longer = self.prompt_tokens + self.answer_tokens + self.added_tokens
        return Session((first, chat(messages, self.answer_tokens, "turn 2", longer)))


@dataclass(frozen=True)
class LongContext:
    """One turn a session, its length one of `lengths`, as many of each."""

    text: Text
    seed: int
    sessions: int
    lengths: Sequence[int]
    answer_tokens: int
    name: str = "long_context"

    def parameters(self) -> dict[str, Any]:
        """See Workload."""
        return {
            "sessions": self.sessions,
            "lengths": list(self.lengths),
            "answer_tokens": self.answer_tokens,
            **_common(self.text, self.seed),
        }

    def largest_prompt(self) -> int:
        """See Workload."""
        return max(self.lengths) + self.answer_tokens + 64

    def round(self, number: int, salt: str = "") -> Load:
        """See Workload."""
        sessions = []
        for length in self.lengths:
            for index in range(self.sessions):
                seed = f"{self.seed}:{self.name}:{number}:{salt}:{length}:{index}"
                content = f"{self.text.draw(length, seed)}\n\n{_question(seed)}"
                sessions.append(Session((chat([_user(content)], self.answer_tokens, short(length), length),)))
        random.Random(f"{self.seed}:{number}").shuffle(sessions)
        return Load(tuple(sessions))


@dataclass(frozen=True)
class Mixed:
    """Prompts of very different lengths (log-uniform) behind one system prompt that all sessions share."""

    text: Text
    seed: int
    sessions: int
    system_tokens: int
    lengths: tuple[int, int]
    answer_tokens: int
    name: str = "mixed"

    def parameters(self) -> dict[str, Any]:
        """See Workload."""
        return {
            "sessions": self.sessions,
            "system_tokens": self.system_tokens,
            "lengths": list(self.lengths),
            "answer_tokens": self.answer_tokens,
            **_common(self.text, self.seed),
        }

    def largest_prompt(self) -> int:
        """See Workload."""
        return self.system_tokens + self.lengths[1] + self.answer_tokens + 64

    def round(self, number: int, salt: str = "") -> Load:
        """See Workload."""
        system = {
            "role": "system",
            "content": self.text.draw(self.system_tokens, self.seed, "system", number, salt),
        }
        low, high = self.lengths
        sessions = []
        for index in range(self.sessions):
            seed = f"{self.seed}:{self.name}:{number}:{index}"
            draw = random.Random(seed)
            length = round(math.exp(draw.uniform(math.log(low), math.log(high))))
            answer = draw.randint(max(1, self.answer_tokens // 2), self.answer_tokens)
            messages = [system, _user(f"{self.text.draw(length, seed, salt)}\n\n{_question(seed)}")]
            label = f"up to {short(1 << (length - 1).bit_length())}"
            sessions.append(Session((chat(messages, answer, label, self.system_tokens + length),)))
        return Load(tuple(sessions))


@dataclass(frozen=True)
class LongAgent:
    """What a coding agent on GLM-5 sends: long prompts, `hit_share` of them seen before, short answers.

    The prefixes (one for every `share` sessions) are sent before the clock starts, so the share of hits is a
    property of the workload; what is missing from it was lost by the endpoint.
    """

    text: Text
    seed: int
    sessions: int
    prompt_tokens: int
    answer_tokens: int
    hit_share: float
    share: int
    name: str = "long_agent"

    def parameters(self) -> dict[str, Any]:
        """See Workload."""
        return {
            "sessions": self.sessions,
            "prompt_tokens": self.prompt_tokens,
            "answer_tokens": self.answer_tokens,
            "hit_share": self.hit_share,
            "sessions_a_prefix": self.share,
            **_common(self.text, self.seed),
        }

    def largest_prompt(self) -> int:
        """See Workload."""
        return self.prompt_tokens + self.answer_tokens + 64

    def round(self, number: int, salt: str = "") -> Load:
        """See Workload."""
        old = round(self.prompt_tokens * self.hit_share)
        groups = -(-self.sessions // self.share)
        prefixes = [self.text.draw(old, self.seed, self.name, number, salt, group) for group in range(groups)]
        prelude = tuple(chat([_user(prefix)], 1, "prefix", old) for prefix in prefixes)
        return Load(
            tuple(
                self._session(f"{number}:{salt}:{index}", prefixes[index % groups], old)
                for index in range(self.sessions)
            ),
            prelude,
        )

    def _session(self, key: str, prefix: str, old: int) -> Session:
        new = self.text.draw(self.prompt_tokens - old, self.seed, self.name, "new", key)
        turn: Turn = chat([_user(f"{prefix}{new}")], self.answer_tokens, "agent turn", self.prompt_tokens)
        return Session((turn,))


def short(tokens: int) -> str:
    """4096 as 4k."""
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def _common(text: Text, seed: int) -> dict[str, Any]:
    return {
        "seed": seed,
        "bytes_per_token": text.bytes_per_token,
        "text": corpus_id(text.files),
    }
