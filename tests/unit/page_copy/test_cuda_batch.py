"""Pieces of a batch against a copy byte by byte, and the driver's call against what it is given."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_sglang.cache.cuda_batch import OVERLAP, BatchCopy, Pieces, Spans, addresses_of, batch_copy
from glm_sglang.cache.cuda_plan import Span

PAGE = 64  # bytes a host page


@st.composite
def span_lists(draw: st.DrawFn) -> tuple[list[Span], int]:
    """(spans of a page one after another, perhaps with bytes between them, staged with gaps; bytes of a staged page)."""
    spans, start, at = [], 0, 0
    for _ in range(draw(st.integers(1, 3))):
        start += draw(st.integers(0, 5))
        at += draw(st.integers(0, 5))
        size = draw(st.integers(1, 12))
        spans.append(Span(start, size, at))
        start, at = start + size, at + size
    return spans, at + draw(st.integers(0, 5))


@given(span_lists(), st.lists(st.integers(0, 15), unique=True, max_size=8))
def test_pieces_are_the_spans_of_every_page_and_no_other_byte(
    made: tuple[list[Span], int], places: list[int]
) -> None:
    spans, width = made
    host = np.random.default_rng(1).integers(0, 254, (16, PAGE), dtype=np.uint8)
    staging = np.full(8 * width + 32, 255, dtype=np.uint8)
    want = staging.copy()
    for row, place in enumerate(places):
        for span in spans:
            for byte in range(span.size):
                want[16 + row * width + span.at + byte] = host[place, span.start + byte]
    pages = addresses_of([host[place].ctypes.data for place in places])
    pieces = Spans(spans, width).pieces(pages, staging.ctypes.data + 16)
    assert len(pieces.targets) == len(pieces.sources) == len(pieces.sizes) == len(spans) * len(places)
    for target, source, size in zip(
        pieces.targets.tolist(), pieces.sources.tolist(), pieces.sizes.tolist(), strict=True
    ):
        page = (source - host.ctypes.data) // PAGE
        assert page == (source + size - 1 - host.ctypes.data) // PAGE  # of one page: of one pinned region
        ctypes.memmove(target, source, size)
    assert np.array_equal(staging, want)


def test_addresses_of_the_upper_half_are_kept() -> None:
    """A user's address has 47 bits, or 56; uint64 holds what int64 would not."""
    top = (1 << 63) + 4096
    pieces = Spans([Span(3, 5, 2)], 16).pieces(addresses_of([top, top + 7]), 1 << 62)
    assert pieces.sources.tolist() == [top + 3, top + 10]
    assert pieces.targets.tolist() == [(1 << 62) + 2, (1 << 62) + 18]


COPY = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_void_p,) * 3,
    ctypes.c_size_t,
    *(ctypes.c_void_p,) * 2,
    ctypes.c_size_t,
    ctypes.c_void_p,
)
NAME = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))


class Driver:
    """libcuda.so.1: C functions that read their arguments as cuda.h declares them."""

    def __init__(self, error: int = 0) -> None:
        self.calls: list[Any] = []
        self._error = error
        self.cuMemcpyBatchAsync_v2 = COPY(self._copy)
        self.cuGetErrorName = NAME(self._name)

    def _copy(self, *found: Any) -> int:
        targets, sources, sizes, count, attributes, first, attribute_count, stream = found
        arrays = [list((ctypes.c_uint64 * count).from_address(array)) for array in (targets, sources, sizes)]
        fields = list((ctypes.c_uint32 * 6).from_address(attributes))  # srcAccessOrder, two locations, flags
        index = list((ctypes.c_size_t * attribute_count).from_address(first))
        self.calls.append((*arrays, fields, index, stream))
        return self._error

    def _name(self, error: int, name: Any) -> int:
        name[0] = b"CUDA_ERROR_INVALID_VALUE" if error == 1 else None
        return 0 if error == 1 else 1


TWO = Pieces(addresses_of([4096, 8192]), addresses_of([1 << 40, 77]), addresses_of([16, 5]))
NONE = Pieces(*(addresses_of([]),) * 3)


def test_one_call_takes_all_pieces_in_the_order_of_a_stream() -> None:
    driver = Driver()
    copy = BatchCopy(driver, 3)
    copy(TWO, 99)
    copy(NONE, 99)  # CUDA refuses a batch of nothing
    stream_order, host, device = 1, [2, 0], [1, 3]
    assert driver.calls == [
        ([4096, 8192], [1 << 40, 77], [16, 5], [stream_order, *host, *device, OVERLAP], [0], 99)
    ]


@pytest.mark.parametrize(("error", "name"), [(1, "CUDA_ERROR_INVALID_VALUE"), (12345, "error 12345")])
def test_a_batch_that_cuda_refuses_is_an_error(error: int, name: str) -> None:
    with pytest.raises(RuntimeError, match=f"cuMemcpyBatchAsync: {name} for 2 pieces"):
        BatchCopy(Driver(error), 0)(TWO, 99)


def test_a_driver_without_the_call_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    assert batch_copy(0, lambda name: Driver()) is not None
    assert caplog.records == []

    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    assert batch_copy(0, lambda name: SimpleNamespace()) is None
    assert batch_copy(0, missing) is None
    assert ["strided copies" in record.getMessage() for record in caplog.records] == [True, True]
