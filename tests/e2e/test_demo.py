"""`make demo` as a newcomer runs it, and as they interrupt it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import orjson
import pytest

from glm_sglang.serving import group_members

ROOT = Path(__file__).resolve().parents[2]
PAGE = 64


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The demo with DEMO_KEEP=1 in a process group of its own, and its output."""
    output = tmp_path_factory.mktemp("demo") / "output"
    (ROOT / "demo-report.json").unlink(missing_ok=True)
    with output.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.demo"],
            cwd=ROOT,
            env={**os.environ, "DEMO_KEEP": "1", "COLUMNS": "200"},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 400
        while b"curl " not in output.read_bytes():
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.2)
        yield process, output
    finally:
        process.kill()
        process.wait()


def test_the_table_and_the_report_say_the_same(demo: tuple[subprocess.Popen[bytes], Path]) -> None:
    report = orjson.loads((ROOT / "demo-report.json").read_bytes())
    first, second = report["turns"]
    assert first["prompt_tokens"] > 2000
    assert first["cached_tokens"] == 0
    # Turn 2 repeats turn 1's prompt; whole pages of it are cached on the prefill node.
    assert second["cached_tokens"] == first["prompt_tokens"] // PAGE * PAGE
    assert report["peak_memory_gib"] < 8
    text = demo[1].read_text()
    for turn in report["turns"]:
        assert str(turn["prompt_tokens"]) in text
        assert str(turn["cached_tokens"]) in text


def test_the_printed_curl_line_answers(demo: tuple[subprocess.Popen[bytes], Path]) -> None:
    line = next(line for line in demo[1].read_text().splitlines() if line.startswith("curl "))
    done = subprocess.run(["bash", "-c", f"{line} --silent"], capture_output=True, timeout=120, check=True)
    assert orjson.loads(done.stdout)["choices"][0]["message"]["content"]


def test_ctrl_c_leaves_no_process(demo: tuple[subprocess.Popen[bytes], Path]) -> None:
    process, output = demo
    groups = _groups_of(process.pid)
    assert len(groups) >= 4  # the demo, prefill, decode, router
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=90) == 130, output.read_text()
    assert [member for group in groups for member in group_members(group)] == []
    line = next(line for line in output.read_text().splitlines() if line.startswith("curl "))
    with pytest.raises(httpx.ConnectError):
        httpx.get(line.split()[1], trust_env=False)


def _groups_of(pid: int) -> list[int]:
    """Process groups of `pid` and of everything below it."""
    children: dict[int, list[tuple[int, int]]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            child, parent, group = _stat(entry)
        except (OSError, ValueError):
            continue
        children.setdefault(parent, []).append((child, group))
    found, queue = {os.getpgid(pid)}, [pid]
    while queue:
        for child, group in children.get(queue.pop(), []):
            found.add(group)
            queue.append(child)
    return sorted(found)


def _stat(entry: Path) -> tuple[int, int, int]:
    fields = entry.read_text().rpartition(")")[2].split()
    return int(entry.parent.name), int(fields[1]), int(fields[2])
