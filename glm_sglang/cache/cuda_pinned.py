"""The CPU pool's memory on a GPU machine: mapped at once, pinned in the background, on the GPU's NUMA node.

Pinning costs about 0.3 s a GiB, minutes for a large pool. So the memory is pinned piece by piece on a thread of its own,
which is bound to CPUs of the node and touches each piece first; slots become free to use as their piece is pinned. The
first piece is pinned before the constructor returns: a machine that cannot do it is found out at the start.

A process that is forked later has none of it: the kernel would copy what is pinned for DMA while it forks, all of the
pool. Subprocesses never look at it. The reference platform, which forks its schedulers, does so before there is a pool,
and has LMCache's memory.

Owner: the CPU pool, which closes it. A copy must not cross from one piece to the next, which CUDA refuses for memory
registered in parts; `region_of` says which piece an address is in.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, Protocol

import torch
from lmcache.v1.memory_allocators.paged_tensor_memory_allocator import PagedTensorMemoryAllocator
from lmcache.v1.memory_allocators.pin_memory_allocator import PinMemoryAllocator

from glm_sglang.cache import numa
from glm_sglang.cache.cuda_runtime import cuda_bindings, leave_captures_alone
from glm_sglang.errors import UsageError

logger = logging.getLogger(__name__)
# CUDA calls of other threads may wait while a piece is registered, so it is not large.
_PIECE = 256 << 20
_OS_PAGE = mmap.PAGESIZE


class PinningError(UsageError):
    """Memory of ours could not be pinned. The message names the flag."""


class Pinner(Protocol):
    """How memory is pinned. `begin` is called once, on the thread that will do it."""

    def begin(self) -> str: ...
    def pin(self, address: int, size: int) -> None: ...
    def unpin(self, address: int) -> None: ...


class CudaPinner:
    """cudaHostRegister, of memory that this thread has touched on the GPU's node. UsageError without cuda-bindings."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime = cuda_bindings()

    def begin(self) -> str:
        """Binds the calling thread; where its memory will be, for the log."""
        torch.cuda.set_device(self._device)  # first: a new thread's is GPU 0
        leave_captures_alone(self._runtime)
        error, name = self._runtime.cudaDeviceGetPCIBusId(32, torch.cuda.current_device())
        if error.value:
            raise RuntimeError(f"cudaDeviceGetPCIBusId: {error.name}")
        address = name.split(b"\0")[0].decode()
        node = numa.node_of(address)
        if node is None:
            return f"no NUMA node: the machine names none for {address}"
        if not numa.keep_thread_on(node):
            return f"anywhere: this process may use no CPU of NUMA node {node}, where {address} is"
        return f"NUMA node {node}, where {address} is"

    def pin(self, address: int, size: int) -> None:
        """RuntimeError where CUDA does not pin it."""
        ctypes.memset(address, 0, size)
        (error,) = self._runtime.cudaHostRegister(address, size, 0)
        if error.value:
            self._runtime.cudaGetLastError()
            raise RuntimeError(f"cudaHostRegister of {size} bytes: {error.name}")

    def unpin(self, address: int) -> None:
        """Ends it."""
        (error,) = self._runtime.cudaHostUnregister(address)
        if error.value:
            logger.error("cudaHostUnregister: %s", error.name)


