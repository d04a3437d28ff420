"""Ranks that hold the same pages put them in shares: each page once, whoever is late, and none without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from glm_connectors.tiers import Share
from glm_connectors.valkey_store import EmbeddedServer
from glm_connectors.valkey_store.breaker import OPEN
from ranks import Rank, keys, until
from valkey_proxy import Proxy

Make = Callable[..., Rank]


def all_commit(ranks: list[Rank], chain: list[bytes]) -> None:
    for one in ranks:
        one.commit(chain)


def saved(one: Rank) -> int:
    return int(one.metrics["cache_saved_pages"])


@pytest.mark.parametrize("of", [1, 2, 3, 8])
def test_every_key_is_in_one_share_and_shares_are_even(of: int) -> None:
    """4,000 digests: within five standard deviations of a fair draw."""
    chain = keys(4000)
    shares = [Share(index, of) for index in range(of)]
    assert all(sum(share.holds(key) for share in shares) == 1 for key in chain)
    mean, deviation = 4000 / of, (4000 * (of - 1)) ** 0.5 / of
    assert all(abs(sum(map(share.holds, chain)) - mean) <= 5 * deviation for share in shares)


@pytest.mark.parametrize(("index", "of"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_is_none_of_them_is_refused(index: int, of: int) -> None:
    with pytest.raises(ValueError, match="expected an index from 0 on"):
        Share(index, of)


def test_a_rank_that_is_cut_off_puts_its_share_later_and_nobody_else_does(
    server: EmbeddedServer, client: Any, proxy: Proxy, rank: Make
) -> None:
    chain = keys(40)
    ranks = [
        rank(server.url, share=Share(0, 2)),
        rank(f"valkey://127.0.0.1:{proxy.port}", share=Share(1, 2)),
    ]
    theirs = sum(map(Share(1, 2).holds, chain))
    proxy.vanish()
    all_commit(ranks, chain)
    until(lambda: saved(ranks[0]) == 40 - theirs)
    until(lambda: ranks[1].metrics["cache_breaker_state", "put"] == OPEN)
    assert client.dbsize() == 40 - theirs
    assert ranks[1].metrics["cache_save_queue_pages"] == theirs  # held, within its patience
    proxy.listen()
    until(lambda: saved(ranks[1]) == theirs)
    assert client.dbsize() == 40
    assert [saved(one) for one in ranks] == [40 - theirs, theirs]
    assert rank(server.url, writer=False).fetch(chain) == "complete"


def test_a_share_that_is_given_up_is_counted_and_ends_the_prompt_before_it(
    server: EmbeddedServer, client: Any, rank: Make
) -> None:
    chain = keys(40)
    with EmbeddedServer() as gone:
        ranks = [
            rank(server.url, share=Share(0, 2)),
            rank(gone.url, share=Share(1, 2), save_patience=0.3),
        ]
        gone.stop()
        all_commit(ranks, chain)
        until(lambda: all(one.metrics["cache_save_queue_pages"] == 0 for one in ranks))
    theirs = sum(map(Share(1, 2).holds, chain))
    assert ranks[1].metrics["cache_dropped_saves", "down"] == theirs
    assert (saved(ranks[0]), client.dbsize()) == (40 - theirs, 40 - theirs)
    reader = rank(server.url, writer=False)
    assert reader.fetch(chain) == "miss"
    assert reader.hits(chain) == next(n for n, key in enumerate(chain) if Share(1, 2).holds(key))
