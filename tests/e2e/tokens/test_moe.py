"""MegaMoE in servers of two ranks, its kernel replaced by the exact reference: tokens equal the oracle's at every size.

And why the fork exists: SGLang's own megamoe, with the same stand-in, is right up to its token cap and wrong above it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from glm_sglang.cluster import DecodeServer, PrefillServer, Router
from glm_sglang.oracle import Oracle
from glm_sglang.serving import Server, stop_together
from tests.e2e.conftest import COMMON, PAGE, TOPK, generate, prompt

CAP = 32  # tokens of one rank in one kernel call: a chunk of 256 tokens is 128 a rank, hence four calls
CAP_VARIABLE = "SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK"
ENV = {CAP_VARIABLE: str(CAP)}
RANKS = 2
MOE_LAYERS = 4  # of the checkpoint's five
NEW = 8
# Pages wait for nobody but their ranks, and a rank's pool is small.
CACHE = ("--glm-cache-url", "embedded://", "--glm-cache-pool-gb", "0.25", "--glm-cache-wait", "complete")
# One token (a rank without any), the cap's edges, chunked prefill with a padded last chunk, beyond the index top-k.
LENGTHS = (1, 2 * CAP - 1, 2 * CAP, 2 * CAP + 1, PAGE + 1, 3 * TOPK, 300, 700)


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


def moe(server: Server) -> list[dict[str, Any]]:
    """What each rank that answers says of its MoE layers."""
    info = httpx.get(f"{server.url}/server_info", timeout=60, trust_env=False).json()
    return [state["glm_moe"] for state in info["internal_states"]]


def metric(server: Server, name: str) -> float:
    """The sum over all ranks of one counter, any path."""
    text = httpx.get(f"{server.url}/metrics", timeout=60, trust_env=False, follow_redirects=True).text
    lines = [line for line in text.splitlines() if line.startswith(f"glm_sglang:moe_{name}_total{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.fixture(scope="module")
def ep2(model: Path) -> Iterator[Server]:
    """Attention over two ranks, experts over two ranks."""
    flags = (*COMMON, "--tp-size", "2", "--glm-moe", "megamoe", "--enable-metrics")
    with Server(model, flags, name="moe-ep2", env=ENV) as server:
        yield server


def test_tokens_equal_the_oracles(ep2: Server, oracle: Oracle) -> None:
    for length in LENGTHS:
        ids = prompt(length, 900)
        assert generate(ep2.url, ids)["output_ids"] == oracle.greedy(ids, NEW), length


def test_calls_tokens_chunks_and_rows_add_up(ep2: Server) -> None:
    """300 new tokens come as chunks of 256 and 44: 128 and 22 rows a rank, so 4 + 1 calls; then one more token."""
    before = {name: metric(ep2, name) for name in ("calls", "tokens", "chunks", "rows")}
    generate(ep2.url, prompt(300, 77), 2)
    grown = {name: metric(ep2, name) - value for name, value in before.items()}
    passes = 3
    assert grown == {
        "calls": RANKS * passes * MOE_LAYERS,
        "tokens": (300 + 1) * MOE_LAYERS,
        "chunks": RANKS * (4 + 1 + 1) * MOE_LAYERS,
        "rows": RANKS * (128 + 22 + 1) * MOE_LAYERS,
    }


def test_the_server_says_which_path_it_runs(ep2: Server) -> None:
    states = moe(ep2)
    assert states
    for state in states:
        assert (state["path"], state["kernel"], state["layers"]) == ("megamoe", "reference", MOE_LAYERS)
        assert state["reason"] == "asked for; the exact reference over gloo"
        assert state["tokens_a_call"] == CAP


def test_every_count_is_there_before_it_counts(ep2: Server) -> None:
    """A rate over a path that was never taken is 0, not absent."""
    text = httpx.get(f"{ep2.url}/metrics", timeout=60, trust_env=False, follow_redirects=True).text
    for name in ("calls", "tokens", "chunks", "rows"):
        for path in ("megamoe-graph", "stock"):
            assert f'glm_sglang:moe_{name}_total{{path="{path}"}} 0.0' in text


def test_other_weights_loaded_while_serving(
    ep2: Server, model: Path, oracle: Oracle, checkpoint: Callable[..., Path]
) -> None:
    """Experts of another checkpoint, then the first ones again: each time the answers are that checkpoint's."""
    other = checkpoint("float32", "--seed", "54")
    ids = prompt(130, 900)
    expected = {other: Oracle(other).greedy(ids, NEW), model: oracle.greedy(ids, NEW)}
    assert expected[other] != expected[model]
    for folder, tokens in expected.items():
        body = {"model_path": str(folder), "flush_cache": True}
        response = httpx.post(f"{ep2.url}/update_weights_from_disk", json=body, timeout=120, trust_env=False)
        assert response.json()["success"], response.text
        assert generate(ep2.url, ids)["output_ids"] == tokens


