"""The accuracy instruments against servers whose answer key is written here, and the article's own figures."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson
import pytest
from scipy import stats  # type: ignore[import-untyped]

from benchmarks.ab.client import Client, Sample
from benchmarks.accuracy import suites
from benchmarks.accuracy.asking import How, judged, mark, turn
from benchmarks.accuracy.identity import identity
from benchmarks.accuracy.paired import Pair, compare, difference, mcnemar
from benchmarks.accuracy.suites import Question, SuiteError, gsm8k, needle
from benchmarks.workloads.text import Text

ROOT = Path(__file__).resolve().parents[3]
Key = Callable[[str], str]
LIMIT = 6000  # tokens, which are bytes, that an endpoint takes


def test_mcnemar_is_the_articles_p() -> None:
    """96.36 % → 96.59 % of 1,319 are three questions more; its p = 0.63 is that of 7 against 10 alone."""
    right_a, right_b = round(0.9636 * 1319), round(0.9659 * 1319)
    assert right_b - right_a == 3
    assert mcnemar(7, 10) == pytest.approx(0.63, abs=0.005)


@pytest.mark.parametrize(("b", "c"), [(0, 0), (0, 5), (1, 9), (6, 6), (10, 25), (40, 41)])
def test_mcnemar_is_the_binomial_sum(b: int, c: int) -> None:
    """Exact: twice the smaller tail of a fair coin, at most 1."""
    n, k = b + c, min(b, c)
    tail = sum(math.comb(n, i) for i in range(k + 1)) / 2**n
    assert mcnemar(b, c) == pytest.approx(min(1.0, 2 * tail))
    assert mcnemar(b, c) == mcnemar(c, b)
    if b != c:
        assert mcnemar(b, c) == pytest.approx(stats.binomtest(k, n).pvalue)


def test_difference_by_hand() -> None:
    """10 and 20 of 200 alone right: (20 − 10)/200, error √(30 − 100/200)/200."""
    value, low, high = difference(10, 20, 200)
    assert value == 0.05
    assert (high - low) / 2 == pytest.approx(1.959964 * math.sqrt(29.5) / 200, rel=1e-6)


def test_wrong_answers_agree_only_when_they_are_the_same() -> None:
    pairs = [Pair("1", "1", True, True), Pair("2", "3", False, False), Pair("4", "4", False, False)]
    found = compare("s", [*pairs, Pair("5", "6", True, False)], errors=2)
    assert found["correct"] == {"a": 0.5, "b": 0.25}
    assert (found["only_a"], found["only_b"], found["mcnemar_p"]) == (1, 0, 1.0)
    assert found["agreement"] == 0.5
    assert found["errors"] == 2
    # Two questions were not answered: they may be the two that differ.
    assert found["says"].startswith("s: undecided: 2 errors (McNemar p = 1;")
    assert (
        "no regression found" in compare("s", [*pairs, *([PAIR] * 5), Pair("5", "6", True, False)], 0)["says"]
    )
    assert compare("s", [Pair("1", "2", True, False)] * 9, errors=1)["says"].startswith(
        "s: undecided: 1 errors"
    )
    assert compare("s", [], 3)["says"] == "s: undecided: no question was answered by both (3 errors)."


PAIR = Pair("1", "1", True, True)
EMPTY = Pair("", "", False, False)


def test_nothing_agrees_with_nothing_and_decides_nothing() -> None:
    found = compare("s", [EMPTY] * 200, errors=0)
    assert found["verdict"].startswith("undecided: A is right 0 times, fewer than the 6")
    assert found["agreement"] == 0.0
    assert found["unanswered"] == {"a": 200, "b": 200}
    assert "none to 200 and 200" in found["says"]


@pytest.mark.parametrize(("right", "decided"), [(5, False), (6, True)])
def test_six_right_answers_are_the_fewest_whose_loss_shows(right: int, decided: bool) -> None:
    """Of n discordant pairs on one side the exact p is 2 · 2^-n: 0.0625 for five, 0.03125 for six."""
    lost = compare("s", [Pair("1", "", True, False)] * right + [EMPTY] * 10, errors=0)
    assert lost["mcnemar_p"] == 2 / 2**right
    assert lost["verdict"].startswith("the two differ" if decided else "undecided")
    kept = compare("s", [PAIR] * right + [EMPTY] * 10, errors=0)
    assert kept["verdict"].startswith("no regression found" if decided else "undecided")


def test_what_differs_is_said_however_few_are_right_at_a() -> None:
    assert compare("s", [Pair("", "1", False, True)] * 9, errors=0)["verdict"] == "the two differ"


CHAT, QUIET, PLAIN = How("chat", 100), How("chat", None), How("completions", 100)


@pytest.mark.parametrize(
    ("how", "text", "reasoning", "finish", "answer", "fails"),
    [
        (QUIET, "It is 1234567", "", "stop", "1234567", False),
        (QUIET, "It is 1234567 and", "", "length", "1234567", False),
        (QUIET, "The text says", "", "length", "", True),
        (QUIET, "no idea", "", "stop", "", False),  # wrong, but an answer
        (PLAIN, "hm", "", "length", "", True),
        # An endpoint with a reasoning parser…
        (CHAT, "", "is it 1234567?", "length", "", True),
        (CHAT, "1234567", "is it 7654321?", "stop", "1234567", False),
        (CHAT, "1234567 or", "hm", "length", "1234567", False),
        # …and one without.
        (CHAT, "<think>is it 7654321?</think>1234567", "", "stop", "1234567", False),
        (CHAT, "is it 7654321?</think>I do not know", "", "stop", "", False),
        (CHAT, "is it 1234567? The text", "", "length", "", True),
        (CHAT, "hm</think>1234567 or", "", "length", "1234567", False),
    ],
)
def test_an_answer_that_was_cut_is_none(
    how: How, text: str, reasoning: str, finish: str, answer: str, fails: bool
) -> None:
    question = Question("x", "needle", "", "1234567", 64)
    sample = Sample("needle", text=text, reasoning=reasoning, finish=finish)
    found, error = judged(question, sample, how)
    assert found == answer
    assert bool(error) is fails
    if fails:
        assert str(64 + how.room) in error
        assert ("--thinking-tokens" if how is CHAT else "--max-tokens") in error


@pytest.mark.parametrize(
    ("text", "finish", "answer", "fails"),
    [
        ("3 + 4 = 7. Of these", "length", "", True),
        ("3 + 4 = 7. #### 7 and", "length", "7", False),
        ("3 + 4 = 7. So 7.", "stop", "7", False),
    ],
)
def test_a_step_of_a_solution_that_was_cut_is_no_answer(
    text: str, finish: str, answer: str, fails: bool
) -> None:
    question = Question("x", "gsm8k", "", "7", 64)
    found, error = judged(question, Sample("gsm8k", text=text, finish=finish), PLAIN)
    assert (found, bool(error)) == (answer, fails)


def test_only_a_completion_is_stopped_at_the_next_question() -> None:
    question = Question("x", "gsm8k", "ask", "7", 64)
    assert turn(question, PLAIN).body["stop"] == ["Question:"]
    assert "stop" not in turn(question, CHAT).body  # its reasoning may say so, too
    assert "stop" not in turn(question, QUIET).body


def test_room_for_reasoning_is_asked_for_in_chat_only() -> None:
    question = Question("x", "needle", "ask", "1234567", 64)
    assert turn(question, CHAT).body["max_tokens"] == 164
    assert "chat_template_kwargs" not in turn(question, CHAT).body
    assert turn(question, QUIET).body["max_tokens"] == 64
    assert turn(question, QUIET).body["chat_template_kwargs"] == {"enable_thinking": False}
    assert turn(question, PLAIN).body["max_tokens"] == 64
    client = Client("http://a", "m")
    assert len({mark(question, client, how) for how in (CHAT, QUIET, PLAIN, How("chat", 101))}) == 4


def test_no_needle_leaves_less_room_for_reasoning_than_the_longest_may_take() -> None:
    asked = list(needle(Text(1.0), [2000, 5000, 6000], [0.5], None, 64, 1, 3000))
    for question, most in zip(asked, (2000, 6000 - 3000, 6000 - 3000), strict=True):
        assert most - 110 <= len(question.prompt.encode()) + 64 <= most - 60
    with pytest.raises(SuiteError, match=r"--thinking-tokens \(3000\)"):
        list(needle(Text(1.0), [3000], [0.5], None, 64, 1, 3000))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so it is 12. #### 1,234", "1234"),
        ("#### -5 and #### 6", "-5"),
        ("She pays $1,200.50.", "1200.5"),
        ("first 3, then 4.0", "4"),
        ("x = 7.", "7"),
        ("none at all", ""),
        ("#### ", ""),
        ("", ""),
    ],
)
def test_gsm8k_answers_are_read_as_numbers(text: str, answer: str) -> None:
    assert suites.read_gsm8k(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [("It is 1234567.", "1234567"), ("7654321", "7654321"), ("12345678", ""), ("12 then 1234567", "1234567")],
)
def test_needle_answers_are_whole_numbers(text: str, answer: str) -> None:
    assert suites.read_needle(text, "1234567") == answer


def rows(path: Path, count: int) -> Path:
    lines = [{"question": f"What is {i} and {i}?", "answer": f"{i}+{i}\n#### {2 * i}"} for i in range(count)]
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path


def test_gsm8k_prompts_teach_five_others(tmp_path: Path) -> None:
    asked = list(gsm8k(rows(tmp_path / "t.jsonl", 12), None, None, 10, 1))
    assert [q.expected for q in asked] == [str(2 * i) for i in range(5, 12)]
    for question in asked:
        assert question.prompt.count("Question: ") == 6
        taught = set(re.findall(r"What is (\d+)", question.prompt)[:5])
        assert taught == {"0", "1", "2", "3", "4"}
        assert question.prompt.endswith("Answer:")
    apart = list(gsm8k(tmp_path / "t.jsonl", rows(tmp_path / "s.jsonl", 9), 4, 10, 1))
    assert [q.expected for q in apart] == ["0", "2", "4", "6"]


def test_data_that_is_not_at_hand_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{}")
    with pytest.raises(SuiteError, match="no JSONL of question and answer"):
        list(gsm8k(tmp_path / "x.jsonl", None, None, 10, 1))
    (tmp_path / "x.jsonl").write_text("")
    with pytest.raises(SuiteError, match="is empty"):
        list(gsm8k(tmp_path / "x.jsonl", None, None, 10, 1))


def test_an_empty_cache_is_said(tmp_path: Path) -> None:
    code = (
        "from benchmarks.accuracy.suites import *\ntry: list(gsm8k(None, None, 1, 1, 1))\n"
        "except SuiteError as error: print(error)"
    )
    env = {"HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.startswith("--data is not given and the Hugging Face cache has no GSM8K")


def test_needles_lie_where_they_should_and_fill_the_length() -> None:
    text = Text(1.0)
    asked = list(needle(text, [2000, 30000], [0.0, 0.5, 1.0], None, 32, 1))
    assert [q.id for q in asked][:3] == ["needle-2000-0", "needle-2000-0.5", "needle-2000-1"]
    assert asked == list(needle(text, [2000, 30000], [0.0, 0.5, 1.0], None, 32, 1))
    for question, (length, depth) in zip(
        asked, [(n, d) for n in (2000, 30000) for d in (0.0, 0.5, 1.0)], strict=True
    ):
        assert question.prompt.count(question.expected) == 1
        assert length - 110 <= len(question.prompt.encode()) + 32 <= length - 60
        at = question.prompt.index(question.expected) / len(question.prompt)
        assert at == pytest.approx(depth, abs=0.15 if length == 2000 else 0.03)
    assert len({q.expected for q in asked}) == 6
    with pytest.raises(SuiteError, match="must leave room for --max-tokens"):
        list(needle(text, [200], [0.5], None, 100, 1))


class Endpoint:
    """An OpenAI server that answers by a key; counts how often each prompt was asked."""

    def __init__(
        self,
        key: Key,
        fails: Callable[[str], bool] = lambda _: False,
        finish: str = "stop",
        port: int = 0,
        tells: dict[str, bytes] | None = None,
    ) -> None:
        outer = self
        # As SGLang's: of no other start, and among what changes while it serves.
        about = {"version": "0.5", "startup_time": {"scheduler_e2e": time.perf_counter()}}
        self.tells = {"/server_info": orjson.dumps(about)} if tells is None else tells
        self.asked: Counter[str] = Counter()
        self.fails = fails

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                listing = {"data": [{"id": "m", "max_model_len": LIMIT}]}
                known = {"/v1/models": orjson.dumps(listing)} | outer.tells
                self.answer(200 if self.path in known else 404, known.get(self.path, b""))

            def do_POST(self) -> None:
                body = orjson.loads(self.rfile.read(int(self.headers["content-length"])))
                prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
                if len(prompt.encode()) > LIMIT:
                    self.answer(400, b"too long")
                    return
                if not body.get("stream"):
                    self.answer(200, orjson.dumps({"usage": {"prompt_tokens": len(prompt.encode())}}))
                    return
                outer.asked[prompt] += 1
                if outer.fails(prompt):
                    self.answer(500, b"broken")
                    return
                events = [
                    {"choices": [{"delta": {"content": piece}}]}
                    for piece in re.findall(r".{1,3}", key(prompt))
                ]
                events.append({"choices": [{"delta": {}, "finish_reason": finish}]})
                events.append(
                    {"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": 1}}
                )
                self.answer(
                    200, b"".join(b"data: " + orjson.dumps(e) + b"\n\n" for e in events) + b"data: [DONE]\n\n"
                )

            def answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def restarted(self, key: Key) -> Endpoint:
        """Another server at the same port, which tells as much of itself."""
        self.server.shutdown()
        self.server.server_close()
        tells = None if "/server_info" in self.tells else self.tells
        return Endpoint(key, port=self.server.server_port, tells=tells)


@pytest.fixture
def endpoints() -> Iterator[list[Endpoint]]:
    made: list[Endpoint] = []
    yield made
    for endpoint in made:
        endpoint.server.shutdown()
        endpoint.server.server_close()


def run(folder: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    argv = [
        sys.executable,
        "-m",
        "benchmarks.accuracy",
        "--json",
        "-o",
        str(folder / "answers.jsonl"),
        *flags,
    ]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    last = done.stdout.splitlines()[-1] if done.stdout else "{}"
    return done.returncode, orjson.loads(last), done.stderr


def right(prompt: str) -> str:
    return f"#### {2 * asked_number(prompt)}"


def asked_number(prompt: str) -> int:
    return int(re.findall(r"What is (\d+)", prompt)[-1])


def test_known_answers_give_the_known_p_and_a_second_run_asks_only_what_failed(
    tmp_path: Path, endpoints: list[Endpoint]
) -> None:
    """40 questions: A errs at every tenth, B at every fourth; question 13 fails at B the first time."""
    a = Endpoint(lambda p: f"#### {2 * asked_number(p) + (asked_number(p) % 10 == 0)}")
    b = Endpoint(lambda p: f"it is {2 * asked_number(p) + 2 * (asked_number(p) % 4 == 0)}")
    endpoints += [a, b]
    b.fails = lambda p: asked_number(p) == 13 and b.asked[p] == 1
    data, shots = rows(tmp_path / "t.jsonl", 40), rows(tmp_path / "s.jsonl", 5)
    flags = ("--suite", "gsm8k", "--a", a.url, "--b", b.url, "--data", str(data), "--shots", str(shots))
    code, result, errors = run(tmp_path, *flags)
    assert code == 1, errors
    assert result["suites"]["gsm8k"]["errors"] == 1
    code, result, errors = run(tmp_path, *flags)
    assert code == 0, errors
    found = result["suites"]["gsm8k"]
    wrong_a, wrong_b = {0, 10, 20, 30}, set(range(0, 40, 4))
    assert found["questions"] == 40
    assert found["correct"] == {"a": 1 - 4 / 40, "b": 1 - 10 / 40}
    assert (found["only_a"], found["only_b"]) == (len(wrong_b - wrong_a), len(wrong_a - wrong_b)) == (8, 2)
    assert found["mcnemar_p"] == pytest.approx(2 * sum(math.comb(10, i) for i in range(3)) / 2**10)
    # 0 and 20 are wrong at both, by 1 and by 2: never the same answer.
    assert found["agreement"] == 1 - len(wrong_a | wrong_b) / 40
    assert set(a.asked.values()) == {1}
    assert Counter(b.asked.values()) == {1: 39, 2: 1}
    assert found["reused"] == {"a": 40, "b": 39}
    assert f"40 and 39 of 40 answers are from {tmp_path / 'answers.jsonl'}, of the same servers" in errors
    assert result["not_measured"] == ["accuracy: needle was not asked"]


TELLS_NO_START: dict[str, dict[str, bytes]] = {
    "nothing": {},
    "its version alone": {"/version": b'{"version": "0.11.0"}'},
}


def gsm8k_flags(folder: Path, a: Endpoint, b: Endpoint) -> tuple[str, ...]:
    data, shots = rows(folder / "t.jsonl", 20), rows(folder / "s.jsonl", 5)
    return ("--suite", "gsm8k", "--a", a.url, "--b", b.url, "--data", str(data), "--shots", str(shots))


@pytest.mark.parametrize("tells", [None, *TELLS_NO_START.values()], ids=["as SGLang", *TELLS_NO_START])
def test_another_server_at_the_same_port_is_asked_again(
    tmp_path: Path, endpoints: list[Endpoint], tells: dict[str, bytes] | None
) -> None:
    """Its answers are all wrong: what the one before it said of them is no answer of its."""
    a, b = Endpoint(right, tells=tells), Endpoint(right, tells=tells)
    flags = gsm8k_flags(tmp_path, a, b)
    code, result, errors = run(tmp_path, *flags)
    assert code == 0, errors
    found = result["suites"]["gsm8k"]
    assert (found["verdict"], found["reused"]) == ("no regression found", {"a": 0, "b": 0})
    broken = b.restarted(lambda prompt: "#### 7777")
    endpoints += [a, broken]
    code, result, errors = run(tmp_path, *flags)
    assert code == 0, errors
    found = result["suites"]["gsm8k"]
    assert set(broken.asked.values()) == {1}
    assert len(broken.asked) == 20
    assert (found["verdict"], found["correct"]) == ("the two differ", {"a": 1.0, "b": 0.0})
    # Of an endpoint that does not tell its starts apart nothing is known, whether it was restarted or not.
    assert found["reused"] == {"a": 20 if tells is None else 0, "b": 0}
    others = 20 if tells is None else 40
    assert f"{others} answers in {tmp_path / 'answers.jsonl'} are of servers that ran at these URLs" in errors


@pytest.mark.parametrize("tells", [None, {}], ids=["as SGLang", "nothing"])
def test_answers_of_whichever_server_count_where_that_is_asked_for(
    tmp_path: Path, endpoints: list[Endpoint], tells: dict[str, bytes] | None
) -> None:
    a, b = Endpoint(right, tells=tells), Endpoint(right, tells=tells)
    flags = gsm8k_flags(tmp_path, a, b)
    assert run(tmp_path, *flags)[0] == 0
    again = b.restarted(right)
    endpoints += [a, again]
    code, result, errors = run(tmp_path, *flags, "--resume")
    assert code == 0, errors
    assert result["suites"]["gsm8k"]["reused"] == {"a": 20, "b": 20}
    assert "20 and 20 of 20 answers are from" in errors
    assert "whichever server gave them (--resume)" in errors
    assert not again.asked


def test_a_server_that_changes_while_it_is_asked_decides_nothing(
    tmp_path: Path, endpoints: list[Endpoint]
) -> None:
    a, b = Endpoint(right), Endpoint(right)
    endpoints += [a, b]

    def restarts(prompt: str) -> bool:
        about = {"version": "0.5", "startup_time": {"scheduler_e2e": 0.5}}
        b.tells["/server_info"] = orjson.dumps(about)
        return False

    b.fails = restarts
    code, _, errors = run(tmp_path, *gsm8k_flags(tmp_path, a, b))
    assert code == 1
    assert f"{b.url}: by what it says of itself not the server that this run began with" in errors


STATE: dict[str, Any] = {"version": "0.5", "random_seed": 5, "startup_time": {"scheduler_e2e": 1.25}}


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"/server_info": STATE | {"internal_states": [{"last_gen_throughput": 9.0}]}}, True),
        ({"/server_info": STATE | {"random_seed": 6}}, False),
        ({"/server_info": STATE | {"startup_time": {"scheduler_e2e": 1.26}}}, False),
        ({"/model_info": {"weight_version": "2"}}, False),
    ],
)
def test_what_makes_a_server_another(endpoints: list[Endpoint], changes: dict[str, Any], same: bool) -> None:
    told = {"/server_info": STATE | {"internal_states": []}, "/model_info": {"weight_version": "1"}}
    endpoint = Endpoint(right, tells={path: orjson.dumps(what) for path, what in told.items()})
    endpoints.append(endpoint)
    before = identity(endpoint.url)
    assert before
    endpoint.tells |= {path: orjson.dumps(what) for path, what in changes.items()}
    assert (identity(endpoint.url) == before) is same


def test_a_processs_start_tells_where_nothing_else_does(endpoints: list[Endpoint]) -> None:
    """vLLM's /version is the same after a restart."""
    endpoint = Endpoint(right, tells=dict(TELLS_NO_START["its version alone"]))
    endpoints.append(endpoint)
    assert identity(endpoint.url) == ""
    found = set()
    for start in (b"1.7e+09", b"1.8e+09"):
        endpoint.tells["/metrics"] = b"# HELP x\nprocess_start_time_seconds " + start + b"\nx 1\n"
        found.add(identity(endpoint.url))
    assert len(found - {""}) == 2


