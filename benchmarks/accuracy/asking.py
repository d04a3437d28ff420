"""Asks both endpoints everything, some at once, and writes every answer down as it comes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchmarks.ab.client import Client, Sample
from benchmarks.accuracy.paired import Pair
from benchmarks.accuracy.suites import Question
from benchmarks.workloads.model import CHAT, COMPLETIONS, Turn

_T = TypeVar("_T")
_STOP = ["Question:"]  # what lm_eval's gsm8k stops at


#: What ends reasoning in the text of GLM and its like, where the endpoint has no parser that sends it apart.
_THOUGHT = "</think>"


@dataclass(frozen=True, slots=True)
class How:
    """How every question is asked. `thinking`: tokens for reasoning before the answer, None to switch it off; chat only,
    completions have no template that could say.
    """

    api: str
    thinking: int | None = None

    @property
    def room(self) -> int:
        """Tokens that an answer may take beside its own."""
        return self.thinking or 0 if self.api == "chat" else 0


def turn(question: Question, how: How) -> Turn:
    """The request: greedy, ends where the model ends it."""
    common: dict[str, Any] = {"max_tokens": question.max_tokens + how.room, "temperature": 0}
    if how.api == "completions":
        if (
            question.suite == "gsm8k"
        ):  # in a chat the template ends the answer, and reasoning may say these words
            common["stop"] = _STOP
        return Turn(COMPLETIONS, {"prompt": question.prompt, **common}, question.suite, 0)
    body = {"messages": [{"role": "user", "content": question.prompt}], **common}
    if how.thinking is None:
        body["chat_template_kwargs"] = {
            "enable_thinking": False
        }  # of SGLang and vLLM; other templates ignore it
    return Turn(CHAT, body, question.suite, 0)


def judged(question: Question, sample: Sample, how: How) -> tuple[str, str]:
    """What was answered ("" for nothing), and what went wrong ("" for nothing).

    An answer that the token limit cut before it said anything is a fault of the asking, not a wrong answer; so is one
    that was cut while it still reasoned.
    """
    # An answer of no token is an answer: a model may end at once.
    error = "" if sample.error == "no token came" else sample.error
    before, end, after = sample.text.rpartition(_THOUGHT)
    text = after if end else before + after
    reasons = how.api == "chat" and how.thinking is not None and not end and not sample.reasoning
    cut = sample.finish == "length"
    # Of a solution that is cut short the last number is a step of it, not its answer.
    unfinished = cut and question.suite == "gsm8k" and "####" not in text
    answer = "" if (cut and reasons) or unfinished else question.read(text)
    if not error and cut and not answer:
        more = "--thinking-tokens, or give --no-thinking" if how.room else "--max-tokens"
        error = f"cut before an answer by max_tokens, {question.max_tokens + how.room}: raise {more}"
    return answer, error


def mark(question: Question, client: Client, how: How) -> str:
    """Names a question to an endpoint, whichever server it is today: that is the notebook's to know."""
    parts = (
        client.url,
        client.model,
        how.api,
        how.thinking,
        question.id,
        question.prompt,
        question.max_tokens,
    )
    return hashlib.sha256(orjson.dumps(parts)).hexdigest()[:16]


class Notebook:
    """The answers on disk, one JSON object a line. A line that an interrupt cut off is dropped.

    `servers`: by URL, which start of which server answers there (`identity`). What another one answered there, or one
    that can't be told, stays on disk and is not among `answers` (`others`: how many), but with `any_server`.
    """

    def __init__(self, path: Path, servers: Mapping[str, str], *, any_server: bool = False) -> None:
        self.path = path
        self.servers = servers
        self.any_server = any_server
        self.answers: dict[str, dict[str, Any]] = {}
        self.others = 0
        if path.exists():
            data = path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            for line in whole.splitlines():
                row = orjson.loads(line)
                # A failure is asked again.
                if row["error"]:
                    continue
                if self._counts(row):
                    self.answers[row["mark"]] = row
                else:
                    self.others += row["endpoint"] in servers
            if len(whole) < len(data):
                path.write_bytes(whole)

    def _counts(self, row: dict[str, Any]) -> bool:
        server = self.servers.get(row["endpoint"])
        return self.any_server or (bool(server) and row.get("server") == server)

    def add(self, row: dict[str, Any]) -> None:
        """Writes an answer down."""
        row["server"] = self.servers.get(row["endpoint"], "")
        self.answers[row["mark"]] = row
        with self.path.open("ab") as file:
            file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))


async def ask_both(
    clients: dict[str, Client], questions: Sequence[Question], notebook: Notebook, how: How, concurrency: int
) -> dict[str, int]:
    """Asks side "a" and side "b" every question that the notebook has no answer to; `concurrency` at once a side.

    Returns how many answers of each side it had.
    """
    had: dict[str, int] = {}
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        async with asyncio.TaskGroup() as group:
            for side, client in clients.items():
                missing = [q for q in questions if mark(q, client, how) not in notebook.answers]
                had[side] = len(questions) - len(missing)
                bar = progress.add_task(f"{side}: {client.url}", total=len(questions))
                progress.advance(bar, had[side])
                group.create_task(
                    _side(
                        side,
                        client,
                        missing,
                        notebook,
                        how,
                        concurrency,
                        lambda bar=bar: progress.advance(bar),
                    )
                )
    return had


async def _side(
    side: str,
    client: Client,
    questions: Sequence[Question],
    notebook: Notebook,
    how: How,
    concurrency: int,
    done: Any,
) -> None:
    gate = asyncio.Semaphore(concurrency)

    async def one(question: Question) -> None:
        async with gate:
            sample = await client.ask(turn(question, how))
        answer, error = judged(question, sample, how)
        notebook.add(
            {
                "mark": mark(question, client, how),
                "suite": question.suite,
                "id": question.id,
                "side": side,
                "endpoint": client.url,
                "answer": answer,
                "correct": answer == question.expected,
                "text": sample.text,
                "reasoning": sample.reasoning,
                "finish": sample.finish,
                "prompt_tokens": sample.prompt_tokens,
                "error": error,
            }
        )
        done()

    async with client, asyncio.TaskGroup() as group:
        for question in questions:
            group.create_task(one(question))


def pairs(
    clients: dict[str, Client], questions: Sequence[Question], notebook: Notebook, how: How
) -> tuple[list[Pair], int]:
    """The questions that both answered, and how many one or both did not."""
    found, errors = [], 0
    for question in questions:
        rows = [notebook.answers.get(mark(question, clients[side], how)) for side in ("a", "b")]
        a, b = rows
        if a is None or b is None or a["error"] or b["error"]:
            errors += 1
            continue
        found.append(Pair(a["answer"], b["answer"], a["correct"], b["correct"]))
    return found, errors
