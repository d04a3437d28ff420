"""What a request is told whose other half never comes, and requests that could have no other half.

Prefill and decode find each other by three fields that the router adds to a request: bootstrap_host and bootstrap_port
(where decode finds prefill) and bootstrap_room (the request's name on both). Upstream's answers to a wrong one name
internal states or a cause that is not it; some values end the scheduler that gets them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: What both schedulers' metadata buffers hold. 0 is upstream's mark for metadata that has not arrived: never received.
LARGEST_ROOM = 2**63 - 1
_ROUTER = (
    "send the request to the router, which gives prefill and decode the same bootstrap_host, bootstrap_port and "
    "bootstrap_room"
)


def refuse(manager: Any, request: Any, input_ids: Any = None) -> None:
    """Before TokenizerManager._validate_one_request. Raises ValueError, which SGLang answers with HTTP 400."""
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
    from sglang.srt.runtime_context import get_disagg

    mode = get_disagg().disaggregation_mode
    if mode == "null" or get_disagg().disaggregation_transfer_backend == "fake":
        return
    if not hasattr(request, "bootstrap_room"):  # an embedding's
        return
    if request.bootstrap_host == FAKE_BOOTSTRAP_HOST:  # health checks and warm-up, which pair with nobody
        return
    if complaint := wrong(mode, request.bootstrap_host, request.bootstrap_port, request.bootstrap_room):
        raise ValueError(f"This is a {mode} server and {complaint}; {_ROUTER}.")


def wrong(mode: str, host: Any, port: Any, room: Any) -> str:
    """What is wrong with these fields on a `prefill` or `decode` server, as a clause; "" where nothing is.

    A port of None is the server's own --disaggregation-bootstrap-port; prefill does not need the host.
    """
    if room is None:
        return "the request has no bootstrap_room"
    # A list is for a list of prompts, which has been taken apart by now.
    if not isinstance(room, int) or not 1 <= room <= LARGEST_ROOM:
        return f"bootstrap_room is {room}, allowed: 1 to {LARGEST_ROOM}"
    if port is not None and (not isinstance(port, int) or not 1 <= port <= 65535):
        return f"bootstrap_port is {port}, allowed: 1 to 65535"
    if host is not None and not isinstance(host, str):
        return f"bootstrap_host is {host}, allowed: one host"
    if mode == "decode" and not host:
        return "the request has no bootstrap_host"
    return ""


def prefill_never_sent(result: Any, receiver: Any) -> None:
    """After CommonKVReceiver._check_waiting_timeout, on the decode server: a status where it gave up, else None."""
    if result is None:
        return
    _record(
        receiver,
        f"no prefill server sent the KV of bootstrap_room {receiver.bootstrap_room} within "
        f"{receiver.kv_mgr.waiting_timeout} s (bootstrap server {receiver.bootstrap_addr}). Is the room unknown there? "
        f"Then {_ROUTER}. Was prefill too busy? Then raise SGLANG_DISAGGREGATION_WAITING_TIMEOUT (seconds) on the decode "
        "server",
    )


def decode_never_asked(result: Any, sender: Any) -> None:
    """After CommonKVSender._check_bootstrap_timeout, on the prefill server: a status where it gave up, else None."""
    if result is None:
        return
    _record(
        sender,
        f"no decode server asked for the KV of bootstrap_room {sender.bootstrap_room} within "
        f"{sender.kv_mgr.bootstrap_timeout} s. Did none get this request, or is it gone? Then {_ROUTER}, and look at its "
        "decode servers. Was decode too busy? Then raise SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT (seconds) on the "
        "prefill server",
    )


def prefill_not_found(original: Callable[..., Any], queue: Any, waiting: dict[str, list[Any]]) -> Any:
    """Around DecodePreallocQueue._ensure_prefill_info: bootstrap address → its requests, to (found, to be tried again).

    UPSTREAM: it aborts the others, whose clients then read that somebody aborted them.
    """
    found, again = original(queue, waiting)
    kept = {id(one) for one in again}
    for address, requests in waiting.items():
        if address in found:
            continue
        for one in requests:
            if id(one) not in kept and one.kv_receiver is not None:
                _record(
                    one.kv_receiver,
                    f"no prefill server is registered at bootstrap_host:bootstrap_port {address}. Start it there, or "
                    "correct the address: the port is prefill's --disaggregation-bootstrap-port, and the router takes "
                    "both from --prefill URL BOOTSTRAP_PORT",
                )
    return found, again


def _record(half: Any, reason: str) -> None:
    """Puts `reason` in the place of upstream's. The scheduler takes it from there into its log and the answer."""
    half.kv_mgr.record_failure(half.bootstrap_room, reason)
