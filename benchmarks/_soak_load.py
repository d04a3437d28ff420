"""The client of `cache_soak`: conversations that go on, of prompts short and long, some of whose requests are given up.

A round sends for some seconds, then lets what is under way end: between two rounds a healthy server is idle. Which
prompts are asked and which are given up follows from the seed; in which order they meet the server does not.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import orjson

from benchmarks._idle_steps import prompt

Abort = Literal["before_the_first_token", "midway", "asked"]
ABORTS: tuple[Abort, ...] = ("before_the_first_token", "midway", "asked")
PAGE = 64
TURNS = 3
ANSWER = 4  # tokens; few, so that prefill is most of the work
LONG_ANSWER = 64  # of a request that may be given up after its first token
CONTROLS = 3
VOCAB = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is asked. Tokens, but for: clients, live (conversations a client has open), probe_every (seconds)."""

    shortest: int
    longest: int
    tail: int
    probe: int
    clients: int
    live: int
    probe_every: float
    abort_share: float = 0.2

    @property
    def context(self) -> int:
        """Of the longest conversation's last turn with its answer, in whole pages, and a page more."""
        tokens = self.longest + TURNS * (self.tail + ANSWER) + LONG_ANSWER
        return (tokens // PAGE + 2) * PAGE


@dataclass(slots=True)
class _Conversation:
    ids: list[int]
    turns: int = 0


@dataclass(frozen=True, slots=True)
class Probe:
    """One answer to the probe prompt: its tokens, and how many tokens came from a cache.

    logprobs: of every token of the vocabulary to be the answer's first, in their order.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = field(repr=False)
    cached: int

    def apart(self, other: Probe) -> float:
        """How far two answers are apart: rms of the difference of their logprobs, nats."""
        squares = [(a - b) ** 2 for a, b in zip(self.logprobs, other.logprobs, strict=True)]
        return math.sqrt(sum(squares) / len(squares))


@dataclass(slots=True)
class Client:
    """Counts what becomes of its requests; keeps what the probe was answered.

    counts: `requests`, each of which is then `completed`, `failed`, one of `aborts_…`, or `ended_before_its_abort`.
    """

    url: str
    sizes: Sizes
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    expected: Probe | None = None
    wrong_probes: list[dict[str, Any]] = field(default_factory=list)
    differences: dict[str, list[float]] = field(
        default_factory=dict
    )  # from the first answer, cold and cached
    other_page: list[float] = field(default_factory=list)  # of the controls
    _probe_ids: list[int] = field(default_factory=list)
    _open: dict[int, list[_Conversation]] = field(default_factory=dict)
    _made: int = 0
    _first_token: float = 0.2  # seconds, of late
    _rng: dict[int, random.Random] = field(default_factory=dict)

    # Rounds

    def round(self, seconds: float) -> None:
        """All clients and the probe, for so long and until their last answers are there."""
        asyncio.run(self._round(time.monotonic() + seconds))

    async def _round(self, until: float) -> None:
        async with self._http() as http:
            await asyncio.gather(
                *(self._talk(http, number, until) for number in range(self.sizes.clients)),
                self._probe(http, until),
                self._flush_amid(http, until),
            )

    def _http(self) -> httpx.AsyncClient:
        # Ended here before the server does (5 s): a request on a connection that is being closed is lost.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)
        return httpx.AsyncClient(base_url=self.url, timeout=180, trust_env=False, limits=limits)

    async def _talk(self, http: httpx.AsyncClient, number: int, until: float) -> None:
        rng = self._rng.setdefault(number, random.Random(f"{self.seed}.{number}"))
        open_ = self._open.setdefault(number, [])
        while time.monotonic() < until:
            conversation = self._choose(rng, open_)
            how = rng.choice(ABORTS) if rng.random() < self.sizes.abort_share else None
            self.counts["requests"] += 1
            rid = f"soak-{number}-{self.counts['requests']}"
            try:
                answer = await self._ask(http, conversation.ids, rid, how, rng)
            except (httpx.HTTPError, ValueError) as error:
                self.counts["failed"] += 1
                self.failures.append(f"{type(error).__name__}: {error}"[:300])
                await asyncio.sleep(0.2)
                continue
            if answer is None:
                continue  # given up: the same prompt comes again, now or later
            conversation.turns += 1
            conversation.ids += [*answer, *self._new(rng, rng.randint(1, self.sizes.tail))]

    def _choose(self, rng: random.Random, open_: list[_Conversation]) -> _Conversation:
        """Any of those that are open; one that has had its turns makes way for a new one."""
        sizes = self.sizes
        if len(open_) < sizes.live:
            place = len(open_)
            open_.append(_Conversation([], TURNS))
        else:
            place = rng.randrange(sizes.live)
        if open_[place].turns >= TURNS:
            length = round(sizes.shortest * (sizes.longest / sizes.shortest) ** rng.random())
            open_[place] = _Conversation(self._new(rng, length))
        return open_[place]

    def _new(self, rng: random.Random, length: int) -> list[int]:
        return prompt(f"{self.seed}.{rng.random()}", length)

    # One request

    async def _ask(
        self, http: httpx.AsyncClient, ids: list[int], rid: str, how: Abort | None, rng: random.Random
    ) -> list[int] | None:
        """Its answer; None where it was given up. ValueError for an answer that is none."""
        tokens = LONG_ANSWER if how in ("midway", "asked") else ANSWER
        patience = rng.uniform(0.0, 1.5 * self._first_token) if how else 0.0
        last: dict[str, Any] = {}
        stopper = asyncio.create_task(self._ask_to_abort(http, rid, patience)) if how == "asked" else None
        began = time.monotonic()
        try:
            limit = asyncio.timeout(patience if how == "before_the_first_token" else None)
            async with limit, aclosing(self._stream(http, ids, rid, tokens)) as stream:
                async for last in stream:
                    if not last.get("output_ids"):
                        continue
                    if how == "midway" and len(last["output_ids"]) < tokens:
                        self.counts["aborts_midway"] += 1
                        return None  # closes the connection
                    if len(last["output_ids"]) == 1 and not how:
                        self._first_token += 0.1 * (time.monotonic() - began - self._first_token)
        except TimeoutError:
            self.counts["aborts_before_the_first_token"] += 1
            return None
        finally:
            if stopper is not None:
                await stopper
        finish = (last.get("meta_info") or {}).get("finish_reason") or {}
        if how == "asked" and finish.get("type") == "abort":
            self.counts["aborts_asked"] += 1
            return None
        if not _whole(last, tokens):
            raise ValueError(f"no whole answer to {len(ids)} tokens: {orjson.dumps(last).decode()[:200]}")
        self.counts["ended_before_its_abort" if how else "completed"] += 1
        return [int(token) for token in last["output_ids"]][:ANSWER]

    @staticmethod
    async def _stream(
        http: httpx.AsyncClient, ids: list[int], rid: str, tokens: int
    ) -> AsyncGenerator[dict[str, Any], None]:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": ids, "rid": rid, "sampling_params": sampling, "stream": True}
        async with http.stream("POST", "/generate", content=orjson.dumps(body), headers=_JSON) as response:
            if response.status_code != 200:
                yield {"error": (await response.aread()).decode(errors="replace")}
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    yield orjson.loads(line[6:])

    @staticmethod
    async def _ask_to_abort(http: httpx.AsyncClient, rid: str, patience: float) -> None:
        await asyncio.sleep(patience)
        await http.post("/abort_request", json={"rid": rid})

    # The probe

    def choose_probe(self) -> None:
        """Its first, cold answer; and, the control, what is answered where one page of it is another one.

        Controls differ from the probe in the last page that a cache can have, so only that page and the few tokens behind
        it are computed otherwise: what the probe would be answered if the cache gave it a wrong page.
        """

        async def all_of_them() -> list[Probe]:
            async with self._http() as http:
                return [
                    await self._answer(http, ids, f"control-{i}" if i else None)
                    for i, ids in enumerate(prompts)
                ]

        ids = prompt(f"{self.seed}.probe", self.sizes.probe)
        end = (len(ids) - 1) // PAGE * PAGE
        others = [prompt(f"{self.seed}.other.{i}", PAGE) for i in range(CONTROLS)]
        prompts = [ids, *([*ids[: end - PAGE], *other, *ids[end:]] for other in others)]
        first, *controls = asyncio.run(all_of_them())
        if first.cached:
            raise ValueError(f"the first answer to the probe took {first.cached} tokens from a cache")
        self._probe_ids, self.expected = ids, first
        self.other_page = [round(first.apart(one), 6) for one in controls]

    @property
    def bound(self) -> float:
        """How far an answer may be from the first: half of what one wrong page makes of it, at least."""
        return 0.5 * min(self.other_page, default=0.0)

    async def _probe(self, http: httpx.AsyncClient, until: float) -> None:
        """Again and again, in turn: as it is, and under a name that no page was saved under, which makes it cold."""
        while time.monotonic() < until:
            self._made += 1
            cold = f"cold-{self._made}" if self._made % 2 else None
            try:
                found = await self._answer(http, self._probe_ids, cold)
            except (httpx.HTTPError, ValueError) as error:
                self.counts["failed"] += 1
                self.failures.append(f"probe: {type(error).__name__}: {error}"[:300])
            else:
                self.note(found)
            await asyncio.sleep(max(0.0, min(self.sizes.probe_every, until - time.monotonic())))

    def note(self, found: Probe) -> None:
        """Compares an answer with the first one."""
        assert self.expected is not None
        kind = "cached" if found.cached else "cold"
        self.counts[f"probes_{kind}"] += 1
        self.counts["probes_of_other_tokens"] += found.tokens != self.expected.tokens
        apart = found.apart(self.expected)
        self.differences.setdefault(kind, []).append(apart)
        if apart > self.bound:
            self.wrong_probes.append({"kind": kind, "cached": found.cached, "apart": apart})

    @staticmethod
    async def _answer(http: httpx.AsyncClient, ids: list[int], extra_key: str | None) -> Probe:
        sampling = {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True}
        body: dict[str, Any] = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        body |= {"top_logprobs_num": VOCAB, "extra_key": extra_key}
        response = await http.post("/generate", content=orjson.dumps(body), headers=_JSON)
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}: {response.text[:200]}")
        answer = orjson.loads(response.content)
        if not _whole(answer, ANSWER):
            raise ValueError(f"no whole answer: {orjson.dumps(answer).decode()[:200]}")
        meta = answer["meta_info"]
        return Probe(
            tuple(answer["output_ids"]),
            tuple(entry[0] for entry in sorted(meta["output_top_logprobs"][0], key=lambda one: one[1])),
            int(meta["cached_tokens"]),
        )

    # Flushes

    async def _flush_amid(self, http: httpx.AsyncClient, until: float) -> None:
        """Amid a round, when a busy server refuses: nothing may come of it."""
        await asyncio.sleep(max(0.0, until - time.monotonic()) / 2)
        try:
            answer = await http.post("/flush_cache")
        except httpx.HTTPError as error:
            self.failures.append(f"flush: {type(error).__name__}: {error}"[:300])
            self.counts["failed"] += 1
            return
        self.counts["flushes" if answer.status_code == 200 else "flushes_refused"] += 1

    def flush(self, patience: float) -> bool:
        """Empties device and pool of a server that comes to rest; whether it did in `patience` seconds."""
        ends = time.monotonic() + patience
        with httpx.Client(base_url=self.url, timeout=30, trust_env=False) as http:
            while http.post("/flush_cache").status_code != 200:
                if time.monotonic() > ends:
                    return False
                time.sleep(0.1)
        self.counts["flushes"] += 1
        return True


_JSON = {"content-type": "application/json"}


def _whole(answer: dict[str, Any], tokens: int) -> bool:
    """Whether it ended because it has all its tokens."""
    reason = (answer.get("meta_info") or {}).get("finish_reason") or {}
    return reason.get("type") == "length" and len(answer.get("output_ids", ())) == tokens
