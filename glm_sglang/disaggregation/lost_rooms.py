"""Decode asks prefill whether it has the other half of a request that waits, and ends the request where it has not.

UPSTREAM: a transfer that fails is told to decode, but not a request that prefill has refused, has answered with an error
or has lost with its process; SGLang's router waits for both halves. Decode, and the client with it, would wait for
SGLANG_DISAGGREGATION_WAITING_TIMEOUT: 300 s.

And decode asks the prefill servers that it knows whether they are still the same process. UPSTREAM: decode tells a
prefill server of its memory once, and again only after two heartbeats, 5 s apart, without an answer. A server that is
back before the second knows nothing of it, and what is sent there waits for 300 s.

Prefill answers at its bootstrap server, which its HTTP process runs. A prefill server without this fork has no such
route: then nothing is known and nothing changes. A request that prefill has received and not yet read is not lost:
`arrivals` numbers what comes in, and a room counts as unknown once all is read that had come before the first question.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from glm_sglang.disaggregation import arrivals
from glm_sglang.disaggregation.arrivals import Arrivals

logger = logging.getLogger(__name__)

PATH = "/glm/unknown_rooms"
EVERY_S = 0.25
#: How often a prefill server is asked which process it is; while it gives no answer, half as often each time, down to
#: every SILENT_S, for each such question keeps the others waiting.
PEER_EVERY_S = 1.0
#: A request reaches both halves at about the same time; one that is younger is not asked for.
AFTER_S = 0.5
#: Turns of prefill's event loop after which a connection that was made before a question is an arrival: one to accept it,
#: one to read it, one to start its task, and one more.
TURNS = 4
#: Until a server that gave no answer is asked again.
SILENT_S = 10.0
#: To connect, to begin an answer, and to end it.
ANSWER_S = 1.0
_LONGEST = 16 << 20  # bytes of an answer

# Prefill: its HTTP process


def serve(_: None, server: Any) -> None:
    """After CommonKVBootstrapServer._setup_routes."""
    from sglang.srt.entrypoints.http_server import app

    server.app.router.add_post(PATH, _answer)
    if not any(one.cls is Arrivals for one in app.user_middleware):
        app.add_middleware(Arrivals)


async def _answer(request: Any) -> Any:
    from aiohttp import web
    from sglang.srt.entrypoints.http_server import get_global_state

    rooms = (await request.json())["rooms"]
    if not rooms:  # who it is can be said before its first request
        return web.json_response({"unknown": [], "epoch": arrivals.EPOCH, "oldest": 0, "following": 0})
    state = get_global_state()
    manager = state.tokenizer_manager if state is not None else None
    loop = manager.event_loop if manager is not None else None  # None before its first request
    if loop is None:
        return web.Response(status=503)
    # On the loop that takes requests in: one that came before this question is known by then.
    asked = asyncio.run_coroutine_threadsafe(_unknown(manager, rooms), loop)
    return web.json_response(await asyncio.wrap_future(asked))


async def _unknown(manager: Any, rooms: Sequence[int]) -> dict[str, Any]:
    """An Answer: those of `rooms` that no request of this server has which is not answered yet, and the arrivals."""
    for _ in range(TURNS):
        await asyncio.sleep(0)
    known: set[int | None] = set()
    for state in manager.rid_to_state.values():
        room = getattr(state.obj, "bootstrap_room", None)
        known.update(room if isinstance(room, list) else [room])
    oldest, following = arrivals.bounds()
    unknown = [room for room in rooms if room not in known]
    return {"unknown": unknown, "epoch": arrivals.EPOCH, "oldest": oldest, "following": following}


# Decode: each scheduler process

#: Room → receiver of requests that decode had to retract: it asks prefill for their KV itself, once it has memory for it.
#: Until then prefill does not know them, and the answer to that question says what becomes of them.
_recomputed: WeakValueDictionary[int, Any] = WeakValueDictionary()


def received(waiting: Any, *_: Any, **__: Any) -> None:
    """After DecodePreallocQueue._create_receiver_and_enqueue: its DecodeRequest."""
    if waiting.is_rebootstrap:
        _recomputed[waiting.req.bootstrap_room] = waiting.kv_receiver
    else:
        _recomputed.pop(waiting.req.bootstrap_room, None)


def watch(_: Any, manager: Any) -> None:
    """After CommonKVManager._start_heartbeat_checker_thread, which the decode server calls."""
    threading.Thread(target=_run, args=(manager,), name="glm-lost-rooms", daemon=True).start()


def _run(manager: Any) -> None:
    lost = LostRooms(manager, ask)
    while not manager._heartbeat_shutdown.wait(EVERY_S):
        try:
            lost.look()
        except Exception:
            logger.exception("prefill was not asked for requests that wait")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a prefill server said.

    unknown    rooms that it does not have, of those that it was asked for.
    epoch      which process of it answered; "" where nobody listens.
    oldest     number of the oldest arrival whose room it has not read yet; `following` where there is none.
    following  number of the next arrival.
    """

    unknown: frozenset[int]
    epoch: str = ""
    oldest: int = 0
    following: int = 0


