"""Mixed chunks: a long prompt is prefilled chunk by chunk while others decode, both kinds of rows in one batch."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import orjson

from glm_sglang.oracle import Oracle
from glm_sglang.serving import Server
from tests.e2e.conftest import TOPK, generate, prompt

LONG = 900


def decode(url: str, ids: list[int], decoding: threading.Event, done: threading.Event) -> list[int]:
    """Streams a greedy answer; sets `decoding` at its first token, and leaves after the first that comes when `done`."""
    sampling = {"temperature": 0, "max_new_tokens": 1000, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
    answer: list[int] = []
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=180, trust_env=False) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                answer = orjson.loads(line[6:])["output_ids"]
                decoding.set()
                if done.is_set():
                    break
    return answer


def test_tokens_of_mixed_batches_equal_the_oracles(
    aggregated: Server, mixed_batches: Path, model: Path
) -> None:
    """Below the index top-k and beyond it, in decode and in prefill."""
    oracle = Oracle(model)
    short = [prompt(length, 950) for length in (5, TOPK - 8, 3 * TOPK)]
    long = prompt(LONG, 951)
    begun, done = [threading.Event() for _ in short], threading.Event()
    with ThreadPoolExecutor(len(short)) as pool:
        answers = [
            pool.submit(decode, aggregated.url, ids, event, done)
            for ids, event in zip(short, begun, strict=True)
        ]
        try:
            assert all(event.wait(180) for event in begun)
            earlier = len(mixed_batches.read_text().splitlines()) if mixed_batches.exists() else 0
            answer = generate(aggregated.url, long)["output_ids"]
        finally:
            done.set()
    assert oracle.judge(long, answer).best == answer  # type: ignore[arg-type]
    for ids, one in zip(short, answers, strict=True):
        tokens = one.result()
        assert len(tokens) > 8  # it decoded on after the long prompt's chunks
        assert oracle.judge(ids, tokens).best == tokens
    batches = [tuple(map(int, line.split())) for line in mixed_batches.read_text().splitlines()[earlier:]]
    # Every token of the long prompt went beside all three that decoded.
    assert sum(prefill for prefill, _ in batches) == LONG
    assert {rows for _, rows in batches} == {len(short)}
    assert len(batches) > LONG // 256
