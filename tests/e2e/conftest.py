"""What the end-to-end tests share: a checkpoint, sizes, and how to ask."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

#: Small enough that a prompt of a few hundred tokens is split, and no multiple of the page.
CHUNK = ("--chunked-prefill-size", "256")
COMMON = (*CHUNK, "--skip-server-warmup", "--enable-cache-report", "--context-length", "2048")
CONTEXT = 2048
# Of the test checkpoints.
TOPK = 64
PAGE = 64


@pytest.fixture(scope="session")
def model(checkpoint: Callable[..., Path]) -> Path:
    """The fp32 checkpoint of the pair's tests: its answers are exact, so tokens compare without tolerance."""
    return checkpoint("float32")


def prompt(length: int, seed: int) -> list[int]:
    """Printable bytes, the same for the same seed."""
    return [random.Random(seed * 7919 + i).randrange(32, 127) for i in range(length)]


def generate(url: str, ids: list[int], tokens: int = 8, **more: object) -> dict[str, object]:
    """Greedy continuation through SGLang's /generate: its JSON. Raises for a status other than 200."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, **more}
    response = httpx.post(f"{url}/generate", json=body, timeout=180, trust_env=False)
    assert response.status_code == 200, response.text
    answer: dict[str, object] = response.json()
    return answer
