"""The ablation's result so far: whole, and none of its rounds lost to the pause between two of them."""

from __future__ import annotations

from pathlib import Path

import orjson

from benchmarks.ab.comparison import Outcome
from benchmarks.ablation import partial
from benchmarks.ablation.__main__ import environment, finish, parser
from benchmarks.ablation.partial import Partial


def rounds(count: int) -> Outcome:
    return Outcome({}, {"": [{}] * count})


def test_what_came_too_soon_is_written_at_the_end(tmp_path: Path, monkeypatch: object) -> None:
    file = tmp_path / "x.partial"
    one = Partial(file, lambda outcome: {"rounds": len(outcome.records[""])})
    one.note(rounds(1))
    one._again = float("inf")  # the intervals took long
    one.note(rounds(2))
    one.note(rounds(3))
    assert orjson.loads(file.read_bytes()) == {"rounds": 1}
    one.write()
    assert orjson.loads(file.read_bytes()) == {"rounds": 3}
    file.unlink()
    one.write()  # nothing is new
    assert not file.exists()
    assert partial._REST >= 9


def test_of_no_path_nothing_is_written(tmp_path: Path) -> None:
    one = Partial(None, lambda outcome: {})
    one.note(rounds(1))
    one.write()


def test_a_partial_result_has_what_makes_a_figure_one() -> None:
    silent = parser().parse_args(["--model", "m", "--platform", "cpu"])
    found = finish({"answer": "none"}, "cpu", silent)
    assert {"question", "commit", "command", "machine", "versions", "date"} <= set(found)


def test_the_environment_is_what_sglang_reads_but_folders() -> None:
    assert environment(
        {
            "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
            "SGLANG_CACHE_DIR": "/tmp/x",
            "HOME": "/root",
            "SGLANG_A": "1",
        }
    ) == {"SGLANG_A": "1", "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"}
