"""Rounds, records and summaries, with a client whose clock is written here."""

from __future__ import annotations

import ast
import asyncio
import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.ab import comparison, records
from benchmarks.ab.client import Sample
from benchmarks.ab.comparison import Cases, Comparison, Plan, blocks
from benchmarks.ab.endpoints import Spec
from benchmarks.ab.load import Point, Round, arrivals, run_round
from benchmarks.ab.running import Between, Endpoint, EndpointError
from benchmarks.ab.summary import ALL, summarise
from benchmarks.workloads import Load, Session, Turn
from benchmarks.workloads.conversations import LongContext, TwoTurn
from benchmarks.workloads.model import COMPLETIONS
from benchmarks.workloads.text import Text


def turn(name: str, label: str = "t") -> Turn:
    return Turn(COMPLETIONS, {"prompt": name, "max_tokens": 1}, label, 1)


class Recorder:
    """Answers after one turn of the loop; remembers who was under way."""

    def __init__(self, fails: str = "") -> None:
        self.order: list[str] = []
        self.running = self.most = 0
        self.fails = fails

    def encode(self, turn: Turn) -> bytes:
        return str(turn.body["prompt"]).encode()

    async def ask(self, turn: Turn, body: bytes | None = None) -> Sample:
        name = str(turn.body["prompt"])
        assert body in (None, name.encode())
        self.order.append(name)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        return Sample(turn.label, error="broken" if name == self.fails else "")


def sessions(count: int, turns: int = 2) -> tuple[Session, ...]:
    return tuple(Session(tuple(turn(f"{s}{t}") for t in range(turns))) for s in range(count))


@pytest.mark.parametrize("concurrency", [1, 3, 50])
async def test_a_closed_loop_has_so_many_under_way(concurrency: int) -> None:
    client = Recorder()
    result = await run_round(client, Load(sessions(10)), Point(concurrency), 0)
    assert client.most == min(concurrency, 10)
    assert [len(one) for one in result.samples] == [2] * 10


async def test_turns_follow_each_other_or_are_kept_apart() -> None:
    client = Recorder()
    await run_round(client, Load(sessions(2)), Point(1), 0)
    assert client.order == ["00", "01", "10", "11"]
    client = Recorder()
    await run_round(client, Load(sessions(2), apart=True), Point(1), 0)
    assert client.order == ["00", "10", "01", "11"]


async def test_the_prelude_comes_first_and_is_not_counted() -> None:
    client = Recorder()
    result = await run_round(client, Load(sessions(1), prelude=(turn("p"),)), Point(1), 0)
    assert client.order == ["p", "00", "01"]
    assert sum(map(len, result.samples)) == 2
    with pytest.raises(RuntimeError, match="prelude failed"):
        await run_round(Recorder(fails="p"), Load(sessions(1), prelude=(turn("p"),)), Point(1), 0)


async def test_a_session_ends_at_its_first_failure() -> None:
    client = Recorder(fails="00")
    result = await run_round(client, Load(sessions(2)), Point(1), 0)
    assert client.order == ["00", "10", "11"]
    assert [len(one) for one in result.samples] == [1, 2]
    assert result.planned == 4


def test_arrivals_are_a_seeded_poisson_process_or_the_traces() -> None:
    many = sessions(4000)
    at = arrivals(many, 20.0, 7)
    assert at == arrivals(many, 20.0, 7) != arrivals(many, 20.0, 8)
    assert at[0] == 0.0
    # The mean gap of 3,999 exponential draws: 1/20 s within four standard errors.
    assert at[-1] / 3999 == pytest.approx(1 / 20, abs=4 / 20 / 3999**0.5)
    traced = [Session((turn("x"),), at_s=t) for t in (0.0, 0.5)]
    assert arrivals(traced, None, 0) == [0.0, 0.5]
    with pytest.raises(ValueError, match="--concurrency or --rate"):
        arrivals(many, None, 0)


