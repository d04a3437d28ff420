"""LMCache's async lookup over real sockets: who wakes the scheduler, whose reply counts, what a dead rank
costs.

Oracles: the answer is the minimum over all ranks for this very question, or a miss; a sleep is a call of
`time.sleep`.
"""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from glm_connectors.lmcache_repairs import lookup_wire
from hypothesis import given
from hypothesis import strategies as st
from lmcache_faults import HUNG, counters, patience, run

CHUNK = 256
TOKENS = list(range(4 * CHUNK))


class Engine:
    """A rank's engine: answers at once, when told, or not at all."""

    def __init__(self, hit: int = len(TOKENS), answers: bool = True, fails: bool = False) -> None:
        self.hit, self.answers, self.fails = hit, answers, fails
        self.server: Any = None
        self.asked = threading.Semaphore(0)
        self.requests: list[tuple[str, int]] = []
        self.released: list[str] = []
        self.cleaned = threading.Semaphore(0)

    def async_lookup_and_prefetch(self, lookup_id: str, hashes: list[int], **_: Any) -> None:
        self.requests.append((lookup_id, len(hashes)))
        if self.fails:
            raise RuntimeError("no storage manager")
        if self.answers:
            self.reply(lookup_id)
        self.asked.release()

    def reply(self, lookup_id: str) -> None:
        self.server.send_response_to_scheduler(lookup_id, self.hit)

    def cleanup_memory_objs(self, lookup_id: str) -> None:
        self.released.append(lookup_id)
        self.cleaned.release()


class Bench:
    """A client and its ranks in one process, over the sockets they would use in several."""

    def __init__(self, *engines: Engine, timeout_ms: int = 100, serve: bool = True, **extra: Any) -> None:
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.lookup_client.lmcache_async_lookup_client import LMCacheAsyncLookupClient

        self.engines = engines
        self.config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK, lookup_timeout_ms=timeout_ms, extra_config=extra or None
        )
        self.engine_id = uuid.uuid4().hex
        self.client = LMCacheAsyncLookupClient(self.config, self.metadata(0))
        if serve:
            for rank in range(len(engines)):
                self.serve(rank)

    def metadata(self, rank: int) -> Any:
        return SimpleNamespace(
            engine_id=self.engine_id,
            kv_connector_extra_config=None,
            world_size=len(self.engines),
            worker_id=rank,
            use_mla=False,
            model_name="model",
        )

    def serve(self, rank: int) -> None:
        from lmcache.v1.lookup_client.lmcache_async_lookup_client import LMCacheAsyncLookupServer

        self.engines[rank].server = LMCacheAsyncLookupServer(self.engines[rank], self.metadata(rank))

    def ask(self, lookup_id: str) -> Any:
        """What vLLM's scheduler does with a request it sees for the first time."""
        assert self.client.lookup_cache(lookup_id) == -1
        return self.client.lookup(TOKENS, lookup_id)

    def poll(self, lookup_id: str) -> Any:
        """Asks again, step by step, until there is a result."""
        deadline = time.monotonic() + max(patience(), 3.0)
        while time.monotonic() < deadline:
            found = self.client.lookup_cache(lookup_id)
            if found is not None:
                return found
        return HUNG


def _sleeps() -> list[bool]:
    """Records every sleep of the client's module: whether its lock was held."""
    from lmcache.v1.lookup_client import lmcache_async_lookup_client as module

    recorded: list[bool] = []
    real = module.time

    class Time:
        client: Any = None

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def sleep(self, seconds: float) -> None:
            recorded.append(Time.client is not None and Time.client.lock.locked())
            real.sleep(seconds)

    module.time = Time()
    _sleeps.client_holder = Time  # type: ignore[attr-defined]
    return recorded


# -- waking --------------------------------------------------------------------------------------------------


