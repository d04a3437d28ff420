"""The A/B harness against real servers: what it says of tokens, hits and errors is what the servers did."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson

from glm_sglang.serving import Server
from tests.e2e.one_pair.conftest import Pair

ROOT = Path(__file__).resolve().parents[3]
PAGE = 64
PROMPT, ADDED, ANSWER = 300, 40, 3


def compare(folder: Path, flags: str) -> dict[str, Any]:
    argv = [
        sys.executable,
        "-m",
        "benchmarks.ab",
        "-o",
        str(folder / "ab.jsonl"),
        "--json",
        *shlex.split(flags),
    ]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(orjson.loads(done.stdout.splitlines()[-1]))


def test_two_turns_of_an_aggregated_server_and_of_a_pair(
    aggregated: Server, pair: Pair, tmp_path: Path
) -> None:
    """Both get the same prompts; each round starts cold, and turn 2 hits every whole page of turn 1's prompt.

    The router passes /flush_cache on to nobody, so the pair is compared by texts that differ.
    """
    result = compare(
        tmp_path,
        f"--url alone={aggregated.url} --url pair={pair.router().url} --no-flush --between running --rounds 2 "
        f"--sessions 2 --concurrency 2 --warm-up 1 --round-warm-up 0 "
        f"--prompt-tokens {PROMPT} --added-tokens {ADDED} --answer-tokens {ANSWER}",
    )
    # As bench_serving writes it: with Infinity, which orjson does not read.
    lines = [json.loads(line) for line in (tmp_path / "ab.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    by_round = {(line["tag"], line["glm_ab"]["round"]): line for line in lines}
    for number in range(2):
        assert by_round["alone", number]["input_lens"] == by_round["pair", number]["input_lens"]
        # Greedy answers of one checkpoint.
        assert by_round["alone", number]["generated_texts"] == by_round["pair", number]["generated_texts"]
    for line in lines:
        assert line["errors"] == [""] * 4
        assert line["output_lens"] == [ANSWER] * 4
        samples = dict(
            zip(
                line["glm_ab"]["keys"],
                zip(line["input_lens"], line["cached_tokens"], strict=True),
                strict=True,
            )
        )
        for session in "01":
            first, second = samples[f"{session}.0"], samples[f"{session}.1"]
            assert first[1] == 0
            # The template's marker after turn 1's prompt is not a part of turn 2's.
            assert second[1] in (first[0] // PAGE * PAGE, (first[0] - 1) // PAGE * PAGE)
            assert second[0] > first[0] + ADDED
    (point,) = result["points"]
    assert point["speedups"]["pair"]["dropped_pairs"] == 0
    for name in ("alone", "pair"):
        one = point["endpoints"][name]
        assert (one["requests"], one["errors"]) == (8, 0)
        turns = one["by_label"]["turn 2"]
        cached = sum(s for line in lines if line["tag"] == name for s in line["cached_tokens"])
        assert turns["cached_tokens"] == cached > 0
    assert result["endpoints"]["alone"]["about"]["version"] == "0.5.23"
