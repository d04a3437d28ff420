"""The report: complete, self-contained, escaped; in a real browser without a horizontal scroll or a complaint."""

from __future__ import annotations

import ast
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import browser
import orjson
import pytest
from node_series import series

from benchmarks import roofline
from benchmarks.ab import records
from benchmarks.ab.client import Sample
from benchmarks.ab.load import Point, Round
from benchmarks.ab.summary import summarise
from benchmarks.ablation.analysis import analyse
from benchmarks.ablation.arms import CHANGES, Setup, arms
from benchmarks.accuracy.paired import Pair, compare
from benchmarks.report import blocks, node, page
from benchmarks.report.page import ReportError, load, not_measured, render
from benchmarks.report.questions import QUESTIONS

ROOT = Path(__file__).resolve().parents[3]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*/*.json"))
FLAGS = frozenset(word for change in CHANGES for word in change.on if word.startswith("--"))
HOSTILE = "<script>alert(1)</script>"


def comparison() -> dict[str, Any]:
    """The result of an A/B run whose figures are written here: `fast` takes half the time of `stock`."""
    lines = []
    for point in (Point(1), Point(4)):
        for number in range(8):
            for name, ttft in (("stock", 0.2), ("fast", 0.1)):
                samples = [
                    [
                        Sample(label, 0, ttft, ttft + 0.04, [0.02] * 2, 1000, cached, 3)
                        for label, cached in (("turn 1", 0), ("turn 2", 960))
                    ]
                ]
                lines.append(records.line(name, "two_turn", point, number, 0, "", Round(samples, ttft), {}))
    command = "python -m launch --model-path /models/a-very-long-path/that-does-not-break/" + "x" * 200
    return {
        "question": "ab_two_turn",
        "kind": "ab",
        "workload": "two_turn",
        "parameters": {"sessions": 1, "text": "pydoc_data.topics:0123"},
        "rounds": 8,
        "confidence": 0.95,
        "baseline": "stock",
        "endpoints": {
            name: {"processes": {"server": command}, "env": {}, "about": {"version": "0.5.23"}}
            for name in ("stock", "fast")
        },
        "discipline": {"order": "rotates", "flush": {"stock": "POST /flush_cache", "fast": HOSTILE}},
        "points": summarise(lines, ["stock", "fast"], "stock"),
        "records": "ab.jsonl",
        "not_measured": ["vLLM: not on this machine"],
        "command": "python -m benchmarks.ab --url stock=http://h:1 --note " + HOSTILE,
        "machine": {"cpu": "a CPU", "cores": 2},
        "versions": {"python": "3.11"},
        "date": "2026-01-01T00:00:00+00:00",
    }


def judged() -> list[dict[str, Any]]:
    """Results whose endpoints are compared."""
    return [comparison(), *(result for result in map(load, RESULTS) if page.kind(result) == "ab")]


def base(question: str, **more: Any) -> dict[str, Any]:
    about = {
        "command": f"python -m benchmarks.{question}",
        "machine": {"cores": 2},
        "versions": {"python": "3.11"},
    }
    return {"question": question, **about, "date": "2026-01-02T00:00:00+00:00", **more}


def others() -> list[dict[str, Any]]:
    """A result of every other kind that has a section of its own, made by the benchmark's own functions."""
    planned = arms(Setup("/m", "single", "gpu", flags="--tp 2", values={"cache": "embedded://"}), flags=FLAGS)
    lines = []
    for number in range(6):
        for name, took in zip(
            [a.name for a in planned if a.spec], (2.0, 2.0, 1.0, 1.0, 1.0, 0.5), strict=True
        ):
            samples = [[Sample("turn 2", 0.0, took, took, [], 1000, 900, 1)]]
            lines.append(records.line(name, "two_turn", Point(1), number, 0, "", Round(samples, took), {}))
    model = roofline.Model.from_config(roofline.glm_5_3())
    points = roofline.points(model, roofline.GPUS["h200"], 8, [4096, 131072], {131072: 59025.0})
    pairs = [Pair("1", "1", True, True)] * 98 + [Pair("1", "2", True, False)] * 2
    interval = {"value": 0.8, "low": 0.7, "high": 0.9, "rounds": 6, "values": 6}
    fan_in = {"prefills": 2, "errors": 0, "survives": interval}
    fan_in |= {
        "direct_tokens_per_s": {**interval, "value": 1000.0},
        "pair_tokens_per_s": {**interval, "value": 800.0},
    }
    itl = {"median": {**interval, "value": 12.5}, "p99": {**interval, "value": 30.0}}
    streams = [{"streams": 16, "itl_ms": itl, "output_tokens_per_s": 1280.0, "errors": 0}]
    return [
        base("ablation", **analyse(planned, lines, "input_tokens_per_s", "turn 2")),
        base("roofline", model="GLM-5.3", gpu="h200", gpus=8, points=points, per_token={"kv_bytes": 53940}),
        base(
            "accuracy",
            suites={"needle": compare("needle", pairs, 0)},
            endpoints={"a": "http://a, stock", "b": "http://b, ours"},
        ),
        base("decode_fanin", arms=[fan_in], streams=streams, answer="Four fifths survive.", carried=16),
        node.join(series(8)),
    ]


class Links(HTMLParser):
    """Everything that a page refers to, its ids and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "action", "srcset", "poster"):
                self.references.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def html() -> str:
    """A page of every result in the repository, an A/B run, and one of every other kind."""
    return render(
        [comparison(), *others(), *map(load, RESULTS)], "python -m benchmarks.report x.json", "measured"
    )


@pytest.fixture(scope="module")
def parsed(html: str) -> Links:
    links = Links()
    links.feed(html)
    return links


def test_nothing_is_fetched_and_every_link_has_its_target(html: str, parsed: Links) -> None:
    outside = [ref for ref in parsed.references if not ref.startswith(("#", "data:"))]
    assert outside == []
    assert "@import" not in html
    assert "url(http" not in html
    assert len(parsed.ids) == len(set(parsed.ids))
    targets = {ref[1:] for ref in parsed.references if ref.startswith("#")}
    assert targets <= set(parsed.ids)
    assert "script" not in parsed.tags  # also proves that the hostile text was escaped


def test_every_result_says_command_machine_and_versions(parsed: Links) -> None:
    text = " ".join(parsed.words)
    for result in [comparison(), *map(load, RESULTS)]:
        assert result["command"] in text
        assert result["date"] in text
        assert f"python {result['versions']['python']}" in text
    assert HOSTILE in text


def test_the_figures_are_the_results(parsed: Links) -> None:
    text = " ".join(parsed.words)
    assert "input tokens per second 2× (faster), first token 2× as fast." in text
    # Of every pair and point one line is the verdict, in results from before that was said as well.
    tables = [block for result in judged() for block in page.section(result).blocks if block.kind == "table"]
    lines = [row for table in tables for row in table.rows if "which says" in table.head]
    assert {row[4] for row in lines if row[5] in ("faster", "slower", "no difference")} == {"verdict"}
    assert {row[2] for row in lines if row[4] == "verdict"} == {"input tokens/s"}
    assert "200 [200, 200]" in text  # TTFT p50 of stock, ms
    assert "96.0\u202f%" in text  # cached in turn 2
    assert "48.0\u202f%" in text  # over both turns


def test_the_other_sections_say_what_their_results_say(parsed: Links) -> None:
    text = " ".join(parsed.words)
    assert "all against stock SGLang: input tokens/s 4.000× (faster)." in text
    assert "no switch of its own: a part of the cache" in text
    assert "alone they would multiply to 8.000×, together they give 4.000×: they take from each other" in text
    assert "53k → ~94k tokens/s at 128k (1.77×), projected from measured pieces" in text
    assert "quoted from the article (8×B300, vLLM); nothing in it was measured here" in text
    assert "The measured run reaches 50.0\u202f% of it at 131,072 tokens." in text
    assert "needle: no regression found (McNemar p = 0.5; 100.00% and 98.00% right of 100" in text
    assert "Four fifths survive." in text
    assert "5 of the 6 targets that could be judged are reached." in text
    assert "35 % → 5 to 8 %" in text
    assert "0.8 [0.7, 0.9]" in text


def test_plots_are_inline_and_their_text_is_text(html: str, parsed: Links) -> None:
    assert html.count("<svg") >= 1
    assert "time to first token" not in html or "<text" in html
    assert "input tokens/s" in parsed.words  # an axis label


def test_what_was_not_measured_is_said() -> None:
    lines = not_measured([comparison()])
    assert lines[0] == "vLLM: not on this machine"
    kinds = {line.partition(":")[0] for line in lines[1:]}
    assert kinds == set(QUESTIONS) - {"ab"}
    assert "ab" not in kinds


def written() -> dict[str, str]:
    """What every benchmark writes: the question that it passes to `_result.finish`, and in which file."""
    found: dict[str, str] = {}
    for file in sorted((ROOT / "benchmarks").rglob("*.py")):
        tree = ast.parse(file.read_text())
        named: dict[str, list[str]] = {}
        for node_ in ast.walk(tree):
            if isinstance(node_, ast.Assign) and isinstance(node_.targets[0], ast.Name):
                choices = (
                    [node_.value.body, node_.value.orelse]
                    if isinstance(node_.value, ast.IfExp)
                    else [node_.value]
                )
                words = [one.value for one in choices if isinstance(one, ast.Constant)]
                named[node_.targets[0].id] = [word for word in words if isinstance(word, str)]
        for node_ in ast.walk(tree):
            if isinstance(node_, ast.Call) and ast.unparse(node_.func) == "_result.finish":
                match node_.args[0]:
                    case ast.Constant(value=str(question)):
                        questions = [question]
                    case ast.Name(id=name):
                        questions = named[name]
                    case ast.Attribute(attr="name"):  # --name of an A/B run, whose kind is always the same
                        questions = ["ab"]
                    case other:
                        raise AssertionError(f"{file.name}: which question is {ast.unparse(other)}?")
                assert questions, file.name
                found |= dict.fromkeys(questions, file.name)
    return found


def test_whatever_a_benchmark_writes_is_missed_where_it_is_missing() -> None:
    """And every change of the article has a benchmark of its own: a page without it says that it was not measured."""
    asked = written()
    assert {"ab", "ab_statistics", "ablation", "gpu_idle", "make_test", "moe_server"} <= set(asked)
    assert set(asked) <= set(QUESTIONS)
    saved = {page.kind(result) for result in map(load, RESULTS)}
    assert saved <= set(QUESTIONS)
    nothing = not_measured([])
    assert len(nothing) == len(QUESTIONS)
    for number in range(1, 6):
        assert [name for name, question in QUESTIONS.items() if question.changes == (number,)]
        assert any(f"(change {number} of the article)" in line for line in nothing)
    assert not [line for line in not_measured(list(map(load, RESULTS))) if line.startswith("gpu_idle:")]


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read"), ("[]", "has no command"), ('{"question": 1}', "has no command, date, machine")],
)
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ReportError, match=message):
        load(file)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.report", str(file), "-o", str(tmp_path / "r.html")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert str(file) in done.stderr
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "n/a"),
        (True, "yes"),
        (1234567, "1\u202f234\u202f567"),
        (0.123456, "0.1235"),
        (12345.6, "12\u202f346"),
        (2.5e-7, "2.500e-07"),
        (3.2e9, "3.200e+09"),
        (0.0, "0"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_read_as_people_write_them(value: Any, shown: str) -> None:
    assert blocks.number(value) == shown


@pytest.mark.parametrize(
    ("cell", "figure"),
    [
        ("n/a", True),
        ("1\u202f234", True),
        ("-0.5", True),
        ("1.2e-05", True),
        ("1.05 [0.913, 1.23]", True),
        ("98.0\u202f%", True),
        ("1 MegaMoE", False),
        ("3, 4 and 5 the cache", False),
        ("6×: HTTP 500", False),
        ("none", False),
        ("", False),
    ],
)
def test_figures_line_up_and_names_do_not(cell: str, figure: bool) -> None:
    assert blocks.is_figure(cell) is figure


@pytest.mark.skipif(
    browser.executable() is None, reason="no Chromium here (Debian: apt-get install chromium)"
)
async def test_in_a_browser_on_a_phone_and_on_a_desk(html: str, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(html, encoding="utf-8")
    async with browser.page() as page:
        for width in (390, 1280):
            await page.open(file.as_uri(), width)
            assert await page.evaluate("window.innerWidth") == width
            # No horizontal scroll of the page; what is wider scrolls in its own frame.
            wide = "document.scrollingElement.scrollWidth"
            assert await page.evaluate(wide) <= width
            offenders = await page.evaluate(
                "[...document.querySelectorAll('body *')].filter(e => !e.closest('.wide, pre, svg') && "
                "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + ' ' + e.className)"
            )
            assert offenders == []
            frames = await page.evaluate(
                "[...document.querySelectorAll('.wide')].every(e => getComputedStyle(e).overflowX === 'auto')"
            )
            assert frames
            sizes = await page.evaluate(
                "[...document.querySelectorAll('figure svg')].map(e => e.getBoundingClientRect().width)"
            )
            assert sizes
            assert all(200 < size <= width for size in sizes)
            smallest = await page.evaluate(
                "Math.min(...[...document.querySelectorAll('p, td, dd, li, pre')].map(e => "
                "parseFloat(getComputedStyle(e).fontSize)))"
            )
            assert smallest >= 12
        assert page.console == []
        assert {url.partition(":")[0] for url in page.requested} <= {"file", "data", "about"}


def test_a_command_line_writes_the_page(tmp_path: Path) -> None:
    result = tmp_path / "ab.json"
    result.write_bytes(orjson.dumps(comparison()))
    out = tmp_path / "r.html"
    argv = [sys.executable, "-m", "benchmarks.report", str(result), "-o", str(out)]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
    assert "vLLM: not on this machine" in out.read_text()
