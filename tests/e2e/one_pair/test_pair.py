"""The pairing: prefill and decode over NIXL behind SGLang's router give what one server gives, token for token."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from glm_sglang.serving import Server
from tests.e2e.conftest import PAGE, TOPK, generate, prompt
from tests.e2e.one_pair.conftest import Pair


@pytest.fixture(scope="module")
def expected(model: Path) -> Any:
    """transformers' model of the same weights."""
    from glm_sglang.oracle import Oracle

    return Oracle(model)


# One chunk and several, one page and several, within the index top-k and beyond it.
LENGTHS = (1, PAGE, TOPK + 1, 3 * TOPK, 256 + 1, 700)
LAYOUTS = {
    "1P1D": ((0,), (0,)),
    "2P1D": ((0, 1), (0,)),
    "1P2D": ((0,), (0, 1)),
    "1P and stock D": ((1,), (1,)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_equal_the_oracles(pair: Pair, expected: Any, layout: str) -> None:
    """Every request of every layout answers transformers' greedy tokens; each layout has prompts of its own."""
    router = pair.router(*LAYOUTS[layout])
    for length in LENGTHS:
        ids = prompt(length, 10 + list(LAYOUTS).index(layout))
        assert generate(router.url, ids)["output_ids"] == expected.greedy(ids, 8), length


def test_pair_equals_aggregated_with_a_cached_prefix(pair: Pair, aggregated: Server) -> None:
    """A second turn hits the prefix on the prefill node, and both ends' answers still agree beyond the index top-k."""
    router = pair.router()
    first = prompt(5 * PAGE, 77)
    for url in (router.url, aggregated.url):
        generate(url, first)
    second = first + prompt(100, 78)
    through_pair, alone = generate(router.url, second), generate(aggregated.url, second)
    assert through_pair["output_ids"] == alone["output_ids"]
    assert through_pair["meta_info"]["cached_tokens"] == 5 * PAGE  # type: ignore[index]


def test_many_at_once_answer_as_alone(pair: Pair, expected: Any) -> None:
    """Eight prompts in one batch: nobody gets another's answer."""
    router = pair.router((0, 1), (0,))
    prompts = [prompt(40 + 37 * i, 200 + i) for i in range(8)]
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
    }
    answers = httpx.post(f"{router.url}/generate", json=body, timeout=240, trust_env=False).json()
    assert [a["output_ids"] for a in answers] == [expected.greedy(ids, 6) for ids in prompts]


def test_every_socket_that_listens_is_on_loopback(pair: Pair) -> None:
    """HTTP, bootstrap, ZeroMQ, UCX, gloo and rendezvous of servers that were told no host, and the router's."""
    served = [*pair.prefills, pair.decodes[0], pair.router()]  # decode1 is stock SGLang
    listening = {}
    for server in served:
        leader = psutil.Process(server.pid)
        for process in (leader, *leader.children(recursive=True)):
            for socket in process.net_connections(kind="tcp"):
                if socket.status == psutil.CONN_LISTEN:
                    listening[server.name, process.name(), socket.laddr.port] = socket.laddr.ip
    assert {name for name, _, _ in listening} == {server.name for server in served}
    assert {key: ip for key, ip in listening.items() if not ip_address(ip).is_loopback} == {}
