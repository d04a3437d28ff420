"""The questions, and how an answer is read and judged."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.workloads.conversations import short
from benchmarks.workloads.text import Text

SHOTS = 5  # as lm_eval's task gsm8k has
_STRICT = re.compile(r"####\s*(-?[0-9.,]+)")
_NUMBER = re.compile(r"-?\$?[0-9][0-9,]*(?:\.[0-9]+)?")


class SuiteError(ValueError):
    """A suite's questions are not at hand; the message names the flag."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question. `expected` is what `read` must make of the answer."""

    id: str
    suite: str
    prompt: str
    expected: str
    max_tokens: int

    def read(self, text: str) -> str:
        """The answer that a text gives, in one spelling; "" for none."""
        return (read_gsm8k if self.suite == "gsm8k" else read_needle)(text, self.expected)


class Row(msgspec.Struct, frozen=True):
    """A line of GSM8K: the answer ends with `#### number`."""

    question: str
    answer: str


def number(text: str) -> str:
    """`$1,234.50` as 1234.5, so that equal numbers are equal texts; "" for what is none."""
    plain = text.replace(",", "").replace("$", "").rstrip(".")
    try:
        value = float(plain)
    except ValueError:
        return ""
    return str(int(value)) if value.is_integer() else repr(value)


def read_gsm8k(text: str, expected: str = "") -> str:
    """The number after the first ####, else the last number (lm_eval's strict-match, then flexible-extract)."""
    if found := _STRICT.search(text):
        return number(found[1])
    numbers = _NUMBER.findall(text)
    return number(numbers[-1]) if numbers else ""


def read_needle(text: str, expected: str) -> str:
    """The expected number where the text has it, else the first number of as many digits."""
    numbers = re.findall(r"[0-9]+", text)
    if expected in numbers:
        return expected
    return next((found for found in numbers if len(found) == len(expected)), "")


def gsm8k(
    data: Path | None, shots: Path | None, limit: int | None, max_tokens: int, seed: int
) -> Iterator[Question]:
    """Questions with five worked examples before each, worded as lm_eval's task words them.

    From `data` and `shots` (JSONL with question and answer); without them from the test and train split that
    the machine's Hugging Face cache holds, which is where lm_eval leaves them. Raises SuiteError.
    """
    tests = _read(data) if data else _cached("test")
    examples = _read(shots) if shots else (tests[:SHOTS] if data else _cached("train"))
    taught = random.Random(seed).sample(examples, min(SHOTS, len(examples)))
    # Without a file of their own the examples are the first questions, which then are not asked.
    asked = tests[SHOTS:] if data and not shots else tests
    head = "".join(f"Question: {row.question}\nAnswer: {row.answer}\n\n" for row in taught)
    for index, row in enumerate(asked[:limit]):
        expected = read_gsm8k(row.answer)
        if not expected:
            raise SuiteError(f"--data: question {index} has no number after ####: {row.answer[-80:]!r}")
        prompt = f"{head}Question: {row.question}\nAnswer:"
        yield Question(f"gsm8k-{index}", "gsm8k", prompt, expected, max_tokens)


def _read(path: Path) -> list[Row]:
    decode = msgspec.json.Decoder(Row).decode
    try:
        rows = [decode(line) for line in path.read_bytes().splitlines() if line.strip()]
    except (OSError, msgspec.MsgspecError) as error:
        raise SuiteError(f"--data/--shots: {path} is no JSONL of question and answer: {error}") from None
    if not rows:
        raise SuiteError(f"--data/--shots: {path} is empty")
    return rows


def _cached(split: str) -> list[Row]:
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    import datasets  # type: ignore[import-untyped]

    reasons = []
    for name in ("openai/gsm8k", "gsm8k"):
        try:
            found = datasets.load_dataset(name, "main", split=split)
            return [Row(row["question"], row["answer"]) for row in found]
        except Exception as error:  # datasets raises what its readers and the hub's client raise
            reasons.append(f"{name}: {type(error).__name__}")
    raise SuiteError(
        f"--data is not given and the Hugging Face cache has no GSM8K ({', '.join(reasons)}); give --data test.jsonl "
        "and --shots train.jsonl"
    )


PLACES = ("Alder", "Birch", "Cedar", "Dogwood", "Elm", "Fir", "Gorse", "Hazel", "Ivy", "Juniper")


def needle(
    text: Text,
    lengths: Sequence[int],
    depths: Sequence[float],
    limit: int | None,
    max_tokens: int,
    seed: int,
    thinking: int = 0,
) -> Iterator[Question]:
    """One number hidden in real text, at every depth (0: first, 1: last) of every length; the same for a seed.

    No length with its answer and `thinking` tokens exceeds the longest one, which may be all that the context holds.
    """
    count = 0
    for length in lengths:
        for depth in depths:
            if limit is not None and count >= limit:
                return
            count += 1
            draw = random.Random(f"{seed}:{length}:{depth}")
            place, secret = draw.choice(PLACES), str(draw.randrange(10**6, 10**7))
            fact = f"\n\nThe registered number of {place} House is {secret}.\n\n"
            ask = (
                f"\n\nWhat is the registered number of {place} House? It is stated once in the text above. Answer with "
                "the number alone."
            )
            kept = max_tokens + max(0, length + thinking - max(lengths))
            room = length - kept - round(len((fact + ask).encode()) / text.bytes_per_token) - 64
            if room < 1:
                raise SuiteError(
                    f"--lengths holds {length}; it must leave room for --max-tokens ({max_tokens}), --thinking-tokens "
                    f"({thinking}) and the question"
                )
            hay = text.draw(room, "needle", seed, length, depth)
            at = _paragraph(hay, depth)
            prompt = hay[:at] + fact + hay[at:] + ask
            yield Question(f"needle-{short(length)}-{depth:g}", "needle", prompt, secret, max_tokens)


def _paragraph(hay: str, depth: float) -> int:
    """The end of a paragraph next to this share of the text; its two ends for 0 and 1."""
    wanted = round(depth * len(hay))
    if wanted in (0, len(hay)):
        return wanted
    before, after = hay.rfind("\n\n", 0, wanted), hay.find("\n\n", wanted)
    candidates = [place for place in (before, after) if place >= 0] or [wanted]
    return min(candidates, key=lambda place: abs(place - wanted))
