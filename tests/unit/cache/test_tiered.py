"""The linker over the real store: CPU pools of two processes' worth, and a real Valkey between them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from glm_connectors.tiers import Share
from glm_connectors.tiers.siblings import place
from glm_connectors.valkey_store import EmbeddedServer

from glm_sglang.cache.build import alike, share_of, siblings_of
from glm_sglang.serving import free_port
from tests.unit.cache.test_linker import prompt, restored
from tests.unit.cache.tree import PAGE, Tree
from tests.unit.tiers.valkey_proxy import Fault, Proxy


def in_valkey(tree: Tree) -> None:
    """Waits until what the tree has saved is in Valkey."""
    tree.drain()
    saver: Any = tree.store._remote.saver  # type: ignore[attr-defined]
    assert saver._idle.wait(10)


def fetched(tree: Tree, req: Any, seconds: float = 10) -> None:
    tree.linker.request_arrives(tree.cache, req)
    arrival = tree.linker.arrivals._known[req.rid]
    tree.linker.arrivals._work.put(None)
    tree.linker.arrivals._thread.join(10)
    assert arrival.ticket is not None
    assert arrival.ticket.wait(seconds)  # type: ignore[attr-defined]


def test_from_one_process_to_another_through_valkey(node: Callable[..., Tree]) -> None:
    first, second = node(), node()
    tokens = prompt(5, seed=11)
    first.prefill(tokens)
    in_valkey(first)
    req = second.request([*tokens, 7])
    assert second.match(req) == (0, 0)
    fetched(second, req)
    assert second.match(req) == (0, 5 * PAGE)
    slots = second.load(req)
    second.cache.linker.start_layer_wise_loading()
    assert second.cache.linker.finish_loads() == []
    assert restored(second, tokens, slots)
    second.linker._loads.quiesce()
    assert second.store.metrics["cache_pinned_bytes", "load"] == 0  # type: ignore[attr-defined]
    assert second.store.metrics["cache_hit_pages", "valkey"] == 5  # type: ignore[attr-defined]


def test_lookup_times_are_those_of_lookups(node: Callable[..., Tree]) -> None:
    """Not of saves, which ask the pool as well."""
    tree = node()

    def lookups() -> int:
        return sum(tree.store.metrics.snapshot()["cache_lookup_seconds"][()].counts)  # type: ignore[attr-defined]

    tree.prefill(prompt(2))
    tree.drain()
    tree.flush_device()
    assert (lookups(), tree.recorder.table["cache_offload_pages", "saved"]) == (0, 2)
    assert tree.match(tree.request([*prompt(2), 7])) == (0, 2 * PAGE)
    assert lookups() == 1


def test_a_flipped_bit_in_valkey_is_a_miss(node: Callable[..., Tree], valkey: EmbeddedServer) -> None:
    """Upstream serves it as a hit."""
    import valkey as client_library

    first, second = node(), node()
    tokens = prompt(4, seed=12)
    first.prefill(tokens)
    in_valkey(first)
    from tests.unit.cache.digests import chain

    client = client_library.Valkey(port=valkey.port)
    [name] = [n for n in client.scan_iter(count=1000) if chain(tokens, PAGE)[2].hex().encode() in n]
    value = bytearray(client.get(name))  # type: ignore[arg-type]
    value[5000] ^= 1
    client.set(name, bytes(value))
    req = second.request([*tokens, 7])
    fetched(second, req)
    assert second.match(req) == (0, 2 * PAGE)
    assert second.store.metrics["cache_bad_values", "checksum"] == 1  # type: ignore[attr-defined]


def test_while_valkey_is_stopped_nobody_waits(node: Callable[..., Tree], valkey: EmbeddedServer) -> None:
    """Saves go to the pool, lookups answer from it, arrivals are admitted at their deadline: no call comes back late,
    or this test would not come back."""
    tree = node(wait_s=0.05)
    tokens = prompt(4, seed=13)
    os.kill(valkey.pid, signal.SIGSTOP)
    try:
        tree.prefill(tokens)
        tree.drain()
        tree.flush_device()
        req, other = tree.request([*tokens, 7]), tree.request([*prompt(3, seed=14), 7])
        for request in (req, other):
            tree.linker.request_arrives(tree.cache, request)
        assert tree.match(req) == (0, 4 * PAGE)
        while tree.linker.held_back([req.rid, other.rid], tree.cache):
            pass
        assert tree.match(other) == (0, 0)
        assert tree.recorder.table["cache_expired_waits"] == 1
        tree.cache.linker.release_request(req.rid)
        tree.cache.linker.release_request(other.rid)
        assert tree.store.metrics["cache_pinned_bytes", "load"] == 0  # type: ignore[attr-defined]
    finally:
        os.kill(valkey.pid, signal.SIGCONT)


@pytest.mark.alone
def test_a_request_rejected_before_its_admission_frees_its_pages_within_a_second(
    node: Callable[..., Tree], valkey: EmbeddedServer
) -> None:
    """vllm 41269, 29906: some of its pages are pinned for it, others are on their way from a slow store.

    Gets that are under way go on (their client writes into the slots): here 0.2 s each, at most the client's timeout.
    """
    between = Proxy(valkey.port)
    try:
        first, second = node(), node(port=between.port)
        tokens = prompt(8, seed=16)
        first.prefill(tokens)
        in_valkey(first)
        second.prefill(tokens[: 2 * PAGE])
        second.drain()
        second.flush_device()
        req = second.request([*tokens, 7])
        store: Any = second.store
        between.fault = Fault("stall", "reply", 0.2)
        second.linker.request_arrives(second.cache, req)
        assert second.match(req)[1] >= 2 * PAGE
        assert store._pool.held("load") >= 2
        patience = time.monotonic() + 10
        while not store._pool.held("get"):
            assert time.monotonic() < patience
        began = time.monotonic()
        second.cache.linker.release_request(req.rid)
        assert store._pool.held("load") == 0
        while store._pool.held("get") or store._remote.prefetcher.running:
            assert time.monotonic() - began < 1.0
        assert len(second.linker.arrivals) == 0
    finally:
        between.close()


def test_a_rank_that_does_not_write_fills_its_pool_only(node: Callable[..., Tree]) -> None:
    tree = node(writer=False)
    tree.prefill(prompt(3, seed=15))
    tree.drain()
    tree.flush_device()
    assert tree.match(tree.request([*prompt(3, seed=15), 7])) == (0, 3 * PAGE)
    assert tree.store.metrics["cache_saved_pages"] == 0  # type: ignore[attr-defined]


def test_alone_a_rank_saves_everything() -> None:
    assert alike(SimpleNamespace()) == []
    assert share_of([]) == Share(0, 1)
    assert siblings_of(Share(0, 1), []) is None


@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (1, 4), (8, 1), (2, 4)])
def test_ranks_of_a_group_have_a_share_each(cp: int, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group stands for (rank, size) of it. DP ranks are in other groups, so theirs are not among these."""
    for name, ask in (
        ("is_initialized", lambda: True),
        ("get_rank", lambda group: group[0]),
        ("get_world_size", lambda group: group[1]),
    ):
        monkeypatch.setattr(torch.distributed, name, ask)
    shares = [
        share_of(
            alike(
                SimpleNamespace(
                    attn_cp_cache_group=(c, cp), attn_tp_cache_group=(t, tp), tp_cache_group=(t, tp)
                )
            )
        )
        for c in range(cp)
        for t in range(tp)
    ]
    assert {share.of for share in shares} == {cp * tp}
    assert sorted(share.index for share in shares) == list(range(cp * tp))