def test_behind_a_router_it_is_all_workers(endpoints: list[Endpoint]) -> None:
    """The router's own /server_info is that of one of them."""
    workers = [Endpoint(right), Endpoint(right)]
    listed = {"workers": [{"url": f"{worker.url}@0"} for worker in workers]}
    told = {"/workers": orjson.dumps(listed), "/server_info": workers[0].tells["/server_info"]}
    router = Endpoint(right, tells=told)
    endpoints += [*workers, router]
    before = identity(router.url)
    assert before
    assert identity(router.url) == before
    workers[1].tells = {"/server_info": orjson.dumps(STATE)}
    assert identity(router.url) not in ("", before)
    workers[1].tells = {}
    assert identity(router.url) == ""


def test_needles_up_to_the_context_limit(tmp_path: Path, endpoints: list[Endpoint]) -> None:
    """A finds every number; B reads only the first half of what it is given."""

    def finds(prompt: str) -> str:
        found = re.search(r"House is (\d+)", prompt)
        return found[1] if found else "no idea"

    endpoints += [Endpoint(finds), Endpoint(lambda p: finds(p[: len(p) // 2]))]
    a, b = endpoints
    code, result, errors = run(
        tmp_path, "--suite", "needle", "--a", a.url, "--b", b.url, "--depths", "0,0.2,0.8,1", "--no-thinking"
    )
    assert code == 0, errors
    found = result["suites"]["needle"]
    # One token a byte here, so lengths are 4096 and the limit; two of four depths lie in the first half.
    assert found["questions"] == 8
    assert found["correct"] == {"a": 1.0, "b": 0.5}
    assert found["mcnemar_p"] == pytest.approx(2 / 2**4)
    assert max(len(p.encode()) for p in a.asked) + 64 <= LIMIT
    assert max(len(p.encode()) for p in a.asked) > LIMIT - 200


def test_answers_that_are_cut_decide_nothing(tmp_path: Path, endpoints: list[Endpoint]) -> None:
    """Two that reason to the end of their tokens: no answer is read, every question is an error, none is compared."""
    endpoints += [Endpoint(lambda p: "it is 1234567? no", finish="length") for _ in range(2)]
    a, b = endpoints
    flags = ("--suite", "needle", "--a", a.url, "--b", b.url, "--depths", "0,1", "--thinking-tokens", "500")
    code, result, errors = run(tmp_path, *flags)
    assert code == 1
    found = result["suites"]["needle"]
    assert (found["questions"], found["errors"]) == (0, 4)
    assert found["verdict"].startswith("undecided")
    assert "undecided" in errors
    answers = [orjson.loads(line) for line in (tmp_path / "answers.jsonl").read_bytes().splitlines()]
    assert {row["finish"] for row in answers} == {"length"}
    assert all("--thinking-tokens" in row["error"] for row in answers)


def test_an_endpoint_that_is_not_there_is_one_message(tmp_path: Path) -> None:
    dead = "http://127.0.0.1:9"
    code, _, errors = run(tmp_path, "--suite", "needle", "--a", dead, "--b", dead)
    assert code == 1
    assert "Traceback" not in errors


def test_questions_know_how_to_read_their_answers() -> None:
    assert Question("x", "gsm8k", "", "4", 1).read("so 3, no: #### 4") == "4"
    assert Question("x", "needle", "", "1234567", 1).read("1234567!") == "1234567"
