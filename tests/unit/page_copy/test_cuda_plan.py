"""Runs, groups and how many layers go together, against their definitions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from glm_sglang.cache import cuda_plan
from glm_sglang.cache.cuda_loads import MEASURED

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


SLOT_BYTES = 64 << 20


def courses(layers: int, owners: set[int]) -> list[cuda_plan.Course]:
    sizes = layout(layers, owners)
    most = max(1, layers // 16)
    return [
        cuda_plan.Course.of(cuda_plan.groups(sizes, first, most)) for first in cuda_plan.group_sizes(layers)
    ]


def test_a_delay_counts_calls_and_blocks_and_what_goes_first() -> None:
    """Three layers of 41,984 bytes, 8,448 of index keys in two of them; four pages in two runs."""
    apart = courses(3, {0, 1})[0]
    count = cuda_plan.Costs(call=1.0, block=0.0, byte=0.0)
    assert apart.delay(4, 2, SLOT_BYTES, count) == 2 * (3 + 2)
    count = cuda_plan.Costs(call=0.0, block=1.0, byte=0.0)
    assert apart.delay(4, 2, SLOT_BYTES, count) == 3
    assert apart.delay(4, 2, 41984, count) == 3 + 4 * (3 * 41984 + 2 * 8448) // 41984
    count = cuda_plan.Costs(call=0.0, block=0.0, byte=1.0)
    assert apart.delay(4, 2, SLOT_BYTES, count) == 4 * (41984 + 8448)


GLM = courses(78, {0, 1, 2, *range(6, 78, 4)})  # 3.45 MB a page


def first_layers(pages: int, run_count: int = 1) -> int:
    return len(cuda_plan.best(GLM, pages, run_count, SLOT_BYTES, MEASURED).groups[0].layers)


def test_large_loads_go_layer_by_layer_and_small_ones_together() -> None:
    assert first_layers(2048) == 1  # 128k tokens: a layer is 88 MB, 1.8 ms
    assert first_layers(1) == 78  # 0.07 ms for all layers, 22 groups of which would take the host 2


def test_the_more_runs_the_more_layers_go_together() -> None:
    assert first_layers(512) == 1
    assert first_layers(512, 20) == 8  # layer by layer: 880 calls, 8 ms
    assert first_layers(512, 512) == 32  # layer by layer: 22,528 calls, 200 ms; all at once: a copy of 35 ms
    for pages in (8, 64, 512, 2048):
        chosen = [first_layers(pages, run_count) for run_count in range(1, pages + 1)]
        assert chosen == sorted(chosen)


@given(st.integers(1, 4000), st.data())
def test_no_other_course_delays_a_forward_less(pages: int, data: st.DataObject) -> None:
    run_count = data.draw(st.integers(1, pages))

    def delay(course: cuda_plan.Course) -> float:
        return course.delay(pages, run_count, SLOT_BYTES, MEASURED)

    assert delay(cuda_plan.best(GLM, pages, run_count, SLOT_BYTES, MEASURED)) == min(map(delay, GLM))
