"""Endpoints as processes: paused while another one is measured, answering before they are asked, gone at the end."""

from __future__ import annotations

import http.server
import json
import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.ab import comparison, running
from benchmarks.ab.comparison import Comparison, Plan, calibrate, compare_cases
from benchmarks.ab.endpoints import Spec, SpecError
from benchmarks.ab.load import Point
from benchmarks.ab.running import Between, Endpoint, EndpointError, answers, hold
from benchmarks.ab.starting import Starting, started
from benchmarks.workloads.conversations import LongContext
from benchmarks.workloads.text import Text
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


def test_a_server_that_is_busy_is_asked_again_to_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang answers 400 while anything is on its way; whatever else it answers is final."""
    answers_given = iter([400, 400, 200, 404])
    asked: list[str] = []

    def post(url: str, **_: Any) -> httpx.Response:
        asked.append(url)
        return httpx.Response(next(answers_given))

    monkeypatch.setattr(httpx, "post", post)
    endpoint = Endpoint(Spec("a", url="http://h"))
    endpoint.flush()
    assert asked == ["http://h/flush_cache"] * 3
    with pytest.raises(EndpointError, match="flush_cache answered 404"):
        endpoint.flush()


def test_a_server_may_be_busy_for_a_minute_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    free = 61.0
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    monkeypatch.setattr(httpx, "post", lambda *_, **__: httpx.Response(200 if clock[0] >= free else 400))
    endpoint = Endpoint(Spec("a", url="http://h"))
    endpoint.flush()
    said = [line for line in capsys.readouterr().err.splitlines() if "refuses to flush" in line]
    assert [line.rpartition("for ")[2] for line in said] == ["5 s", "10 s", "20 s", "40 s"]
    assert endpoint.flushed.endswith("before every round; refused for up to 61 s")
    free = 1e9
    with pytest.raises(EndpointError, match="flush_cache answered 400"):
        endpoint.flush()
    assert clock[0] == pytest.approx(61 + running._BUSY_S, abs=1)


def bad(name: str) -> Endpoint:
    """One whose server ends before it serves."""
    command = "python -c 'import sys; sys.exit(\"no GPU left\")'"
    return Endpoint(Spec(name, processes={"prefill": command, "server": NULL}, ready="/v1/models"))


def test_what_does_not_start_beside_the_others_is_left_out_with_its_reason() -> None:
    a, b, c = null("a"), bad("b"), null("c")
    with ExitStack() as stack:
        left_out = started([a, b, c], stack, Starting("running", together=True, baseline="a"))
        assert set(left_out) == {"b"}
        assert "b-prefill ended with status 1" in left_out["b"]
        assert "no GPU left" in left_out["b"]
        assert [answers(f"{e.url}/v1/models") for e in (a, c)] == [True, True]
        assert b.processes == {}
        groups = [e.processes["server"].pid for e in (a, c)]
    assert [group_members(group) for group in groups] == [[], []]


def test_without_the_baseline_nothing_is_left_running() -> None:
    a, c = bad("a"), null("c")
    with ExitStack() as stack, pytest.raises(EndpointError, match=r"a, which all need: a-prefill ended"):
        started([a, c], stack, Starting("running", together=True, baseline="a"))
    assert (a.processes, c.processes) == ({}, {})


def sharing(name: str, command: str = NULL) -> Endpoint:
    """It asks of a server that is another's, too."""
    return Endpoint(
        Spec(
            name,
            processes={"server": NULL},
            env={"PYTHONPATH": str(ROOT)},
            ready="/v1/models",
            flush=("server", "decode"),
            shared={"decode": command},
        )
    )


@pytest.mark.parametrize("together", [False, True])
def test_what_endpoints_share_is_started_once_and_ends_last(together: bool) -> None:
    a, b = sharing("a"), sharing("b")
    with ExitStack() as stack:
        assert started([a, b], stack, Starting("running", together, "a")) == {}
        (decode,) = {e.shared["decode"] for e in (a, b)}
        assert answers(f"{decode.url}/v1/models")
        assert a._target("decode") == b._target("decode") == decode.url
        assert len({e.url for e in (a, b)} | {decode.url}) == 3
        a.flush()
        a.stop()
        assert answers(f"{decode.url}/v1/models")
    assert not decode.alive


def test_what_is_shared_is_needed_by_all() -> None:
    command = "python -c 'import sys; sys.exit(3)'"
    with ExitStack() as stack, pytest.raises(EndpointError, match="shared decode, which all need"):
        started([sharing("a", command), sharing("b", command)], stack, Starting("running", True, "a"))


