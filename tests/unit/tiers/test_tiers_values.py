"""Layouts, name spaces, keys, envelopes, rates and the metric table: the parts that need no server."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
from glm_connectors.tiers import Histogram, Metric, MetricTable, PageLayout, TierConfig, checksums
from glm_connectors.tiers.envelope import HEADER_BYTES, Envelope
from glm_connectors.tiers.metric_list import METRICS
from glm_connectors.tiers.rates import LoadMeter, Rate, Worth
from hypothesis import given
from hypothesis import strategies as st
from ranks import NAMESPACE, bytes_of, keys

DIFFERENT = {
    "model": replace(NAMESPACE, model="glm2"),
    "weights": replace(NAMESPACE, weights_revision="revision 2"),
    "dtype": replace(NAMESPACE, dtype="bf16"),
    "indexer": replace(NAMESPACE, indexer="full 0,1"),
    "parallel": replace(NAMESPACE, parallel="cp 2"),
    "page tokens": replace(NAMESPACE, layout=PageLayout(32, NAMESPACE.layout.parts)),
    "part size": replace(NAMESPACE, layout=PageLayout(64, (("kv", 7001), ("index", 999)))),
    "part name": replace(NAMESPACE, layout=PageLayout(64, (("kv2", 7000), ("index", 1000)))),
    "part order": replace(NAMESPACE, layout=PageLayout(64, (("index", 1000), ("kv", 7000)))),
    "shifted": replace(NAMESPACE, model="gl", weights_revision="mrevision 1"),
}


def test_every_part_of_a_name_space_changes_its_fingerprint() -> None:
    prints = {name: space.fingerprint for name, space in DIFFERENT.items()} | {"": NAMESPACE.fingerprint}
    assert len(set(prints.values())) == len(prints)
    assert {len(value) for value in prints.values()} == {16}
    assert replace(NAMESPACE).fingerprint == NAMESPACE.fingerprint


_IN_A_PROCESS = """
from glm_connectors.page_hashes import as_tokens, page_hashes, root
from glm_connectors.tiers import Namespace, PageLayout
from glm_connectors.tiers.envelope import Envelope
from glm_connectors.valkey_store.shards import Shards
from glm_connectors.valkey_store.url import Node
space = Namespace("glm", "r", "fp8", PageLayout(64, (("kv", 7000),)), "full", "")
chain = page_hashes(as_tokens(range(640)), 64, root(b"salt", b"adapter"))
shards = Shards([Node("a", 1), Node("b", 2), Node("c", 3)])
for key in chain:
    print(Envelope(space).name(key), shards.place(key))
