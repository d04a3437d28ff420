"""Loads by themselves: how long they take, how long the host queues them, what they cost a forward over them."""

from __future__ import annotations

import cProfile
import ctypes
import pstats
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks._page_memory import (
    LAYERS,
    MAIN,
    HostPage,
    device_seconds,
    rate,
    seconds,
    shuffled,
    slots_of,
)
from glm_sglang.cache.cuda_batch import OVERLAP, BatchCopy, Spans, addresses_of
from glm_sglang.cache.cuda_copies import CudaPageCopier
from glm_sglang.cache.cuda_layers import StreamLayerCounter
from glm_sglang.cache.cuda_plan import Span
from glm_sglang.cache.cuda_runtime import CudaRuntime
from glm_sglang.cache.device_pages import DevicePages


class Memory(Protocol):
    """`_page_copies.Copies`."""

    device: DevicePages
    page_bytes: int
    host: list[HostPage]
    runtime: CudaRuntime
    copier: CudaPageCopier

    def scattered(self, count: int) -> list[HostPage]: ...


_STAGE = 64 << 20
_SHOWN = 15  # lines of a profile


class Loads:
    """Of the copier as it chooses, and each way whatever it would choose: strided copies, batches, and batches without
    the hint that they should leave the SMs alone.
    """

    def __init__(self, copies: Memory) -> None:
        self._copies = copies
        unhinted = CudaRuntime(copies.device.device)
        unhinted._batch = _batch_copy(0)

        def batched(runtime: CudaRuntime) -> CudaPageCopier:
            return CudaPageCopier(copies.device, runtime, most_calls=0, call_pieces=1 << 30)

        self._ways = {
            "strided": CudaPageCopier(copies.device, copies.runtime, most_calls=1 << 30),
            "batched": batched(copies.runtime),
            "batched_unhinted": batched(unhinted),
        }

    def load(self, count: int, forward_ms: Sequence[float]) -> dict[str, Any]:
        """A load of `count` pages alone, and under forwards of 78 layers that take `forward_ms` by themselves.

        Exposed: what the forward takes longer with the load under it, than without.
        """
        size = count * self._copies.page_bytes
        slots = [slots_of(shuffled(count))]
        host = self._copies.host[:count]
        apart = self._copies.scattered(count)
        taken = seconds(lambda: self._copies.copier.load(slots, host, _ignore))
        scattered = seconds(lambda: self._copies.copier.load(slots, apart, _ignore))
        queued = {
            f"{way}_{where}": self._queueing(copier, slots, pages)
            for way, copier in self._ways.items()
            for where, pages in (("neighbours", host), ("scattered", apart))
        }
        result: dict[str, Any] = {
            "pages": count,
            "gigabytes": round(size / 1e9, 3),
            "load_ms": round(taken * 1e3, 2),
            "load_gb_s": rate(size, taken),
            "load_scattered_gb_s": rate(size, scattered),
            "queued": queued,
            "profiles": {
                f"{way}_{where}": self._profile(self._ways[way], slots, pages)
                for way, where, pages in (("strided", "neighbours", host), ("batched", "scattered", apart))
            },
        }
        for wanted in forward_ms:
            forward = Forward(wanted)
            without = seconds(lambda forward=forward: forward.run(None))  # type: ignore[misc]
            name = f"under_a_forward_of_{wanted:.0f}_ms"
            result[name] = self._exposed(self._copies.copier, forward, without, slots, host, taken)
            for way, copier in self._ways.items():
                result[f"{way}_scattered_{name}"] = self._exposed(
                    copier, forward, without, slots, apart, taken
                )
        return result

    def _queueing(
        self, copier: CudaPageCopier, slots: Sequence[torch.Tensor], host: Sequence[HostPage]
    ) -> dict[str, float]:
        """What a launch waits for where nothing else delays the load's thread, and the rate of the load."""
        queueing: list[float] = []

        def work() -> None:
            began = time.perf_counter()
            end = copier.start_load(slots, host, _ignore)
            queueing.append(time.perf_counter() - began)
            end()

        taken = seconds(work)
        return {
            "queueing_ms": round(statistics.median(queueing[1:]) * 1e3, 3),
            "gb_s": rate(len(host) * self._copies.page_bytes, taken),
        }

    def _profile(
        self, copier: CudaPageCopier, slots: Sequence[torch.Tensor], host: Sequence[HostPage]
    ) -> list[str]:
        """Of the third of three queueings: what took the host longest by itself, in µs that the profiler lengthens."""
        for _ in range(2):
            copier.load(slots, host, _ignore)
        counter = StreamLayerCounter(LAYERS, copier)
        index = counter.update_producer()
        torch.cuda.synchronize()
        profile = cProfile.Profile()
        profile.enable()
        end = copier.start_load(slots, host, lambda layer: counter.complete(index, layer))
        profile.disable()
        end()
        stats: Any = pstats.Stats(profile)
        longest = sorted(stats.stats.items(), key=lambda one: one[1][2], reverse=True)
        return [
            f"{own * 1e6:.0f} us in {calls} calls: {Path(file).name}:{line} {name}"
            for (file, line, name), (_, calls, own, _, _) in longest[:_SHOWN]
        ]

    def _exposed(
        self,
        copier: CudaPageCopier,
        forward: Forward,
        without: float,
        slots: Sequence[torch.Tensor],
        host: Sequence[HostPage],
        copy: float,
    ) -> dict[str, float]:
        """A load under a forward that takes `without` seconds alone; copy: of the same load's pages, alone."""
        waits: list[tuple[float, float]] = []
        under = seconds(lambda: self._forward_over_load(copier, forward, slots, host, waits))
        launch, finish = (statistics.median(times) for times in zip(*waits[1:], strict=True))
        return {
            "forward_alone_ms": round(without * 1e3, 2),
            "forward_over_load_ms": round(under * 1e3, 2),
            "exposed_ms": round((under - without) * 1e3, 2),
            "exposed_share_of_copy": round((under - without) / copy, 4),
            "launch_waits_ms": round(launch * 1e3, 3),
            "finish_ms": round(finish * 1e3, 3),
        }

    def _forward_over_load(
        self,
        copier: CudaPageCopier,
        forward: Forward,
        slots: Sequence[torch.Tensor],
        host: Sequence[HostPage],
        waits: list[tuple[float, float]],
    ) -> None:
        """waits gets the seconds that the launching thread waited for layers to be queued, and those of `finish`."""
        counter = StreamLayerCounter(LAYERS, copier)
        waited = [0.0]

        @contextmanager
        def waiting() -> Iterator[None]:
            began = time.perf_counter()
            yield
            waited[0] += time.perf_counter() - began

        counter.waiting = waiting
        index = counter.update_producer()
        counter.set_consumer(index)
        ready = copier.free(torch.cuda.current_stream())

        def load() -> None:
            ready()
            copier.load(slots, host, lambda layer: counter.complete(index, layer))

        thread = threading.Thread(target=load)
        thread.start()
        forward.launch(counter.wait_until)
        began = time.perf_counter()
        assert counter.finish(index)
        waits.append((waited[0], time.perf_counter() - began))
        torch.cuda.synchronize()
        thread.join()

    def batches(self, count: int) -> dict[str, dict[str, float]]:
        """Batches by themselves, of main KV of so many layers of `count` scattered pages: GB/s over the bus, and what a
        piece takes the host. Rounds: the same again, before the first has ended; a full queue shows in the last.
        """
        found: dict[str, dict[str, float]] = {}
        staging = torch.empty(_STAGE, dtype=torch.uint8, device="cuda")
        stream: Any = self._copies.copier.loads.copies
        at = sorted(page.address for page in self._copies.scattered(count))
        for layers, rounds in ((1, 1), (2, 1), (7, 1), (16, 1), (2, 32), (7, 32)):
            size = layers * MAIN
            each = _STAGE // size
            spans = Spans([Span(0, size, 0)], size)
            blocks = [addresses_of(at[start : start + each]) for start in range(0, count, each)]
            for flags, hint in ((OVERLAP, "hinted"), (0, "unhinted")):
                copy = _batch_copy(flags)
                submitted: list[list[float]] = []

                def work() -> None:
                    took = []
                    for _ in range(rounds):  # noqa: B023  (called within the loop)
                        began = time.perf_counter()
                        for block in blocks:  # noqa: B023
                            copy(spans.pieces(block, staging.data_ptr()), stream.cuda_stream)  # noqa: B023
                        took.append(time.perf_counter() - began)
                    submitted.append(took)  # noqa: B023
                    torch.cuda.synchronize()

                taken = seconds(work)
                first, last = (
                    round(statistics.median(took[at] for took in submitted[1:]) / count * 1e6, 3)
                    for at in (0, -1)
                )
                found[f"{layers}_layers_{rounds}_rounds_{hint}"] = {
                    "gb_s": rate(rounds * count * size, taken),
                    "host_us_a_piece": first,
                    "host_us_a_piece_in_the_last_round": last,
                }
        return found