@pytest.mark.parametrize(
    ("between", "together", "one"),
    [("ended", True, null), ("paused", True, sharing), ("ended", False, sharing)],
)
def test_ways_of_starting_that_exclude_each_other_are_refused(
    between: Between, together: bool, one: Any
) -> None:
    with pytest.raises(SpecError, match="--between"):
        Starting(between, together, "a").check([one("a").spec])


def test_cases_are_measured_on_endpoints_that_start_once(tmp_path: Path) -> None:
    """Two cases, an arm that does not start, and the same again from the file, which starts it alone."""

    def make(tokens: int, rounds: int) -> Any:
        def plan(size: float) -> Plan:
            work = LongContext(Text(size), 1, 1, (tokens,), 1)
            return Plan(work, [Point(1)], rounds, tmp_path / "x.jsonl", warm_up=1, round_warm_up=0)

        return plan

    makes = {"short": make(64, 3), "long": make(256, 2)}
    endpoints = [null("a"), null("b"), bad("c")]
    seen: list[dict[str, int]] = []
    found = compare_cases(
        endpoints,
        4.0,
        (),
        makes,
        Starting("running", True, "a"),
        note=lambda outcome: seen.append({name: len(lines) for name, lines in outcome.records.items()}),
    )
    assert {name: len(lines) for name, lines in found.records.items()} == {"short": 6, "long": 4}
    assert seen[:3] == [{"short": 2, "long": 0}, {"short": 2, "long": 2}, {"short": 4, "long": 2}]
    assert set(found.left_out) == {"c"}
    assert [e.processes for e in endpoints] == [{}, {}, {}]
    again = compare_cases([null("a"), null("b"), bad("c")], 4.0, (), makes, Starting("running", True, "a"))
    assert again.records == found.records


def test_an_arm_that_fails_once_goes_on_and_what_was_noted_is_kept_before_all_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two arms, without which nothing is measured; the second failure ends it."""
    failures: list[int] = []

    def ask(self: Comparison, endpoint: Endpoint, load: Any, point: Point, number: int) -> Any:
        if endpoint.spec.name == "b" and number in failures:
            raise EndpointError(f"busy in round {number}")
        return asked(self, endpoint, load, point, number)

    asked = Comparison._ask
    monkeypatch.setattr(comparison.Comparison, "_ask", ask)

    def run(name: str) -> tuple[Any, list[list[int]]]:
        def plan(size: float) -> Plan:
            work = LongContext(Text(size), 1, 1, (64,), 1)
            return Plan(work, [Point(1)], 3, tmp_path / name, warm_up=0, round_warm_up=0)

        endpoints = [null("a"), null("b")]
        alive: list[list[int]] = []
        starting = Starting("running", True, "a")
        end = lambda: alive.append([len(e.processes) for e in endpoints])  # noqa: E731
        return compare_cases(endpoints, 4.0, (), {"": plan}, starting, ending=end), alive

    failures[:] = [1]
    found, alive = run("x.jsonl")
    assert [(line["tag"], line["glm_ab"]["round"]) for line in found.records[""]] == [
        *(("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 2)),
    ]
    assert found.lost == ["b: busy in round 1"]
    assert found.left_out == {}
    assert alive == [[1, 1]]
    failures[:] = [0, 1]
    with pytest.raises(EndpointError, match="b: busy in round 1\ntoo few are left"):
        run("y.jsonl")


class Small(http.server.BaseHTTPRequestHandler):
    """A server of one token a byte that refuses prompts of more than `room` tokens, as SGLang does whose KV is small."""

    room = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = len(body["prompt"].encode())
        status, answer = (200, {"usage": {"prompt_tokens": tokens}}) if tokens <= self.room else (400, {})
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize(("room", "counts"), [(10_000, True), (2554, True), (600, True), (100, False)])
def test_tokens_are_counted_by_a_prompt_that_the_server_takes(room: int, counts: bool) -> None:
    """`make bench`'s servers hold 2,560 tokens, in a context of 16k."""
    handler = type("Handler", (Small,), {"room": room})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = Endpoint(Spec("small", url=f"http://127.0.0.1:{server.server_port}"))
        endpoint.context = 16384
        if counts:
            assert calibrate(endpoint, []) == 1.0
        else:
            with pytest.raises(EndpointError, match="--bytes-per-token"):
                calibrate(endpoint, [])
        server.shutdown()
