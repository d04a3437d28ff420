"""Plots as SVG for inlining: text stays text, ids are unique on the page, nothing is fetched."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from itertools import count
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib.figure import Figure as Canvas

#: Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_SIZE = (5.6, 3.3)  # inches: readable at a phone's width without zooming
_numbers = count(1)
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
}

Line = tuple[str, Sequence[float], Sequence[float]]


def lines(
    series: Sequence[Line],
    x: str,
    y: str,
    *,
    log_x: bool = False,
    marks: Sequence[tuple[str, float, float]] = (),
    marker: str = "o",
    ticks: Sequence[tuple[float, str]] = (),
) -> str:
    """Curves with a legend; `marks` are single labelled points, `ticks` replace the x axis's."""
    with mpl.rc_context(_STYLE):
        figure = Canvas(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        for (name, xs, ys), colour in zip(series, _cycle(len(series)), strict=True):
            axes.plot(xs, ys, "-", marker=marker or None, markersize=3, color=colour, label=name)
        for name, at_x, at_y in marks:
            axes.plot([at_x], [at_y], "*", markersize=11, color="#000000", label=name)
        if log_x:
            axes.set_xscale("log", base=2 if ticks else 10)
        if ticks:
            axes.set_xticks([value for value, _ in ticks], [name for _, name in ticks])
            axes.minorticks_off()
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.set_ylim(bottom=0)
        if len(series) + len(marks) > 1:
            axes.legend(frameon=False, fontsize=8)
        return _svg(figure)


def bars(
    names: Sequence[str],
    groups: Sequence[tuple[str, Sequence[dict[str, Any] | None]]],
    x: str,
    one: bool = True,
) -> str:
    """Horizontal bars with intervals, a group of bars for each name; `one` draws a line at 1."""
    with mpl.rc_context(_STYLE):
        height = max(1.6, 0.5 + 0.3 * len(names) * max(1, len(groups)))
        figure = Canvas(figsize=(_SIZE[0], height), layout="constrained")
        axes = figure.add_subplot()
        thick = 0.8 / max(1, len(groups))
        for index, ((label, values), colour) in enumerate(zip(groups, _cycle(len(groups)), strict=True)):
            at = [i + index * thick for i in range(len(names))]
            known = [(place, value) for place, value in zip(at, values, strict=True) if value]
            axes.barh(
                [p for p, _ in known], [v["value"] for _, v in known], thick * 0.9, color=colour, label=label
            )
            for place, value in known:
                if value.get("low") is not None:
                    axes.plot(
                        [value["low"], value["high"]], [place, place], "-", color="#333333", linewidth=1.4
                    )
        middle = thick * (len(groups) - 1) / 2
        axes.set_yticks([i + middle for i in range(len(names))], names)
        axes.invert_yaxis()
        if one:
            axes.axvline(1.0, color="#333333", linewidth=0.8, linestyle="--")
        axes.set_xlabel(x)
        if len(groups) > 1:
            axes.legend(frameon=False, fontsize=8)
        return _svg(figure)


def _cycle(length: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(length)]


def _svg(figure: Canvas) -> str:
    buffer = io.StringIO()
    unique = f"p{next(_numbers)}"
    with mpl.rc_context({"svg.hashsalt": unique}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # The page's width rules; the viewBox keeps the proportions.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'\bid="', f'id="{unique}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{unique}-", svg)
    return svg.strip()
