"""The dense graph of short prompts: which steps may replay it, where its requests begin, and what a failure costs."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm_sglang.prefill_graph import agreement, dense, eligibility, options, whole
from glm_sglang.prefill_graph.arena import REQUESTS, Arena
from glm_sglang.prefill_graph.options import Options

LIMIT = 64


def arena(limit: int = LIMIT) -> Arena:
    return Arena.create(
        128, index_topk=64, index_heads=2, head_dim=4, group_ends=(0,), device="cpu", dense_limit=limit
    )


def batch(lengths: list[int], prefixes: list[int] | None = None) -> Any:
    return SimpleNamespace(
        batch_size=len(lengths),
        extend_seq_lens_cpu=lengths,
        extend_prefix_lens_cpu=prefixes or [0] * len(lengths),
        forward_mode="extend",
    )


@given(st.lists(st.integers(1, 300), min_size=1, max_size=REQUESTS - 1), st.integers(0, 500))
def test_boundaries_cut_the_bucket_into_requests_and_padding(lengths: list[int], spare: int) -> None:
    bucket = sum(lengths) + spare
    ends = dense.boundaries(lengths, bucket)
    sizes = [after - before for before, after in itertools.pairwise(ends)]
    assert (ends[0], ends[-1], len(ends)) == (0, bucket, REQUESTS + 1)
    assert sizes[: len(lengths)] == lengths, "each request keeps its rows"
    assert sizes[len(lengths) : -1] == [0] * (REQUESTS - 1 - len(lengths))
    assert sizes[-1] == spare, "padding rows are a request of their own"


@pytest.mark.parametrize("lengths", [[], [1] * REQUESTS, [100, 29]])
def test_what_does_not_fit_is_an_error(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="do not fit a bucket of 128"):
        dense.boundaries(lengths, 128)


@pytest.mark.parametrize(
    ("lengths", "prefixes", "bucket", "fits"),
    [
        ([64], None, 64, True),
        ([64, 64], None, 128, True),
        ([65], None, 128, False),  # more keys than a row selects
        ([10, 10], [0, 64], 64, False),  # a cached prefix
        ([8] * REQUESTS, None, 64, False),
        ([60], None, 96, False),  # a bucket without a dense graph
    ],
)
def test_only_short_fresh_prompts_are_dense(
    lengths: list[int], prefixes: list[int] | None, bucket: int, fits: bool
) -> None:
    held = arena()
    held.dense_buckets |= {64, 128}
    assert dense.fits(held, batch(lengths, prefixes), bucket) is fits


class Key(NamedTuple):
    """Of the graphs captured: size and variant."""

    size: int
    variant: str | None


@dataclasses.dataclass(frozen=True)
class ShapeKey:
    """As SGLang's."""

    size: int
    variant_label: str | None = None


@dataclasses.dataclass(frozen=True)
class Metadata:
    """As much of DSAMetadata as a dense graph replaces."""

    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    max_seq_len_q: int = 0
    max_seq_len_k: int = 0


class Scene:
    """A graph backend on an attention backend; `captured` gets every graph and what attention would read in it."""

    def __init__(self, held: Arena | None, broken: bool = False) -> None:
        self.held, self.broken = held, broken
        self.backend = SimpleNamespace(forward_metadata=Metadata(), use_mha=False)
        self.graphs = SimpleNamespace(_model_runner=SimpleNamespace(attn_backend=self.backend))
        self.captured: list[tuple[Key, bool, list[int] | None]] = []

    def original(self, graphs: Any, key: ShapeKey, forward_fn: Any) -> None:
        if self.broken and key.variant_label:
            raise RuntimeError("cannot capture")
        ends = self.backend.forward_metadata.cu_seqlens_q
        read = None if ends is None else ends.tolist()
        self.captured.append((Key(key.size, key.variant_label), self.backend.use_mha, read))

    def capture(self, size: int) -> None:
        dense.capture_one(self.original, self.graphs, ShapeKey(size), None)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(held: Arena | None, mode: Any = "auto", broken: bool = False, world: int = 1) -> Scene:
        made = Scene(held, broken)
        monkeypatch.setattr(agreement, "ranks", lambda: SimpleNamespace(world_size=world))
        monkeypatch.setattr(whole, "arena_of", lambda backend: held)
        monkeypatch.setattr(options, "current", lambda: Options(mode=mode))
        return made

    return make


