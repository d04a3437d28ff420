"""The hierarchical cache under the real pair: prefill with a CPU pool and a real Valkey, decode, router."""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from glm_connectors.valkey_store import EmbeddedServer

from glm_sglang.cache.page_keys import chain_names
from glm_sglang.cluster import DecodeServer, PrefillServer, Router
from glm_sglang.oracle import Oracle
from glm_sglang.serving import Server, stop_together
from tests.e2e.conftest import CHUNK, generate
from tests.e2e.loads import plight, seconds_until_idle

PAGE = 64
ANSWER = 6
# The device holds 24 pages, so a few prompts push out what was there. A prompt is beyond the index top-k of 64.
# UPSTREAM: decode takes a prompt once it has room for it and 512 tokens more, so 16 pages are the longest.
SMALL = (*CHUNK, "--skip-server-warmup", "--enable-cache-report", "--context-length", "1200")
DEVICE = ("--max-total-tokens", str(24 * PAGE))


def prompt(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(32, 127) for _ in range(length)]


class Metrics:
    """One scrape of a server."""

    def __init__(self, url: str) -> None:
        self.text = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text

    def sum(self, name: str, **labels: str) -> float:
        """All children of `glm_sglang:NAME` with these labels. AssertionError where there is none."""
        found = []
        for line in self.text.splitlines():
            if re.match(rf"glm_sglang:{name}[{{ ]", line) and all(
                f'{k}="{v}"' in line for k, v in labels.items()
            ):
                found.append(float(line.rpartition(" ")[2]))
        assert found, f"{name} {labels} is not exported"
        return sum(found)

    def moved(self) -> str:
        """Ours that are not 0, a line each; of histograms their sums and counts."""
        ours = (line for line in self.text.splitlines() if re.match(r"glm_sglang:\w+(?<!_bucket)[{ ]", line))
        return "\n".join(line for line in ours if not line.endswith(" 0.0"))


def settled(url: str, check: Callable[[Metrics], bool], seconds: float = 20) -> Metrics:
    """The first scrape that `check` likes; metrics are brought up to date once a second."""
    patience = time.monotonic() + seconds
    while not check(metrics := Metrics(url)):
        assert time.monotonic() < patience, metrics.moved()
        time.sleep(0.2)
    return metrics


def saved(url: str) -> None:
    """Waits until no page is on its way to the pool or to Valkey."""
    time.sleep(1.1)  # a gauge's period
    settled(url, lambda m: not m.sum("cache_offload_queue_pages") and not m.sum("cache_save_queue_pages"))


def cached(answer: dict[str, Any]) -> int:
    return int(answer["meta_info"]["cached_tokens"])


class Cached:
    """A pair whose prefill has a cache, and the Valkey behind it."""

    def __init__(self, stack: ExitStack, model: Path) -> None:
        self.valkey = stack.enter_context(EmbeddedServer())
        cache = (
            "--glm-cache-url",
            self.valkey.url,
            "--glm-cache-pool-gb",
            "0.25",
            "--glm-cache-wait",
            "3000",
        )
        path = filter(None, [str(Path(__file__).parent / "boundary_site"), os.environ.get("PYTHONPATH")])
        self.prefill = PrefillServer(
            model,
            (*SMALL, *DEVICE, *cache),
            name="cached-prefill",
            env={"PYTHONPATH": os.pathsep.join(path)},
        )
        self.decode = DecodeServer(model, (*SMALL, *DEVICE), name="cached-decode")
        stack.callback(stop_together, (self.prefill, self.decode))
        for server in (self.prefill, self.decode):
            server.start()
        for server in (self.prefill, self.decode):
            server.wait_ready()
        self.router = stack.enter_context(Router([self.prefill], [self.decode]))

    def ask(self, ids: list[int]) -> dict[str, Any]:
        return generate(self.router.url, ids, ANSWER)

    def push_out(self, seed: int) -> None:
        """Fills the device with other prompts."""
        for number in range(4):
            generate(self.router.url, prompt(7 * PAGE, 10_000 * seed + number), 1)
        saved(self.prefill.url)

    def flush(self) -> None:
        """Empties device and pool; Valkey keeps what it has."""
        saved(self.prefill.url)
        patience = time.monotonic() + 30
        while httpx.post(f"{self.prefill.url}/flush_cache", timeout=30, trust_env=False).status_code != 200:
            # Refused while anything runs.
            assert time.monotonic() < patience, f"{plight(self.prefill)}\n{Metrics(self.prefill.url).moved()}"
            time.sleep(0.2)

    @contextmanager
    def stalled(self) -> Iterator[None]:
        os.kill(self.valkey.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.valkey.pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Cached]:
    with ExitStack() as stack:
        yield Cached(stack, model)


