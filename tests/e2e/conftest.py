"""Servers shared by the end-to-end tests: each starts once a session, when the first test asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from glm_sglang.cluster import STOCK_LAUNCHER, DecodeServer, PrefillServer, Router
from glm_sglang.serving import Process, Server

#: Small enough that a prompt of a few hundred tokens is split, and no multiple of the page.
CHUNK = ("--chunked-prefill-size", "256")
COMMON = (*CHUNK, "--skip-server-warmup", "--enable-cache-report", "--context-length", "2048")
CONTEXT = 2048


@pytest.fixture(scope="session")
def stack() -> Iterator[ExitStack]:
    """Stops, at the end of the session, whatever was pushed on it."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def model(checkpoint: Callable[..., Path]) -> Path:
    """The fp32 checkpoint of the pair's tests: its answers are exact, so tokens compare without tolerance."""
    return checkpoint("float32")


@pytest.fixture(scope="session")
def aggregated(stack: ExitStack, model: Path) -> Server:
    """One server that prefills and decodes."""
    return stack.enter_context(Server(model, COMMON, name="aggregated"))


class Pair:
    """Two prefill servers and two decode servers, and routers over any of them."""

    def __init__(self, stack: ExitStack, model: Path) -> None:
        self.stack = stack
        self.prefills = [PrefillServer(model, COMMON, name=f"prefill{i}") for i in range(2)]
        # decode1 runs SGLang's own launcher, with this package installed for its platform only.
        modules = ("glm_sglang.launch_server", STOCK_LAUNCHER)
        # How long decode waits for KV from a prefill; upstream waits 300 s, for a long queue. A test cannot.
        patience = {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "40"}
        stock = ("--device", "cpu", "--page-size", "64")
        self.decodes = [
            DecodeServer(
                model,
                COMMON + (stock if module == STOCK_LAUNCHER else ()),
                name=f"decode{i}",
                module=module,
                env=patience,
            )
            for i, module in enumerate(modules)
        ]
        self.routers: dict[tuple[tuple[int, ...], tuple[int, ...]], Router] = {}
        servers: list[Process] = [*self.prefills, *self.decodes]
        for server in servers:
            stack.callback(server.stop)
            server.start()
        for server in servers:
            server.wait_ready()

    def router(self, prefills: tuple[int, ...] = (0,), decodes: tuple[int, ...] = (0,)) -> Router:
        """A router over these servers, by number; started once."""
        key = (prefills, decodes)
        if key not in self.routers:
            chosen = [self.prefills[i] for i in prefills], [self.decodes[i] for i in decodes]
            self.routers[key] = self.stack.enter_context(Router(*chosen))
        return self.routers[key]


@pytest.fixture(scope="session")
def pair(stack: ExitStack, model: Path) -> Pair:
    """The servers of the pairing tests."""
    return Pair(stack, model)


def generate(url: str, ids: list[int], tokens: int = 8, **more: object) -> dict[str, object]:
    """Greedy continuation through SGLang's /generate: its JSON. Raises for a status other than 200."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, **more}
    response = httpx.post(f"{url}/generate", json=body, timeout=180, trust_env=False)
    assert response.status_code == 200, response.text
    answer: dict[str, object] = response.json()
    return answer