def one_lookup_and_a_slow_one() -> tuple[list[Any], list[bool]]:
    sleeps = _sleeps()
    fast, slow = Engine(hit=512), Engine(hit=768)
    bench = Bench(fast, slow, timeout_ms=60_000)
    _sleeps.client_holder.client = bench.client if hasattr(bench.client, "lock") else None  # type: ignore[attr-defined]
    answers = [bench.poll("a") if (found := bench.ask("a")) is None else found]
    assert slow.asked.acquire(timeout=30)
    slow.answers = False
    assert bench.ask("b") is None
    assert bench.client.lookup_cache("b") is None
    assert slow.asked.acquire(timeout=30)  # a reply before its question is none
    slow.reply("b")
    answers.append(bench.poll("b"))
    return answers, sleeps


def test_the_last_reply_wakes_the_waiter_and_nothing_sleeps() -> None:
    answers, sleeps = run(one_lookup_and_a_slow_one, repaired=False)
    assert answers == [512, 512]
    assert sleeps
    assert any(sleeps)  # with the lock held that the reply thread needs
    assert run(one_lookup_and_a_slow_one, repaired=True) == ([512, 512], [])


def _blocking_reads() -> threading.Event:
    """Is set when a link is read by someone who waits."""
    from glm_connectors.lmcache_repairs.lookup_link import Link

    reading, receive = threading.Event(), Link.receive

    def observed(link: Link, milliseconds: int) -> list[bytes]:
        if milliseconds:
            reading.set()
        return receive(link, milliseconds)

    Link.receive = observed  # type: ignore[method-assign]
    return reading


def replies_while_the_scheduler_looks(order: list[int], ends: int | None) -> tuple[Any, list[int], bool]:
    """Ranks reply in `order`, or one ends, while the scheduler looks for replies; the result, the ranks counted in, and
    whether it ever slept in a read.
    """
    from glm_connectors.lmcache_repairs import lookup_client

    lookup_client._AWAKE = 60.0
    engines = [Engine(hit=(rank + 1) * CHUNK, answers=False) for rank in range(3)]
    bench = Bench(*engines, timeout_ms=60_000, lookup_backoff_time=60.0)
    slept, counted = _blocking_reads(), []
    table = bench.client._table
    reply = table.reply

    def observed(message: Any) -> bool:
        counted.append(message.rank)
        return bool(reply(message))

    table.reply = observed
    results: list[Any] = []
    scheduler = threading.Thread(target=lambda: results.append(bench.ask("a")))
    scheduler.start()
    for engine in engines:
        assert engine.asked.acquire(timeout=30)
    for rank in order:
        engines[rank].reply("a")
        deadline = time.monotonic() + patience()
        while rank not in counted and time.monotonic() < deadline:
            time.sleep(0.001)
    if ends is not None:
        engines[ends].server.close()
    scheduler.join(30)
    return results[0], counted, slept.is_set()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_a_scheduler_that_looks_counts_replies_as_they_come(order: list[int]) -> None:
    assert run(replies_while_the_scheduler_looks, order, None, repaired=True) == (CHUNK, order, False)


def test_a_rank_that_ends_under_a_scheduler_that_looks_is_a_miss_at_once() -> None:
    assert run(replies_while_the_scheduler_looks, [1], 2, repaired=True) == (0, [1], False)


def lock_while_the_scheduler_waits(reader: str) -> tuple[bool, Any]:
    """Whether the table's lock can be taken during a wait, and the wait's result; who reads the replies
    meanwhile.
    """
    engine = Engine(answers=False)
    bench = Bench(engine, timeout_ms=60_000, lookup_backoff_time=60.0 if reader == "scheduler" else 0.001)
    table = bench.client._table
    waiting = _blocking_reads()
    if reader == "reply thread":
        assert bench.ask("a") is None
        deadline = time.monotonic() + patience()
        while not bench.client._baton.locked() and time.monotonic() < deadline:
            time.sleep(0.01)
        bench.client.lookup_backoff_time = 60.0
        bench.client._patience, bench.client._patient_since = 60.0, 0.0
        wait, waiting = table.lock.wait, threading.Event()
        table.lock.wait = lambda timeout=None: (waiting.set(), wait(timeout))[1]
    ask = bench.ask if reader == "scheduler" else bench.client.lookup_cache
    results: list[Any] = []
    scheduler = threading.Thread(target=lambda: results.append(ask("a")))
    scheduler.start()
    assert waiting.wait(30)
    free = table.lock.acquire(timeout=30)
    table.lock.release()
    assert engine.asked.acquire(timeout=30)
    engine.reply("a")
    scheduler.join(30)
    return free, results[0]


