"""How far the pool looks, under its lock, for pages that may go."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from glm_connectors.tiers.layout import PageLayout
from glm_connectors.tiers.pool import CpuPool
from ranks import keys

HELD, IDLE = 300, 100


class Counting(OrderedDict[bytes, Any]):
    """An index that counts whom the pool passes."""

    passed = 0

    def move_to_end(self, key: bytes, last: bool = True) -> None:
        self.passed += 1
        super().move_to_end(key, last)


def test_held_pages_in_front_are_passed_once_for_all_that_are_taken_behind_them() -> None:
    """A refusal for want of a walk would be a page that is not saved; a walk at every take, milliseconds each time."""
    pool = CpuPool(PageLayout(64, (("kv", 100),)), (HELD + IDLE) * 512)
    chain = keys(HELD + IDLE)
    pages = pool.take(HELD + IDLE, "save")
    assert pages is not None
    pool.also(pages[:HELD], "put")
    pool.insert(pages, chain, "save")
    assert pool.missing(chain[:HELD]) == []
    assert pool.missing(chain[HELD:]) == []  # the held ones are the least recently used
    pool._resident = index = Counting(pool._resident)
    taken = pool.take(1, "save")
    assert taken is not None
    assert HELD < index.passed <= HELD + IDLE
    index.passed = 0
    for _ in range(IDLE - 1):
        one = pool.take(1, "save")
        assert one is not None
        taken += one
    # Not for each of them: the rest once more, and for the choice among them twice what is taken and 16 each time.
    assert index.passed <= HELD + IDLE + (IDLE - 1) * 18
    assert pool.take(1, "save") is None
    assert pool.prefix(chain[:HELD]) == HELD
    pool.release(taken, "save")
    pool.release(pages[:HELD], "put")
    pool.clear()
    assert pool.close()