@pytest.fixture(scope="module")
def cp2(model: Path) -> Iterator[tuple[PrefillServer, Router]]:
    """Prefill with each prompt spread over two ranks and its experts over the same two; decode on one rank."""
    flags = ("--tp-size", "2", "--enable-prefill-cp", "--attn-cp-size", "2", "--glm-moe", "megamoe")
    with ExitStack() as stack:
        prefill = PrefillServer(model, (*COMMON, *flags, *CACHE), name="moe-cp2", env=ENV)
        decode = DecodeServer(model, COMMON, name="moe-cp2-decode")
        stack.callback(stop_together, (prefill, decode))
        for server in (prefill, decode):
            server.start()
        for server in (prefill, decode):
            server.wait_ready()
        yield prefill, stack.enter_context(Router([prefill], [decode]))


def test_a_pair_with_prefill_cp_and_experts_on_the_same_ranks(
    cp2: tuple[PrefillServer, Router], oracle: Oracle
) -> None:
    prefill, router = cp2
    for length in LENGTHS:
        ids = prompt(length, 900)
        assert generate(router.url, ids)["output_ids"] == oracle.greedy(ids, NEW), length
    assert {state["path"] for state in moe(prefill)} == {"megamoe"}


def second_turn_from_valkey(url: str, ask: str, oracle: Oracle) -> None:
    """Turn one is saved; device and pool are emptied; turn two's whole pages come back from Valkey, on every rank."""
    first = prompt(5 * PAGE + 7, 910)
    assert generate(ask, first)["output_ids"] == oracle.greedy(first, NEW)
    flush(url)
    second = first + prompt(70, 911)
    answer = generate(ask, second)
    assert answer["output_ids"] == oracle.greedy(second, NEW)
    assert answer["meta_info"]["cached_tokens"] == 5 * PAGE  # type: ignore[index]


def flush(url: str) -> None:
    """Empties device and pool once nothing is on its way to Valkey."""
    names = ("cache_offload_queue_pages", "cache_save_queue_pages")
    deadline = time.monotonic() + 60
    time.sleep(1.1)  # a gauge's period
    while True:
        text = httpx.get(f"{url}/metrics", timeout=60, trust_env=False, follow_redirects=True).text
        lines = [
            line for line in text.splitlines() if line.startswith(tuple(f"glm_sglang:{n}" for n in names))
        ]
        assert lines
        waiting = sum(float(line.rpartition(" ")[2]) for line in lines)
        # Refused while anything runs.
        if not waiting and httpx.post(f"{url}/flush_cache", timeout=30, trust_env=False).status_code == 200:
            return
        assert time.monotonic() < deadline, lines
        time.sleep(0.2)


def test_the_cache_with_prefill_cp(cp2: tuple[PrefillServer, Router], oracle: Oracle) -> None:
    prefill, router = cp2
    second_turn_from_valkey(prefill.url, router.url, oracle)


# What isn't MoE stays on each DP rank, too: gathering over DP ranks takes kernels that only CUDA has.
DP = ("--attn-dp-size", "2", "--moe-dense-tp-size", "1", "--enable-dp-lm-head")


def at_once(url: str, lengths: tuple[int, ...], oracle: Oracle) -> None:
    """Prompts of these lengths in one request, which the server spreads over its DP ranks."""
    prompts = [prompt(length, 900) for length in lengths]
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True},
    }
    response = httpx.post(f"{url}/generate", json=body, timeout=180, trust_env=False)
    assert response.status_code == 200, response.text
    got = [answer["output_ids"] for answer in response.json()]
    assert got == [oracle.greedy(ids, NEW) for ids in prompts], lengths


def test_attention_dp(model: Path, oracle: Oracle) -> None:
    """A long and a short request, on a rank of attention each: the short one's rank makes every call."""
    flags = (*COMMON, "--tp-size", "2", *DP, "--glm-moe", "megamoe")
    with Server(model, flags, name="moe-dp2-short", env=ENV) as server:
        at_once(server.url, (200, 3), oracle)


@pytest.mark.slow
def test_attention_dp_with_uneven_ranks_and_the_cache(model: Path, oracle: Oracle) -> None:
    flags = (*COMMON, "--tp-size", "2", *DP, "--glm-moe", "megamoe", "--enable-metrics", *CACHE)
    with Server(model, flags, name="moe-dp2", env=ENV) as server:
        for lengths in ((1,), (200, 3), (300, 65), (700, 1)):
            at_once(server.url, lengths, oracle)
        second_turn_from_valkey(server.url, server.url, oracle)


def test_upstream_is_wrong_above_its_cap(model: Path, oracle: Oracle) -> None:
    """The reason for this room. When this fails upstream has changed: read its MegaMoE path again."""
    flags = (*COMMON, "--tp-size", "2", "--moe-a2a-backend", "megamoe")
    with Server(
        model, flags, name="moe-upstream", module="tests.e2e.tokens.stock_megamoe", env=ENV
    ) as server:
        for length, right in ((1, True), (CAP, True), (2 * CAP + 2, False), (200, False)):
            ids = prompt(length, 900)
            # HTTP 200 in any case: generate() asserts it.
            assert (generate(server.url, ids)["output_ids"] == oracle.greedy(ids, NEW)) is right, length
