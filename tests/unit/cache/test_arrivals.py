"""Arrivals: hashed and fetched once, held back as long as the flag says, on every rank alike."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from glm_sglang.cache import gate, in_use
from glm_sglang.cache.arrivals import Arrivals
from glm_sglang.cache.recorder import Recorder
from tests.unit.cache.digests import chain
from tests.unit.cache.memory_store import MemoryStore

PAGE = 64
TOKENS = list(range(1000, 1000 + 5 * PAGE + 1))


class Setup:
    def __init__(self, wait_s: float | None) -> None:
        self.now = 100.0
        self.store = MemoryStore(4, manual=True)
        self.recorder = Recorder()
        self.arrivals = Arrivals(self.store, PAGE, wait_s, recorder=self.recorder, clock=lambda: self.now)

    def begin(self, rid: str, tokens: list[int] = TOKENS, device_pages: int = 0) -> None:
        self.arrivals.begin(rid, tokens, None, None, device_pages)

    def hashed(self, rid: str) -> None:
        patience = time.monotonic() + 60  # the first one imports SGLang
        while self.arrivals._known[rid].ticket is None:
            assert time.monotonic() < patience
            time.sleep(0.001)


def test_what_is_not_on_the_device_is_fetched_and_no_more() -> None:
    setup = Setup(None)
    setup.begin("a", device_pages=2)
    setup.hashed("a")
    assert setup.store.tickets["a"].keys == chain(TOKENS[: 5 * PAGE], PAGE)[2:]
    assert setup.arrivals.digests("a") == chain(TOKENS[: 5 * PAGE], PAGE)
    # The last token is always computed: a page that it completes is never restored, so it is not fetched.
    setup.begin("b", TOKENS[: 3 * PAGE])
    setup.hashed("b")
    assert len(setup.store.tickets["b"].keys) == 2
    for tokens, pages in ((TOKENS[:PAGE], 0), (TOKENS, 5)):
        setup.begin("c", tokens, pages)
        assert not setup.arrivals.undecided("c")
    setup.arrivals.close()


def test_what_the_device_has_is_hashed_too_and_waits_for_nothing() -> None:
    """By the time that it is admitted its pages may have been evicted: the scheduler would hash the prompt itself."""
    setup = Setup(None)
    setup.begin("a", device_pages=5)
    assert not setup.arrivals.undecided("a")
    patience = time.monotonic() + 60
    while (names := setup.arrivals.names("a")) is None:
        assert time.monotonic() < patience
        time.sleep(0.001)
    assert names == [digest.hex() for digest in chain(TOKENS[: 5 * PAGE], PAGE)]
    setup.begin("b")
    setup.hashed("b")  # after it, on the same thread
    assert list(setup.store.tickets) == ["b"]
    setup.arrivals.forget("a")
    assert setup.arrivals.names("a") is None
    setup.arrivals.close()


@pytest.mark.parametrize(
    ("wait_s", "ready"),
    [(0.0, [True, True, True]), (0.2, [False, True, True]), (None, [False, False, True])],
)
def test_never_a_deadline_complete(wait_s: float | None, ready: list[bool]) -> None:
    """Asked at arrival, after the deadline, and when the pages have come."""
    setup = Setup(wait_s)
    setup.begin("a")
    setup.hashed("a")
    said = [setup.arrivals.ready("a")]
    setup.now += 0.2
    said.append(setup.arrivals.ready("a"))
    setup.store.tickets["a"].arrive()
    said.append(setup.arrivals.ready("a"))
    assert said == ready
    setup.arrivals.close()


def test_a_deadline_counts_from_when_it_could_first_run() -> None:
    """A PD prefill server's request waits for its decode server first: it may find no room for its pages meanwhile. A
    deadline counts also while it is not hashed yet: the thread is busy with another request."""
    setup = Setup(0.25)
    blocked = threading.Event()
    setup.store.prefetch = lambda rid, keys: blocked.wait(10)  # type: ignore[method-assign, assignment, return-value]
    setup.begin("first")
    setup.begin("a")
    setup.now += 60
    assert not setup.arrivals.ready("a")
    setup.now += 0.125
    assert not setup.arrivals.ready("a")
    setup.now += 0.125
    assert setup.arrivals.ready("a")
    setup.arrivals.release("a")
    assert not setup.arrivals.undecided("a")
    assert setup.recorder.table["cache_expired_waits"] == 1
    waits: Any = setup.recorder.table.snapshot()["cache_wait_seconds"][()]
    assert waits.total == 0.25
    blocked.set()
    setup.arrivals.close()


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("wait_s", [0.25, 2.0])
def test_a_deadline_is_met_to_the_tick(wait_s: float, hashed: bool) -> None:
    """Whatever its prefetch is doing: not a moment earlier, and no later than at the moment itself."""
    setup = Setup(wait_s)
    blocked = threading.Event()
    if not hashed:
        setup.store.prefetch = lambda rid, keys: blocked.wait(10)  # type: ignore[method-assign, assignment, return-value]
    setup.begin("a")
    if hashed:
        setup.hashed("a")
    asked = setup.now
    assert not setup.arrivals.ready("a")
    setup.now = asked + wait_s - 2.0**-20  # exact in binary, as all numbers here
    assert not setup.arrivals.ready("a")
    setup.now = asked + wait_s
    assert setup.arrivals.ready("a")
    blocked.set()
    setup.arrivals.close()


@pytest.mark.parametrize("wait_s", [0.0, 0.2, None])
def test_only_who_has_a_deadline_and_missed_it_counts_as_late(wait_s: float | None) -> None:
    """A request that is never held back has none, however long it has been here; nor has one that is always."""
    setup = Setup(wait_s)
    setup.begin("late")
    setup.begin("in time")
    for rid in ("late", "in time"):
        setup.hashed(rid)
        setup.arrivals.ready(rid)
    setup.store.tickets["in time"].arrive()
    setup.now += 0.3
    for rid in ("in time", "late"):
        setup.arrivals.release(rid)
    assert setup.recorder.table["cache_expired_waits"] == (wait_s == 0.2)
    setup.arrivals.close()


def test_one_that_another_rank_released_in_time_is_not_late() -> None:
    setup = Setup(0.2)
    setup.begin("a")
    setup.hashed("a")
    setup.now += 60
    assert not setup.arrivals.ready("a")
    setup.arrivals.release("a")
    assert setup.recorder.table["cache_expired_waits"] == 0
    setup.arrivals.close()


def test_whom_the_scheduler_asks_for_comes_first() -> None:
    """In the order in which it asks, whether the prefetch has been started by then or not."""
    setup = Setup(None)
    for rid in ("a", "b", "c"):
        setup.begin(rid)
        setup.hashed(rid)
    for rid in ("b", "a", "b"):
        assert not setup.arrivals.ready(rid)
    assert setup.store.urged == {"b": 0, "a": 1}
    started, prefetch = threading.Event(), setup.store.prefetch

    def late(rid: str, keys: Any) -> Any:
        assert started.wait(10)
        return prefetch(rid, keys)

    setup.store.prefetch = late  # type: ignore[method-assign]
    setup.begin("d")
    assert not setup.arrivals.ready("d")
    started.set()
    setup.arrivals._work.put(None)
    setup.arrivals._thread.join()
    assert setup.store.urged == {"b": 0, "a": 1, "d": 2}


@pytest.mark.parametrize(("wait_s", "anew"), [(0.0, False), (10.0, True), (None, True)])
def test_pages_that_were_given_up_for_others_are_fetched_anew_when_it_can_run(
    wait_s: float | None, anew: bool
) -> None:
    setup = Setup(wait_s)
    setup.begin("a")
    setup.hashed("a")
    first = setup.store.tickets["a"]
    first.done = first.lost = True
    assert setup.arrivals.ready("a") is not anew
    if anew:
        setup.hashed("a")
        second = setup.store.tickets["a"]
        assert second is not first
        assert second.keys == first.keys
        assert not setup.arrivals.ready("a")
        second.arrive()
        assert setup.arrivals.ready("a")
    setup.arrivals.close()


def test_a_prefetch_that_cannot_start_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup(None)

    def fail(rid: str, keys: Any) -> Any:
        raise RuntimeError("no")

    setup.store.prefetch = fail  # type: ignore[method-assign]
    setup.begin("a")
    setup.arrivals._work.put(None)
    setup.arrivals._thread.join()
    assert setup.arrivals.ready("a")
    assert setup.recorder.table["cache_failed_prefetches"] == 1
    setup.arrivals.release("a")
    assert setup.recorder.table["cache_expired_waits"] == 0


@pytest.mark.parametrize("come", [False, True])
def test_gone_requests_are_cancelled(come: bool) -> None:
    """Those whose pages have come too: they are held."""
    setup = Setup(None)
    setup.begin("a")
    setup.hashed("a")
    if come:
        setup.store.tickets["a"].arrive()
        assert setup.arrivals.ready("a")
        setup.arrivals.release("a")
    setup.arrivals.forget("a")
    setup.arrivals.forget("a")
    assert setup.store.cancelled == ["a"]
    assert len(setup.arrivals) == 0
    setup.arrivals.close()


class Linker:
    """What the gate asks of a linker, with readiness said by the test."""

    def __init__(self) -> None:
        from contextlib import nullcontext

        self.ready: set[str] = set()
        self.batches: list[list[str]] = []
        self.stalls = SimpleNamespace(measure=lambda **_: nullcontext())
        self.rate = SimpleNamespace(step=lambda now: None, launched=lambda tokens, now: None)
        self.looks = False
        self.seen: list[list[str]] = []

    def looks_around(self, now: float) -> bool:
        return self.looks

    def present(self, rids: Any) -> None:
        self.seen.append(list(rids))

    def held_back(self, rids: list[str], tree: Any) -> set[str]:
        return {rid for rid in rids if rid not in self.ready}

    def admitted(self, rids: list[str]) -> None:
        self.batches.append(rids)


class Scheduler:
    """Takes everything from its waiting queue; what it puts back goes to the end."""

    def __init__(self, *rids: str) -> None:
        self.waiting_queue = [SimpleNamespace(rid=rid) for rid in rids]
        self.tree_cache = None
        self.retracted: list[Any] = []
        self.last_batch: Any = None
        self.running_batch: Any = None
        self.grammar_manager: Any = SimpleNamespace(has_waiting_grammars=lambda: False)

    def get_new_batch_prefill(self) -> Any:
        taken, self.waiting_queue = self.waiting_queue, list(self.retracted)
        batch = SimpleNamespace(reqs=taken, extend_num_tokens=1) if taken else None
        return SimpleNamespace(batch_to_run=batch)

    @property
    def waiting(self) -> list[str]:
        return [req.rid for req in self.waiting_queue]


@pytest.fixture
def linker(monkeypatch: pytest.MonkeyPatch) -> Linker:
    linker = Linker()
    monkeypatch.setattr(in_use, "_linker", linker)
    return linker


def test_held_requests_stay_in_the_queue_and_others_go_on(linker: Linker) -> None:
    scheduler = Scheduler("a", "b", "c")
    linker.ready = {"b"}
    scheduler.retracted = [SimpleNamespace(rid="r")]
    gate.build_batch(Scheduler.get_new_batch_prefill, scheduler)
    assert linker.batches == [["b"]]
    assert scheduler.waiting == ["a", "c", "r"]  # older ones first
    linker.ready = {"a", "c", "r"}
    scheduler.retracted = []
    gate.build_batch(Scheduler.get_new_batch_prefill, scheduler)
    assert linker.batches[1] == ["a", "c", "r"]
    assert scheduler.waiting == []


class Grammars:
    """SGLang's GrammarManager, as far as a pass asks it: of those that wait `ready` are."""

    def __init__(self, *rids: str) -> None:
        self.queue = list(rids)
        self.ready: set[str] = set()
        self.polls = 0

    def has_waiting_grammars(self) -> bool:
        return bool(self.queue)

    def get_ready_grammar_requests(self) -> list[Any]:
        self.polls += 1
        ready = [rid for rid in self.queue if rid in self.ready]
        self.queue = [rid for rid in self.queue if rid not in self.ready]
        return [SimpleNamespace(rid=rid) for rid in ready]


