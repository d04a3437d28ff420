"""Servers that the tests of this folder share: each starts when the first test asks for it, and ends with the folder's
last test. A machine of the size that CI has does not hold them and other tests' servers at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from glm_sglang.cluster import STOCK_LAUNCHER, DecodeServer, PrefillServer, Router
from glm_sglang.serving import Process, Server, stop_together
from tests.e2e.conftest import COMMON

#: How long one end waits for the other; upstream waits 300 s, for a long queue. A test cannot.
PATIENCE_S = 25


@pytest.fixture(scope="package")
def stack() -> Iterator[ExitStack]:
    """Stops, at the end of the folder, whatever was pushed on it."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="package")
def mixed_batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A line for each batch of `aggregated` with rows of prefill and decode: how many of either."""
    return tmp_path_factory.mktemp("aggregated") / "mixed_batches"


@pytest.fixture(scope="package")
def aggregated(stack: ExitStack, model: Path, mixed_batches: Path) -> Server:
    """One server that prefills and decodes, both in one batch where it can."""
    path = filter(None, [str(Path(__file__).parent / "mixed_site"), os.environ.get("PYTHONPATH")])
    env = {"PYTHONPATH": os.pathsep.join(path), "MIXED_BATCHES": str(mixed_batches)}
    flags = (*COMMON, "--enable-mixed-chunk")
    return stack.enter_context(Server(model, flags, name="aggregated", env=env))


class Pair:
    """Two prefill servers and two decode servers, and routers over any of them."""

    def __init__(self, stack: ExitStack, model: Path) -> None:
        self.stack = stack
        patience = {
            "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(PATIENCE_S),
            "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(PATIENCE_S),
        }
        self.prefills = [PrefillServer(model, COMMON, name=f"prefill{i}", env=patience) for i in range(2)]
        # decode1 runs SGLang's own launcher, with this package installed for its platform only.
        modules = ("glm_sglang.launch_server", STOCK_LAUNCHER)
        # Whether two heartbeats of SGLang's meet a restart hangs on how long it takes: decode0 has to notice it itself.
        heartbeats = ({"SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1000"}, {})
        stock = ("--device", "cpu", "--page-size", "64")
        self.decodes = [
            DecodeServer(
                model,
                COMMON + (stock if module == STOCK_LAUNCHER else ()),
                name=f"decode{i}",
                module=module,
                env=patience | heartbeats[i],
            )
            for i, module in enumerate(modules)
        ]
        self.routers: dict[tuple[tuple[int, ...], tuple[int, ...]], Router] = {}
        servers: list[Process] = [*self.prefills, *self.decodes]
        stack.callback(stop_together, servers)
        for server in servers:
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


@pytest.fixture(scope="package")
def pair(stack: ExitStack, model: Path) -> Pair:
    """The servers of the pairing tests."""
    return Pair(stack, model)
