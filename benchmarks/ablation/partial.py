"""The result so far in a file: after rounds, and before the servers are stopped, whatever ends the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from benchmarks.ab.comparison import Outcome

_REST = 9.0  # intervals take seconds, and the servers wait meanwhile: a tenth of the time at most


class Partial:
    """Writes what `make` says of the rounds so far, whole: the file before is replaced. Of no path it writes nothing."""

    def __init__(self, path: Path | None, make: Callable[[Outcome], dict[str, Any]]) -> None:
        self.path = path
        self.make = make
        self._unwritten: Outcome | None = None
        self._again = 0.0

    def note(self, outcome: Outcome) -> None:
        """Takes what there is, and writes it, unless the last time was a moment ago."""
        self._unwritten = outcome
        if time.monotonic() >= self._again:
            self.write()

    def write(self) -> None:
        """Writes what has been noted and is not written yet."""
        outcome, self._unwritten = self._unwritten, None
        if self.path is None or outcome is None:
            return
        began = time.monotonic()
        beside = self.path.with_name(f"{self.path.name}.tmp")
        beside.write_bytes(orjson.dumps(self.make(outcome), option=orjson.OPT_APPEND_NEWLINE))
        beside.replace(self.path)
        self._again = time.monotonic() + _REST * (time.monotonic() - began)