class ConstrainedScheduler(Scheduler):
    """Takes those whose grammars are ready by itself, before all else."""

    def _add_request_to_queue(self, req: Any) -> None:
        self.waiting_queue.append(req)

    def get_new_batch_prefill(self) -> Any:
        if self.grammar_manager.has_waiting_grammars():
            for req in self.grammar_manager.get_ready_grammar_requests():
                self._add_request_to_queue(req)
        return super().get_new_batch_prefill()


def test_a_request_whose_grammar_is_ready_waits_for_its_pages_too(linker: Linker) -> None:
    """Grammars are asked for once a step: each call counts against their deadline. One that is ready a moment later is
    the next step's."""
    scheduler = ConstrainedScheduler("a")
    grammars = scheduler.grammar_manager = Grammars("g", "later")
    linker.ready = {"a"}
    grammars.ready = {"g"}
    held_back = linker.held_back

    def slow(rids: list[str], tree: Any) -> set[str]:
        grammars.ready = {"later"}
        return held_back(rids, tree)

    linker.held_back = slow  # type: ignore[method-assign]
    gate.build_batch(ConstrainedScheduler.get_new_batch_prefill, scheduler)
    assert linker.batches == [["a"]]
    assert (scheduler.waiting, grammars.queue, grammars.polls) == (["g"], ["later"], 1)
    linker.ready = {"g"}
    gate.build_batch(ConstrainedScheduler.get_new_batch_prefill, scheduler)
    assert linker.batches[1:] == [["g"]]
    assert (scheduler.waiting, grammars.queue, grammars.polls) == (["later"], [], 2)