@pytest.mark.parametrize("blind", [None, 1])
def test_ranks_of_a_group_find_each_other(blind: int | None) -> None:
    """Over gloo, a process each: a rank's siblings are all that it shares a CP or TP group with, directly or not. One
    that does not know its machine (`blind`) comes to the exchange as well, and is nobody's neighbour."""
    cp = tp = 2
    of = cp * tp
    context = multiprocessing.get_context("fork")  # to import all of it anew takes each of them seconds
    results: Any = context.Queue()
    port = free_port()
    ranks = [context.Process(target=meet, args=(rank, cp, tp, port, results, blind)) for rank in range(of)]
    for rank in ranks:
        rank.start()
    found = dict(results.get(timeout=60) for _ in ranks)
    for rank in ranks:
        rank.join(30)
    pids = {index: pid for index, pid, _, _ in found.values()}
    assert sorted(pids) == list(range(of))
    for rank, (index, _, theirs, elsewhere) in found.items():
        assert theirs == {other: pid for other, pid in pids.items() if other != index}
        assert elsewhere == (0 if blind is None else of - 1 if rank == blind else 1)


def meet(rank: int, cp: int, tp: int, port: int, results: Any, blind: int | None) -> None:
    """A rank of the test above: puts (rank, (its index, its process, its siblings' processes, how many are
    elsewhere))."""
    if rank == blind:
        place._BOOT = "/nowhere"
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=cp * tp
    )
    of_tp = [torch.distributed.new_group([c * tp + t for t in range(tp)]) for c in range(cp)]
    of_cp = [torch.distributed.new_group([c * tp + t for c in range(cp)]) for t in range(tp)]
    params = SimpleNamespace(
        attn_cp_cache_group=of_cp[rank % tp], attn_tp_cache_group=of_tp[rank // tp], tp_cache_group=None
    )
    groups = alike(params)
    share = share_of(groups)
    siblings = siblings_of(share, groups)
    assert siblings is not None
    theirs = {index: siblings.pid(index) for index in range(share.of) if index != share.index}
    results.put((rank, (share.index, os.getpid(), theirs, siblings.count("elsewhere"))))
    torch.distributed.barrier()
