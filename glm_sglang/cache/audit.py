"""An instrument for tests and benchmarks: the digest of every page when it is saved and when it is loaded.

Lines of `save|load KEY DIGEST` in one file a process, in the folder that GLM_SGLANG_CACHE_AUDIT names; without it
nothing is hashed. Joining the files of two servers by key says whether each hit brought back the bytes that were saved.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Literal

import xxhash

from glm_sglang import settings
from glm_sglang.cache.copier import HostPage


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

    def record(self, what: Literal["save", "load"], keys: Sequence[bytes], pages: Sequence[HostPage]) -> None:
        """Any thread; the pages are reserved or pinned."""
        if self._file is None:
            return
        lines = [
            f"{what} {key.hex()} {xxhash.xxh3_128_hexdigest(page.tensor.numpy().data)}\n"
            for key, page in zip(keys, pages, strict=True)
        ]
        self._file.write("".join(lines))


def mismatches(folder: Path) -> tuple[int, list[str]]:
    """(loads checked, keys of loads whose bytes were never saved under that key) over all files of a folder."""
    saved: dict[str, set[str]] = {}
    loaded: list[tuple[str, str]] = []
    for file in sorted(folder.glob("*.log")):
        for line in file.read_text().splitlines():
            what, key, digest = line.split()
            if what == "save":
                saved.setdefault(key, set()).add(digest)
            else:
                loaded.append((key, digest))
    return len(loaded), [key for key, digest in loaded if digest not in saved.get(key, set())]