@pytest.mark.parametrize("reader", ["scheduler", "reply thread"])
def test_no_lock_is_held_while_the_scheduler_waits(reader: str) -> None:
    assert run(lock_while_the_scheduler_waits, reader, repaired=True) == (True, len(TOKENS))


def waits_of_a_pass_over_many_lookups() -> float:
    """Seconds that the scheduler asked to wait in one pass over 50 pending lookups."""
    bench = Bench(Engine(answers=False), timeout_ms=60_000, lookup_backoff_time=0.05)
    asked: list[float] = []
    wait = bench.client._wait
    bench.client._wait = lambda lookup, until: (asked.append(until - time.monotonic()), wait(lookup, until))
    for number in range(50):
        assert bench.client.lookup_hashes([1], [CHUNK], f"r{number}") is None
    return sum(asked)


def test_a_pass_over_many_lookups_waits_once_and_not_once_for_each() -> None:
    # The purse is one back-off time, and fills only while the scheduler does something else. Each for
    # itself: 2.5 s.
    assert run(waits_of_a_pass_over_many_lookups, repaired=True) < 1.0


def replies_after_the_scheduler_left() -> tuple[Any, bool]:
    """A lookup whose reply comes when nobody waits: the next ask finds it; then the reply thread sleeps
    again.
    """
    engine = Engine(answers=False)
    bench = Bench(engine, timeout_ms=60_000, lookup_backoff_time=0.001)
    assert bench.ask("a") is None
    assert engine.asked.acquire(timeout=30)
    engine.reply("a")
    deadline = time.monotonic() + patience()
    while bench.client._handed.is_set() and time.monotonic() < deadline:
        time.sleep(0.01)
    bench.client.lookup_backoff_time = 0.0
    return bench.client.lookup_cache("a"), bench.client._handed.is_set()


def test_the_reply_thread_reads_what_comes_later_and_then_sleeps() -> None:
    assert run(replies_after_the_scheduler_left, repaired=True) == (len(TOKENS), False)


def asks_while_the_reply_thread_is_busy() -> tuple[Any, int]:
    """A scheduler that asks again and again while late replies come in; the answer, and how many were late."""
    engine = Engine(answers=False)
    bench = Bench(engine, timeout_ms=60_000, lookup_backoff_time=0.001)
    late = 50
    for number in range(late):
        bench.client.lookup_hashes([1], [CHUNK], f"left{number}")
        assert engine.asked.acquire(timeout=30)
        bench.client.clear_lookup_status(f"left{number}")
    assert bench.ask("a") is None
    assert engine.asked.acquire(timeout=30)
    for _ in range(20_000):
        assert bench.client.lookup_cache("a") is None
    for number in range(late):
        engine.reply(f"left{number}")
        for _ in range(100):
            assert bench.client.lookup_cache("a") is None
    engine.reply("a")
    return bench.poll("a"), counters()["late_replies"]


def test_a_scheduler_that_asks_in_a_loop_does_not_lock_up_the_reply_thread() -> None:
    assert run(asks_while_the_reply_thread_is_busy, repaired=True) == (len(TOKENS), 50)


# -- whose reply counts --------------------------------------------------------------------------------------


