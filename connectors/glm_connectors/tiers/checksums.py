"""xxh3-64 of several pages in one call, which lets go of the interpreter once.

`xxhash` lets go of it for each page (of 100 KB and more), and has to get it back: beside a thread that computes in
Python that takes a turn of the interpreter a page, which costs that thread more than the page's checksum does. So
the function that is in `xxhash`'s own library is called in a loop that numba compiles (numba is LMCache's and SGLang's
own requirement). Where either is missing, `xxhash` is called page by page: the same numbers.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash

logger = logging.getLogger(__name__)

Digests = Callable[[Sequence[int], int], list[int]]
# The first one has the processor's widest instructions; libraries for Arm have the second one only.
_SYMBOLS = ("XXH3_64bits_dispatch", "XXH3_64bits")


@functools.cache
def digests() -> Digests:
    """The function: addresses of pages, bytes of a page → xxh3-64 of each. Compiled when first asked for, 0.7 s.

    The memory must stay readable meanwhile.
    """
    try:
        return _compiled()
    except Exception as error:  # whatever a build of either lacks
        logger.warning("cache: checksums are made page by page, which costs the scheduler turns: %s", error)
        return _one_by_one


def _one_by_one(addresses: Sequence[int], size: int) -> list[int]:
    return [xxhash.xxh3_64_intdigest((ctypes.c_char * size).from_address(address)) for address in addresses]


def _compiled() -> Digests:
    import numba  # type: ignore[import-untyped]

    library = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
    hash_of: Any = next(getattr(library, name) for name in _SYMBOLS if hasattr(library, name))
    hash_of.argtypes, hash_of.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_uint64
    numbers = numba.uint64[::1]

    @numba.njit(numba.void(numbers, numba.uint64, numbers), nogil=True)  # type: ignore[untyped-decorator]
    def fill(addresses: Any, size: Any, found: Any) -> None:
        for place in range(addresses.size):
            found[place] = hash_of(addresses[place], size)

    def of_all(addresses: Sequence[int], size: int) -> list[int]:
        if not addresses:  # a call lets go of the interpreter
            return []
        at = np.array(addresses, dtype=np.uint64)
        found = np.empty_like(at)
        fill(at, size, found)
        return found.tolist()  # type: ignore[no-any-return]

    return of_all
