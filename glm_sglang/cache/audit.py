"""An instrument for tests and benchmarks: whether every page that comes back is the page that was computed.

In one file a process, in the folder that GLM_SGLANG_CACHE_AUDIT names, a line for each page and each look at it:

  save KEY DIGEST     in the CPU pool, when it has been saved there
  again NUMBER DIGEST on the device, read once more when the save's forward is over; NUMBER is the page's on the device,
                      DIGEST is `-` where the bytes are those of the save
  load KEY DIGEST     in the CPU pool, when a request loads it
  device KEY DIGEST   on the device, read back behind the load and before any later forward

so a gather before the forward has written, a scatter to another page, or bytes that change anywhere between, are found.
Joining the files of two servers by key says whether each hit brought back what was saved. Without the variable nothing is
hashed or read again. With it a launch takes some tenths of a millisecond longer for a load, and a save a step.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import torch
import xxhash

from glm_sglang import settings
from glm_sglang.cache.copier import HostPage, PageCopier

#: Of host memory, for pages that are on their way back from loads; what finds no room is not looked at.
BACK_BYTES = 1 << 30
_AGAIN = 32  # pages that are read again at once
What = Literal["save", "again", "load", "device"]


class Audit:
    """Writes nothing unless it is given a folder."""

    def __init__(self, folder: str = "") -> None:
        self._file: IO[str] | None = None
        if folder:
            path = Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            self._file = (path / f"{os.getpid()}.log").open("a", buffering=1)

    @classmethod
    def from_environment(cls) -> Audit:
        """As GLM_SGLANG_CACHE_AUDIT says."""
        return cls(settings.read(settings.CACHE_AUDIT))

    @property
    def on(self) -> bool:
        """Whether it writes."""
        return self._file is not None

    def record(self, what: What, keys: Sequence[bytes], pages: Sequence[HostPage]) -> None:
        """Any thread; the pages are reserved, pinned, or the audit's own."""
        if self._file is not None:
            self._write((what, key.hex(), _digest(page)) for key, page in zip(keys, pages, strict=True))

    def _write(self, lines: Iterator[tuple[str, str, str]]) -> None:
        assert self._file is not None
        self._file.write("".join(f"{what} {key} {digest}\n" for what, key, digest in lines))

    def watch(self, copier: PageCopier) -> Watch | None:
        """From now on this copier's saves are read again; what reads its loads back. None where the audit is off."""
        return Watch(self, copier) if self.on else None

    def read_again(
        self, copier: PageCopier, memory: _Memory, pages: Sequence[int], saved: Sequence[HostPage]
    ) -> None:
        """Save thread: the device pages whose bytes have just come into `saved`."""
        for start in range(0, len(pages), _AGAIN):
            numbers, before = pages[start : start + _AGAIN], saved[start : start + _AGAIN]
            with memory.pages(len(numbers)) as after:
                copier.save_again(numbers, after)
                self._write(
                    ("again", str(number), "-" if torch.equal(one.tensor, other.tensor) else _digest(other))
                    for number, one, other in zip(numbers, before, after, strict=True)
                )


@dataclass(frozen=True, slots=True)
class _Own:
    tensor: torch.Tensor

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()


class _Memory:
    """Host pages of the audit's, given out and taken back by any thread."""

    def __init__(self, copier: PageCopier, count: int) -> None:
        self._pages = [_Own(page) for page in copier.own_memory(count)]
        self._free = list(range(count))
        self._lock = threading.Lock()

    def take(self, wanted: int) -> list[int]:
        """As many as there are, at most."""
        with self._lock:
            taken, self._free = self._free[:wanted], self._free[wanted:]
            return taken

    def give(self, taken: Sequence[int]) -> None:
        """Back; neighbours come together again."""
        with self._lock:
            self._free = sorted([*self._free, *taken])

    def of(self, taken: Sequence[int]) -> list[_Own]:
        """The pages."""
        return [self._pages[number] for number in taken]

    @contextmanager
    def pages(self, count: int) -> Iterator[list[_Own]]:
        """For a while."""
        taken = self.take(count)
        try:
            yield self.of(taken)
        finally:
            self.give(taken)


class Watch:
    """The device's side. One for a copier."""

    def __init__(self, audit: Audit, copier: PageCopier) -> None:
        self._audit, self._copier = audit, copier
        self._back = _Memory(copier, max(8, BACK_BYTES // copier.page_bytes))
        again = _Memory(copier, _AGAIN)
        copier.saved = lambda pages, into: audit.read_again(copier, again, pages, into)

    def start_load(
        self,
        slots: Sequence[torch.Tensor],
        keys: Sequence[bytes],
        source: Sequence[HostPage],
        landed: Callable[[int], None],
    ) -> Callable[[], int]:
        """`PageCopier.start_load`; what it returns has the pages that were loaded, as the device has them, recorded."""
        last = self._copier.layers - 1
        looks: list[Callable[[], None]] = []

        def landing(layer: int) -> None:
            if layer == last:
                looks.append(self._look(slots, keys))
            landed(layer)

        wait = self._copier.start_load(slots, source, landing)

        def ended() -> int:
            runs = wait()
            for look in looks:
                look()
            return runs

        return ended

    def _look(self, slots: Sequence[torch.Tensor], keys: Sequence[bytes]) -> Callable[[], None]:
        """Load thread. The result records the pages, or as many of the first as there is memory for."""
        taken = self._back.take(len(keys))
        into = self._back.of(taken)
        tokens = sum(one.shape[0] for one in slots) // len(keys) * len(taken)
        some: list[torch.Tensor] = []
        for one in slots:
            some.append(one[:tokens])
            tokens -= some[-1].shape[0]
        wait = self._copier.read_back([one for one in some if one.shape[0]], into) if taken else _nothing

        def look() -> None:
            wait()
            self._audit.record("device", keys[: len(taken)], into)
            self._back.give(taken)

        return look


def mismatches(folder: Path) -> tuple[int, list[str]]:
    """(loads checked in the CPU pool, what is wrong) over all files of a folder.

    Wrong are keys of loads whose bytes were never saved under that key, `device KEY` where others came to the device, and
    `again NUMBER` of a device page that became something else after it had been saved.
    """
    saved: dict[str, set[str]] = {}
    looks: list[tuple[str, str, str]] = []
    for what, key, digest in _lines(folder):
        if what == "save":
            saved.setdefault(key, set()).add(digest)
        else:
            looks.append((what, key, digest))
    wrong = [
        (what, key)
        for what, key, digest in looks
        if (digest != "-" if what == "again" else digest not in saved.get(key, ()))
    ]
    checked = sum(what == "load" for what, _, _ in looks)
    return checked, [key if what == "load" else f"{what} {key}" for what, key in wrong]


def looks(folder: Path) -> Counter[str]:
    """Lines of each kind, over all files of a folder."""
    return Counter(what for what, _, _ in _lines(folder))


def _lines(folder: Path) -> Iterator[tuple[str, str, str]]:
    for file in sorted(folder.glob("*.log")):
        for line in file.read_text().splitlines():
            what, key, digest = line.split()
            yield what, key, digest


def _nothing() -> None:
    return None


def _digest(page: HostPage) -> str:
    return xxhash.xxh3_128_hexdigest(page.tensor.numpy().data)
