"""Decode asks prefill for requests that wait: who is asked, when, and whose request ends."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll

from glm_sglang.disaggregation import arrivals, lost_rooms
from glm_sglang.disaggregation.lost_rooms import AFTER_S, EVERY_S, PEER_EVERY_S, SILENT_S, Answer, LostRooms

HERE = "10.0.0.1:8998"


class Setup:
    """A decode server's table of rooms, a clock, and a prefill server that knows what the test says."""

    def __init__(self) -> None:
        self.now = 100.0
        self.known: set[int] | None = set()
        # What prefill says of its arrivals: all read, unless a test says otherwise.
        self.epoch, self.oldest, self.following = "a", 5, 5
        self.asked: list[tuple[str, list[int]]] = []
        self.reasons: dict[int, str] = {}
        self.manager = SimpleNamespace(
            addr_to_rooms_tracker=defaultdict(set),
            request_status={},
            record_failure=self.reasons.__setitem__,
            prefill_info_table={},
        )
        self.forgotten: list[str] = []
        self.manager._handle_node_failure = self.forget
        self.manager.update_status = self.manager.request_status.__setitem__
        self.lost = LostRooms(self.manager, self.ask, clock=lambda: self.now)

    def forget(self, address: str) -> None:
        self.forgotten.append(address)
        del self.manager.prefill_info_table[address]

    def ask(self, address: str, rooms: Sequence[int]) -> Answer | None:
        self.asked.append((address, list(rooms)))
        if self.known is None:
            return None
        return Answer(frozenset(rooms) - self.known, self.epoch, self.oldest, self.following)

    def arrives(self, room: int, status: Any = KVPoll.WaitingForInput, address: str = HERE) -> None:
        self.manager.addr_to_rooms_tracker[address].add(room)
        self.manager.request_status[room] = status

    def look(self, seconds: float) -> None:
        """Rounds for so long."""
        for _ in range(round(seconds / EVERY_S)):
            self.lost.look()
            self.now += EVERY_S


@pytest.mark.parametrize("status", [KVPoll.Bootstrapping, KVPoll.WaitingForInput])
def test_a_request_that_prefill_does_not_know_ends_within_a_second(status: Any) -> None:
    setup = Setup()
    setup.arrives(7, status)
    setup.look(AFTER_S)
    assert setup.asked == []
    setup.look(0.5)
    assert setup.manager.request_status[7] == KVPoll.Failed
    assert "bootstrap_room 7" in setup.reasons[7]
    assert HERE in setup.reasons[7]


def test_one_that_prefill_knows_waits_on_and_ends_when_it_does_no_longer() -> None:
    setup = Setup()
    setup.known = {7}
    setup.arrives(7)
    setup.look(20)
    assert setup.manager.request_status[7] == KVPoll.WaitingForInput
    setup.known = set()
    setup.look(EVERY_S)
    assert (
        setup.manager.request_status[7] == KVPoll.WaitingForInput
    )  # once is not enough: it may be about to succeed
    setup.look(EVERY_S)
    assert setup.manager.request_status[7] == KVPoll.Failed


@pytest.mark.parametrize("status", [KVPoll.Transferring, KVPoll.Success, KVPoll.Failed])
def test_what_does_not_wait_is_not_asked_for(status: Any) -> None:
    setup = Setup()
    setup.arrives(7, status)
    setup.look(5)
    assert setup.asked == []
    assert setup.reasons == {}


def test_a_request_that_has_come_meanwhile_is_left_alone() -> None:
    """Between prefill's answer and what is made of it."""
    setup = Setup()
    setup.arrives(7)
    setup.look(AFTER_S + EVERY_S)
    ask = setup.lost._ask

    def late(address: str, rooms: Sequence[int]) -> Answer | None:
        setup.manager.request_status[7] = KVPoll.Success
        return ask(address, rooms)

    setup.lost._ask = late
    setup.look(1)
    assert setup.manager.request_status[7] == KVPoll.Success


def test_a_server_that_does_not_say_ends_nobody_and_is_left_alone_for_a_while() -> None:
    setup = Setup()
    setup.known = None
    setup.arrives(7)
    setup.arrives(8, address="10.0.0.2:8998")
    setup.look(AFTER_S + SILENT_S)
    assert {address for address, _ in setup.asked} == {HERE, "10.0.0.2:8998"}
    assert len(setup.asked) == 2
    assert setup.reasons == {}
    setup.look(2 * EVERY_S)
    assert len(setup.asked) == 4


