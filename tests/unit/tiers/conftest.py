"""A real Valkey for the tiers' tests, ranks on it, and a proxy between where one is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import valkey as valkey_client
from glm_connectors.valkey_store import EmbeddedServer
from ranks import Rank
from valkey_proxy import Proxy


@pytest.fixture(scope="session")
def _server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def server(_server: EmbeddedServer) -> EmbeddedServer:
    """A running, empty server; shared, so leave it as it was."""
    client = valkey_client.Valkey(port=_server.port)
    client.flushall()
    client.close()
    return _server


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[Any]:
    """A plain client of the server."""
    client = valkey_client.Valkey(port=server.port)
    yield client
    client.close()


@pytest.fixture
def rank() -> Iterator[Callable[..., Rank]]:
    """`rank(url, …)`: a store, closed at the end. Nothing may be held or lost then."""
    made: list[Rank] = []

    def make(url: str, **more: Any) -> Rank:
        made.append(Rank(url, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert set(one.pool._held.values()) == {0}


@pytest.fixture
def proxy(server: EmbeddedServer) -> Iterator[Proxy]:
    """A proxy before the server."""
    between = Proxy(server.port)
    yield between
    between.close()