@pytest.fixture(scope="module")
def expected(model: Path) -> Callable[[list[int]], list[int]]:
    """transformers' greedy tokens: what a cold server answers."""
    oracle = Oracle(model)
    return lambda ids: oracle.greedy(ids, ANSWER)


def test_second_turn(pair: Cached, expected: Callable[..., list[int]]) -> None:
    """All whole pages of the first turn come back from the CPU pool after the device has lost them."""
    first = prompt(6 * PAGE + 11, 1)
    answer = pair.ask(first)
    assert answer["output_ids"] == expected(first)
    assert cached(answer) == 0
    pair.push_out(1)
    second = [*first, *answer["output_ids"], *prompt(90, 2)]
    answer = pair.ask(second)
    assert answer["output_ids"] == expected(second)
    assert cached(answer) == 6 * PAGE
    assert Metrics(pair.prefill.url).sum("cache_load_pages_total") >= 6


def test_valkey_restarted_between_the_turns(pair: Cached, expected: Callable[..., list[int]]) -> None:
    """The CPU tier keeps the hits of an empty Valkey."""
    first = prompt(5 * PAGE, 3)
    pair.ask(first)
    pair.push_out(2)
    pair.valkey.stop()
    pair.valkey.start()
    before = Metrics(pair.prefill.url)
    second = first + prompt(70, 4)
    answer = pair.ask(second)
    assert (answer["output_ids"], cached(answer)) == (expected(second), 5 * PAGE)
    loads, hits = before.sum("cache_load_pages_total"), before.sum("cache_hit_pages_total", tier="valkey")
    after = settled(pair.prefill.url, lambda m: m.sum("cache_load_pages_total") > loads)
    assert after.sum("cache_load_pages_total") == loads + 5
    assert after.sum("cache_hit_pages_total", tier="valkey") == hits


def test_pool_lost_between_the_turns(pair: Cached, expected: Callable[..., list[int]]) -> None:
    """Valkey keeps the hits of a prefill that has nothing left; they are fetched before the request is scheduled."""
    first = prompt(5 * PAGE, 5)
    pair.ask(first)
    pair.flush()
    before = Metrics(pair.prefill.url).sum("cache_hit_pages_total", tier="valkey")
    second = first + prompt(70, 6)
    answer = pair.ask(second)
    assert (answer["output_ids"], cached(answer)) == (expected(second), 5 * PAGE)
    after = settled(pair.prefill.url, lambda m: m.sum("cache_hit_pages_total", tier="valkey") > before)
    assert after.sum("cache_hit_pages_total", tier="valkey") == before + 5


def test_a_block_that_valkey_has_lost(pair: Cached, expected: Callable[..., list[int]]) -> None:
    """vllm 49250: block k cannot be loaded: the hit ends before it, and tokens equal the cold run's."""
    import valkey

    first = prompt(6 * PAGE, 7)
    pair.ask(first)
    pair.flush()
    key = chain_names(first, PAGE)[3]
    client = valkey.Valkey(port=pair.valkey.port)
    names = [name for name in client.scan_iter(count=1000) if key.encode() in name.lower()]
    assert len(names) == 1
    client.delete(*names)
    second = first + prompt(70, 8)
    answer = pair.ask(second)
    assert (answer["output_ids"], cached(answer)) == (expected(second), 3 * PAGE)


