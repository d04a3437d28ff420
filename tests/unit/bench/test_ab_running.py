"""Endpoints as processes: paused while another one is measured, answering before they are asked, gone at the end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.ab.endpoints import Spec
from benchmarks.ab.running import Endpoint, EndpointError, answers, hold
from glm_sglang.serving import group_members

ROOT = Path(__file__).resolve().parents[3]
NULL = "python -m benchmarks.ab.null_server --port {port}"


def null(name: str) -> Endpoint:
    return Endpoint(Spec(name, processes={"server": NULL}, env={"PYTHONPATH": str(ROOT)}, ready="/v1/models"))


def state(endpoint: Endpoint) -> str:
    """The scheduler's letter for its process: T is stopped."""
    pid = endpoint.processes["server"].pid
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_only_the_measured_one_runs() -> None:
    with null("a") as a, null("b") as b:
        assert (a.model, b.model) == ("null", "null")
        hold(a, [a, b], "paused")
        deadline = time.monotonic() + 10
        while state(b) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (state(a) != "T", state(b)) == (True, "T")
        hold(b, [a, b], "paused")
        assert answers(f"{b.url}/v1/models")  # it is asked only once it answers
        hold(a, [a, b], "running")
        assert answers(f"{a.url}/v1/models")
        assert answers(f"{b.url}/v1/models")
        groups = [e.processes["server"].pid for e in (a, b)]
        a.pause()
    # One that is paused ends too.
    assert [group_members(group) for group in groups] == [[], []]


def test_ended_endpoints_are_started_when_it_is_their_turn() -> None:
    with null("a") as a, null("b") as b:
        first = a.processes["server"].pid
        hold(b, [a, b], "ended")
        assert a.processes == {}
        assert not os.path.exists(f"/proc/{first}")
        hold(a, [a, b], "ended")
        assert answers(f"{a.url}/v1/models")
        assert b.processes == {}


def test_a_process_that_ends_before_it_serves_leaves_none_behind() -> None:
    bad = Endpoint(Spec("bad", processes={"good": NULL, "server": "python -c pass"}, ready="/v1/models"))
    with pytest.raises(RuntimeError, match="bad-server ended with status 0"):
        bad.start()
    assert bad.processes == {}


def test_what_an_endpoint_lacks_is_said() -> None:
    with null("a") as a:
        # The null server answers 200 to whatever is no completion, so a flush works; one to nowhere doesn't.
        a.flush()
        assert a.flushed == "POST /flush_cache to 1 process(es) before every round"
        lost = Endpoint(Spec("lost", url=a.url, flush=("http://127.0.0.1:9",)))
        with pytest.raises(EndpointError, match="flush_cache answered ConnectError; name the processes"):
            lost.flush()
        with pytest.raises(EndpointError, match=r"gone: http://127.0.0.1:9 cannot be asked for its model"):
            Endpoint(Spec("gone", url="http://127.0.0.1:9")).start()
        unflushed = Endpoint(Spec("x", url=a.url, flush=None))
        unflushed.flush()
        assert unflushed.flushed.startswith("not flushed")