@given(st.lists(st.booleans(), min_size=1, max_size=100))
def test_a_piece_is_no_longer_than_the_one_before_hides(shares: list[bool]) -> None:
    layers = len(shares)
    selecting = [layer for layer in range(1, layers) if not shares[layer]]
    found = sorted(dense.cuts(eligibility.group_ends(shares)))
    assert set(found) <= set(selecting)
    assert found[:1] == selecting[:1], "the first piece is as short as it can be"
    edges = [0, *found, layers]
    for before, begin, end in zip(edges, edges[1:], edges[2:], strict=False):
        inside = any(begin < layer < end for layer in selecting)
        assert end - begin <= dense.GROWTH * (begin - before) or not inside


def test_glm_is_launched_in_four_pieces() -> None:
    shares = [layer >= 3 and (layer - 2) % 4 != 0 for layer in range(78)]
    assert dense.cuts(eligibility.group_ends(shares)) == {1, 6, 46}


def test_a_bucket_that_may_hold_short_prompts_gets_two_graphs(scene: Any) -> None:
    held = arena()
    made = scene(held)
    for size in (128, 64, 32):
        made.capture(size)
    assert [key for key, _, _ in made.captured] == [
        Key(128, None),
        Key(64, None),
        Key(64, dense.LABEL),
        Key(32, None),
        Key(32, dense.LABEL),
    ]
    assert made.captured[2][1:] == (True, [0, *[64] * REQUESTS]), (
        "with dense attention over the arena's boundaries"
    )
    assert made.captured[3][1:] == (False, None), "and the next bucket is captured as before"
    assert held.dense_buckets == {64, 32}
    assert not held.capturing_dense


@pytest.mark.parametrize(("held", "mode"), [(None, "auto"), (arena(limit=0), "auto"), (arena(), "off")])
def test_elsewhere_there_is_one(scene: Any, held: Arena | None, mode: str) -> None:
    made = scene(held, mode)
    made.capture(64)
    assert [key for key, _, _ in made.captured] == [Key(64, None)]


def test_a_failure_leaves_the_sparse_graph(scene: Any, caplog: pytest.LogCaptureFixture) -> None:
    held = arena()
    made = scene(held, broken=True)
    made.capture(64)
    assert [key for key, _, _ in made.captured] == [Key(64, None)]
    assert held.dense_buckets == set()
    assert not held.capturing_dense
    assert not made.backend.use_mha
    assert "no dense graph for 64 tokens" in caplog.text


def test_strict_lets_the_failure_out(scene: Any) -> None:
    held = arena()
    made = scene(held, "strict", broken=True)
    with pytest.raises(RuntimeError, match="cannot capture"):
        made.capture(64)
    assert not held.capturing_dense


def test_beside_other_ranks_a_failure_ends_the_start(scene: Any) -> None:
    """The other rank has captured it, and would replay what this one has not."""
    held = arena()
    scene(held, world=2).capture(64)
    assert held.dense_buckets == {64}
    failing = arena()
    made = scene(failing, broken=True, world=2)
    with pytest.raises(RuntimeError, match="cannot capture"):
        made.capture(64)
    assert not failing.capturing_dense


def test_a_dense_step_makes_no_metadata_and_replays_its_own_graph(
    scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = arena()
    made = scene(held)
    made.capture(64)
    monkeypatch.setattr(whole, "_read_end", lambda declared, batch: declared)
    runner = SimpleNamespace(prefill_backend_name="breakable", model_runner=made.graphs._model_runner)
    replayed: list[ShapeKey] = []

    def step(of: Any) -> None:
        def metadata(*args: Any) -> str:
            made.backend.forward_metadata = SimpleNamespace(dsa_cache_seqlens_int32=torch.ones(64).int())
            return "made"

        made.backend.get_indexer_metadata = lambda layer, batch: SimpleNamespace(
            topk_transform=lambda scores, topk: torch.zeros(len(scores), topk, dtype=torch.int32)
        )
        of.seq_lens_cpu = torch.tensor(
            [a + b for a, b in zip(of.extend_seq_lens_cpu, of.extend_prefix_lens_cpu, strict=True)]
        )
        made.backend.forward_metadata = "not made"
        whole.bind_replay(metadata, runner, of, of, ShapeKey(64))
        dense.replay(lambda graphs, key, *_: replayed.append(key), made.graphs, ShapeKey(64), of)

    step(batch([20, 30]))
    assert made.backend.forward_metadata == "not made"
    assert held.ends.tolist() == [0, 20, 50, 50, 50, 50, 50, 50, 64]
    step(batch([20, 30], [0, 64]))
    assert made.backend.forward_metadata != "not made"
    assert [key.variant_label for key in replayed] == [dense.LABEL, None]
