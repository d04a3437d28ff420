"""Ranks over gloo, a thread each: whatever they hold, they agree, and each page is saved once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed
from glm_connectors.tiers import Share
from glm_connectors.tiers.envelope import HEADER_BYTES
from glm_connectors.valkey_store import EmbeddedServer

from tests.unit.cache.digests import chain
from tests.unit.cache.test_linker import prompt, restored, saved
from tests.unit.cache.test_tiered import fetched
from tests.unit.cache.tree import PAGE, Tree

Result = TypeVar("Result")


class Ranks:
    """The ranks' trees; SGLang's reductions go over a gloo group of them."""

    def __init__(
        self,
        make_tree: Callable[..., Tree],
        pool: ThreadPoolExecutor,
        *,
        count: int = 2,
        shares: bool = False,
        **more: Any,
    ) -> None:
        """more: for each tree. shares: whether each rank saves its share only."""
        self.pool = pool
        store = torch.distributed.HashStore()
        groups = self.both(lambda rank: torch.distributed.ProcessGroupGloo(store, rank, count), range(count))
        self.trees = [
            make_tree(wait_s=None, **more, **({"share": Share(rank, count)} if shares else {}))
            for rank in range(count)
        ]
        self.reductions = 0
        self.alone = True
        for tree, group in zip(self.trees, groups, strict=True):
            tree.cache._all_reduce_attn_groups = self._reduce(group)

    def _reduce(self, group: Any) -> Callable[..., None]:
        def all_reduce(tensor: torch.Tensor, op: Any) -> None:
            if self.alone:
                return
            options = torch.distributed.AllreduceOptions()
            options.reduceOp = op
            group.allreduce([tensor], options).wait()
            self.reductions += 1

        return all_reduce

    def both(self, act: Callable[[Any], Result], over: Any = None) -> list[Result]:
        """The ranks do it at once, as ranks do."""
        return [f.result(30) for f in [self.pool.submit(act, item) for item in over or self.trees]]

    def together(self) -> None:
        self.alone = False


@pytest.fixture
def ranks(make_tree: Callable[..., Tree]) -> Iterator[Ranks]:
    with ThreadPoolExecutor(2) as pool:
        yield Ranks(make_tree, pool)


@pytest.fixture
def real_ranks(node: Callable[..., Tree]) -> Iterator[Ranks]:
    """Each with a pool of its own, over one Valkey."""
    with ThreadPoolExecutor(2) as pool:
        yield Ranks(node, pool)


def test_differing_prefixes_give_the_shortest_common(real_ranks: Ranks) -> None:
    """LMCache 1467: ranks disagree on the hit length. Both use the shorter one, and load it."""
    ranks, tokens = real_ranks, prompt(5, seed=1467)
    for tree, pages in zip(ranks.trees, (5, 3), strict=True):
        saved(tree, tokens[: pages * PAGE])
    ranks.together()
    requests = [tree.request([*tokens, 7], rid="r") for tree in ranks.trees]
    pairs = list(zip(ranks.trees, requests, strict=True))
    assert ranks.both(lambda pair: pair[0].match(pair[1]), pairs) == [(0, 3 * PAGE)] * 2
    slots = ranks.both(lambda pair: pair[0].load(pair[1]), pairs)
    ranks.both(lambda tree: tree.cache.linker.start_layer_wise_loading())
    assert ranks.both(lambda tree: tree.cache.linker.finish_loads()) == [[], []]
    for tree, loaded in zip(ranks.trees, slots, strict=True):
        tree.linker._loads.quiesce()
        assert loaded.numel() == 3 * PAGE
        assert restored(tree, tokens, loaded)
        assert tree.store.metrics["cache_pinned_bytes", "load"] == 0


def test_one_rank_without_the_prompt_makes_it_a_miss(real_ranks: Ranks) -> None:
    ranks, tokens = real_ranks, prompt(4, seed=2979)
    saved(ranks.trees[0], tokens)
    ranks.together()
    pairs = [(tree, tree.request([*tokens, 7], rid="r")) for tree in ranks.trees]
    assert ranks.both(lambda pair: pair[0].match(pair[1]), pairs) == [(0, 0)] * 2


@pytest.mark.parametrize("left", [0, 3, 5])
def test_what_an_earlier_step_has_found_is_no_hit_when_a_rank_has_lost_it(
    real_ranks: Ranks, left: int
) -> None:
    """Both offered five pages, the request was not admitted; then one rank lost all, the other all but `left`."""
    ranks, tokens = real_ranks, prompt(5, seed=991)
    for tree in ranks.trees:
        saved(tree, tokens)
    ranks.together()
    pairs = [(tree, tree.request([*tokens, 7], rid="r")) for tree in ranks.trees]
    assert ranks.both(lambda pair: pair[0].match(pair[1]), pairs) == [(0, 5 * PAGE)] * 2
    ranks.both(lambda tree: tree.step())
    pools: list[Any] = [tree.store._pool for tree in ranks.trees]  # type: ignore[attr-defined]
    pools[0].drop(chain(tokens, PAGE)[left:])
    pools[1].clear()
    assert ranks.both(lambda pair: pair[0].match(pair[1]), pairs) == [(0, 0)] * 2
    assert ranks.both(lambda pair: pair[0].cache.linker.load_back(pair[1])[0], pairs) == [0, 0]
    ranks.both(lambda tree: tree.step())
    assert [pool.held("load") for pool in pools] == [0, 0]


def test_a_request_is_held_back_until_every_rank_has_its_pages(ranks: Ranks) -> None:
    for tree in ranks.trees:
        tree.store.manual = True
        tree.linker.request_arrives(tree.cache, tree.request([*prompt(3), 7], rid="r"))
        while "r" not in tree.store.tickets or tree.linker.arrivals._known["r"].ticket is None:
            pass
    ranks.together()

    def held(tree: Tree) -> set[str]:
        return tree.linker.held_back(["r", "unknown"], tree.cache)

    assert ranks.both(held) == [{"r"}] * 2
    ranks.trees[0].store.tickets["r"].arrive()
    assert ranks.both(held) == [{"r"}] * 2
    ranks.trees[1].store.tickets["r"].arrive()
    assert ranks.both(held) == [set()] * 2
    before = ranks.reductions
    assert ranks.both(held) == [set()] * 2
    assert ranks.reductions == before  # nobody is asked about it again


def test_a_save_counts_when_all_ranks_have_it(ranks: Ranks) -> None:
    """One rank's pool had no room: both trees take it as not saved, and offer it again."""
    ranks.together()
    ranks.trees[1].store.refuse_after = 0
    tokens = prompt(2)
    for tree in ranks.trees:
        tree.prefill(tokens)
        tree.linker._saves._work.join()
    ranks.both(lambda tree: tree.step())
    ends = [tree.recorder.table["cache_offload_pages", "saved"] for tree in ranks.trees]
    assert ends == [2, 0]
    ranks.trees[1].store.refuse_after = None
    for tree in ranks.trees:
        slots = tree.alloc(2)
        assert slots is not None
        tree.insert(tokens, slots)  # the same prompt again: a hit on nodes that are not stored
        tree.linker._saves._work.join()
    ranks.both(lambda tree: tree.step())
    assert ranks.trees[0].recorder.table["cache_offload_pages", "resident"] == 2
    assert ranks.trees[1].recorder.table["cache_offload_pages", "saved"] == 2


