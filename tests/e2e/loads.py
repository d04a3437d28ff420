"""What a server holds for requests, as SGLang reports it on /v1/loads."""

from __future__ import annotations

import time

import httpx

from glm_sglang.serving import Server, tail


def held(server: Server) -> tuple[int, int]:
    """(requests in any of the server's queues or batches, tokens of KV that they hold). AssertionError with the end of
    its log where it does not answer: one that finds pages that nobody holds ends itself.
    """
    try:
        answer = httpx.get(f"{server.url}/v1/loads", timeout=10, trust_env=False).json()
    except httpx.TransportError as error:
        raise AssertionError("\n".join([f"{server.name}: {error!r}", *tail(server.log, 40)])) from error
    (rank,) = answer["loads"]
    in_transfer = rank["disaggregation"]["prefill_inflight_queue_reqs"]
    return rank["num_running_reqs"] + rank["num_waiting_reqs"] + in_transfer, rank["num_used_tokens"]


def seconds_until_idle(*servers: Server, patience: float = 60) -> float:
    """Until none of them holds a request or a page for one."""
    began = time.monotonic()
    while any(held(server) != (0, 0) for server in servers):
        assert time.monotonic() - began < patience, plight(*servers)
        time.sleep(0.02)
    return time.monotonic() - began


def plight(*servers: Server) -> str:
    """What each of them holds and has logged last: why it has not come to what was waited for."""
    lines = []
    for server in servers:
        lines.append(f"{server.name} holds (requests, tokens) {held(server)}; its log ends with")
        lines += [f"  {line}" for line in tail(server.log, 40)]
    return "\n".join(lines)