async def test_an_open_loop_starts_sessions_at_their_times_however_long_the_others_take() -> None:
    """The second session starts while the first one still waits for its answer."""

    other = asyncio.Event()

    class Slow(Recorder):
        async def ask(self, turn: Turn, body: bytes | None = None) -> Sample:
            if turn.body["prompt"] == "first":
                await other.wait()
            sample = await super().ask(turn, body)
            other.set()
            return sample

    client = Slow()
    traced = (Session((turn("first"),), at_s=0.0), Session((turn("second"),), at_s=0.01))
    result = await asyncio.wait_for(run_round(client, Load(traced), Point(), 0), 10)
    assert client.order == ["second", "first"]
    assert [len(one) for one in result.samples] == [1, 1]
    rated = await run_round(Recorder(), Load(sessions(20)), Point(rate=1e5), 0)
    assert [len(one) for one in rated.samples] == [2] * 20


def plan(between: Between, rounds: int, block: int) -> Plan:
    workload = LongContext(Text(), 1, 1, (64,), 1)
    return Plan(workload, [Point(1), Point(2)], rounds, Path("x"), between=between, block=block)


def test_blocks_hold_every_round_once() -> None:
    for between in ("paused", "ended"):
        for block in (1, 3, 10):
            cells = [cell for one in blocks(plan(between, 7, block)) for cell in one]
            assert sorted(cells, key=str) == sorted(
                [(point, n) for point in (Point(1), Point(2)) for n in range(7)], key=str
            )
    assert [len(one) for one in blocks(plan("paused", 7, 3))] == [3, 3, 1] * 2
    # What must be started anew meets all points while it runs.
    assert [len(one) for one in blocks(plan("ended", 7, 3))] == [6, 6, 2]


def test_who_is_first_is_drawn_and_ended_ones_turn_round() -> None:
    endpoints = [Endpoint(Spec(name, url="http://h")) for name in "abc"]

    def orders(between: Between, case: str = "") -> list[str]:
        comparison = Comparison(plan(between, 6, 1), endpoints, quiet=True, case=case)
        return ["".join(e.spec.name for e in comparison.order(i)) for i in range(12)]

    for point in (orders("paused")[:6], orders("paused")[6:]):
        for place in range(3):
            assert sorted(order[place] for order in point) == list("aabbcc")
    assert orders("paused") == orders("paused")
    assert orders("paused")[:6] != orders("paused")[6:] != orders("paused", "other")[6:]
    assert orders("ended")[:4] == ["abc", "cba", "abc", "cba"]


def three(left: Any, between: Between = "running") -> str:
    """Who is asked what, case by case, of three cases of 3, 1 and 2 rounds."""
    asked: list[str] = []

    class Told(Comparison):
        def ask(self, endpoint: Endpoint, point: Point, number: int, *rest: Any) -> None:
            asked.append(f"{self.case}{number}{endpoint.spec.name}")

    endpoints = [Endpoint(Spec(name, url="http://h")) for name in "ab"]
    work = {"x": 3, "y": 1, "z": 2}
    comparisons: dict[str, Comparison] = {}
    for case, rounds in work.items():
        one = Plan(LongContext(Text(), 1, 1, (64,), 1), [Point(1)], rounds, Path("x"), between=between)
        comparisons[case] = Told(one, endpoints, quiet=True, case=case)
    Cases(comparisons, left).run()
    return " ".join(asked)


def test_cases_take_turns_and_every_endpoint_is_asked_what_was_begun() -> None:
    words = three(lambda: True).split()
    pairs = [words[i : i + 2] for i in range(0, len(words), 2)]
    assert [sorted(pair) for pair in pairs] == [
        [f"{c}a", f"{c}b"] for c in ("x0", "y0", "z0", "x1", "z1", "x2")
    ]
    # One that must be started meets all cases while it runs.
    assert three(lambda: True, "ended") == "x0a y0a z0a x0b y0b z0b x1b z1b x1a z1a x2a x2b"
    time_left = iter([True, True, False, False, False, False])
    assert sorted(three(lambda: next(time_left)).split()) == ["x0a", "x0b", "y0a", "y0b"]