def test_ranks_with_little_room_serve_everybody_from_the_cache(node: Callable[..., Tree]) -> None:
    """Five prompts of eight pages, and pools of twenty, of which waiting requests may hold ten: a request runs when both
    ranks have its pages, and they have begun with different ones."""
    prompts = [prompt(8, seed) for seed in range(20, 25)]
    first = node()
    for tokens in prompts:
        saved(first, tokens)
    first.store._remote.saver._idle.wait(30)  # type: ignore[attr-defined]
    slot = first.store._pool.slot_bytes  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as pool:
        ranks = Ranks(node, pool, pool_bytes=20 * slot, writer=False)
        for tree, order in zip(ranks.trees, ((0, 1, 2, 3, 4), (1, 0, 2, 3, 4)), strict=True):
            for number in order:
                req = tree.request([*prompts[number], 7], rid=f"r{number}")
                tree.linker.request_arrives(tree.cache, req)
        ranks.together()
        waiting = list(range(5))
        patience = time.monotonic() + 60
        while waiting:
            assert time.monotonic() < patience, f"{waiting} wait for ever"
            rids = [f"r{number}" for number in waiting]
            held = ranks.both(lambda tree, rids=rids: tree.linker.held_back(rids, tree.cache))
            assert held[0] == held[1]
            for number in [number for number in waiting if f"r{number}" not in held[0]]:
                waiting.remove(number)
                tokens = prompts[number]

                def run(tree: Tree, number: int = number, tokens: list[int] = tokens) -> bool:
                    req = tree.request([*tokens, 7], rid=f"r{number}")
                    assert tree.match(req) == (0, 8 * PAGE)
                    slots = tree.load(req)
                    tree.linker.admitted([req.rid])
                    tree.cache.linker.start_layer_wise_loading()
                    assert tree.cache.linker.finish_loads() == []
                    right = restored(tree, tokens, slots)
                    tree.allocator.free(slots)
                    return right

                assert ranks.both(run) == [True, True]
        for tree in ranks.trees:
            tree.linker._loads.quiesce()
            held_now = tree.store._pool._held  # type: ignore[attr-defined]
            while any(held_now.values()):
                assert time.monotonic() < patience, held_now
                time.sleep(0.002)
            assert len(tree.linker.arrivals) == 0


