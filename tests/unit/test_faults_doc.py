"""docs/faults.md names tests: each of them exists, and every report that a test names is in its table."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
DOC = (ROOT / "docs" / "faults.md").read_text()
REPORT = r"(?:sglang|nixl|LMCache|redis-py|valkey-glide|vllm|dynamo) \d+"


def test_every_test_that_is_named_exists() -> None:
    """`folder/file.py::test`, `…::test` of the file before it, `folder/file.py`; some from unit/tiers."""
    named = re.findall(r"`(?:([\w/]+\.py)|…)(?:::(\w+))?`", DOC)
    assert len(named) > 60
    file = Path()
    for path, test in named:
        if path:
            file = next(
                (f for f in (TESTS / path, TESTS / "unit" / "tiers" / path) if f.exists()), Path(path)
            )
            assert file.is_absolute(), f"{path} does not exist"
        if test:
            assert f"def {test}(" in file.read_text(), f"{file.name} has no {test}"


def test_every_report_that_a_test_names_is_listed() -> None:
    listed = set()
    for first, more in re.findall(rf"({REPORT})((?:, \d+)*)", DOC):
        project = first.split()[0]
        listed |= {first, *(f"{project} {number}" for number in re.findall(r"\d+", more))}
    named = {
        report
        for file in TESTS.rglob("test_*.py")
        for report in re.findall(REPORT, file.read_text())
        if len(report.split()[1]) > 2
    }
    assert named - listed == set()
