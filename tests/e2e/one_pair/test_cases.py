"""Ways in which pairs have failed their users elsewhere, each with the right outcome: docs/faults.md lists them."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from glm_sglang.cluster import PrefillServer, Router
from glm_sglang.oracle import Oracle
from glm_sglang.serving import Server
from tests.e2e.conftest import CONTEXT, PAGE, generate, prompt
from tests.e2e.loads import held, seconds_until_idle
from tests.e2e.one_pair.conftest import Pair

CHUNK = 256
LONGEST = (
    CONTEXT - 7
)  # UPSTREAM: TpModelWorker.get_worker_info: context, less one, less five, and this is the first refused


@pytest.fixture(scope="module")
def expected(model: Path) -> Callable[[list[int], int], list[int]]:
    """transformers' greedy tokens."""
    return Oracle(model).greedy


def post(url: str, ids: list[int], tokens: int = 2, timeout: float = 60, **more: Any) -> httpx.Response:
    """/generate, whatever its status."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, **more}
    return httpx.post(f"{url}/generate", json=body, timeout=timeout, trust_env=False)


def counted(server: Server, name: str) -> float:
    """A metric of SGLang's, over all its children. AssertionError where it is not there."""
    text = httpx.get(f"{server.url}/metrics", timeout=10, trust_env=False).text
    found = [
        float(line.rpartition(" ")[2]) for line in text.splitlines() if re.match(rf"sglang:{name}[{{ ]", line)
    ]
    assert found, name
    return sum(found)


def sent(server: Server) -> float:
    """Requests whose KV a prefill server has sent."""
    return counted(server, "kv_transfer_total_mb_count")


# -- lengths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1])
def test_lengths_around_page_chunk_and_limit(
    pair: Pair, expected: Callable[..., list[int]], length: int
) -> None:
    ids = prompt(length, 500 + length)
    assert generate(pair.router().url, ids, 2)["output_ids"] == expected(ids, 2)


def test_the_longest_prompt_is_served(pair: Pair) -> None:
    assert len(generate(pair.router().url, prompt(LONGEST, 590), 2)["output_ids"]) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("length", "limit"),
    [(LONGEST + 1, LONGEST + 1), (CONTEXT - 1, LONGEST + 1), (CONTEXT, CONTEXT), (CONTEXT + 9, CONTEXT)],
)
def test_a_prompt_over_the_limit_goes_no_further(pair: Pair, length: int, limit: int) -> None:
    """sglang 30233: the client gets an error with both numbers; no KV is sent to decode, which says the same by itself.

    The first two pass the tokenizer and are refused by the scheduler, the others by the tokenizer.
    """
    prefill, decode = pair.prefills[0], pair.decodes[0]
    before = sent(prefill)
    room = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": 7_000_000 + length,
    }
    ids = prompt(length, 600)
    for answer in (post(pair.router().url, ids, 1), post(decode.url, ids, 1, **room)):
        assert answer.status_code == 400, answer.text
        assert str(length) in answer.text
        assert str(limit) in answer.text
        assert "output_ids" not in answer.text
    assert seconds_until_idle(prefill, decode) < 5
    assert sent(prefill) == before
    generate(pair.router().url, [65, 66, 67], 2)
    assert sent(prefill) == before + 1


def test_one_request_moves_the_pairs_metrics(pair: Pair) -> None:
    """sglang 16832, 21167: what SGLang counts of the transfer on the prefill node."""
    prefill = pair.prefills[0]
    names = ("kv_transfer_total_mb_sum", "kv_transfer_latency_ms_sum", "kv_transfer_bootstrap_ms_count")
    generate(pair.router().url, prompt(130, 700), 2)
    before = [counted(prefill, name) for name in names]
    generate(pair.router().url, prompt(130, 701), 2)
    after = [counted(prefill, name) for name in names]
    assert all(new > old for old, new in zip(before, after, strict=True)), (names, before, after)


def test_a_request_under_another_ones_name_is_refused(pair: Pair, expected: Callable[..., list[int]]) -> None:
    """The first is answered as if there were no second."""
    url = pair.router().url
    ids = prompt(1800, 800)  # seconds of prefill, in which both are seen to hold it
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, url, ids, 4, rid="twice")
        patience = time.monotonic() + 30
        # UPSTREAM: of a prompt that is computed in chunks /v1/loads knows the tokens, and in between no request.
        while any(held(server) == (0, 0) for server in (pair.prefills[0], pair.decodes[0])):
            assert time.monotonic() < patience
        second = post(url, ids, 4, rid="twice")
        assert 400 <= second.status_code < 500, second.text
        assert "twice" in second.text
        assert "Traceback" not in second.text
        answer = first.result()
    assert answer.status_code == 200, answer.text
    assert answer.json()["output_ids"] == expected(ids, 4)


# -- requests that go --------------------------------------------------------------------------------------------------