@pytest.mark.parametrize("count", [2, 4])
def test_what_all_ranks_hold_is_put_once_in_shares(
    node: Callable[..., Tree], valkey: EmbeddedServer, count: int
) -> None:
    """Bytes put = tokens × bytes a token, and an envelope a page; each rank's chunks have puts of every rank."""
    import valkey as client_library

    pages = 16
    tokens = prompt(pages, seed=6000 + count)
    client = client_library.Valkey(port=valkey.port)
    before, sets = client.dbsize(), client.info("commandstats").get("cmdstat_set", {}).get("calls", 0)
    with ThreadPoolExecutor(count) as pool:
        ranks = Ranks(node, pool, count=count, shares=True)
        ranks.together()
        for tree in ranks.trees:
            tree.prefill(tokens)
            tree.linker._saves._work.join()
        ranks.both(lambda tree: tree.step())
        stores: list[Any] = [tree.store for tree in ranks.trees]
        for store in stores:
            assert store._remote.saver._idle.wait(30)
        layout = stores[0].namespace.layout
        of_a_token = layout.page_bytes // PAGE
        put = [store.metrics["cache_saved_bytes"] for store in stores]
        assert sum(put) == pages * PAGE * of_a_token + pages * HEADER_BYTES
        assert client.dbsize() - before == pages
        assert client.info("commandstats")["cmdstat_set"]["calls"] - sets == pages
        of_rank = [
            sum(share.holds(key) for key in chain(tokens, PAGE)) for share in (s.share for s in stores)
        ]
        assert [store.metrics["cache_saved_pages"] for store in stores] == of_rank
        assert min(of_rank) > 0
        assert [tree.recorder.table["cache_offload_pages", "saved"] for tree in ranks.trees] == [
            pages
        ] * count
    reader = node()
    req = reader.request([*tokens, 7])
    fetched(reader, req)
    assert reader.match(req) == (0, pages * PAGE)