def test_a_room_that_is_used_again_starts_anew() -> None:
    setup = Setup()
    setup.arrives(7)
    setup.look(AFTER_S + EVERY_S)  # unknown once
    setup.manager.addr_to_rooms_tracker[HERE].clear()
    setup.look(EVERY_S)
    setup.arrives(7)
    setup.look(AFTER_S + EVERY_S)
    assert setup.reasons == {}


def test_a_request_that_decode_retracted_is_not_asked_for() -> None:
    """Decode tells prefill of it when it has memory for it, and hears from that call what becomes of it."""

    class Receiver:
        pass

    setup = Setup()
    receiver: Receiver | None = Receiver()
    request = SimpleNamespace(bootstrap_room=7)
    lost_rooms.received(SimpleNamespace(req=request, kv_receiver=receiver, is_rebootstrap=True))
    setup.arrives(7)
    setup.look(60)
    assert setup.asked == []
    receiver = None  # it is done with; the room comes again
    setup.look(5)
    assert list(setup.reasons) == [7]


def test_a_room_of_a_retracted_request_that_comes_anew_is_asked_for() -> None:
    receiver = Setup()
    request = SimpleNamespace(bootstrap_room=7)
    for again in (True, False):
        lost_rooms.received(SimpleNamespace(req=request, kv_receiver=receiver, is_rebootstrap=again))
    setup = Setup()
    setup.arrives(7)
    setup.look(5)
    assert list(setup.reasons) == [7]


@pytest.mark.parametrize("between", ["a", ""])
def test_a_prefill_server_that_another_process_replaced_is_met_anew(between: str) -> None:
    """Between two heartbeats: seen down or not. The one that SGLang has met anew is not forgotten again."""
    setup = Setup()
    setup.manager.prefill_info_table[HERE] = object()
    setup.look(60)
    setup.epoch = between
    setup.look(PEER_EVERY_S)
    assert setup.forgotten == []
    setup.epoch = "b"
    setup.look(PEER_EVERY_S)
    assert setup.forgotten == [HERE]
    setup.manager.prefill_info_table[HERE] = object()
    setup.look(60)
    assert setup.forgotten == [HERE]


def test_a_prefill_server_that_could_not_be_reached_for_a_while_is_the_same_afterwards() -> None:
    """A load balancer refuses for one that is not ready: requests that run there go on."""
    setup = Setup()
    setup.manager.prefill_info_table[HERE] = object()
    setup.look(5)
    for epoch in ("", "a", "", "a"):
        setup.epoch = epoch
        setup.look(5)
    assert setup.forgotten == []
    setup.epoch = "b"
    setup.look(PEER_EVERY_S)
    assert setup.forgotten == [HERE]


def test_one_that_was_down_when_it_was_first_asked_is_met_anew() -> None:
    setup = Setup()
    setup.manager.prefill_info_table[HERE] = object()
    setup.epoch = ""
    setup.look(5)
    setup.epoch = "b"
    setup.look(PEER_EVERY_S)
    assert setup.forgotten == [HERE]


def test_what_sglang_has_met_anew_itself_is_not_forgotten() -> None:
    setup = Setup()
    setup.manager.prefill_info_table[HERE] = object()
    setup.look(PEER_EVERY_S)
    setup.manager.prefill_info_table[HERE] = object()
    setup.epoch = "b"
    setup.look(60)
    assert setup.forgotten == []


@pytest.mark.parametrize("met", [True, False], ids=["met anew", "dropped"])
def test_what_sglang_meets_anew_or_drops_during_the_question_is_not_forgotten(met: bool) -> None:
    """A question may take seconds; the requests of the entry that is there after it are the new process's."""
    setup = Setup()
    table = setup.manager.prefill_info_table
    table[HERE] = object()
    setup.look(PEER_EVERY_S)
    setup.epoch = "b"
    ask = setup.lost._ask

    def slow(address: str, rooms: Sequence[int]) -> Answer | None:
        setup.lost._ask = ask
        del table[HERE]
        if met:
            table[HERE] = object()
        return ask(address, rooms)

    setup.lost._ask = slow
    setup.look(60)
    assert setup.forgotten == []
    assert (HERE in table) == met


