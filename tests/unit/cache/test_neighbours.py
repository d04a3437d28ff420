"""Host pages of a load lie next to each other, however long the pool has been full: it is copied run by run."""

from __future__ import annotations

import pytest

from tests.unit.cache.pool_churn import PRODUCT, SOAK, Churn, Traffic, figures


# The least of ten seeds was 25 and 58 pages a run. Of a pool that takes what is oldest, wherever it lies, three seeds had
# 2 and 5: two pages are always at some distance.
@pytest.mark.parametrize(("traffic", "requests", "least"), [(SOAK, 1500, 16), (PRODUCT, 1500, 35)])
@pytest.mark.parametrize("seed", [0, 1])
def test_pages_of_a_load_are_neighbours(traffic: Traffic, requests: int, least: float, seed: int) -> None:
    churn = Churn(traffic, seed)
    churn.run(requests)
    found = figures(churn.loads)
    pool = churn.pool
    assert pool.evicted > 5 * pool.slots  # it has been full for long
    assert found["pages_a_run"] >= least
    # Nothing of all that is left.
    pool.clear()
    assert pool.free == pool.slots
    assert pool.close()
