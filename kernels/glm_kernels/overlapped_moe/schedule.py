"""What one step runs, on which stream, after what: a list that the host walks once. Policy only: no torch.

Three streams. `gemm`: the grouped GEMMs, one after the other, and whatever has all SMs between them. `side`: kernels
bound by memory, beside a GEMM, on the few SMs that it leaves. `comm`: barriers, copy engines, and what is too small to
count. An operation runs after those before it on its stream and after those in `after`.

A GEMM needs its SMs whole, so nothing on `side` may come between the end of one GEMM and the start of the next: spread
over all SMs, it would keep the next GEMM out until it ends. Hence each operation on `side` is also after what the GEMM
that it runs beside follows, and `gated` then: it waits until that GEMM has had the time to take its SMs.

The order of the GEMMs decides what hides under what. Peers' tokens come second, when they have arrived, and leave first,
so that their sums travel under the own tokens' second GEMMs; between a chunk's two GEMMs another one runs, under which
the chunk is activated.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from glm_kernels.overlapped_moe.plan import Plan


class Kind(enum.StrEnum):
    """Operations; `index` of an Op is a source, a chunk or a peer, as named here."""

    ROUTING = "routing"
    """Own ids and weights to every rank, theirs to this one."""
    QUANTISE = "quantise"
    """Own rows to E4M3, where peers can read them."""
    LAYOUT = "layout"
    """Ids to buffer rows."""
    ANNOUNCE = "announce"
    """Every rank has quantised."""
    PULL = "pull"
    """index: peer. Its codes and scales come here."""
    PLACE = "place"
    """index: source. Its codes and scales go to their buffer rows."""
    GEMM1 = "gemm1"
    """index: chunk."""
    SWIGLU = "swiglu"
    """index: chunk. Activation and quantisation."""
    GEMM2 = "gemm2"
    """index: chunk."""
    REDUCE = "reduce"
    """index: source, of a peer. Each token's weighted sum of this rank's outputs, to where the peer adds it."""
    PUSH = "push"
    """index: source, of a peer. The sums travel, where REDUCE left them here."""
    MEET = "meet"
    """Every rank's sums have arrived."""
    FINISH = "finish"
    """index: own source. Its sums, and the peers'."""


@dataclass(frozen=True)
class Op:
    """One operation. `after`: positions in the schedule of what it needs beside its stream's earlier operations.

    `wide`: it may take all SMs, because no GEMM runs beside it. `step`: of a GEMM, its number in the schedule; otherwise
    that of the GEMM which is to run beside it (one more than there are, after the last).
    """

    kind: Kind
    index: int
    stream: str
    after: tuple[int, ...]
    wide: bool = False
    gated: bool = False
    step: int = 0


_GEMMS = (Kind.GEMM1, Kind.GEMM2)
ORDERS = ("peers_second", "peers_early", "own_first")


def gemm_order(plan: Plan, order: str = "peers_second") -> list[tuple[Kind, int]]:
    """The GEMMs of a step, chunks without rows left out.

    peers_second: first GEMMs of the first own part, the peers, the other own parts; then second GEMMs of the peers
    (last region first) and the own parts, last first. peers_early: the first own part and the peers entirely before the
    other own parts, which leaves the peers' sums more time and exposes one activation. own_first: regions in order,
    then in reverse; with expert_splits of at least 2 the last region's second half hides the activation of its first.
    """
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}; allowed are {', '.join(ORDERS)}")
    own, regions = plan.own, range(len(plan.sources))
    peers = [region for region in regions if region not in own]
    one, two = Kind.GEMM1, Kind.GEMM2
    if order == "own_first":
        groups = [(one, list(regions)), (two, [*reversed(peers), *reversed(own)])]
    elif order == "peers_second":
        groups = [(one, [*own[:1], *peers, *own[1:]]), (two, [*reversed(peers), *reversed(own)])]
    else:
        groups = [
            (one, [*own[:1], *peers]),
            (two, [*own[:1], *reversed(peers)]),
            (one, list(own[1:])),
            (two, list(reversed(own[1:]))),
        ]
    return [
        (kind, i)
        for kind, wanted in groups
        for region in wanted
        for i, chunk in enumerate(plan.chunks)
        if chunk.region == region and chunk.rows
    ]