def test_a_prefill_server_that_never_says_who_it_is_is_asked_rarely() -> None:
    setup = Setup()
    setup.known = None  # without this fork
    setup.manager.prefill_info_table[HERE] = object()
    setup.look(2 * SILENT_S)
    assert setup.asked == 2 * [(HERE, [])]
    setup.known = set()
    setup.look(4 * PEER_EVERY_S)
    assert len(setup.asked) == 6


@pytest.mark.parametrize("takes", [0.0, 3.0])
def test_one_that_said_and_is_mute_is_asked_more_and_more_rarely_until_it_says_again(takes: float) -> None:
    """However long a question without an answer takes: rounds are there for others."""
    setup = Setup()
    setup.manager.prefill_info_table[HERE] = object()
    asked: list[float] = []
    ask = setup.lost._ask

    def mute(address: str, rooms: Sequence[int]) -> Answer | None:
        asked.append(setup.now)
        answer = ask(address, rooms)
        if answer is None:
            setup.now += takes
        return answer

    def between() -> list[float]:
        return [after - before for before, after in itertools.pairwise(asked)]

    setup.lost._ask = mute
    setup.look(PEER_EVERY_S)
    for _ in range(2):  # an answer ends it
        setup.known, asked[:] = None, []
        setup.look(40)
        assert between()[:6] == [takes + wait for wait in (1, 2, 4, 8, 10, 10)]
        setup.known = set()
        setup.look(SILENT_S)
        asked.clear()
        setup.look(3 * PEER_EVERY_S)
        assert between() == [1, 1]
    setup.epoch = "b"
    setup.look(PEER_EVERY_S)
    assert setup.forgotten == [HERE]


@pytest.mark.parametrize(
    "content",
    [
        b"<html>",
        b"[]",
        b'{"unknown": [1]}',
        b'{"unknown": 1, "epoch": "a"}',
        b'{"unknown": [], "epoch": "a", "oldest": "x", "following": {}}',
        pytest.param(b"[" * 100_000, id="deep"),
    ],
)
def test_another_server_at_the_address_does_not_say(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_rooms, "ANSWER_S", 30.0)  # not what ends it

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert lost_rooms.ask(f"127.0.0.1:{server.server_port}", [1]) is None
        thread.join()


@pytest.mark.parametrize(
    ("size", "answer_s", "longest"),
    [(1, 1.0, 1 << 20), (1 << 16, 60.0, 1 << 18)],
    ids=["too long a time", "too many bytes"],
)
def test_an_answer_that_does_not_end_is_none(
    size: int, answer_s: float, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same round asks others. One bound each: the other is beyond all that the server sends."""
    monkeypatch.setattr(lost_rooms, "ANSWER_S", answer_s)
    monkeypatch.setattr(lost_rooms, "_LONGEST", longest)
    ended, enough = threading.Event(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                for _ in range(300):
                    self.wfile.write(b"x" * size)
                    enough.wait(0.05)
                ended.set()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert lost_rooms.ask(f"127.0.0.1:{server.server_port}", [1]) is None
        assert not ended.is_set()
        enough.set()
        thread.join()


@pytest.mark.parametrize("address", ["a..b:8998", "a b:8998", "10.0.0.1:x", "\n:1"])
def test_what_is_no_address_does_not_say(address: str) -> None:
    """A client chooses bootstrap_host; others' requests are asked for in the same round."""
    assert lost_rooms.ask(address, [1]) is None


@pytest.fixture
def prefill(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A bootstrap server's route over aiohttp, and a tokenizer manager on a loop of its own; it may take its time."""
    from aiohttp import web
    from sglang.srt.entrypoints import http_server

    manager = SimpleNamespace(rid_to_state={}, event_loop=asyncio.new_event_loop())
    monkeypatch.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=manager))
    monkeypatch.setattr(lost_rooms, "ANSWER_S", 30.0)
    app = web.Application()
    lost_rooms.serve(None, SimpleNamespace(app=app))
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app)

    async def start() -> str:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]

    threads = [threading.Thread(target=one.run_forever, daemon=True) for one in (loop, manager.event_loop)]
    for thread in threads:
        thread.start()
    address = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield SimpleNamespace(address=address, manager=manager)
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    for one in (loop, manager.event_loop):
        one.call_soon_threadsafe(one.stop)
    for thread in threads:
        thread.join(10)