def test_valkey_stops_and_four_requests_arrive(pair: Cached, expected: Callable[..., list[int]]) -> None:
    """sglang 26092: /health answers meanwhile, and the requests are served as misses; Valkey is stopped throughout.

    UPSTREAM: /health generates a token, sleeps a second and looks: below 2 s the first look found it, and the scheduler
    answered within that second. Half of the looks: a chunk on two busy cores may take longer.
    """
    firsts = [prompt(3 * PAGE, 20 + n) for n in range(4)]
    for ids in firsts:
        pair.ask(ids)
    pair.flush()
    seconds = [ids + prompt(30, 30 + n) for n, ids in enumerate(firsts)]
    looks: list[float] = []
    held = Metrics(pair.prefill.url).sum("scheduler_hold_seconds_count")
    with pair.stalled(), ThreadPoolExecutor(4) as pool, httpx.Client(trust_env=False, timeout=5) as client:
        asked = [pool.submit(pair.ask, ids) for ids in seconds]
        while not all(future.done() for future in asked):
            answer = client.get(f"{pair.prefill.url}/health")
            assert answer.status_code == 200
            looks.append(answer.elapsed.total_seconds())
        answers = [future.result() for future in asked]
    assert looks
    assert statistics.median(looks) < 2, looks
    assert [answer["output_ids"] for answer in answers] == [expected(ids) for ids in seconds]
    assert [cached(answer) for answer in answers] == [0] * 4
    settled(pair.prefill.url, lambda m: m.sum("scheduler_hold_seconds_count") > held)


@pytest.mark.parametrize("launched", range(1, 5))
def test_an_abort_at_a_chunk_boundary_frees_everything(pair: Cached, launched: int) -> None:
    """sglang 36926: the scheduler meets the abort when `launched` of 4 chunks have been launched, and the last of
    them has no result yet (`boundary_site`: it waits for the abort there).

    None is computed but what was launched by then; no page and no pin is held; the scheduler's own check for leaks,
    which ends the server, passes. Both halves are sent as a router would, but for its second try of what was aborted.
    """
    room = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": pair.prefill.bootstrap_port,
        "bootstrap_room": 36926 + launched,
    }
    rid = f"stops-after-{launched}"
    sampling = {"max_new_tokens": 4, "ignore_eos": True}
    body = {
        "input_ids": prompt(3 * 256 + 100, 40 + launched),
        "rid": rid,
        "sampling_params": sampling,
        **room,
    }
    servers = (pair.prefill, pair.decode)
    seconds_until_idle(*servers)
    before = chunks(pair.prefill)
    with ThreadPoolExecutor(2) as pool, httpx.Client(timeout=120, trust_env=False) as client:
        asked = [pool.submit(client.post, f"{server.url}/generate", json=body) for server in servers]
        patience = time.monotonic() + 50
        while f"{rid} waits for its abort".encode() not in pair.prefill.log.read_bytes():
            assert time.monotonic() < patience, plight(*servers)
            time.sleep(0.02)
        for server in servers:
            client.post(f"{server.url}/abort_request", json={"rid": rid})
        wait(asked, timeout=60)
        assert all(future.done() and not future.exception() for future in asked), plight(*servers)
        answers = [future.result() for future in asked]
    said = [(answer.status_code, answer.text) for answer in answers]
    assert all(status >= 400 or "abort" in text for status, text in said), said
    seconds_until_idle(*servers)
    settled(pair.prefill.url, nothing_held)
    pair.flush()  # refused while a result is outstanding
    assert chunks(pair.prefill) == before + launched
    assert pair.ask(prompt(70, 60))["output_ids"]
    assert pair.prefill.alive


