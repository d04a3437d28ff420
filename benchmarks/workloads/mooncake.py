"""Traces in Mooncake's format: one JSON object a line with `timestamp` (ms), `input_length`, `output_length` (tokens) and
`hash_ids`, one for every block of 512 prompt tokens; equal ids mean equal blocks.

Source of the format: Mooncake's published traces (FAST25-release/traces in its repository). A block's text
is drawn from its id, so that prompts share prefixes exactly where the trace says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.workloads.model import COMPLETIONS, Load, Session, Turn, sampling
from benchmarks.workloads.text import Text, corpus_id

BLOCK = 512  # tokens


class Row(msgspec.Struct, frozen=True):
    """One request of a trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read(path: Path, limit: int | None = None) -> list[Row]:
    """The trace's first `limit` rows by time. Raises ValueError that names the line which is no such row."""
    rows = []
    decode = msgspec.json.Decoder(Row).decode
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = decode(line)
            except msgspec.MsgspecError as error:
                raise ValueError(
                    f"--trace: line {number} of {path} is no Mooncake request: {error}"
                ) from None
            blocks = -(-row.input_length // BLOCK)
            if row.input_length < 1 or len(row.hash_ids) != blocks:
                raise ValueError(
                    f"--trace: line {number} of {path} has {len(row.hash_ids)} hash_ids for {row.input_length} "
                    f"tokens; it must have {blocks}, one for every {BLOCK}"
                )
            rows.append(row)
    rows.sort(key=lambda row: row.timestamp)
    return rows[:limit]


@dataclass(frozen=True)
class Mooncake:
    """A trace, shrunk by `length_scale` in tokens and by `time_scale` in time (2: twice as slow).

    Every round replays the same arrivals with other text.
    """

    text: Text
    seed: int
    trace: Path
    limit: int | None
    time_scale: float
    length_scale: float
    name: str = "mooncake"

    def rows(self) -> list[Row]:
        """The rows that are replayed."""
        return read(self.trace, self.limit)

    def parameters(self) -> dict[str, Any]:
        """See Workload."""
        rows = self.rows()
        return {
            "trace": self.trace.name,
            "requests": len(rows),
            "time_scale": self.time_scale,
            "length_scale": self.length_scale,
            "seed": self.seed,
            "bytes_per_token": self.text.bytes_per_token,
            "text": corpus_id(self.text.files),
        }

    def largest_prompt(self) -> int:
        """See Workload."""
        return max(self._scaled(r.input_length) + self._scaled(r.output_length) for r in self.rows()) + 64

    def round(self, number: int, salt: str = "") -> Load:
        """See Workload."""
        rows = self.rows()
        start = rows[0].timestamp if rows else 0.0
        return Load(
            tuple(
                Session(
                    (self._turn(f"{number}:{salt}", row),), (row.timestamp - start) / 1e3 * self.time_scale
                )
                for row in rows
            )
        )

    def _scaled(self, tokens: int) -> int:
        return max(1, round(tokens * self.length_scale))

    def _turn(self, key: str, row: Row) -> Turn:
        size = round(self._scaled(BLOCK) * self.text.bytes_per_token)
        blocks = [self.text.exactly(size, self.seed, key, hash_id) for hash_id in row.hash_ids]
        tokens = self._scaled(row.input_length)
        prompt = "".join(blocks).encode()[: round(tokens * self.text.bytes_per_token)].decode(errors="ignore")
        body = {"prompt": prompt, **sampling(self._scaled(row.output_length))}
        return Turn(COMPLETIONS, body, "trace", tokens)