def test_cancelled_requests_keep_nobody(pair: Pair) -> None:
    """dynamo 13703: ten long requests are cancelled before their first token; a short one is served as on an idle server.

    A server looks whether a client that waits is still there once a second, and finishes the chunk that it is at.
    """
    router, servers = pair.router(), (pair.prefills[0], pair.decodes[0])

    def short(seed: int) -> float:
        began = time.monotonic()
        generate(router.url, prompt(70, seed), 2)
        return time.monotonic() - began

    short(900)
    idle = max(short(901), short(902))
    began = time.monotonic()
    generate(router.url, prompt(CHUNK, 903), 1)
    chunk = time.monotonic() - began
    gone: list[str] = []

    def leave(number: int) -> None:
        """Streamed or not: both kinds of client go away."""
        try:
            post(router.url, prompt(1900, 910 + number), 4, timeout=1.0, stream=bool(number % 2))
        except httpx.TimeoutException:
            gone.append(f"{number}")

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(leave, range(10)))
    assert len(gone) == 10
    served = short(920)
    assert served < idle + 1.0 + 2 * chunk + 0.5, (served, idle, chunk)
    assert seconds_until_idle(*servers) < 3


class Refusing:
    """Stands for a prefill server that answers 500 to every request, and is well otherwise."""

    def __init__(self, behind: PrefillServer) -> None:
        self.bootstrap_port = behind.bootstrap_port
        self.refused: list[float] = []
        refused = self.refused

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_GET(self) -> None:
                found = httpx.get(f"{behind.url}{self.path}", timeout=30, trust_env=False)
                self.answer(found.status_code, found.content)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                refused.append(time.monotonic())
                self.answer(500, b'{"error": {"message": "out of order", "code": 500}}')

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_prefill_answers_500(pair: Pair) -> None:
    """sglang 9726: decode's half of the request ends within a second, and then the client gets its error.

    UPSTREAM: the router waits for both halves, so without `lost_rooms` both wait for decode's deadline.
    """
    decode = pair.decodes[0]
    refusing = Refusing(pair.prefills[0])
    try:
        with Router([refusing], [decode], ("--disable-retries",)) as router:  # type: ignore[list-item]
            answer = post(router.url, prompt(100, 950), 8)
            took = time.monotonic() - refusing.refused[0]
            assert answer.status_code >= 500, answer.text
            seconds_until_idle(decode, patience=1)
            generate(pair.router().url, [65, 66, 67], 2)
    finally:
        refusing.close()
    assert len(refusing.refused) == 1
    assert took < 1.0 + 1.0, took


# -- a prefill server that comes back, and one whose transfers fail ------------------------------------------------------


class Restarted:
    """prefills[1] after a restart at its address, with a switch for what NIXL answers there."""

    def __init__(self, pair: Pair, switch: Path, expected: Callable[..., list[int]]) -> None:
        self.pair, self.server, self._switch = pair, pair.prefills[1], switch
        self.ids = prompt(150, 990)
        self.right = expected(self.ids, 3)
        router = pair.router((1,), (0,))
        assert generate(router.url, self.ids, 3)["output_ids"] == self.right
        self.server.stop()
        self.server.env |= {
            "PYTHONPATH": str(Path(__file__).parent / "fault_site"),
            "FAILING_TRANSFERS": str(switch),
        }
        self.server.start()
        self.server.wait_ready()

    def failing(self, how: str) -> None:
        self._switch.write_text(how)

    def working(self) -> None:
        self._switch.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def restarted(
    pair: Pair, tmp_path_factory: pytest.TempPathFactory, expected: Callable[..., list[int]]
) -> Iterator[Restarted]:
    one = Restarted(pair, tmp_path_factory.mktemp("switch") / "failing", expected)
    yield one
    one.working()


@pytest.fixture(scope="module")
def to_it(restarted: Restarted) -> Iterator[Router]:
    """A router that does not try again: what one attempt costs is the question."""
    with Router([restarted.server], [restarted.pair.decodes[0]], ("--disable-retries",)) as router:
        yield router


def test_prefill_restarted_at_its_address(restarted: Restarted, to_it: Router) -> None:
    """nixl 795, sglang 34289: decode, which knew the server from before, is not restarted; the next request succeeds."""
    assert generate(to_it.url, restarted.ids, 3)["output_ids"] == restarted.right


@pytest.mark.parametrize("how", ["state", "post"])
def test_a_transfer_that_fails(restarted: Restarted, to_it: Router, how: str) -> None:
    """sglang 36033: the client sees it within 2 s; nothing is held; the next request succeeds.

    UPSTREAM: after a failed post decode keeps the pages for 30 s: NIXL does not say that nothing will be written to them.
    """
    began = time.monotonic()
    generate(to_it.url, restarted.ids, 3)
    usual = time.monotonic() - began
    restarted.failing(how)
    try:
        began = time.monotonic()
        answer = post(to_it.url, restarted.ids, 3)
        took = time.monotonic() - began
    finally:
        restarted.working()
    assert answer.status_code >= 500, answer.text
    assert "Traceback" not in answer.text
    assert took < 2 + usual
    servers = (restarted.server, *([restarted.pair.decodes[0]] if how == "state" else []))
    assert seconds_until_idle(*servers) < 5
    assert generate(to_it.url, restarted.ids, 3)["output_ids"] == restarted.right