"""


def test_two_processes_with_different_hash_seeds_have_the_same_keys_on_the_same_nodes() -> None:
    """LMCache 1739, 2979."""

    def printed(seed: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", _IN_A_PROCESS], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    first = printed("1")
    assert len(first.splitlines()) == 10
    assert printed("2") == first


@pytest.mark.parametrize("parts", [(), (("kv", 0),), (("kv", 1), ("kv", 2))], ids=["none", "empty", "twice"])
def test_layouts_that_say_nothing_are_refused(parts: Any) -> None:
    with pytest.raises(ValueError, match="part"):
        PageLayout(64, parts)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("put_share", 0.0),
        ("put_share", 1.1),
        ("pool_bytes", 0),
        ("get_workers", 0),
        ("request_timeout", 0.0),
        ("ttl", -1),
    ],
)
def test_absurd_settings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        TierConfig(**{name: value})


KEY = keys(1)[0]


def sealed() -> bytearray:
    value = bytearray(HEADER_BYTES) + bytes_of(KEY)
    Envelope(NAMESPACE).seal(memoryview(value), KEY)
    return value


def test_a_sealed_page_is_that_page() -> None:
    value = sealed()
    assert Envelope(NAMESPACE).check(memoryview(value), KEY, len(value)) is None
    assert bytes(value[HEADER_BYTES:]) == bytes_of(KEY)


@given(bit=st.integers(0, 8 * (HEADER_BYTES + NAMESPACE.layout.page_bytes) - 1))
def test_any_flipped_bit_is_found(bit: int) -> None:
    value = sealed()
    value[bit // 8] ^= 1 << bit % 8
    assert Envelope(NAMESPACE).check(memoryview(value), KEY, len(value)) is not None


class Slot:
    """A slot in memory of its own."""

    def __init__(self, page: bytes) -> None:
        self.bytes = np.frombuffer(bytearray(HEADER_BYTES) + page, dtype=np.uint8)
        self.slot = memoryview(self.bytes)
        self.address = self.bytes.ctypes.data + HEADER_BYTES


def test_pages_together_are_sealed_and_checked_as_each_alone() -> None:
    """The second has a flipped bit, the third is another's, the fourth is too short."""
    chain = keys(5)
    slots = [Slot(bytes_of(key)) for key in chain]
    envelope = Envelope(NAMESPACE)
    envelope.seal_all(slots, chain)
    for slot, key in zip(slots, chain, strict=True):
        alone = bytearray(HEADER_BYTES) + bytes_of(key)
        envelope.seal(memoryview(alone), key)
        assert bytes(slot.slot) == alone
    lengths = [envelope.value_bytes] * 5
    assert envelope.check_all(slots, chain, lengths) == [None] * 5
    slots[1].slot[-1] ^= 1
    lengths[3] -= 1
    faults = envelope.check_all(slots, [*chain[:2], chain[0], *chain[3:]], lengths)
    assert faults == [None, "checksum", "key", "length", None]
    assert envelope.check_all([], [], []) == []


@pytest.mark.parametrize("of_all", [checksums._compiled(), checksums._one_by_one])
@pytest.mark.parametrize("size", [1, 16, 17, 240, 241, 1024, 252_160])
def test_checksums_in_one_call_are_those_of_xxhash(of_all: checksums.Digests, size: int) -> None:
    pages = [np.frombuffer(hashlib.shake_128(b"%d" % n).digest(size), dtype=np.uint8) for n in range(3)]
    expected = [xxhash.xxh3_64_intdigest(page.tobytes()) for page in pages]
    assert of_all([page.ctypes.data for page in pages], size) == expected
    assert of_all([], size) == []


def test_without_numba_checksums_are_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    checksums.digests.cache_clear()
    try:
        assert checksums.digests() is checksums._one_by_one
    finally:
        checksums.digests.cache_clear()


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_page_of_another_name_space_is_not_that_page(name: str) -> None:
    value = sealed()
    other = DIFFERENT[name]
    fault = Envelope(other).check(memoryview(value), KEY, len(value))
    assert fault == "fingerprint"
    assert Envelope(other).name(KEY) != Envelope(NAMESPACE).name(KEY)


def test_a_rate_is_amount_over_seconds_and_forgets() -> None:
    rate = Rate()
    assert rate.value == 0.0
    rate.note(100, 1.0)
    assert rate.value == 100
    rate.note(0, 1.0)  # a stall
    assert 25 < rate.value < 100
    for _ in range(20):
        rate.note(10, 1.0)
    assert rate.value == pytest.approx(10, rel=0.01)


def test_gets_that_run_together_share_their_seconds() -> None:
    now = [0.0]
    meter = LoadMeter(lambda: now[0])
    one, two = meter.start(), meter.start()
    now[0] = 1.0
    meter.stop(one, 50)
    meter.stop(two, 50)
    assert meter.rate.value == pytest.approx(100, rel=0.2)
    nothing = meter.start()
    now[0] = 100.0
    meter.stop(nothing, None)  # a miss says nothing about the rate
    assert meter.rate.last_known == pytest.approx(100, rel=0.2)


