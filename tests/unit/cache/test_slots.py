"""Slots and the pages they make up, told on the host and on the device."""

from __future__ import annotations

import pytest
import torch

from glm_sglang.cache.slots import numbers_on_device, page_numbers
from tests.unit.cache.tree import PAGE

GOOD = torch.cat([torch.arange(128, 192), torch.arange(64, 128)])
BAD = {
    "off by one": GOOD + 1,
    "a gap in a page": torch.cat([torch.arange(64), torch.arange(80, 144)]),
    "ends elsewhere": torch.cat([torch.arange(63), torch.tensor([127])]),
}


def test_page_numbers_come_in_the_order_of_the_slots() -> None:
    assert page_numbers(GOOD, PAGE) == [2, 1]
    assert numbers_on_device([GOOD], PAGE).tolist() == [2, 1]


def test_requests_are_put_after_each_other() -> None:
    requests = [GOOD, torch.empty(0, dtype=torch.int64), torch.arange(5 * PAGE, 6 * PAGE)]
    assert numbers_on_device(requests, PAGE).tolist() == [2, 1, 5]


@pytest.mark.parametrize("slots", BAD.values(), ids=BAD)
def test_slots_that_are_no_whole_pages_are_refused(slots: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="whole pages of 64"):
        page_numbers(slots, PAGE)
    with pytest.raises(RuntimeError, match="whole pages of 64"):
        numbers_on_device([GOOD, slots], PAGE)
