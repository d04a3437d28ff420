"""What a section of the page is made of. All text is plain; the template escapes it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table. Cells that are numbers are set to the right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    kind: str = "table"


@dataclass(frozen=True)
class Figure:
    """A plot as SVG markup of our own making, with the words for who cannot see it."""

    svg: str
    caption: str
    kind: str = "figure"


@dataclass(frozen=True)
class Facts:
    """Named facts, one a line."""

    items: Sequence[tuple[str, str]]
    kind: str = "facts"


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    kind: str = "text"


@dataclass(frozen=True)
class Code:
    """A command or raw data; folded away when it has a title."""

    text: str
    title: str = ""
    kind: str = "code"


Block = Table | Figure | Facts | Text | Code


@dataclass
class Section:
    """One result: its question, the answer in a sentence, what stands behind it."""

    title: str
    lead: str
    blocks: list[Block] = field(default_factory=list)
    anchor: str = ""


def number(value: Any, digits: int = 4) -> str:
    """A number as people read it: `digits` significant ones, thousands apart, no exponent before 1e7."""
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f")
    if not isinstance(value, float):
        return str(value)
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if value and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.{digits - 1}e}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}".replace(",", "\u202f")
    return f"{value:.{digits}g}"


def is_figure(text: str) -> bool:
    """Whether a cell is a number, with an interval or a percent sign perhaps: such cells line up at the right."""
    return re.fullmatch(r"n/a|-?[0-9][0-9.\u202fe+-]*( \[.*\])?(\u202f%)?", text) is not None


def interval(found: dict[str, Any] | None, digits: int = 4) -> str:
    """`1.23 [1.2, 1.26]`; the value alone without an interval."""
    if not found:
        return "n/a"
    value = number(float(found["value"]), digits)
    if found.get("low") is None:
        return value
    return f"{value} [{number(float(found['low']), digits)}, {number(float(found['high']), digits)}]"


def share(value: float | None) -> str:
    """0.981 as 98.1 %."""
    return "n/a" if value is None else f"{value * 100:.1f}\u202f%"