class Stopped(Exception):
    """The person who pressed Ctrl-C."""


class Notes(Comparison):
    """A comparison whose client notes what each endpoint is asked, and stops at the `last` request."""

    def __init__(self, plan: Plan, names: str, last: int = 10**9) -> None:
        super().__init__(plan, [Endpoint(Spec(n, url=f"http://{n}", flush=None)) for n in names], quiet=True)
        self.told: dict[str, list[str]] = {name: [] for name in names}
        self.last = last
        self.most = 0

    def _client(self, endpoint: Endpoint) -> Any:
        outer, told = self, self.told[endpoint.spec.name]

        class Client(Recorder):
            async def __aenter__(self) -> Client:
                return self

            async def __aexit__(self, *_: object) -> None:
                outer.most = max(outer.most, self.most)

            def encode(self, turn: Turn) -> bytes:
                return orjson.dumps(turn.body)

            async def ask(self, turn: Turn, body: bytes | None = None) -> Sample:
                told.append(orjson.dumps(turn.body).decode())
                if sum(map(len, outer.told.values())) == outer.last:
                    raise Stopped
                return await Recorder.ask(self, Turn(turn.path, {"prompt": "x"}, turn.label, 0))

        return Client()


def sweep(output: Path, points: tuple[Point, ...] = (Point(1), Point(2)), **more: Any) -> Plan:
    workload = TwoTurn(Text(), 1, 3, 64, 8, 1, False)
    return Plan(
        workload, points, 2, output, **{"warm_up": 1, "round_warm_up": 1, "between": "running", **more}
    )


def marks_of(bodies: list[str]) -> set[str]:
    """The first line of each prompt, which names its text; both turns of a session begin with it."""
    return {orjson.loads(body)["messages"][0]["content"].partition("\n")[0] for body in bodies}


@pytest.mark.parametrize("between", ["running", "ended"])
def test_no_text_is_asked_twice_of_an_endpoint_but_every_endpoint_is_asked_the_same(
    tmp_path: Path, between: str
) -> None:
    """A store behind an endpoint outlives a flush: texts of an earlier point or run would be hits there."""
    seen: set[str] = set()
    for run in ("first", "again"):  # the same seed into another file
        notes = Notes(sweep(tmp_path / f"{run}.jsonl", between=between), "ab")
        notes.run()
        assert notes.told["a"] == notes.told["b"]
        # Two points of two rounds, each of three sessions and one that warms; two where two are asked at once.
        asked = 2 * 2 * (3 + 1) + 1
        assert len(notes.told["a"]) == asked * 2
        texts = marks_of(notes.told["a"])
        assert len(texts) == asked
        assert not texts & seen
        seen |= texts