class GrowingAllocator(PinMemoryAllocator):  # type: ignore[misc]
    """LMCache's paged pinned allocator over memory that is pinned while it is in use already.

    Raises PinningError, naming the flag, where not even the first piece can be pinned.
    """

    def __init__(
        self,
        size: int,
        *,
        shapes: Any,
        dtypes: Any,
        fmt: Any,
        use_paging: bool = True,
        pinner: Pinner,
        piece_bytes: int = _PIECE,
    ) -> None:
        assert use_paging
        self.size = size
        self.usable_bytes = size  # less once it is known that no more can be pinned
        # Private, so that transparent huge pages apply. Unmapped when the last tensor over it is gone.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without transparent huge pages: it takes longer to pin
            memory.madvise(mmap.MADV_HUGEPAGE)
        with suppress(
            OSError
        ):  # a fork would copy at once what is pinned, page by page; a sandbox may not know the advice
            memory.madvise(mmap.MADV_DONTFORK)
        self.buffer = torch.frombuffer(memory, dtype=torch.uint8)
        self.base = self.buffer.data_ptr()
        self.allocator = PagedTensorMemoryAllocator(self.buffer, shapes, dtypes, fmt)
        self.host_mem_lock = nullcontext()
        self._unregistered = False
        slot = self.allocator.align_bytes
        self.piece = piece_of(slot, piece_bytes)
        self._free: deque[Any] = self.allocator.free_blocks
        self._waiting = deque(self._free)
        self._free.clear()
        self._pinner = pinner
        self._pinned: list[int] = []
        self.pinned_bytes = 0
        self.place = ""
        self._failure: BaseException | None = None
        self._first = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="glm-cache-pin", daemon=True)
        self._thread.start()
        self._first.wait()
        if not self.pinned_bytes:
            self.finish()
            raise PinningError(
                f"the first {min(self.piece, size) >> 20} MiB of the CPU pool cannot be registered with CUDA "
                f"({self._failure}); lower --glm-cache-pool-gb, or raise the limit of locked memory"
            )

    def _run(self) -> None:
        try:
            self.place = self._pinner.begin()
            for start in range(0, self.size, self.piece):
                if self._stop.is_set():
                    return
                size = min(self.piece, self.size - start)
                self._pinner.pin(self.base + start, size)
                self._pinned.append(self.base + start)
                self._grow(start + size)
                self._first.set()
        except BaseException as error:
            self._failure = error
            if self.pinned_bytes:
                self.usable_bytes = self.pinned_bytes
                logger.error(
                    "cache: the CPU pool stays at %d of %d MiB: %s. Lower --glm-cache-pool-gb",
                    self.pinned_bytes >> 20,
                    self.size >> 20,
                    error,
                )
        finally:
            self._first.set()

    def _grow(self, ready: int) -> None:
        """Slots that end within the first `ready` bytes may be used."""
        slots = ready // self.allocator.align_bytes
        while self._waiting and self._waiting[0].meta.address < slots:
            self._free.append(self._waiting.popleft())
        tenth = 10 * self.pinned_bytes // self.size
        self.pinned_bytes = ready
        if 10 * ready // self.size == tenth:
            return
        logger.info(
            "cache: %d of %d MiB of the CPU pool are pinned, on %s", ready >> 20, self.size >> 20, self.place
        )

    def region_of(self, address: int) -> int:
        """The piece that an address is in."""
        return (address - self.base) // self.piece

    def finish(self) -> None:
        """Pins no more; slots that never became usable count as free, so that the pool can be closed. Idempotent."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._free.extend(self._waiting)
        self._waiting.clear()

    def close(self) -> None:
        """Unpins; the memory itself goes with the last tensor over it."""
        self.finish()
        if not self._unregistered:
            self._unregistered = True
            for address in self._pinned:
                self._pinner.unpin(address)


def piece_of(slot_bytes: int, wanted: int) -> int:
    """The least size from `wanted` on that holds whole slots and whole pages of the operating system."""
    unit = slot_bytes
    while unit % _OS_PAGE:
        unit += slot_bytes
    return -(-wanted // unit) * unit


class PinnedMemory:
    """What a store is given to make its pool's memory with, and a copier to know its pieces by.

    Where a machine does not register memory of ours, LMCache's allocator takes the place: all of it at once, anywhere,
    before the server goes on. `in_background` says which of them it was, and so does the log.
    """

    def __init__(self, pinner: Pinner, piece_bytes: int = _PIECE) -> None:
        self._pinner = pinner
        self._piece_bytes = piece_bytes
        self._made: list[GrowingAllocator] = []
        self.in_background = True

    def __call__(self, size: int, **arguments: Any) -> PinMemoryAllocator:
        """As LMCache's PinMemoryAllocator is called."""
        try:
            made = GrowingAllocator(size, pinner=self._pinner, piece_bytes=self._piece_bytes, **arguments)
        except PinningError as error:
            logger.warning(
                "cache: %s. All of it is allocated by CUDA at once instead, on any NUMA node", error
            )
            self.in_background = False
            return PinMemoryAllocator(size, **arguments)
        self._made.append(made)
        return made

    def registered_bytes(self) -> int:
        """How much has been pinned in the background."""
        return sum(made.pinned_bytes for made in self._made)

    def region_of(self, address: int) -> int:
        """The piece that an address is in. ValueError for an address outside."""
        if not self.in_background:
            return 0
        for made in self._made:
            if made.base <= address < made.base + made.size:
                return made.region_of(address)
        raise ValueError(f"{address:#x} is in no memory of the CPU pool")


RegionOf = Callable[[int], int]
