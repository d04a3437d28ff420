"""Many pieces of pinned host memory to the device in one call of the copy engine: cuMemcpyBatchAsync, by ctypes.

A strided copy takes the host 8 to 10 µs, whatever it moves; a piece of a batch about 1 µs (both beside an H200). The
arrays are computed by numpy, and the call lets go of the interpreter: neither costs another thread its turn.

UPSTREAM: cuda.h of CUDA 13, cuMemcpyBatchAsync_v2. cuda-bindings has the call too, but takes Python lists of integers.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from glm_sglang.cache.cuda_plan import Span

logger = logging.getLogger(__name__)
Addresses = npt.NDArray[np.uint64]

_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_DEVICE, _HOST = 1, 2  # CU_MEM_LOCATION_TYPE_*: hints, which CUDA ignores for pinned memory
# CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE, a hint: the forward's products fill every SM, and a copy that took some of
# them would cost each product a second wave.
OVERLAP = 1


def addresses_of(values: Sequence[int]) -> Addresses:
    """uint64 [n]."""
    return np.array(values, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Pieces:
    """What one call copies: sizes[i] bytes from sources[i] to targets[i]; addresses and bytes, uint64 [pieces] each."""

    targets: Addresses
    sources: Addresses
    sizes: npt.NDArray[np.uint64]


class Spans:
    """Spans of a host page, and where they are staged in pages of `width` bytes."""

    def __init__(self, spans: Sequence[Span], width: int) -> None:
        self._starts, self._places, self._sizes = (
            np.array(values, dtype=np.uint64)[:, None]
            for values in (
                [span.start for span in spans],
                [span.at for span in spans],
                [span.size for span in spans],
            )
        )
        self._width = width
        self._targets = self._places  # of the pages of a slot staged at 0; as many as were asked for so far

    def pieces(self, pages: Addresses, staging: int) -> Pieces:
        """Of host pages at these addresses, uint64 [n], page i staged from byte staging + i · width on: one piece a span
        and page, spans apart. A piece lies within its page, so within one region of memory that was pinned in parts.
        """
        count = pages.shape[0]
        if count > self._targets.shape[1]:
            self._targets = self._places + np.arange(count, dtype=np.uint64) * np.uint64(self._width)
        targets = self._targets[:, :count] + np.uint64(staging)
        sizes = self._sizes.repeat(count, 1)
        return Pieces(targets.reshape(-1), (pages + self._starts).reshape(-1), sizes.reshape(-1))


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


class BatchCopy:
    """The driver's call, for host memory to one device. Any thread whose current context is that device's."""

    def __init__(self, driver: Any, device: int, *, flags: int = OVERLAP) -> None:
        """AttributeError where the driver lacks it."""
        self._call = driver.cuMemcpyBatchAsync_v2
        self._call.restype = ctypes.c_int
        self._call.argtypes = [
            *(ctypes.c_void_p,) * 3,  # targets, sources, sizes: read before the call returns
            ctypes.c_size_t,
            ctypes.POINTER(_Attributes),
            ctypes.POINTER(ctypes.c_size_t),
            ctypes.c_size_t,
            ctypes.c_void_p,
        ]
        self._error_name = driver.cuGetErrorName
        self._error_name.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
        self._attributes = _Attributes(_STREAM_ORDER, _Location(_HOST, 0), _Location(_DEVICE, device), flags)
        self._first = ctypes.c_size_t(0)  # the attributes are those of the pieces from 0 on

    def __call__(self, pieces: Pieces, stream: int) -> None:
        """Queues them, in no order among each other, on a stream other than the NULL stream, which CUDA refuses. No
        pieces are no call. RuntimeError where CUDA refuses.
        """
        count = pieces.sizes.shape[0]
        if not count:
            return
        error = self._call(
            pieces.targets.ctypes.data,
            pieces.sources.ctypes.data,
            pieces.sizes.ctypes.data,
            count,
            ctypes.byref(self._attributes),
            ctypes.byref(self._first),
            1,
            stream,
        )
        if error:
            raise RuntimeError(f"cuMemcpyBatchAsync: {self._name(error)} for {count} pieces")

    def _name(self, error: int) -> str:
        name = ctypes.c_char_p()
        self._error_name(error, ctypes.byref(name))
        return (name.value or f"error {error}".encode()).decode()


def batch_copy(device: int, load: Callable[[str], Any] = ctypes.CDLL) -> BatchCopy | None:
    """None where the driver lacks the call, which the log says: then strided copies serve."""
    try:
        return BatchCopy(load("libcuda.so.1"), device)
    except (OSError, AttributeError) as error:
        logger.warning(
            "no batched copies (%s): scattered pages are loaded by strided copies, which take the host longer; a driver "
            "of CUDA 13 has them",
            error,
        )
        return None
