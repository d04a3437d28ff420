"""Runs, groups and how many layers go together, against their definitions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from glm_sglang.cache import cuda_plan

addresses = st.sets(st.integers(0, 60), max_size=30).map(lambda slots: [7 + 100 * s for s in sorted(slots)])


@given(addresses)
def test_runs_are_the_addresses_again(found: list[int]) -> None:
    runs = cuda_plan.runs(found, 90)
    assert [run.address + i * run.pitch for run in runs for i in range(run.count)] == found
    assert [run.first for run in runs] == [sum(r.count for r in runs[:i]) for i in range(len(runs))]
    assert all(run.pitch >= 90 for run in runs)


def test_neighbouring_slots_are_one_run_and_gaps_part_it() -> None:
    assert [run.count for run in cuda_plan.runs([0, 10, 20, 30], 8)] == [4]
    assert [run.count for run in cuda_plan.runs([0, 10, 20, 50, 60, 70], 8)] == [3, 3]
    assert cuda_plan.runs([], 8) == []


@given(addresses, st.integers(0, 30), st.integers(0, 30))
def test_clipped_runs_are_the_addresses_of_those_places(found: list[int], start: int, count: int) -> None:
    inside = cuda_plan.clip(cuda_plan.runs(found, 90), start, start + count)
    part = found[start : start + count]
    assert [run.address + i * run.pitch for run in inside for i in range(run.count)] == part
    assert [run.first + i for run in inside for i in range(run.count)] == list(range(len(part)))


def test_a_pitch_that_cuda_does_not_take_parts_a_run() -> None:
    assert [run.count for run in cuda_plan.runs([0, 1 << 31], 8)] == [1, 1]


def layout(
    layers: int, owners: set[int], main: int = 41984, index: int = 8448
) -> list[list[tuple[int, int]]]:
    """Main KV of every layer, then index keys of the owners, as device_pages lays them out."""
    parts = [[(layer * main, main)] for layer in range(layers)]
    for place, owner in enumerate(sorted(owners)):
        parts[owner].append((layers * main + place * index, index))
    return parts


@given(
    st.integers(1, 20),
    st.sets(st.integers(0, 19)),
    st.integers(1, 20),
    st.integers(1, 20),
    st.sampled_from([656, 100]),
)
def test_groups_hold_every_byte_of_every_layer_once(
    layers: int, owners: set[int], first: int, most: int, main: int
) -> None:
    parts = layout(layers, {owner for owner in owners if owner < layers}, main, 132)
    groups = cuda_plan.groups(parts, first, most)
    assert [layer for group in groups for layer in group.layers] == list(range(layers))
    for group in groups:
        source = {}  # byte of a staged page -> byte of a host page
        for span in group.spans:
            for byte in range(span.size):
                assert span.at + byte not in source
                source[span.at + byte] = span.start + byte
        assert max(source) < group.width
        assert group.width % 16 == 0
        taken: set[int] = set()
        for layer, starts in zip(group.layers, group.starts, strict=True):
            for (start, size), at in zip(parts[layer], starts, strict=True):
                assert [source[at], source[at + size - 1]] == [start, start + size - 1]
                taken.update(range(at, at + size))
        assert taken == set(source)  # nothing is copied that no layer needs


def test_main_kv_of_a_group_is_one_copy_and_its_index_keys_another() -> None:
    groups = cuda_plan.groups(layout(8, {0, 1, 2, 6}), 4, 4)
    assert [len(group.spans) for group in groups] == [2, 2]
    assert groups[0].width == 4 * 41984 + 3 * 8448


def test_groups_double_as_far_as_they_may() -> None:
    def sizes(first: int, most: int) -> list[int]:
        return [len(part) for part in cuda_plan.growing(78, first, most)]

    assert sizes(1, 4) == [1, 1, 2, *[4] * 18, 2]
    assert sizes(2, 4) == [2, 2, *[4] * 18, 2]
    assert sizes(8, 4) == [*[8] * 9, 6]
    assert sizes(78, 4) == [78]


@given(st.integers(1, 90), st.integers(1, 16), st.integers(1, 16), st.floats(1.0, 3.0))
def test_a_forward_that_takes_no_less_than_the_copy_waits_for_the_first_group_and_fewer_layers_than_the_largest(
    layers: int, first: int, most: int, slower: float
) -> None:
    """A layer of the copy takes 1, of the forward `slower`. What it waits for is by when it would have ended else."""
    now = copied = 0.0
    for group in cuda_plan.growing(layers, first, most):
        copied += len(group)
        now = max(now, copied) + slower * len(group)
    assert now - slower * layers <= first + max(0, most - 1) + 1e-9


@given(st.integers(1, 100), st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 1 << 20))
def test_every_number_of_layers_that_is_chosen_is_one_of_the_sizes(
    layers: int, pages: int, run_count: int, layer_bytes: int
) -> None:
    together = cuda_plan.layers_together(layers, layer_bytes, pages, run_count, step=8 << 20, call=256 << 10)
    assert together in cuda_plan.group_sizes(layers)


def test_large_loads_go_layer_by_layer_and_small_ones_together() -> None:
    def together(pages: int, run_count: int = 1) -> int:
        return cuda_plan.layers_together(78, 44260, pages, run_count, step=8 << 20, call=256 << 10)

    assert together(2000) == 1  # 128k tokens: 88 MB a layer
    assert together(1) == 78  # one page is 3.4 MB, less than a step
    assert together(64) == 4  # 2.8 MB a layer: 3 layers are a step, the next power of two
    assert together(2000, run_count=2000) == 8  # no neighbours: 44 KB a copy would be too little
    assert together(0) == 78