def test_prefill_knows_what_it_has_not_answered(prefill: SimpleNamespace) -> None:
    """Single requests, lists of them, and those without a room."""
    prefill.manager.rid_to_state = {
        "a": SimpleNamespace(obj=SimpleNamespace(bootstrap_room=2**63 - 1)),
        "b": SimpleNamespace(obj=SimpleNamespace(bootstrap_room=[2, 3])),
        "c": SimpleNamespace(obj=SimpleNamespace(bootstrap_room=None)),
        "d": SimpleNamespace(obj=SimpleNamespace()),
    }
    answer = lost_rooms.ask(prefill.address, [1, 2, 3, 4, 2**63 - 1])
    assert answer is not None
    assert answer.unknown == {1, 4}


def test_who_does_not_say(prefill: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill.manager.event_loop, loop = None, prefill.manager.event_loop
    assert lost_rooms.ask(prefill.address, [1]) is None  # it has had no request yet
    answer = lost_rooms.ask(prefill.address, [])
    assert answer is not None
    assert answer.epoch == arrivals.EPOCH
    prefill.manager.event_loop = loop
    with socket.create_server(("127.0.0.1", 0)) as silent, monkeypatch.context() as soon:
        soon.setattr(lost_rooms, "ANSWER_S", 0.2)
        assert lost_rooms.ask(f"127.0.0.1:{silent.getsockname()[1]}", [1]) is None
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
        answer = lost_rooms.ask(nobody, [1, 2])  # the machine is there, the server is not
        assert answer is not None
        assert answer.unknown == {1, 2}
    request = urllib.request.Request(
        f"http://{prefill.address}{lost_rooms.PATH}", json.dumps({"rooms": []}).encode()
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        assert json.load(response)["unknown"] == []


@pytest.mark.parametrize("seconds", [5, 60])
def test_a_request_that_prefill_is_still_reading_is_not_lost(seconds: float) -> None:
    """It arrived as number 3, before the first question; later arrivals come and are read meanwhile."""
    setup = Setup()
    setup.oldest, setup.following = 3, 5
    setup.arrives(7)
    for _ in range(int(seconds)):
        setup.look(1)
        setup.following += 10
    assert setup.reasons == {}
    setup.oldest = setup.following - 1  # read: and it was another room's
    setup.look(EVERY_S)
    assert list(setup.reasons) == [7]


def test_what_arrives_after_the_first_question_keeps_nobody() -> None:
    setup = Setup()
    setup.arrives(7)
    setup.look(AFTER_S + EVERY_S)
    setup.following, setup.oldest = 30, 6  # 5 was the next one, and has been read
    setup.look(EVERY_S)
    assert list(setup.reasons) == [7]


def test_numbers_of_another_process_are_not_compared() -> None:
    """Prefill was restarted between two questions: its numbers start again."""
    setup = Setup()
    setup.oldest = setup.following = 1000
    setup.arrives(7)
    setup.look(AFTER_S + EVERY_S)
    setup.epoch, setup.oldest, setup.following = "b", 1, 2
    setup.look(5)
    assert setup.reasons == {}
    setup.oldest = 2
    setup.look(EVERY_S)
    assert list(setup.reasons) == [7]


def test_arrivals_are_open_until_they_are_in_the_table_or_answered() -> None:
    """Through the real middleware: a request whose body is being read, one in the table, one that was refused."""

    async def run() -> list[tuple[int, int]]:
        first = arrivals.bounds()[1]
        seen = []
        reading, entered, leave = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/refused":
                return
            await reading.wait()
            # A middleware of Starlette's runs what is below it in a task of its own.
            await asyncio.create_task(handle())

        async def handle() -> None:
            arrivals.entered(None, "manager", "request")
            entered.set()
            await leave.wait()

        middleware = arrivals.Arrivals(app)

        def post(path: str, method: str = "POST") -> asyncio.Task[None]:
            scope = {"type": "http", "method": method, "path": path}
            return asyncio.create_task(middleware(scope, None, None))

        def look() -> None:
            oldest, following = arrivals.bounds()
            seen.append((oldest - first, following - first))

        look()
        slow = post("/generate")
        await asyncio.sleep(0)
        look()
        await post("/refused")
        await post("/refused", "GET")
        look()
        reading.set()
        await entered.wait()
        look()
        leave.set()
        await slow
        look()
        return seen

    assert asyncio.run(run()) == [(0, 0), (0, 1), (0, 2), (2, 2), (2, 2)]