class Wire:
    """The sockets of all ranks, without servers: the test decides what is replied, and when."""

    def __init__(self, bench: Bench, ranks: int) -> None:
        from glm_connectors.lmcache_repairs.lookup_link import Inlet, address

        self.inlets = [Inlet(address(_upstream_path(bench, rank))) for rank in range(ranks)]
        self.came: list[list[tuple[Any, bytes]]] = [[] for _ in range(ranks)]
        self.links: list[Any] = [None] * ranks

    def request(self, rank: int) -> int:
        """The attempt of the next request."""
        while not self.came[rank]:
            self.came[rank] += self.inlets[rank].wait()
        self.links[rank], frame = self.came[rank].pop(0)
        request = lookup_wire.decode_to_rank(frame)
        assert isinstance(request, lookup_wire.LookupRequest)
        return request.attempt

    def reply(self, rank: int, attempt: int, tokens: int, name: int | None = None) -> None:
        """`name`: the rank that the reply says it is from."""
        from glm_connectors.lmcache_repairs.lookup_link import framed

        named = rank if name is None else name
        assert self.links[rank].send(
            framed(lookup_wire.encode(lookup_wire.LookupReply("a", tokens, named, attempt)))
        )


class UpstreamWire:
    """The same for an unrepaired client, whose requests and replies have no attempt."""

    def __init__(self, bench: Bench, ranks: int) -> None:
        import zmq

        context = zmq.Context()
        self.pulls = []
        for rank in range(ranks):
            self.pulls.append(context.socket(zmq.PULL))
            self.pulls[-1].bind(f"ipc://{_upstream_path(bench, rank)}")
        self.push = context.socket(zmq.PUSH)
        self.push.connect(f"ipc://{_upstream_path(bench, 0, 'lookup_scheduler')}")

    def request(self, rank: int) -> int:
        request = lookup_wire.decode_to_rank(self.pulls[rank].recv())
        assert isinstance(request, lookup_wire.LookupRequest)
        return request.attempt

    def reply(self, rank: int, attempt: int, tokens: int) -> None:
        self.push.send(lookup_wire.encode(lookup_wire.LookupReply("a", tokens, rank, attempt)))


def _upstream_path(bench: Bench, rank: int, service: Any = "lookup_worker") -> str:
    from lmcache.v1.rpc_utils import get_zmq_rpc_path_lmcache

    return str(get_zmq_rpc_path_lmcache(bench.engine_id, service, 0, rank))


def late_reply_and_the_next_lookup_of_that_id() -> tuple[Any, Any, int]:
    """Rank 0's reply to a question that nobody asks any more arrives under the next question with that id.

    Returns the answers once rank 0 has replied to both (1024 each), and once rank 1 has (256); late replies.
    """
    bench = Bench(Engine(), Engine(), serve=False, timeout_ms=60_000)
    wire = Wire(bench, 2) if hasattr(bench.client, "_table") else UpstreamWire(bench, 2)
    bench.ask("a")
    bench.client.clear_lookup_status("a")
    bench.ask("a")
    attempts = [[wire.request(rank) for _ in range(2)] for rank in range(2)]
    wire.reply(0, attempts[0][0], 1024)
    wire.reply(0, attempts[0][1], 1024)
    known = getattr(bench.client, "_table", None)
    deadline = time.monotonic() + patience()
    while time.monotonic() < deadline and (known is None or not known.lookups["a"].replies):
        time.sleep(0.01)
    early = bench.client.lookup_cache("a")
    wire.reply(1, attempts[1][1], 256)
    return early, bench.poll("a"), counters()["late_replies"]


def test_a_late_reply_does_not_count_for_the_next_lookup() -> None:
    early, _, _ = run(late_reply_and_the_next_lookup_of_that_id, repaired=False)
    assert early == 1024  # two replies of rank 0: rank 1, which has 256, was not waited for
    assert run(late_reply_and_the_next_lookup_of_that_id, repaired=True) == (None, 256, 1)


def expired_lookup_asked_again() -> list[Any]:
    bench = Bench(Engine(answers=False))
    bench.ask("a")
    answers = [bench.poll("a")]
    for _ in range(2):  # there was no room for the request: the scheduler asks at its next step
        try:
            answers.append(bench.client.lookup_cache("a"))
        except KeyError:
            answers.append("KeyError")
    return answers


