"""Loads by themselves: how long they take, how long the host queues them, what they cost a forward over them."""

from __future__ import annotations

import cProfile
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
    HostPage,
    device_seconds,
    rate,
    seconds,
    shuffled,
    slots_of,
)
from glm_sglang.cache.cuda_copies import CudaPageCopier
from glm_sglang.cache.cuda_layers import StreamLayerCounter
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


_SHOWN = 15  # lines of a profile


class Loads:
    """Of host pages that are neighbours, and of scattered ones."""

    def __init__(self, copies: Memory) -> None:
        self._copies = copies

    def load(self, count: int, forward_ms: Sequence[float]) -> dict[str, Any]:
        """A load of `count` pages alone, and under forwards of 78 layers that take `forward_ms` by themselves.

        Exposed: what the forward takes longer with the load under it, than without.
        """
        size = count * self._copies.page_bytes
        slots = [slots_of(shuffled(count))]
        host = self._copies.host[:count]
        apart = self._copies.scattered(count)
        copier = self._copies.copier
        places = {"": host, "scattered_": apart}
        taken = {
            name: seconds(lambda p=pages: copier.load(slots, p, _ignore)) for name, pages in places.items()
        }  # type: ignore[misc]
        result: dict[str, Any] = {
            "pages": count,
            "gigabytes": round(size / 1e9, 3),
            "load_ms": round(taken[""] * 1e3, 2),
            "load_gb_s": rate(size, taken[""]),
            "load_scattered_gb_s": rate(size, taken["scattered_"]),
        }
        for name, pages in places.items():
            result[f"{name}queueing_ms"] = self._queueing(copier, slots, pages)
            result[f"{name}queueing_profile"] = self._profile(copier, slots, pages)
        for wanted in forward_ms:
            forward = Forward(wanted)
            without = seconds(lambda forward=forward: forward.run(None))  # type: ignore[misc]
            for name, pages in places.items():
                result[f"{name}under_a_forward_of_{wanted:.0f}_ms"] = self._exposed(
                    copier, forward, without, slots, pages, taken[name]
                )
        return result

    def _queueing(
        self, copier: CudaPageCopier, slots: Sequence[torch.Tensor], host: Sequence[HostPage]
    ) -> float:
        """Milliseconds that a launch waits for where nothing else delays the load's thread."""
        queueing: list[float] = []

        def work() -> None:
            began = time.perf_counter()
            end = copier.start_load(slots, host, _ignore)
            queueing.append(time.perf_counter() - began)
            end()

        seconds(work)
        return round(statistics.median(queueing[1:]) * 1e3, 3)

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
