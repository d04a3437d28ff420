"""A cached prefix is not sent to decode ahead of its batch while a batch that loads may still write it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from glm_sglang.cache import gate
from glm_sglang.cache.in_use import set_in_use


@pytest.fixture
def linker() -> Iterator[Any]:
    found: Any = SimpleNamespace(loads_launched=-(1 << 40))
    set_in_use(found)
    yield found
    set_in_use(None)


def sent(batches: list[bool], **more: Any) -> list[int]:
    """batches: whether each one loads. Those whose prefix, of two requests, is sent ahead."""
    found: list[int] = []

    def original(scheduler: Any, req: int, allow_send: bool = True) -> None:
        if allow_send:
            found.append(scheduler.forward_ct)

    for number, loads in enumerate(batches):
        scheduler = SimpleNamespace(forward_ct=number, **more)
        for req in range(2):
            gate.early_send(original, scheduler, req, allow_send=not loads)
    return sorted(set(found))


def test_not_from_a_batch_that_loads_nor_from_the_next(linker: Any) -> None:
    assert sent([False, True, False, False, True, True, False, False]) == [0, 3, 7]


def test_with_pipeline_stages_not_before_its_result_has_gone_round(linker: Any) -> None:
    assert sent([True, False, False, False, False], pp_loop_size=3) == [4]


def test_without_a_cache_sglang_decides() -> None:
    assert sent([False, True, False]) == [0, 2]