def test_a_finished_file_is_read_back_and_other_endpoints_are_all_asked_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A verdict is of rounds that were asked side by side: a and b of one visit say nothing beside c of another."""
    file = tmp_path / "x.jsonl"
    first = Notes(sweep(file, round_warm_up=0, warm_up=0), "ab")
    lines = first.run()
    assert all("glm_ab" in json.loads(line) for line in file.read_bytes().splitlines())
    same = Notes(sweep(file, round_warm_up=0, warm_up=0), "ab")
    assert same.run() == lines
    assert same.told == {"a": [], "b": []}
    assert "8 of 8 rounds of this run are in it and not asked again; 0 others" in capsys.readouterr().err
    more = Notes(sweep(file, round_warm_up=0, warm_up=0), "ac")
    assert {line["tag"] for line in more.run()} == {"a", "c"}
    assert more.told["a"] == more.told["c"]
    assert not marks_of(more.told["a"]) & marks_of(first.told["a"])
    assert "0 of 8 rounds of this run are in it and not asked again; 8 others" in capsys.readouterr().err


def test_an_endpoint_that_did_not_start_changes_nothing_of_the_others_rounds(tmp_path: Path) -> None:
    plan = sweep(tmp_path / "x.jsonl")
    endpoints = [Endpoint(Spec(name, url="http://h")) for name in "abc"]
    whole = Comparison(plan, endpoints, quiet=True)
    rest = Comparison(plan, endpoints[:2], quiet=True, among=["c", "b", "a"])
    assert set(rest.marks()) < set(whole.marks())


@pytest.mark.parametrize("other", [{"commit": "b"}, {"machine": {"name": "h200"}}], ids=("commit", "machine"))
def test_another_commits_or_machines_rounds_are_not_used(
    other: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"commit": "a", "machine": {"name": "cpu"}}
    monkeypatch.setattr(comparison, "measured_by", lambda: here)
    file = tmp_path / "x.jsonl"
    Notes(sweep(file), "ab").run()
    monkeypatch.setattr(comparison, "measured_by", lambda: here | other)
    again = Notes(sweep(file), "ab")
    assert len(again.run()) == 8
    assert again.told["a"] == again.told["b"] != []


@pytest.mark.parametrize("last", range(1, 17))
def test_a_round_that_was_cut_off_is_asked_anew_with_other_texts(tmp_path: Path, last: int) -> None:
    """Wherever it was cut: nobody is asked a text twice, and what counts was asked of both."""
    file = tmp_path / "x.jsonl"
    one = {"points": (Point(1),), "warm_up": 0, "round_warm_up": 0}
    first = Notes(sweep(file, **one), "ab", last)
    with pytest.raises((Stopped, ExceptionGroup)):
        first.run()
    second = Notes(sweep(file, **one), "ab")
    lines = second.run()
    assert len(lines) == 4
    for name in "ab":
        before, after = marks_of(first.told[name]), marks_of(second.told[name])
        assert not before & after
    salts = {(line["glm_ab"]["round"], line["glm_ab"]["texts"]) for line in lines}
    assert len(salts) == 2
    assert records.read(file) == sorted(lines, key=records.read(file).index)


def test_what_is_in_the_file_counts_though_the_time_is_over(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    one = {"points": (Point(1),)}
    Notes(sweep(file, **one), "ab", 10**9).run()
    again = Notes(sweep(file, **one), "ab")
    assert [len(lines) for lines in Cases({"x": again}, lambda: False).run().values()] == [4]
    other = Notes(sweep(file, **one), "abc")
    assert [len(lines) for lines in Cases({"x": other}, lambda: False).run().values()] == [0]
    assert other.told == {"a": [], "b": [], "c": []}


def test_an_endpoint_that_cannot_go_on_is_left_out_or_ends_it(tmp_path: Path) -> None:
    class Broken(Notes):
        def ask(self, endpoint: Endpoint, *rest: Any) -> None:
            if endpoint.spec.name == "b" and rest[1] == 1:
                raise EndpointError("gone")
            super().ask(endpoint, *rest)

    failed: list[str] = []
    one = Broken(sweep(tmp_path / "x.jsonl", points=(Point(1),)), "abc")
    lines = Cases({"": one}, fails=lambda endpoint, error: failed.append(f"{endpoint.spec.name}: {error}"))
    assert [(line["tag"], line["glm_ab"]["round"]) for line in lines.run()[""]] == [
        ("a", 0),
        ("a", 1),
        ("c", 0),
        ("c", 1),
    ]
    assert failed == ["b: gone"]
    with pytest.raises(EndpointError, match="gone"):
        Cases({"": Broken(sweep(tmp_path / "y.jsonl", points=(Point(1),)), "abc")}).run()


def test_an_endpoint_that_may_go_on_loses_one_round_which_counts_for_nobody(tmp_path: Path) -> None:
    class Broken(Notes):
        def ask(self, endpoint: Endpoint, *rest: Any) -> None:
            if endpoint.spec.name == "b" and rest[1] == 0:
                records.begin(self.plan.output, self.asked(*rest[:2]))
                raise EndpointError("busy")
            super().ask(endpoint, *rest)

    file = tmp_path / "x.jsonl"
    one = Broken(sweep(file, points=(Point(1),)), "ab")
    lines = Cases({"": one}, fails=lambda endpoint, error: True).run()[""]
    assert [(line["tag"], line["glm_ab"]["round"]) for line in lines] == [("a", 0), ("a", 1), ("b", 1)]
    found = summarise(lines, ["a", "b"], "a")
    assert found[0]["rounds"] == 1
    # The same command asks it of both again.
    again = Notes(sweep(file, points=(Point(1),)), "ab")
    assert sorted((line["tag"], line["glm_ab"]["round"]) for line in again.run()) == [
        *(("a", 0), ("a", 1), ("b", 0), ("b", 1)),
    ]
    assert again.told["a"] == again.told["b"] != []


def test_warm_up_has_as_many_under_way_as_the_round_and_as_many_sessions_as_asked(tmp_path: Path) -> None:
    """Seven, though a round has three."""
    notes = Notes(sweep(tmp_path / "x.jsonl", (Point(5),), warm_up=7, round_warm_up=0), "a")
    notes.run()
    assert len(notes.told["a"]) == (7 + 3 + 3) * 2
    assert notes.most == 5


@pytest.mark.parametrize(
    ("between", "asked"),
    [
        ("running", [(2, 1), (1, 1), (4, 4), (1, 1), (16, 16), (1, 1)]),
        ("ended", [(2, 1), (4, 4), (16, 16), (1, 1), (1, 1), (1, 1)]),  # all points in a block
    ],
)
def test_every_new_point_has_been_asked_as_much_at_once_as_its_rounds_will(
    tmp_path: Path, between: str, asked: list[tuple[int, int]]
) -> None:
    """With the two sessions of the default: 1, 4 and 16 at once have 2, 4 and 16 before their first round."""
    points = (Point(1), Point(4), Point(16))
    warmed: list[tuple[int, int]] = []  # sessions that were asked and how many at once, by warm-up

    class Warmed(Notes):
        def warm(self, endpoint: Endpoint, point: Point, number: int) -> None:
            before, self.most = len(self.told["a"]), 0
            super().warm(endpoint, point, number)
            warmed.append(((len(self.told["a"]) - before) // 2, self.most))

    plan = sweep(tmp_path / "x.jsonl", points, warm_up=2, round_warm_up=1, between=between)
    Warmed(plan, "a").run()
    assert warmed == asked
    warmed.clear()
    Warmed(sweep(tmp_path / "y.jsonl", points, warm_up=0, round_warm_up=0), "a").run()
    assert warmed == [(0, 0)] * 6


def test_the_seed_fixes_sizes_and_order_whatever_the_texts() -> None:
    workload = LongContext(Text(), 1, 2, (64, 256), 1)
    a, b = workload.round(0, "x"), workload.round(0, "y")
    assert [s.turns[0].label for s in a.sessions] == [s.turns[0].label for s in b.sessions]
    bodies = [{s.turns[0].body["messages"][0]["content"][:18] for s in one.sessions} for one in (a, b)]
    assert not bodies[0] & bodies[1]
    assert workload.round(0, "x") == a


def sample(label: str, ttft: float, cached: int = 0, error: str = "") -> Sample:
    itls = [0.010, 0.030]
    return Sample(
        label,
        ttft=ttft,
        e2e=ttft + 0.040,
        itls=itls,
        prompt_tokens=100,
        cached_tokens=cached,
        output_tokens=3,
        error=error,
    )


def record(endpoint: str, number: int, samples: list[list[Sample]], seconds: float = 2.0) -> dict[str, Any]:
    result = Round(samples, seconds)
    return records.line(endpoint, "two_turn", Point(4), number, 0, f"{endpoint}{number}", result, {})


def test_a_line_has_bench_servings_fields_and_comes_back_as_it_was(tmp_path: Path) -> None:
    """Field names: sglang 0.5.23, sglang/benchmark/serving.py, `result` and `result_details`."""
    line = record("a", 0, [[sample("turn 1", 0.1), sample("turn 2", 0.3, 50)], [sample("turn 1", 0.2)]])
    assert line["completed"] == 3
    assert line["total_input_tokens"] == 300
    assert line["input_throughput"] == 150.0
    assert line["output_throughput"] == 4.5
    assert line["median_ttft_ms"] == 200.0
    assert line["median_itl_ms"] == 20.0
    assert line["mean_tpot_ms"] == 20.0
    assert line["max_concurrency"] == 4
    assert line["cache_report"]["cache_hit_rate_pct"] == 16.67
    assert line["request_rate"] == math.inf
    for field in ("input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors"):
        assert len(line[field]) == 3
    path = tmp_path / "x.jsonl"
    records.append(path, line)
    records.append(path, line)
    path.write_bytes(path.read_bytes() + b'{"cut off')
    assert records.read(path) == [json.loads(json.dumps(line))] * 2
    # As bench_serving writes it, and as its readers read it.
    assert b'"request_rate": Infinity' in path.read_bytes()
    assert path.read_bytes().endswith(b"\n")
    found = records.samples_of(line)
    assert list(found) == ["0.0", "0.1", "1.0"]
    assert found["0.1"].cached_tokens == 50
    assert found["0.1"].ttft == 0.3


def test_every_field_of_bench_serving_is_there() -> None:
    """Read off its source: the dictionaries `result` and `result_details`, and what it adds for a cache report."""
    source = Path(str(find_spec("sglang").submodule_search_locations[0])) / "benchmark" / "serving.py"  # type: ignore[union-attr, index]
    fields: set[str] = set()
    report: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if not isinstance(node, ast.Assign):
            continue
        match node.targets[0], node.value:
            case ast.Name(id="result" | "result_details"), ast.Dict(keys=keys):
                fields |= {key.value for key in keys if isinstance(key, ast.Constant)}
            case ast.Subscript(
                value=ast.Name(id="result" | "result_details"), slice=ast.Constant(value=key)
            ), value:
                fields.add(str(key))
                if key == "cache_report" and isinstance(value, ast.Dict):
                    report = {str(one.value) for one in value.keys if isinstance(one, ast.Constant)}
    assert {"median_ttft_ms", "input_lens", "cached_tokens", "cache_report"} <= fields  # it was found
    assert {"total_cached_tokens", "storage_backend"} <= report
    line = record("a", 0, [[sample("turn 1", 0.1)]])
    assert fields <= set(line)
    assert report == set(line["cache_report"])


def test_summary_compares_pair_by_pair() -> None:
    """The second is twice as fast at turn 1, equal at turn 2, in every one of six rounds."""
    lines = []
    for number in range(6):
        base = 0.1 * (number + 1)  # rounds differ, the ratio doesn't
        lines.append(record("a", number, [[sample("turn 1", base), sample("turn 2", base)]], 2.0))
        lines.append(record("b", number, [[sample("turn 1", base / 2), sample("turn 2", base, 80)]], 1.0))
    (point,) = summarise(lines, ["a", "b"], "a")
    assert point["point"] == "concurrency 4"
    assert point["rounds"] == 6
    speedups = point["speedups"]["b"]
    assert speedups["by_label"]["turn 1"]["ttft"]["value"] == pytest.approx(2.0, abs=1e-3)
    # In a closed loop the input rate is the verdict; of the rest it is said where it lies.
    assert point["verdict"] == {"of": {"metric": "input_tokens_per_s", "label": ALL}, "verdicts": 1}
    assert speedups["input_tokens_per_s"]["says"] == "faster"
    assert speedups["by_label"]["turn 1"]["ttft"]["says"] == "interval above 1"
    assert speedups["by_label"]["turn 2"]["ttft"]["says"] == "interval holds 1"
    assert speedups["by_label"][ALL]["ttft"]["value"] == pytest.approx(2**0.5, abs=1e-3)
    assert speedups["input_tokens_per_s"]["value"] == pytest.approx(2.0)
    b = point["endpoints"]["b"]
    assert b["by_label"]["turn 2"]["cached_share"] == 0.8
    assert b["by_label"][ALL]["cached_share"] == 0.4
    assert b["by_label"]["turn 1"]["ttft_ms"]["median"]["value"] == pytest.approx(175.0)
    assert b["input_tokens_per_s"]["value"] == 200.0


@pytest.mark.parametrize(
    ("tokens", "says"), [(100, "faster"), (101, "faster"), (98, "undecided: 6 prompts with")]
)
def test_an_endpoint_that_reads_less_is_not_called_faster(tokens: int, says: str) -> None:
    """One of 101 tokens may be the template's; two of 100 are more than one in a hundred."""
    lines = []
    for number in range(6):
        short = sample("turn 1", 0.1)
        short.prompt_tokens = tokens
        lines.append(record("a", number, [[sample("turn 1", 0.2)]], 2.0))
        lines.append(record("b", number, [[short]], 1.0))
    (point,) = summarise(lines, ["a", "b"], "a")
    found = point["speedups"]["b"]
    assert found["unlike_prompts"] == {
        "pairs": 0 if tokens == 100 else 6,
        "most": {100: 0, 101: 0.0099, 98: 0.02}[tokens],
    }
    assert found["input_tokens_per_s"]["says"].startswith(says)
    assert found["by_label"][ALL]["ttft"]["says"].startswith(says.replace("faster", "interval above 1"))