def ask(address: str, rooms: Sequence[int]) -> Answer | None:
    """What the prefill server at `address` says of them; None where it does not say.

    Where nobody listens any more, there is no request either.
    """
    connection = None
    try:
        connection = http.client.HTTPConnection(address, timeout=ANSWER_S)
        connection.request(
            "POST", PATH, json.dumps({"rooms": list(rooms)}), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            return None
        content = _content(response)
        said = json.loads(content)
        numbers = int(said["oldest"]), int(said["following"])
        return Answer(frozenset(said["unknown"]), str(said["epoch"]), *numbers)
    except ConnectionRefusedError:
        return Answer(frozenset(rooms))
    except (
        OSError,
        http.client.HTTPException,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
    ):  # the last four: no such address or answer
        return None
    finally:
        if connection is not None:
            connection.close()


def _content(response: http.client.HTTPResponse) -> bytes:
    """TimeoutError where it does not end, however little comes at a time: others are asked after it."""
    ends = time.monotonic() + ANSWER_S
    content = bytearray()
    while piece := response.read1(1 << 16):
        content += piece
        if time.monotonic() > ends or len(content) > _LONGEST:
            raise TimeoutError
    return bytes(content)


@dataclass(slots=True)
class _Waiting:
    """since: when it was first seen here. first: prefill's first answer, of those in a row, that it is unknown."""

    since: float
    first: Answer | None = None


@dataclass(slots=True)
class _Peer:
    """info: SGLang's entry for this prefill server, a new one whenever it meets it anew. epoch: of the last process
    that answered, "" where nobody has listened yet, None before the first answer. due: when it is asked next.
    silent_s: until then from the end of a question without an answer.
    """

    info: Any
    epoch: str | None = None
    due: float = 0.0
    silent_s: float = SILENT_S


class LostRooms:
    """The requests of one decode process whose KV has not come, and how often prefill did not know each; and the prefill
    servers that it knows.
    """

    def __init__(
        self,
        manager: Any,
        ask: Callable[[str, Sequence[int]], Answer | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager, self._ask, self._clock = manager, ask, clock
        self._seen: dict[int, _Waiting] = {}
        self._silent: dict[str, float] = {}
        self._peers: dict[str, _Peer] = {}

    def look(self) -> None:
        """One round: asks each prefill server who it is, and for the requests that have waited long enough."""
        now = self._clock()
        self._meet(now)
        waiting = {
            address: [room for room in list(rooms) if self._waits(room)]
            for address, rooms in list(self._manager.addr_to_rooms_tracker.items())
        }
        seen = self._seen
        self._seen = {room: seen.get(room) or _Waiting(now) for rooms in waiting.values() for room in rooms}
        for address, rooms in waiting.items():
            due = [room for room in rooms if now - self._seen[room].since >= AFTER_S]
            if due and now >= self._silent.get(address, now):
                self._judge(address, due)

    def _meet(self, now: float) -> None:
        """Where another process has taken a server's place, SGLang forgets the server, and meets it anew."""
        known = self._manager.prefill_info_table
        self._peers = {
            address: peer for address, peer in self._peers.items() if known.get(address) is peer.info
        }
        for address, info in list(known.items()):
            peer = self._peers.setdefault(address, _Peer(info))
            if now < peer.due:
                continue
            answer = self._ask(address, ())
            if answer is None:
                peer.due = self._clock() + peer.silent_s
                peer.silent_s = min(2 * peer.silent_s, SILENT_S)
                continue
            peer.due = now + PEER_EVERY_S
            peer.silent_s = PEER_EVERY_S
            before = peer.epoch
            # Nobody listening says nothing of who was there and may be still.
            if answer.epoch or before is None:
                peer.epoch = answer.epoch
            # The question took its time: the requests of an entry that came meanwhile are the new process's.
            restarted = answer.epoch and before not in (None, answer.epoch)
            if restarted and known.get(address) is peer.info:
                logger.warning("the prefill server at %s was restarted", address)
                self._manager._handle_node_failure(address)  # ends what waits for the process before

    def _waits(self, room: int) -> bool:
        from sglang.srt.disaggregation.base.conn import KVPoll

        waits = self._manager.request_status.get(room) in (KVPoll.Bootstrapping, KVPoll.WaitingForInput)
        return waits and room not in _recomputed

    def _judge(self, address: str, rooms: Sequence[int]) -> None:
        answer = self._ask(address, rooms)
        if answer is None:
            self._silent[address] = self._clock() + SILENT_S
            return
        for room in rooms:
            waiting = self._seen[room]
            first = waiting.first
            if room not in answer.unknown:
                waiting.first = None
            elif first is None or first.epoch != answer.epoch:
                waiting.first = answer
            elif answer.oldest >= first.following and self._waits(room):
                self._end(address, room)

    def _end(self, address: str, room: int) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        self._manager.record_failure(
            room,
            f"the prefill server at {address} has no request with bootstrap_room {room}: it has refused it, has answered "
            "it with an error, or never got it; or nobody listens there. Its own answer or log says why; send requests "
            "to the router, which gives both halves the same room and takes that address from --prefill (prefill's host "
            "and its --disaggregation-bootstrap-port)",
        )
        self._manager.update_status(room, KVPoll.Failed)