def test_an_expired_lookup_stays_a_miss() -> None:
    assert run(expired_lookup_asked_again, repaired=False) == [0, "KeyError", "KeyError"]
    assert run(expired_lookup_asked_again, repaired=True) == [0, 0, 0]


def lookup_expired_with_one_reply(replies_late: bool) -> tuple[list[str], list[str]]:
    """What two ranks are told to release; one replied in time, the other late or never."""
    prompt, other = Engine(), Engine(answers=False)
    bench = Bench(prompt, other, timeout_ms=2000)
    bench.ask("a")
    assert other.asked.acquire(timeout=30)
    assert bench.poll("a") in (0, HUNG)
    if replies_late:
        other.reply("a")
        assert other.cleaned.acquire(timeout=30)
    bench.client.lookup_cache("other")  # upstream sends its cleanups in the next lookup
    prompt.cleaned.acquire(timeout=patience())
    return prompt.released, other.released


def test_ranks_release_what_they_loaded_for_an_expired_lookup() -> None:
    assert run(lookup_expired_with_one_reply, False, repaired=False) == ([], [])
    assert run(lookup_expired_with_one_reply, False, repaired=True) == (["a"], [])
    assert run(lookup_expired_with_one_reply, True, repaired=True) == (["a"], ["a"])


def lookup_cancelled(replied: bool) -> list[str]:
    engine = Engine(answers=replied)
    bench = Bench(engine, timeout_ms=60_000)
    found = bench.ask("a")
    if replied:
        assert (bench.poll("a") if found is None else found) == len(TOKENS)
    bench.client.cancel_lookup("a")
    if not replied:
        assert engine.asked.acquire(timeout=30)
        engine.reply("a")
    assert engine.cleaned.acquire(timeout=30)
    assert bench.client.lookup_cache("a") == -1
    return engine.released


@pytest.mark.parametrize("replied", [False, True], ids=["before_the_reply", "after_the_reply"])
def test_a_cancelled_lookup_is_released_by_its_rank(replied: bool) -> None:
    assert run(lookup_cancelled, replied, repaired=True) == ["a"]


def reply_in_another_rank_s_name() -> tuple[Any, int]:
    bench = Bench(Engine(), serve=False, timeout_ms=60_000, lookup_backoff_time=0.001)
    wire = Wire(bench, 1)
    bench.ask("a")
    wire.reply(0, wire.request(0), 99, name=-1)
    deadline = time.monotonic() + 30
    while not counters()["foreign_replies"] and time.monotonic() < deadline:
        time.sleep(0.01)
    return bench.client.lookup_cache("a"), counters()["foreign_replies"]


def test_a_reply_that_is_not_in_its_rank_s_name_does_not_count() -> None:
    assert run(reply_in_another_rank_s_name, repaired=True) == (None, 1)


def rank_without_repairs() -> tuple[list[Any], list[str]]:
    import logging

    bench = Bench(Engine(), serve=False, timeout_ms=60_000)
    UpstreamWire(bench, 1)
    said: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("glm_connectors.lmcache_repairs.lookup_client").addHandler(handler)
    return [bench.ask(name) for name in "ab"], said


def test_a_rank_without_repairs_is_a_miss_and_named_once() -> None:
    answers, said = run(rank_without_repairs, repaired=True)
    assert answers == [0, 0]
    assert [line.count("install() in every worker") for line in said] == [1]


def requests_under_one_id(second_extends: bool) -> tuple[Any, int, list[tuple[str, int]]]:
    """A second request while the first is loading: its answer, the loads that were started."""
    engine = Engine(hit=CHUNK, answers=False)
    bench = Bench(engine, timeout_ms=60_000, lookup_backoff_time=0.001)
    bench.client.lookup_hashes([1, 2], [CHUNK] * 2, "a")
    assert engine.asked.acquire(timeout=30)
    found = bench.client.lookup_hashes([1, 2, 3] if second_extends else [7, 8, 9], [CHUNK] * 3, "a")
    if second_extends:
        # FIFO: the rank has the second request once it answers a third one, under another id.
        bench.client.lookup_hashes([5], [CHUNK], "b")
        assert engine.asked.acquire(timeout=30)
        engine.reply("a")
    found = bench.poll("a") if found is None else found
    return found, counters()["late_replies"], engine.requests


