"""From results to the page."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import orjson

from benchmarks import _result
from benchmarks.report import comparisons, node, others
from benchmarks.report.blocks import Code, Facts, Section, is_figure, number
from benchmarks.report.questions import QUESTIONS

_SECTIONS = {
    "ab": comparisons.comparison,
    "ablation": comparisons.ablation,
    "roofline": others.roofline,
    "accuracy": others.accuracy,
    "decode_fanin": others.fanin,
    "node": node.section,
}
_MOST_RAW = 200_000  # bytes of one raw result on the page


class ReportError(ValueError):
    """A file is no result of ours; the message names it."""


def load(path: Path) -> dict[str, Any]:
    """One result. Raises ReportError."""
    try:
        result = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ReportError(f"RESULTS: {path} cannot be read: {error}") from None
    missing = {"question", "command", "machine", "versions", "date"} - set(
        result if isinstance(result, dict) else ()
    )
    if missing:
        raise ReportError(
            f"RESULTS: {path} has no {', '.join(sorted(missing))}; it must be what a benchmark printed or saved "
            "with --json or --save"
        )
    return dict(result)


def kind(result: dict[str, Any]) -> str:
    """Which section draws it; "" for the general one."""
    return str(result.get("kind") or result["question"])


def section(result: dict[str, Any]) -> Section:
    """The result's section, with its command, commit, machine, versions and raw data at the end."""
    found = _SECTIONS.get(kind(result), others.anything)(result)
    found.anchor = re.sub(r"[^a-z0-9]+", "-", f"{result['question']}-{result['date']}".lower()).strip("-")
    found.blocks.append(Code(result["command"]))
    machine = ", ".join(
        f"{key.replace('_', ' ')} {number(value)}" for key, value in result["machine"].items()
    )
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    measured = " at ".join(filter(None, (result["date"], result.get("commit"))))
    found.blocks.append(Facts([("machine", machine), ("versions", versions), ("measured", measured)]))
    raw = orjson.dumps(result, option=orjson.OPT_INDENT_2).decode()
    if len(raw) <= _MOST_RAW:
        found.blocks.append(Code(raw, title="the raw result"))
    return found


def not_measured(results: Sequence[dict[str, Any]]) -> list[str]:
    """What the results say they left out, and the questions to which none of them is an answer."""
    said = [str(line) for result in results for line in result.get("not_measured", ())]
    kinds = {kind(result) for result in results} | {str(result["question"]) for result in results}
    absent = [
        f"{name}: {words}; no result was given" for name, words in QUESTIONS.items() if name not in kinds
    ]
    return list(dict.fromkeys(said + absent))


def render(results: Sequence[dict[str, Any]], command: str, title: str) -> str:
    """The page as one HTML document that refers to nothing outside of it."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests["figure"] = is_figure
    return environment.get_template("page.html.j2").render(
        title=title,
        sections=[section(result) for result in results],
        not_measured=not_measured(results),
        command=command,
        versions=_result.versions(),
        date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
    )