def _batch_copy(flags: int) -> BatchCopy:
    return BatchCopy(ctypes.CDLL("libcuda.so.1"), torch.cuda.current_device(), flags=flags)


class Forward:
    """78 layers of matrix products, which keep the SMs and the memory of the device as busy as a forward does."""

    def __init__(self, milliseconds: float) -> None:
        self._a = torch.randn(4096, 6144, dtype=torch.bfloat16, device="cuda")
        self._b = torch.randn(6144, 6144, dtype=torch.bfloat16, device="cuda")
        self._out = torch.empty(4096, 6144, dtype=torch.bfloat16, device="cuda")
        once = device_seconds(self._product)
        self._products = max(1, round(milliseconds / 1e3 / LAYERS / once))

    def _product(self) -> None:
        torch.mm(self._a, self._b, out=self._out)

    def run(self, wait_for_layer: Callable[[int], None] | None) -> None:
        """One forward; returns when it has ended."""
        self.launch(wait_for_layer)
        torch.cuda.synchronize()

    def launch(self, wait_for_layer: Callable[[int], None] | None) -> None:
        """One forward; returns when it is queued."""
        for layer in range(LAYERS):
            if wait_for_layer is not None:
                wait_for_layer(layer)
            for _ in range(self._products):
                self._product()


def _ignore(layer: int) -> None:
    """A layer that nobody waits for."""
