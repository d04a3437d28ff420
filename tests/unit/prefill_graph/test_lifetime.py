"""Break inputs (sglang issue 37606): a model-free reproducer on SGLang's own breakable graph; stock fails, ours holds.

A segment allocates a buffer, a break fills its tail once and its head at every step, and reads all of it: what
SGLang's attention and indexer breaks do with padding rows.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from glm_sglang.prefill_graph import lifetime, options
from glm_sglang.prefill_graph.options import Options
from tests.unit.prefill_graph import fake_graph
from tests.unit.prefill_graph.fake_graph import Pool

HEAD, TAIL = slice(0, 2), slice(2, 4)
OURS = Options(mode="auto")


def bucket(module: Any, pool: Pool, seen: list[list[int]], head: int, tail: int) -> Any:
    """A captured bucket of two segments and a break between them; `seen` gets what each run of the break read."""
    filled = False

    def fill(buffer: Any) -> None:
        nonlocal filled
        if not filled:
            buffer.fill(TAIL, tail)
            filled = True
        buffer.fill(HEAD, head)
        seen.append(list(buffer.values))

    attention = module.eager_on_graph(fill)
    with fake_graph.captured(module) as graph:
        bridge = pool.empty()
        attention(bridge)
        del bridge
        after = pool.empty()
        after.fill(slice(0, 4), -head)
        del after
    return graph


def use(monkeypatch: pytest.MonkeyPatch, module: Any, chosen: Options) -> None:
    original = module._weak_ref_if_tensor
    monkeypatch.setattr(options, "current", lambda: chosen)
    monkeypatch.setattr(module, "_weak_ref_if_tensor", lambda value: lifetime.keep(original, value))


def replayed(monkeypatch: pytest.MonkeyPatch, chosen: Options) -> tuple[list[int], list[int]]:
    """What the first bucket's break read when it was captured, and in a replay after another bucket's."""
    module, pool = fake_graph.install(monkeypatch)
    use(monkeypatch, module, chosen)
    seen: list[list[int]] = []
    first = bucket(module, pool, seen, head=1, tail=7)
    second = bucket(module, pool, [], head=2, tail=9)
    second.replay()
    first.replay()
    return seen[0], seen[-1]


def test_stock_lets_a_later_bucket_overwrite_what_a_break_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, later = replayed(monkeypatch, Options(mode="off"))
    assert captured == [1, 1, 7, 7]
    assert later != captured


def test_ours_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, later = replayed(monkeypatch, OURS)
    assert captured == later == [1, 1, 7, 7]


def test_no_bucket_shares_a_break_input_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    module, pool = fake_graph.install(monkeypatch)
    use(monkeypatch, module, OURS)
    blocks: list[int] = []

    def read(buffer: Any, more: list[Any], *, named: Any) -> None:
        blocks.extend(tensor.block for tensor in (buffer, *more, named))

    note = module.eager_on_graph(read)
    graphs = []
    for _ in range(5):
        with fake_graph.captured(module) as graph:
            for _ in range(3):
                note(pool.empty(), [pool.empty()], named=pool.empty())
        graphs.append(graph)
    assert len(blocks) == 5 * 3 * 3
    assert len(set(blocks)) == len(blocks)
    assert not set(blocks) & set(pool.free)
    graphs.clear()
    del graph
    assert set(blocks) <= set(pool.free), "a graph that is gone gives its break inputs back"


def test_segments_and_breaks_run_in_the_order_of_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    module, pool = fake_graph.install(monkeypatch)
    use(monkeypatch, module, OURS)
    order: list[str] = []

    pause = module.eager_on_graph(order.append)
    with fake_graph.captured(module) as graph:
        for layer in range(3):
            pool.run(lambda layer=layer: order.append(f"segment {layer}"))  # type: ignore[misc]
            pause(f"break {layer}")
    assert order == ["break 0", "break 1", "break 2"], "a capture runs breaks, not segments"
    order.clear()
    graph.replay()
    assert order == [f"{what} {layer}" for layer in range(3) for what in ("segment", "break")]
    assert (len(graph._segments), len(graph._break_fns)) == (4, 3)


LAYERS = 4


def rewriting_bucket(module: Any, pool: Pool, seen: list[Any], name: int) -> Any:
    """A bucket whose segments write, in each layer, all that its break reads, and read what the break wrote."""

    def attend(queries: Any, out: Any, layer: int) -> None:
        seen.append((name, layer, list(queries.values)))
        out.fill(slice(0, 4), -queries.values[0])

    attention = module.eager_on_graph(attend)
    with fake_graph.captured(module) as graph:
        for layer in range(LAYERS):
            queries, out = pool.empty(), pool.empty()
            queries.fill(slice(0, 4), 100 * name + layer)
            with lifetime.rewritten():
                attention(queries, out, layer)
            pool.run(lambda values=out.values: seen.append(list(values)))  # type: ignore[misc]
            del queries, out
    return graph


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 1, 1, 3, 2)])
def test_what_each_replay_writes_anew_needs_one_layers_memory(
    monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]
) -> None:
    module, pool = fake_graph.install(monkeypatch)
    use(monkeypatch, module, OURS)
    monkeypatch.setattr(lifetime, "_kept", lifetime.Kept())
    seen: list[Any] = []
    graphs = {name: rewriting_bucket(module, pool, seen, name) for name in (1, 2, 3)}
    assert len(pool.memory) == 2, "queries and output, for all layers and buckets"
    for name in order:
        for block in pool.memory:
            block[:] = [10**9] * pool.cells  # what anybody may have left
        seen.clear()
        graphs[name].replay()
        values = [100 * name + layer for layer in range(LAYERS)]
        assert seen[0::2] == [(name, layer, [value] * 4) for layer, value in enumerate(values)]
        assert seen[1::2] == [[-value] * 4 for value in values]


def test_only_the_break_inside_is_exempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "current", lambda: OURS)
    mine = object()
    with lifetime.rewritten():
        assert lifetime.keep(lambda _: "weak", mine) == "weak"
    assert lifetime.keep(lambda _: "weak", mine) is mine
    with contextlib.suppress(RuntimeError), lifetime.rewritten():
        raise RuntimeError("a capture that fails")
    assert lifetime.keep(lambda _: "weak", mine) is mine


def test_memory_is_counted_once_a_storage() -> None:
    kept = lifetime.Kept()
    whole = torch.zeros(256, dtype=torch.uint8)
    kept.add([whole[:10], whole[100:], whole.view(torch.float32)])
    kept.add([torch.zeros(16, dtype=torch.float32)])
    assert kept.bytes == 256 + 64