def test_aborts_of_requests_with_pages_to_load(pair: Cached) -> None:
    """sglang 36926: as above, with a prefix that is in Valkey: on its way, in the pool, on its way to the device."""
    first = prompt(8 * PAGE, 50)
    pair.ask(first)
    pair.flush()
    for number in range(4):
        ids = [*first, *prompt(6 * PAGE, 51 + number)]
        body = {"input_ids": ids, "rid": f"left-{number}", "sampling_params": {"max_new_tokens": 4}}
        with httpx.Client(base_url=pair.router.url, timeout=0.02 + 0.06 * number, trust_env=False) as client:
            try:
                client.post("/generate", json=body)
            except httpx.TimeoutException:
                for server in (pair.prefill, pair.decode):
                    httpx.post(f"{server.url}/abort_request", json={"rid": body["rid"]}, trust_env=False)
    seconds_until_idle(pair.prefill, pair.decode)
    settled(pair.prefill.url, nothing_held)
    pair.flush()
    assert pair.ask(prompt(70, 60))["output_ids"]


def chunks(server: Server) -> int:
    """Prefill batches that have been computed, by the server's log; those of a token are health checks."""
    return len(re.findall(rb"Prefill batch.*#new-token: (?!1,)", server.log.read_bytes()))


def nothing_held(metrics: Metrics) -> bool:
    return metrics.sum("cache_pinned_bytes") == 0 and metrics.sum("cache_waiting_requests") == 0


# Needs a fault, a shortage, a GPU or GLM_SGLANG_CACHE_AUDIT; exported all the same.
QUIET = {
    "cache_bad_values",
    "cache_breaker_state",
    "cache_dropped_saves",
    "cache_evicted_pages",
    "cache_expired_waits",
    "cache_failed_loads",
    "cache_failed_prefetches",
    "cache_lost_pages",
    "cache_off",
    "cache_offload_queue_pages",
    "cache_pinned_bytes",
    "cache_refused_reservations",
    "cache_registered_bytes",
    "cache_save_queue_bytes",
    "cache_save_queue_pages",
    "cache_sibling_pages",
    "cache_siblings",
    "cache_store_failures",
    "cache_waiting_requests",
    "scheduler_hold_running_seconds",
    "scheduler_hold_seconds",
    "scheduler_stall_running_seconds",
}


def test_a_lookup_is_timed_and_a_save_is_none(pair: Cached) -> None:
    """Of a prompt of one page nothing can be restored, as its last token is computed: it is saved, not looked up."""

    def counts() -> tuple[float, float]:
        metrics = Metrics(pair.prefill.url)
        return metrics.sum("cache_lookup_seconds_count"), metrics.sum("cache_offload_pages_total")

    saved(pair.prefill.url)
    lookups, pages = counts()
    pair.ask(prompt(PAGE, 50))
    saved(pair.prefill.url)
    assert counts() == (lookups, pages + 1)
    pair.ask(prompt(PAGE + 1, 51))
    saved(pair.prefill.url)
    assert counts()[0] > lookups