class _Builder:
    def __init__(self, plan: Plan, overlap: bool) -> None:
        self.plan, self.overlap, self.ops = plan, overlap, list[Op]()
        self.at: dict[tuple[Kind, int], int] = {}

    def add(
        self,
        kind: Kind,
        index: int,
        stream: str,
        after: Sequence[tuple[Kind, int]] = (),
        *,
        wide: bool = False,
    ) -> None:
        if stream == "side" and not self.overlap:
            stream, wide = "gemm", True
        needs = {self.at[key] for key in after}
        if stream == "side":
            needs.update(self._before_the_gemm())
        gated = stream == "side" and any(self.ops[i].stream == "gemm" for i in needs)
        gemms = [i for i, op in enumerate(self.ops) if op.kind in _GEMMS]
        beside_the_last = kind not in _GEMMS and gemms and gemms[-1] not in needs
        step = len(gemms) - (1 if beside_the_last else 0)
        self.at[kind, index] = len(self.ops)
        self.ops.append(Op(kind, index, stream, tuple(sorted(needs)), wide, gated, step))

    def _before_the_gemm(self) -> list[int]:
        """What the last GEMM queued so far follows on its stream."""
        queued = [i for i, op in enumerate(self.ops) if op.stream == "gemm"]
        gemms = [n for n, i in enumerate(queued) if self.ops[i].kind in _GEMMS]
        return [queued[gemms[-1] - 1]] if gemms and gemms[-1] else []

    def place(self, sources: Sequence[int], stream: str) -> None:
        """Also of sources that are placed already: nothing then."""
        for i in sources:
            if (Kind.PLACE, i) not in self.at:
                peer = self.plan.sources[i].peer
                come = (Kind.PULL, peer) if peer else (Kind.QUANTISE, 0)
                self.add(Kind.PLACE, i, stream, [(Kind.LAYOUT, 0), come], wide=stream == "gemm")

    def needed_by(self, gemm: tuple[Kind, int]) -> range:
        return range(self.plan.chunks[gemm[1]].region + 1) if gemm[0] is Kind.GEMM1 else range(0)

    def outputs_of(self, source: int) -> list[tuple[Kind, int]]:
        """The second GEMMs that this source's rows may be in."""
        return [
            (Kind.GEMM2, i)
            for i, chunk in enumerate(self.plan.chunks)
            if chunk.rows and chunk.region >= source
        ]


def schedule(
    plan: Plan,
    *,
    order: str = "peers_second",
    overlap: bool = True,
    push: bool = False,
    early_finish: bool = False,
) -> tuple[Op, ...]:
    """The step's operations in the order in which the host queues them.

    `overlap`: memory-bound kernels beside the GEMMs; without it they take turns with them on all SMs, and only what
    copy engines do is hidden. `push`: sums for a peer are made here and travel afterwards. `early_finish`: own sources
    that are complete before the last GEMM are finished beside it.
    """
    build = _Builder(plan, overlap)
    peers = [i for i, source in enumerate(plan.sources) if source.peer]
    many = plan.geometry.ranks > 1
    build.add(Kind.ROUTING, 0, "comm")
    build.add(Kind.QUANTISE, 0, "gemm", wide=True)
    build.add(Kind.LAYOUT, 0, "comm")
    if many:
        build.add(Kind.ANNOUNCE, 0, "comm", [(Kind.QUANTISE, 0)])
        for i in peers:
            build.add(Kind.PULL, plan.sources[i].peer, "comm")
    gemms = gemm_order(plan, order)
    if gemms:
        build.place(build.needed_by(gemms[0]), "gemm")
    for step, gemm in enumerate(gemms):
        build.place(build.needed_by(gemm), "side")
        following = gemms[step + 1] if step + 1 < len(gemms) else None
        if gemm[0] is Kind.GEMM1:
            build.add(*gemm, "gemm", [(Kind.PLACE, i) for i in build.needed_by(gemm)])
        else:
            build.add(*gemm, "gemm", [(Kind.SWIGLU, gemm[1])])
        if following and overlap:
            build.place(build.needed_by(following), "side")
        _follow(build, gemm, following, peers, push)
        if early_finish and overlap and step == len(gemms) - 2:
            _finish(build, peers, "side")
    _returns(build, peers, push)
    _finish(build, peers, "gemm")
    return tuple(build.ops)


def _follow(
    build: _Builder,
    gemm: tuple[Kind, int],
    following: tuple[Kind, int] | None,
    peers: Sequence[int],
    push: bool,
) -> None:
    """What this GEMM's end makes possible. What the next GEMM waits for has all SMs."""
    if gemm[0] is Kind.GEMM1:
        alone = following == (Kind.GEMM2, gemm[1])
        build.add(Kind.SWIGLU, gemm[1], "gemm" if alone else "side", [gemm], wide=alone)
    else:
        _returns(build, peers, push)


def _returns(build: _Builder, peers: Sequence[int], push: bool) -> None:
    """Sums of every peer whose second GEMMs are all queued; after the last of them, the meeting."""
    for i in peers:
        outputs = build.outputs_of(i)
        if (Kind.REDUCE, i) in build.at or any(gemm not in build.at for gemm in outputs):
            continue
        build.add(Kind.REDUCE, i, "side", [*outputs, (Kind.LAYOUT, 0)])
        if push:
            build.add(Kind.PUSH, i, "comm", [(Kind.REDUCE, i)])
    sent = [(Kind.PUSH if push else Kind.REDUCE, i) for i in peers]
    if peers and (Kind.MEET, 0) not in build.at and all(key in build.at for key in sent):
        build.add(Kind.MEET, 0, "comm", sent)


def _finish(build: _Builder, peers: Sequence[int], stream: str) -> None:
    """Own sources that nothing is missing for."""
    if peers and (Kind.MEET, 0) not in build.at:
        return
    for i in build.plan.own:
        outputs = build.outputs_of(i)
        if (Kind.FINISH, i) in build.at or any(gemm not in build.at for gemm in outputs):
            continue
        needs = [*outputs, (Kind.LAYOUT, 0), *([(Kind.MEET, 0)] if peers else [])]
        build.add(Kind.FINISH, i, stream, needs, wide=stream == "gemm")