def test_a_load_slower_than_recompute_is_skipped_and_tried_again() -> None:
    now = [0.0]
    worth = Worth(page_bytes=1000, page_tokens=64, clock=lambda: now[0])
    assert worth.fetch(10, 0)  # nothing is known
    worth.load.rate.note(100_000, 1.0)  # 100 pages a second
    assert worth.fetch(10, 0)
    worth.prefill.note(6400, 1.0)  # 100 pages a second as well
    assert worth.fetch(10, 0)
    assert not worth.fetch(10, 1)  # one page waits before these
    worth.prefill.note(640_000, 1.0)
    assert not worth.fetch(10, 0)
    now[0] = 5.1
    assert worth.fetch(10, 0)  # nothing recent is known
    assert worth.load.rate.last_known == 100_000
    worth.load.rate.note(100_000, 1.0)
    assert not worth.fetch(10, 0)


def test_a_stall_does_not_make_a_store_slower_than_recompute() -> None:
    """A store of 1 MB/s that stops 1.5 s of every 5 s: each stall keeps four gets, one a worker."""
    now = [0.0]
    worth = Worth(page_bytes=1000, page_tokens=64, clock=lambda: now[0])
    worth.prefill.note(64 * 500, 1.0)  # recomputing does half as many pages a second

    def gets(count: int, seconds: float, beside: int) -> None:
        started = [worth.load.start() for _ in range(count)]
        now[0] += seconds
        for one in started:
            worth.load.stop(one, round(1e6 * 0.01 / beside))

    for _ in range(6):
        for _ in range(5):
            gets(4, 0.01, beside=4)
        gets(4, 1.5, beside=4)
        assert worth.fetch(10, 0)
    for _ in range(50):  # and where it is slow throughout, it is
        gets(4, 0.1, beside=4)
    assert not worth.fetch(10, 0)
    assert worth.load.rate.value == pytest.approx(1e5, rel=0.3)  # gets that end side by side share unevenly
    now[0] += 5.1  # fast again, which nobody has seen
    assert worth.fetch(10, 0)
    for _ in range(4):
        gets(4, 0.01, beside=4)
    assert [worth.fetch(10, 0) for _ in range(3)] == [True] * 3


def test_a_store_that_fails_most_gets_is_slow_and_not_unknown() -> None:
    """Every other get answers, so no breaker opens; of the others each costs its timeout."""
    now = [0.0]
    worth = Worth(page_bytes=1000, page_tokens=64, clock=lambda: now[0])
    worth.prefill.note(6400, 1.0)
    for arrived in (1000, 0) * 10 + (0,):
        started = worth.load.start()
        now[0] += 0.001 if arrived else 0.3
        worth.load.stop(started, arrived)
    assert not worth.fetch(10, 0)


def test_every_child_is_there_from_the_start() -> None:
    values = MetricTable(METRICS).snapshot()
    assert set(values) == {metric.name for metric in METRICS}
    assert len(values) == len(METRICS)
    for metric in METRICS:
        children = values[metric.name]
        expected = 1
        for label in metric.labels.values():
            expected *= len(label)
        assert len(children) == expected
        for value in children.values():
            assert value == (Histogram([0] * (len(metric.buckets) + 1)) if metric.kind == "histogram" else 0)


def test_a_table_counts_reads_and_tells() -> None:
    told: list[Any] = []

    class Sink:
        def add(self, *event: Any) -> None:
            told.append(event)

        def observe(self, *event: Any) -> None:
            told.append(event)

    table = MetricTable(
        (
            Metric("c", "counter", "", {"x": ("a", "b")}),
            Metric("g", "gauge", ""),
            Metric("h", "histogram", "", buckets=(1.0, 2.0)),
        ),
        Sink(),
    )
    table.add("c", "b", amount=3)
    table.read_from("g", read=lambda: 7.0)
    for value in (1.0, 1.5, 9.0):
        table.observe("h", value=value)
    assert table.snapshot() == {
        "c": {("a",): 0, ("b",): 3},
        "g": {(): 7.0},
        "h": {(): Histogram([1, 1, 1], 11.5)},
    }
    assert told == [("c", ("b",), 3), ("h", (), 1.0), ("h", (), 1.5), ("h", (), 9.0)]
    with pytest.raises(KeyError):
        table.add("c", "typo")
    with pytest.raises(KeyError):
        table.read_from("g", "typo", read=lambda: 0.0)