def test_every_counter_moves_or_is_there(pair: Cached) -> None:
    """sglang 16832, 21167: what two turns must have moved by now has moved, and the rest is exported."""
    from glm_connectors.tiers.metric_list import METRICS as tier_metrics

    from glm_sglang.cache.recorder import METRICS as linker_metrics

    first = prompt(6 * PAGE, 60)
    pair.ask(first)
    for number in range(12):  # a rate is known after 20 ms of loading (glm_connectors.tiers.rates)
        pair.flush()
        pair.ask(first + prompt(10, 61 + number))
        saved(pair.prefill.url)
        metrics = Metrics(pair.prefill.url)
        if metrics.sum("cache_load_bytes_per_second") > 0:
            break
    moved = [
        ("cache_hit_pages_total", {"tier": "cpu"}),
        ("cache_hit_pages_total", {"tier": "valkey"}),
        ("cache_miss_pages_total", {"tier": "cpu"}),
        ("cache_miss_pages_total", {"tier": "valkey"}),
        ("cache_lookup_seconds_count", {}),
        ("cache_prefetch_seconds_count", {}),
        ("cache_prefetches_total", {"end": "complete"}),
        ("cache_loaded_bytes_total", {}),
        ("cache_saved_pages_total", {}),
        ("cache_saved_bytes_total", {}),
        ("cache_offload_pages_total", {"end": "saved"}),
        ("cache_load_pages_total", {}),
        ("cache_load_runs_total", {}),
        ("cache_wait_seconds_count", {}),
        ("cache_load_wait_seconds_count", {}),
        ("cache_hash_seconds_count", {}),
        ("cache_pool_bytes", {"state": "resident"}),
        ("cache_prefill_tokens_per_second", {}),
        ("cache_load_bytes_per_second", {}),
        ("scheduler_stall_seconds_count", {}),
        ("scheduler_stall_max_seconds", {}),
        ("lmcache_live_workers", {}),
        ("lmcache_expected_workers", {}),
    ]
    for name, labels in moved:
        assert metrics.sum(name, **labels) > 0, (name, labels)
    # What is documented is what is declared: each name has moved, or is one of those that a healthy server leaves alone.
    for metric in (*tier_metrics, *linker_metrics):
        suffix = {"counter": "_total", "histogram": "_count", "gauge": ""}[metric.kind]
        metrics.sum(metric.name + suffix)
        known = {name.removesuffix("_total").removesuffix("_count") for name, _ in moved}
        repairs = metric.name.startswith(
            "lmcache_"
        )  # by what they repair: tests/unit/test_lmcache_*.py move each
        assert metric.name in known | QUIET or repairs, metric.name
    # The article's two signals. A save that stores nothing is one of the first two here: LMCache's engine saves nothing.
    assert metrics.sum("cache_refused_reservations_total") == 0
    assert metrics.sum("cache_offload_pages_total", end="pool_full") == 0
    assert metrics.sum("lmcache_queue_depth") == 0


def test_prefill_restarted_between_the_turns(pair: Cached, expected: Callable[..., list[int]]) -> None:
    """At its address, behind a router and a decode server that go on: Valkey keeps the hits."""
    first = prompt(5 * PAGE + 3, 80)
    pair.ask(first)
    saved(pair.prefill.url)
    pair.prefill.stop()
    pair.prefill.start()
    pair.prefill.wait_ready()
    patience = time.monotonic() + 60  # the router has noticed, and looks every 5 s
    while httpx.get(f"{pair.router.url}/readiness", timeout=10, trust_env=False).status_code != 200:
        assert time.monotonic() < patience
        time.sleep(0.2)
    second = first + prompt(70, 81)
    answer = pair.ask(second)
    assert (answer["output_ids"], cached(answer)) == (expected(second), 5 * PAGE)
    metrics = settled(pair.prefill.url, lambda m: m.sum("cache_load_pages_total") > 0)
    assert metrics.sum("cache_hit_pages_total", tier="valkey") == 5
    assert metrics.sum("cache_load_pages_total") == 5


def test_two_ranks_of_another_process(pair: Cached, model: Path, expected: Callable[..., list[int]]) -> None:
    """Prefill restarted, as two ranks: both get every page from Valkey, and what both save is put once, in shares."""
    first = prompt(5 * PAGE, 70)
    pair.ask(first)
    saved(pair.prefill.url)
    flags = (*SMALL, *DEVICE, "--tp-size", "2", "--enable-metrics", "--glm-cache-url", pair.valkey.url)
    more = ("--glm-cache-pool-gb", "0.25", "--glm-cache-wait", "complete")
    second = first + prompt(70, 71)
    with Server(model, (*flags, *more), name="two-ranks") as server:
        answer = generate(server.url, second, ANSWER)
        assert (answer["output_ids"], cached(answer)) == (expected(second), 5 * PAGE)
        saved(server.url)
        metrics = Metrics(server.url)
    for rank in ("0", "1"):
        assert metrics.sum("cache_hit_pages_total", tier="valkey", rank=rank) == 5
        assert metrics.sum("cache_load_pages_total", rank=rank) == 5
        assert metrics.sum("cache_siblings", state="usable", rank=rank) == 1
        assert metrics.sum("cache_offload_pages_total", end="saved", rank=rank) >= 1
    copied = [metrics.sum("cache_offload_pages_total", end="saved", rank=rank) for rank in ("0", "1")]
    assert copied == [metrics.sum("cache_saved_pages_total")] * 2
