"""How tokens and sums travel: symmetric memory (copy engines, peers' stores), or the group's collectives.

Both own the buffers that other ranks see, of one plan's geometry, from their making to the end of the process or the
last reference. Arrivals are in ring order: 0 is this rank, i the rank i steps after it. Calls go to the current
stream, wait for no device, and every rank makes them in the same order.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from glm_kernels.mega_moe.numerics import E4M3
from glm_kernels.overlapped_moe.plan import Geometry

_ALIGNMENT = 256  # bytes, of each part of the symmetric buffer


class Transport(Protocol):
    """What a step needs of the group. T tokens a rank, H hidden, G = H / 128, K slots, R ranks."""

    ids: torch.Tensor
    """int32 [R, T, K], in ring order after `publish`."""
    weights: torch.Tensor
    """fp32 [R, T, K]."""
    codes: list[torch.Tensor]
    """R times E4M3 [T, H]; of a peer after `pull`. codes[0] is where own rows are quantised to."""
    scales: list[torch.Tensor]
    """R times fp32 [T, G]."""
    outbox: list[torch.Tensor]
    """R - 1 times bf16 [T, H]: where this rank's sums for the tokens of arrival i + 1 go."""
    partials: torch.Tensor
    """bf16 [R - 1, T, H]: after `meet` the peers' sums for own tokens."""
    pushes: bool
    """Whether `push` must follow what fills an outbox."""

    def publish(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Own ids int32 [n, K] and weights fp32 [n, K], n <= T, to every rank; rows from n on are masked."""

    def announce(self) -> None:
        """Own codes are complete; returns, on the stream, when every rank's are."""

    def pull(self, arrival: int) -> None:
        """Brings that peer's codes and scales."""

    def push(self, arrival: int) -> None:
        """Sends what the outbox holds for that peer."""

    def meet(self) -> None:
        """Every rank has filled and sent its outboxes; `partials` are complete, own codes may be written again."""


def _fill(target: torch.Tensor, rows: torch.Tensor, rest: float) -> None:
    target[: len(rows)].copy_(rows)
    if len(rows) < len(target):
        target[len(rows) :].fill_(rest)


class Symmetric:
    """Buffers that every rank of one NVLink domain maps.

    `dispatch`: "copy_engine" copies peers' rows into memory here, "peer_reads" leaves them there, for the placing
    kernel to read. `combine`: "peer_writes" lets the reducing kernel store into the peer's memory, "copy_engine" has
    it store here and copies afterwards. `allocate` returns the buffer and its handle: torch's symmetric memory, or a
    test's.
    """

    def __init__(
        self,
        geometry: Geometry,
        allocate: Any,
        *,
        dispatch: str = "copy_engine",
        combine: str = "peer_writes",
    ) -> None:
        for name, value, allowed in (
            ("dispatch", dispatch, ("copy_engine", "peer_reads")),
            ("combine", combine, ("peer_writes", "copy_engine")),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; symmetric memory allows {', '.join(allowed)}")
        self.geometry = of = geometry
        tokens, groups = of.tokens, of.hidden // 128
        self._parts: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        size = 0
        for name, shape, dtype in (
            ("codes", (tokens, of.hidden), E4M3),
            ("scales", (tokens, groups), torch.float32),
            ("ids", (tokens, of.top_k), torch.int32),
            ("weights", (tokens, of.top_k), torch.float32),
            ("partials", (of.ranks - 1, tokens, of.hidden), torch.bfloat16),
        ):
            self._parts[name] = (size, shape, dtype)
            size += -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.bytes = size
        # Symmetric: mapped by every rank, so it lives until all of them have let go; the handle keeps it here.
        self._buffer, self._handle = allocate(size)
        device = self._buffer.device
        self._own = {name: self._view(self._buffer, name) for name in self._parts}
        self._peer = [self._own] + [self._peer_views(i) for i in range(1, of.ranks)]
        self.ids = torch.empty((of.ranks, tokens, of.top_k), dtype=torch.int32, device=device)
        self.weights = torch.empty((of.ranks, tokens, of.top_k), dtype=torch.float32, device=device)
        self._pulls, self.pushes = dispatch == "copy_engine", combine == "copy_engine"
        self.codes, self.scales = ([peer[name] for peer in self._peer] for name in ("codes", "scales"))
        if self._pulls:
            for i in range(1, of.ranks):
                self.codes[i] = torch.empty_like(self._own["codes"])
                self.scales[i] = torch.empty_like(self._own["scales"])
        self.partials = self._own["partials"]
        # Seen from arrival i this rank is arrival R - i, whose sums have slot R - i - 1.
        self._inbox = [self._peer[i]["partials"][of.ranks - i - 1] for i in range(1, of.ranks)]
        self.outbox = [torch.empty_like(box) for box in self._inbox] if self.pushes else self._inbox

    def _view(self, memory: torch.Tensor, name: str) -> torch.Tensor:
        at, shape, dtype = self._parts[name]
        return memory[at : at + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def _peer_views(self, arrival: int) -> dict[str, torch.Tensor]:
        rank = (self.geometry.rank + arrival) % self.geometry.ranks
        # Not get_buffer, which ignores where torch's pool of symmetric memory put this tensor.
        memory = self._handle.get_remote_tensor(rank, (self.bytes,), torch.uint8)
        return {name: self._view(memory, name) for name in self._parts}

    def _meet(self, channel: int) -> None:
        if self.geometry.ranks > 1:
            self._handle.barrier(channel)

    def publish(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        _fill(self._own["ids"], ids, -1)
        _fill(self._own["weights"], weights, 0.0)
        self._meet(0)
        for i, peer in enumerate(self._peer):
            self.ids[i].copy_(peer["ids"])
            self.weights[i].copy_(peer["weights"])

    def announce(self) -> None:
        self._meet(1)

    def pull(self, arrival: int) -> None:
        if self._pulls:
            self.codes[arrival].view(torch.uint8).copy_(self._peer[arrival]["codes"].view(torch.uint8))
            self.scales[arrival].copy_(self._peer[arrival]["scales"])

    def push(self, arrival: int) -> None:
        if self.pushes:
            self._inbox[arrival - 1].copy_(self.outbox[arrival - 1])

    def meet(self) -> None:
        self._meet(2)


def cuda_symmetric_memory(group: dist.ProcessGroup, device: torch.device) -> Any:
    """`allocate` of Symmetric on GPUs. Set TORCH_SYMM_MEM_DISABLE_MULTICAST=1: only peer pointers are used."""
    import torch.distributed._symmetric_memory as symmetric

    def allocate(size: int) -> tuple[torch.Tensor, Any]:
        buffer = symmetric.empty(size, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(buffer, group)
        buffer.zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group)
        return buffer, handle

    return allocate


class Collective:
    """The same through all-gather and all-to-all of any backend: NCCL where symmetric memory fails, gloo on a CPU."""

    pushes = False

    def __init__(self, geometry: Geometry, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.geometry, self._group = geometry, group
        of = geometry
        groups, self._order = of.hidden // 128, [(of.rank + i) % of.ranks for i in range(of.ranks)]

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        # By rank, as collectives have them; the process group reads and writes them until `meet`.
        self._own_routing = empty(2, of.tokens, of.top_k, dtype=torch.int32)
        self._routing = empty(of.ranks, 2, of.tokens, of.top_k, dtype=torch.int32)
        self._own_codes = empty(of.tokens, of.hidden, dtype=E4M3)
        self._own_scales = empty(of.tokens, groups, dtype=torch.float32)
        self._codes = empty(of.ranks, of.tokens, of.hidden, dtype=E4M3)
        self._scales = empty(of.ranks, of.tokens, groups, dtype=torch.float32)
        self._sums = torch.zeros(of.ranks, of.tokens, of.hidden, dtype=torch.bfloat16, device=device)
        self._returned = torch.zeros_like(self._sums)
        self.ids = empty(of.ranks, of.tokens, of.top_k, dtype=torch.int32)
        self.weights = empty(of.ranks, of.tokens, of.top_k, dtype=torch.float32)
        self.codes = [self._own_codes] + [self._codes[rank] for rank in self._order[1:]]
        self.scales = [self._own_scales] + [self._scales[rank] for rank in self._order[1:]]
        self.outbox = [self._sums[rank] for rank in self._order[1:]]
        self.partials = empty(of.ranks - 1, of.tokens, of.hidden, dtype=torch.bfloat16)

    def publish(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        _fill(self._own_routing[0], ids, -1)
        _fill(self._own_routing[1].view(torch.float32), weights, 0.0)
        if self.geometry.ranks > 1:
            dist.all_gather_into_tensor(self._routing.flatten(0, 1), self._own_routing, group=self._group)
        else:
            self._routing.copy_(self._own_routing[None])
        for i, rank in enumerate(self._order):
            self.ids[i].copy_(self._routing[rank, 0])
            self.weights[i].copy_(self._routing[rank, 1].view(torch.float32))

    def announce(self) -> None:
        codes = self._codes.view(torch.uint8).flatten(0, 1)
        dist.all_gather_into_tensor(codes, self._own_codes.view(torch.uint8), group=self._group)
        dist.all_gather_into_tensor(self._scales.flatten(0, 1), self._own_scales, group=self._group)

    def pull(self, arrival: int) -> None:
        """Nothing: `announce` brought it."""

    def push(self, arrival: int) -> None:
        """Nothing: `meet` sends it."""

    def meet(self) -> None:
        if self.geometry.ranks > 1:
            dist.all_to_all_single(
                self._returned.view(torch.uint8), self._sums.view(torch.uint8), group=self._group
            )
            for i, rank in enumerate(self._order[1:]):
                self.partials[i].copy_(self._returned[rank])