def test_a_request_that_extends_a_loading_one_is_answered_by_its_load() -> None:
    found, late, requests = run(requests_under_one_id, True, repaired=True)
    assert (found, late, requests) == (CHUNK, 0, [("a", 2), ("b", 1)])


def test_another_request_under_a_loading_id_is_a_miss() -> None:
    found, _, requests = run(requests_under_one_id, False, repaired=True)
    assert (found, requests) == (0, [("a", 2)])


# -- dead ranks ----------------------------------------------------------------------------------------------


def dead_rank(hangs: bool) -> tuple[list[Any], dict[str, int], Any]:
    """Answers to three lookups with rank 1 dead, the counters then, and the answer once it is back.

    hangs: its socket is there, and nobody reads it.
    """
    from glm_connectors.lmcache_repairs import lookup_link, lookup_table

    lookup_table.PROBE_FIRST = lookup_table.PROBE_LAST = 0.05
    bench = Bench(Engine(), Engine(hit=512), serve=False, timeout_ms=2000)
    bench.serve(0)
    hung = lookup_link.Inlet(lookup_link.address(_upstream_path(bench, 1))) if hangs else None
    answers = []
    for name in "abc":
        found = bench.ask(name)
        answers.append(bench.poll(name) if name == "a" else found)
    counted = counters()
    if hung is not None:
        hung.close()
    bench.serve(1)
    deadline = time.monotonic() + patience()
    while counters()["dead_ranks"] and time.monotonic() < deadline:
        time.sleep(0.01)
    found = bench.ask("d")
    return answers, counted, bench.poll("d") if found is None else found


@pytest.mark.parametrize("hangs", [True, False], ids=["hangs", "is_not_there"])
def test_a_dead_rank_costs_its_deadline_once_at_most_and_comes_back_by_itself(hangs: bool) -> None:
    if not hangs:
        answers, *_ = run(dead_rank, hangs, repaired=False)
        assert answers == [0, None, None]  # b and c wait for their own deadlines
    answers, counted, back = run(dead_rank, hangs, repaired=True)
    assert answers == [0, 0, 0]
    assert (counted["lookups_expired"], counted["lookups_without_rank"]) == ((1, 2) if hangs else (0, 3))
    assert counted["dead_ranks"] == 1
    assert back == 512


def rank_that_ends() -> tuple[Any, Any, int]:
    """A rank's process ends with a question unanswered; the answer, the next one's once it is back, expiries."""
    from glm_connectors.lmcache_repairs import lookup_table

    lookup_table.PROBE_FIRST = lookup_table.PROBE_LAST = 0.05
    engine = Engine(answers=False)
    bench = Bench(Engine(), engine, timeout_ms=60_000)
    bench.ask("a")
    assert engine.asked.acquire(timeout=30)
    engine.server.close()
    engine.server = None  # a probe that comes before there is another is answered with a miss
    answer = bench.poll("a")
    engine.answers = True
    bench.serve(1)
    deadline = time.monotonic() + patience()
    while counters()["dead_ranks"] and time.monotonic() < deadline:
        time.sleep(0.01)
    found = bench.ask("b")
    return answer, bench.poll("b") if found is None else found, counters()["lookups_expired"]


def test_a_rank_that_ends_is_a_miss_at_once_and_comes_back_by_itself() -> None:
    # Its deadline is a minute.
    assert run(rank_that_ends, repaired=True) == (0, len(TOKENS), 0)


