"""Workloads: lengths as asked, prefixes shared exactly where they should be, the same for a seed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks import workloads
from benchmarks.workloads import Turn, mooncake
from benchmarks.workloads.text import Text, paragraphs


def build(*flags: str, size: float = 4.0) -> workloads.Workload:
    parser = argparse.ArgumentParser()
    workloads.add_arguments(parser)
    return workloads.build(parser.parse_args(flags), size)


def content(turn: Turn) -> bytes:
    """All text of a request, in order."""
    if "prompt" in turn.body:
        return str(turn.body["prompt"]).encode()
    return "".join(message["content"] for message in turn.body["messages"]).encode()


def shared(a: bytes, b: bytes) -> int:
    """Bytes that both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("tokens", [1, 100, 131072])
@pytest.mark.parametrize("size", [1.0, 4.25])
def test_text_has_the_length_asked(tokens: int, size: float) -> None:
    drawn = Text(size).draw(tokens, "seed")
    assert 0 <= round(tokens * size) - len(drawn.encode()) <= 3
    assert drawn == Text(size).draw(tokens, "seed")
    assert (
        shared(drawn.encode(), Text(size).draw(tokens, "other").encode()) <= 4
    )  # "[" and a digit or two by chance


def test_text_is_real() -> None:
    drawn = Text(1.0).draw(20_000, 1)
    inside = [part for part in paragraphs() if part in drawn]
    assert sum(map(len, inside)) > 18_000  # but for the last one, which is cut


def test_other_text_is_taken_from_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("\n\n".join(f"paragraph {i} of a document of one's own users" for i in range(3)))
    assert "of one's own users" in Text(1.0, [str(file)]).draw(200, 1)
    file.write_text("too short")
    (tmp_path / "other.txt").write_text("")
    with pytest.raises(ValueError, match="at least 2"):
        Text(1.0, [str(file), str(tmp_path / "other.txt")]).draw(10, 1)


def test_turn_two_repeats_turn_one_and_adds_a_little() -> None:
    load = build("--prompt-tokens", "2k", "--added-tokens", "100", "--answer-tokens", "10").round(3)
    assert len(load.sessions) == 4
    for session in load.sessions:
        first, second = session.turns
        assert content(second).startswith(content(first))
        added = len(content(second)) - len(content(first))
        assert added == pytest.approx(4 * 110, abs=8)
        assert (first.label, second.label) == ("turn 1", "turn 2")
        assert first.body["max_tokens"] == 10
        assert first.body["ignore_eos"] is True


@pytest.mark.parametrize("name", ["two_turn", "long_context", "mixed", "long_agent"])
def test_rounds_repeat_themselves_and_share_nothing_with_each_other(name: str) -> None:
    flags = ("--workload", name, "--prompt-tokens", "1k", "--lengths", "256,1k", "--system-tokens", "128")
    a, again, b = build(*flags).round(0), build(*flags).round(0), build(*flags).round(1)
    assert a == again
    other, salted = build(*flags, "--seed", "2").round(0), build(*flags).round(0, "salt")
    sizes = [[turn.expected_tokens for s in one.sessions for turn in s.turns] for one in (a, salted)]
    assert sizes[0] == sizes[1]
    for x in a.sessions:
        for y in (*b.sessions, *other.sessions, *salted.sessions):
            assert shared(content(x.turns[0]), content(y.turns[0])) <= 6


def test_long_context_asks_each_length_as_often() -> None:
    load = build("--workload", "long_context", "--lengths", "4k,16k", "--sessions", "3").round(0)
    labels = [session.turns[0].label for session in load.sessions]
    assert sorted(labels) == ["16k"] * 3 + ["4k"] * 3
    for session in load.sessions:
        tokens = len(content(session.turns[0])) / 4
        assert tokens == pytest.approx(session.turns[0].expected_tokens, rel=0.01)


def test_mixed_shares_the_system_prompt_and_nothing_more() -> None:
    load = build(
        "--workload", "mixed", "--system-tokens", "1k", "--lengths", "64,4k", "--sessions", "20"
    ).round(0)
    prompts = [content(session.turns[0]) for session in load.sessions]
    for other in prompts[1:]:
        assert 4096 <= shared(prompts[0], other) <= 4096 + 4
    sizes = [len(p) / 4 - 1024 for p in prompts]
    assert min(sizes) < 512 < max(sizes)


def test_the_agents_hit_share_is_a_property_of_the_prompts() -> None:
    flags = ("--workload", "long_agent", "--sessions", "8", "--prefix-sessions", "4", "--hit-share", "0.9")
    load = build(*flags, "--prompt-tokens", "64k").round(0)
    assert len(load.prelude) == 2
    prefixes = [content(turn) for turn in load.prelude]
    for session in load.sessions:
        prompt = content(session.turns[0])
        best = max(shared(prefix, prompt) for prefix in prefixes)
        assert best / len(prompt) == pytest.approx(0.9, abs=0.001)
        assert len(prompt) / 4 == pytest.approx(65536, rel=0.001)
        assert session.turns[0].body["max_tokens"] == 400


def trace(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def row(at: float, tokens: int, out: int, ids: list[int]) -> dict[str, Any]:
    return {"timestamp": at, "input_length": tokens, "output_length": out, "hash_ids": ids}


def test_a_trace_shares_what_its_hash_ids_share(tmp_path: Path) -> None:
    file = trace(
        tmp_path, row(2000, 1200, 9, [1, 2, 4]), row(1000, 1100, 7, [1, 2, 3]), row(4000, 512, 1, [5])
    )
    flags = ("--workload", "mooncake", "--trace", str(file))
    load = build(*flags, "--time-scale", "0.5", size=1.0).round(0)
    assert [session.at_s for session in load.sessions] == [0.0, 0.5, 1.5]
    first, second, third = (content(session.turns[0]) for session in load.sessions)
    assert [len(p) for p in (first, second, third)] == [1100, 1200, 512]
    assert 1024 <= shared(first, second) <= 1028
    assert shared(first, third) <= 4
    salted = build(*flags, size=1.0).round(0, "salt")
    assert [session.at_s for session in salted.sessions] == [0.0, 1.0, 3.0]
    assert shared(first, content(salted.sessions[0].turns[0])) <= 4
    assert [s.turns[0].body["max_tokens"] for s in load.sessions] == [7, 9, 1]
    # Half the length: blocks shrink with the prompt, so the share of hits stays.
    halves = [content(s.turns[0]) for s in build(*flags, "--length-scale", "0.5", size=1.0).round(0).sessions]
    assert [len(p) for p in halves] == [550, 600, 256]
    assert 512 <= shared(halves[0], halves[1]) <= 516


def test_a_file_that_is_no_trace_is_refused_by_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 1 of .*no Mooncake request"):
        mooncake.read(trace(tmp_path, {"timestamp": 1}))
    with pytest.raises(ValueError, match=r"line 2 of .*must have 3"):
        mooncake.read(trace(tmp_path, row(0, 512, 1, [1]), row(0, 1200, 1, [1])))
    with pytest.raises(ValueError, match="--trace is not given"):
        build("--workload", "mooncake")


@pytest.mark.parametrize("flags", [["--sessions", "0"], ["--prefix-sessions", "0"]])
def test_sizes_that_make_no_sense_are_refused(flags: list[str]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        build(*flags)


@pytest.mark.parametrize("flags", [["--lengths", "4kk"], ["--hit-share", "1"], ["--prompt-tokens", "-1"]])
def test_words_that_are_no_numbers_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        build(*flags)
