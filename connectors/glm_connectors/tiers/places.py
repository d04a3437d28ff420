"""Which slots may be taken, as intervals of neighbours: who takes several gets them next to each other.

Plain arithmetic on slot numbers, under the pool's lock; what a slot holds is the pool's business. A slot that is
offered is in one interval; who takes gets the shortest that is long enough, or the longest. Who takes piece by piece (the
gets of a prompt, the blocks of a save) names a lane: its first piece is taken where there is room behind it, the next
ones follow on as long as nobody else has come there. Nothing is kept for a lane: what was kept would have to be
given back, and others would be scattered meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from itertools import islice

AHEAD = 128  # slots that a lane looks for at first, and whenever it can't go on where it was
_LANES = 64  # that are remembered: requests that are fetched, and a save
_LOOKED_AT = 8  # intervals of a class


class Places:
    """Intervals of offered slots, of 0 … slots − 1; none at first."""

    def __init__(self, slots: int) -> None:
        self._offered = bytearray(slots)
        self._end: dict[int, int] = {}  # of each interval, by its first slot
        self._start: dict[int, int] = {}  # by the slot behind its last
        # First slots, by the bits of the interval's length: none of a class is twice as long as another.
        self._classes: list[dict[int, None]] = [{} for _ in range(max(slots, AHEAD).bit_length() + 1)]
        self._next: OrderedDict[Hashable, int] = OrderedDict()  # of each lane, the slot behind its last piece

    def offer(self, slots: Iterable[int]) -> None:
        """These may be taken; those that are offered already stay so."""
        offered = self._offered
        start = end = -1
        for slot in sorted(slots):
            if offered[slot]:
                continue
            offered[slot] = 1
            if slot != end:
                if start >= 0:
                    self._add(start, end)
                start = slot
            end = slot + 1
        if start >= 0:
            self._add(start, end)

    def take(self, count: int, lane: Hashable = None) -> range | None:
        """Up to `count` neighbours, no longer offered; None where nothing is."""
        start = self._next.pop(lane, None) if lane is not None else None
        if start is None or start not in self._end:
            wanted = count if lane is None else max(count, AHEAD)
            start = self._find(wanted)
            if start is None:
                return None
            end = self._remove(start)
            if end - start > wanted:  # its last ones, for the beginning of a prompt lies first
                self._insert(start, end - wanted)
                start = end - wanted
        else:
            end = self._remove(start)
        taken = range(start, min(end, start + count))
        self._offered[taken.start : taken.stop] = bytes(len(taken))
        if taken.stop < end:
            self._insert(taken.stop, end)
            if lane is not None:
                self._next[lane] = taken.stop
                if len(self._next) > _LANES:
                    self._next.popitem(last=False)
        return taken

    def _find(self, wanted: int) -> int | None:
        """The first slot of the shortest interval that is long enough, or of the longest, among those looked at."""
        bits = wanted.bit_length()
        if fits := [one for one in self._some(bits) if one[0] >= wanted]:
            return min(fits)[1]
        for longer in range(bits + 1, len(self._classes)):
            if self._classes[longer]:
                return min(self._some(longer))[1]
        for shorter in range(bits, 0, -1):
            if self._classes[shorter]:
                return max(self._some(shorter))[1]
        return None

    def _some(self, bits: int) -> Iterator[tuple[int, int]]:
        """(length, first slot) of intervals of a class."""
        return ((self._end[start] - start, start) for start in islice(self._classes[bits], _LOOKED_AT))

    def _add(self, start: int, end: int) -> None:
        """An interval, one with its neighbours from now on."""
        if (before := self._start.get(start)) is not None:
            self._remove(before)
            start = before
        if end in self._end:
            end = self._remove(end)
        self._insert(start, end)

    def _insert(self, start: int, end: int) -> None:
        self._end[start] = end
        self._start[end] = start
        self._classes[(end - start).bit_length()][start] = None

    def _remove(self, start: int) -> int:
        """Its end."""
        end = self._end.pop(start)
        del self._start[end]
        del self._classes[(end - start).bit_length()][start]
        return end