def ranks_that_come_and_go() -> tuple[set[Any], Any, bool]:
    """Ranks end and start while the scheduler asks. Answers; the one when all are back; whether a lookup hung."""
    from glm_connectors.lmcache_repairs import lookup_table

    lookup_table.PROBE_FIRST = lookup_table.PROBE_LAST = 0.01
    engines = [Engine(hit=CHUNK * (number + 1)) for number in range(3)]
    bench = Bench(*engines, timeout_ms=1000, lookup_backoff_time=0.002)

    def restart() -> None:
        for number in range(30):
            server, engines[number % 3].server = engines[number % 3].server, None
            server.close()
            bench.serve(number % 3)

    restarts = threading.Thread(target=restart)
    restarts.start()
    answers: set[Any] = set()
    number = 0
    while restarts.is_alive() or number < 300:
        found = bench.ask(f"r{number}")
        answers.add(bench.poll(f"r{number}") if found is None else found)
        number += 1
    deadline = time.monotonic() + patience()
    while counters()["dead_ranks"] and time.monotonic() < deadline:
        time.sleep(0.01)
    found = bench.ask("last")
    return answers - {HUNG}, bench.poll("last") if found is None else found, HUNG in answers


def test_ranks_that_come_and_go_cost_misses_and_nothing_else() -> None:
    answers, last, hung = run(ranks_that_come_and_go, repaired=True)
    assert answers <= {0, CHUNK}  # rank 0 has the least
    assert (last, hung) == (CHUNK, False)


def rank_with_a_full_queue(repaired: bool) -> list[Any]:
    """Rank 1 hangs: messages to it fill its queue. Answers until one is a miss, and the next."""
    bench = Bench(Engine(), Engine(), serve=False, timeout_ms=60_000, lookup_backoff_time=0.001)
    bench.serve(0)
    answers: list[Any] = []
    if repaired:
        from glm_connectors.lmcache_repairs import lookup_link

        lookup_link.ROOM = 1 << 20
        inlet = lookup_link.Inlet(lookup_link.address(_upstream_path(bench, 1)))  # nobody reads there
        hashes, offsets = list(range(20_000)), [CHUNK] * 20_000  # 160 kB
        while not answers or answers[-1] is None:
            answers.append(bench.client.lookup_hashes(hashes, offsets, f"r{len(answers)}"))
        del inlet
        return [*answers, bench.ask("after")]
    import zmq

    bench.client.push_sockets[1].setsockopt(zmq.SNDHWM, 1)
    address = bench.client.push_sockets[1].getsockopt_string(zmq.LAST_ENDPOINT)
    bench.client.push_sockets[1].disconnect(address)
    bench.client.push_sockets[1].connect(address)
    return [bench.ask(name) for name in "abc"]


def test_a_full_queue_does_not_block_the_scheduler() -> None:
    assert run(rank_with_a_full_queue, False, repaired=False, seconds=5) == HUNG
    answers = run(rank_with_a_full_queue, True, repaired=True)
    assert answers[-2:] == [0, 0]
    kernel = int(Path("/proc/sys/net/core/wmem_default").read_text())
    most = ((1 << 20) + kernel) // 160_000 + 4  # of 160 kB each: 1 MiB waits here, and some in the kernel
    assert 6 <= answers.index(0) <= most


def lookup_with_an_engine_that_raises() -> Any:
    bench = Bench(Engine(fails=True), timeout_ms=60_000)
    found = bench.ask("a")
    return bench.poll("a") if found is None else found


def test_an_engine_that_raises_answers_with_a_miss() -> None:
    assert run(lookup_with_an_engine_that_raises, repaired=False) == HUNG
    assert run(lookup_with_an_engine_that_raises, repaired=True) == 0


def reply_that_nobody_reads(repaired: bool) -> tuple[str, int]:
    """The scheduler is gone and the rank goes on answering."""
    import zmq

    engine = Engine(answers=False)
    bench = Bench(engine, timeout_ms=60_000, lookup_backoff_time=0.001)
    if not repaired:
        engine.server.push_socket.close(linger=0)
        engine.server.push_socket = engine.server.ctx.socket(zmq.PUSH)  # connected to nobody
    bench.ask("a")
    assert engine.asked.acquire(timeout=30)
    if repaired:
        bench.client.close()
    engine.reply("a")
    return "returned", counters()["unsent_replies"]


