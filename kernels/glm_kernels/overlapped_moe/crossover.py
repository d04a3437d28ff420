"""Which path computes a MoE layer: decided by what was measured on this GPU, and MegaMoE where nothing was.

`benchmarks.moe_layer --crossover RESULT.json` writes the table, an entry a size; those of other sizes, GPUs and shapes
stay.
Policy only: no torch.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path as File
from typing import Any

TABLE = File(__file__).parent / "crossover.json"
MARGIN = 0.01
"""Share of MegaMoE's time by which the overlapped path must be faster: runs of one arm differ by less."""


class Path(enum.StrEnum):
    """Ways to compute a MoE layer over an EP group."""

    MEGAMOE = "megamoe"
    OVERLAPPED = "overlapped"


@dataclass(frozen=True)
class Key:
    """What a measurement is of: the GPU by name, the group, and the layer's shape on a rank."""

    gpu: str
    ranks: int
    hidden: int
    intermediate: int
    experts_a_rank: int
    top_k: int


@dataclass(frozen=True)
class Measured:
    """Milliseconds of both paths at `tokens` a rank; `options` are the overlapped path's at that time."""

    key: Key
    tokens: int
    megamoe_ms: float
    overlapped_ms: float
    options: dict[str, Any]
    date: str

    @property
    def winner(self) -> Path:
        faster = self.overlapped_ms < (1 - MARGIN) * self.megamoe_ms
        return Path.OVERLAPPED if faster else Path.MEGAMOE


@dataclass(frozen=True)
class Choice:
    """The path, and the options that it was measured with (None for MegaMoE)."""

    path: Path
    options: dict[str, Any] | None = None


class Crossover:
    """Measurements, the latest of each key and size."""

    def __init__(self, entries: Iterable[Measured] = ()) -> None:
        self._entries: dict[tuple[Key, int], Measured] = {}
        self.add(entries)

    def add(self, entries: Iterable[Measured]) -> None:
        """Later entries replace earlier ones of the same key and size."""
        for entry in entries:
            self._entries[entry.key, entry.tokens] = entry

    @property
    def entries(self) -> list[Measured]:
        """Sorted by key and size."""
        return sorted(self._entries.values(), key=lambda entry: (str(entry.key), entry.tokens))

    def choose(self, key: Key, tokens: int) -> Choice:
        """OVERLAPPED only at a size where it won, or between two neighbouring sizes that it won both; options are
        those of the nearest such size. Everything else is MEGAMOE, and so is every size outside what was measured.
        """
        sizes = sorted(size for of, size in self._entries if of == key)
        below = [size for size in sizes if size <= tokens]
        above = [size for size in sizes if size >= tokens]
        if not below or not above:
            return Choice(Path.MEGAMOE)
        ends = [self._entries[key, below[-1]], self._entries[key, above[0]]]
        if any(end.winner is Path.MEGAMOE for end in ends):
            return Choice(Path.MEGAMOE)
        nearest = min(ends, key=lambda end: abs(end.tokens - tokens))
        return Choice(Path.OVERLAPPED, nearest.options)

    @classmethod
    def load(cls, file: File | None = None) -> Crossover:
        """The table (TABLE), empty where the file is not there. Raises ValueError for one that is not a table."""
        file = file or TABLE
        if not file.exists():
            return cls()
        try:
            lines = json.loads(file.read_text())
            return cls(Measured(**{**line, "key": Key(**line["key"])}) for line in lines)
        except (TypeError, KeyError, json.JSONDecodeError) as error:
            names = ", ".join(field.name for field in fields(Measured))
            raise ValueError(
                f"{file} is no list of {names}: {error}. Write it with `python -m benchmarks.moe_layer "
                "--crossover RESULT.json`, or remove it"
            ) from error

    def save(self, file: File | None = None) -> None:
        """Writes all entries, one a line."""
        file = file or TABLE
        lines = ",\n".join(json.dumps(asdict(entry)) for entry in self.entries)
        file.write_text(f"[\n{lines}\n]\n")
