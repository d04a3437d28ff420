"""What a server holds for requests, as SGLang reports it on /v1/loads."""

from __future__ import annotations

import time

import httpx

from glm_sglang.serving import Server


def held(server: Server) -> tuple[int, int]:
    """(requests in any of the server's queues or batches, tokens of KV that they hold)."""
    answer = httpx.get(f"{server.url}/v1/loads", timeout=10, trust_env=False).json()
    (rank,) = answer["loads"]
    in_transfer = rank["disaggregation"]["prefill_inflight_queue_reqs"]
    return rank["num_running_reqs"] + rank["num_waiting_reqs"] + in_transfer, rank["num_used_tokens"]


def seconds_until_idle(*servers: Server, patience: float = 60) -> float:
    """Until none of them holds a request or a page for one."""
    began = time.monotonic()
    while any(held(server) != (0, 0) for server in servers):
        assert time.monotonic() - began < patience, [held(server) for server in servers]
        time.sleep(0.02)
    return time.monotonic() - began