def test_failed_requests_are_counted_and_their_pairs_dropped() -> None:
    lines = []
    for number in range(6):
        lines.append(record("a", number, [[sample("turn 1", 0.1)], [sample("turn 1", 0.1)]]))
        wrong = sample("turn 1", 9.0, error="HTTP 500")
        lines.append(record("b", number, [[sample("turn 1", 0.1)], [wrong]]))
    (point,) = summarise(lines, ["a", "b"], "a")
    b = point["endpoints"]["b"]
    assert (b["requests"], b["errors"], b["error_examples"]) == (12, 6, ["6×: HTTP 500"])
    assert point["speedups"]["b"]["errors"] == 6
    assert point["speedups"]["b"]["dropped_pairs"] == 6
    assert point["speedups"]["b"]["by_label"][ALL]["ttft"]["value"] == pytest.approx(1.0)
    assert point["speedups"]["b"]["by_label"][ALL]["ttft"]["values"] == 6


@pytest.mark.parametrize("broken", ["a", "b"])
def test_an_endpoint_that_sheds_load_is_not_called_faster(broken: str) -> None:
    """One session of two fails at its first turn, at one side: the second turn is never asked, the pairs that remain look
    twice as fast, and so do the rates of the survivors.
    """
    lines = []
    for number in range(6):
        for name, ttft in (("a", 0.2), ("b", 0.1)):
            good = [sample("turn 1", ttft), sample("turn 2", ttft)]
            bad = [sample("turn 1", 1.0, error="HTTP 503")] if name == broken else good
            result = Round([good, bad], ttft * 10, planned=4)
            lines.append(records.line(name, "two_turn", Point(4), number, 0, f"{name}{number}", result, {}))
    (point,) = summarise(lines, ["a", "b"], "a")
    found = point["speedups"]["b"]
    assert found["dropped_pairs"] == 6 * 2
    verdicts = [found["input_tokens_per_s"], *(one["ttft"] for one in found["by_label"].values())]
    assert [one["says"] for one in verdicts] == ["undecided: 6 errors"] * 4