def test_a_rank_does_not_wait_for_a_scheduler_that_is_gone() -> None:
    assert run(reply_that_nobody_reads, False, repaired=False, seconds=5) == HUNG
    assert run(reply_that_nobody_reads, True, repaired=True) == ("returned", 1)


def close_beside_another_user_of_the_context() -> tuple[str, bool]:
    import zmq

    other = zmq.Context.instance().socket(zmq.PULL)  # vLLM and LMCache's controller share this context
    other.bind("inproc://other")
    engine = Engine()
    bench = Bench(engine)
    bench.client.close()
    engine.server.close()
    return "closed", bench.client.thread.is_alive() or engine.server.thread.is_alive()


def test_close_ends_the_threads_and_leaves_the_shared_context_alone() -> None:
    # Unrepaired: closes the socket under its reader (libzmq may abort), then waits for the context's other
    # users.
    unrepaired = run(close_beside_another_user_of_the_context, repaired=False, seconds=8)
    assert unrepaired in (HUNG, "exit code -6")
    assert run(close_beside_another_user_of_the_context, repaired=True) == ("closed", False)


# -- the wire ------------------------------------------------------------------------------------------------

HASHES = st.lists(st.integers(0, 2**64 - 1)) | st.lists(st.integers(-(2**63), 2**63 - 1))


@given(hashes=HASHES, offsets=st.lists(st.integers(1, 512)), chunks=st.integers(0, 600))
def test_a_request_arrives_as_it_was_sent(hashes: list[int], offsets: list[int], chunks: int) -> None:
    for lengths in (offsets, [CHUNK] * chunks, [CHUNK] * chunks + [17]):
        frame = lookup_wire.encode(lookup_wire.request("id", hashes, lengths, {"tag": "x"}, 7))
        message = lookup_wire.decode_to_rank(frame)
        assert isinstance(message, lookup_wire.LookupRequest)
        assert list(lookup_wire.hashes_of(message)) == hashes
        read = lookup_wire.Offsets(message.offsets)
        assert (list(read), len(read), list(read[:3])) == (lengths, len(lengths), lengths[:3])
        assert (message.lookup_id, message.request_configs, message.attempt) == ("id", {"tag": "x"}, 7)


def test_a_repaired_rank_reads_upstream_s_request() -> None:
    frame = lookup_wire.encode(
        {"type": "LookupRequestMsg", "lookup_id": "id", "hashes": [1, -2], "offsets": [256, 9]}
    )
    message = lookup_wire.decode_to_rank(frame)
    assert isinstance(message, lookup_wire.LookupRequest)
    assert list(lookup_wire.hashes_of(message)) == [1, -2]
    assert list(lookup_wire.Offsets(message.offsets)) == [256, 9]
    assert message.attempt == 0


def keys_of_a_packed_request() -> bool:
    """Whether LMCache's engine side makes the same keys of what arrives packed as of lists."""
    import torch
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.token_database import ChunkedTokenDatabase

    config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK)
    metadata = SimpleNamespace(
        model_name="m", world_size=1, worker_id=0, kv_dtype=torch.bfloat16, use_mla=False
    )
    database = ChunkedTokenDatabase(config, metadata)
    hashes, offsets = [2**63 + 5, 1, 7], [CHUNK, CHUNK, 17]
    message = lookup_wire.decode_to_rank(
        lookup_wire.encode(lookup_wire.request("id", hashes, offsets, None, 1))
    )
    assert isinstance(message, lookup_wire.LookupRequest)
    packed = database.process_tokens(
        hashes=lookup_wire.hashes_of(message), offsets=lookup_wire.Offsets(message.offsets)
    )
    return list(packed) == list(database.process_tokens(hashes=hashes, offsets=offsets))


def test_lmcache_makes_the_same_keys_of_a_packed_request() -> None:
    assert run(keys_of_a_packed_request, repaired=True)