@pytest.mark.parametrize(
    ("ready", "last", "running", "rests"),
    [
        (set(), None, None, 1),
        (set(), None, [], 1),
        ({"a", "b"}, None, None, 0),  # nobody is held
        ({"b"}, None, None, 0),  # there is a batch
        (set(), "a batch", None, 0),  # its result is outstanding
        (set(), None, ["decoding"], 0),
    ],
)
def test_a_scheduler_that_can_only_wait_lets_others_have_the_interpreter(
    linker: Linker,
    monkeypatch: pytest.MonkeyPatch,
    ready: set[str],
    last: Any,
    running: list[str] | None,
    rests: int,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(gate, "time", SimpleNamespace(sleep=slept.append, monotonic=time.monotonic))
    scheduler = Scheduler("a", "b")
    linker.ready = ready
    scheduler.last_batch = last
    scheduler.running_batch = None if running is None else SimpleNamespace(is_empty=lambda: not running)
    gate.build_batch(Scheduler.get_new_batch_prefill, scheduler)
    assert len(slept) == rests
    assert all(0.0 < seconds <= 1e-3 for seconds in slept)


def test_everybody_in_a_queue_is_present(linker: Linker) -> None:
    """In the one for decode servers as well, which only a prefill node has."""
    scheduler = Scheduler("a", "b")
    gate.build_batch(Scheduler.get_new_batch_prefill, scheduler)
    assert linker.seen == []
    linker.looks = True
    gate.build_batch(Scheduler.get_new_batch_prefill, scheduler)
    queue = SimpleNamespace(queue=[SimpleNamespace(rid="c")])
    scheduler.disagg_prefill_bootstrap_queue = queue  # type: ignore[attr-defined]
    gate.build_batch(Scheduler.get_new_batch_prefill, scheduler)
    assert linker.seen == [["a", "b"], ["a", "b", "c"]]


def test_a_pass_that_fails_loses_nobody(linker: Linker) -> None:
    scheduler = Scheduler("a", "b")
    linker.ready = {"b"}

    def fail(scheduler: Scheduler) -> Any:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        gate.build_batch(fail, scheduler)
    assert scheduler.waiting == ["a", "b"]


def test_without_a_cache_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_use, "_linker", None)
    scheduler = Scheduler("a")
    queue = scheduler.waiting_queue
    plan = gate.build_batch(lambda s: s.waiting_queue is queue, scheduler)
    assert plan is True
    gate.request_arrives(scheduler, object())
    wrapper = SimpleNamespace(cache_linker=object())  # another's linker
    assert gate.matching(lambda *args: args, wrapper, 1, 2, 3) == (wrapper, 1, 2, 3)
    assert gate.tail_hashes(lambda *args: args, wrapper, 1, 2, 3) == (wrapper, 1, 2, 3)
    assert gate.shortest_common(lambda *args, **more: 5, wrapper, [1], num_pages=9, device_hit_pages=0) == 5
    assert gate.order_queue(lambda *args: args, "policy", 1) == ("policy", 1)
