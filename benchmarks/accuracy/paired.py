"""Statistics of paired right and wrong answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats  # type: ignore[import-untyped]

#: Below this p the two endpoints count as different.
SIGNIFICANT = 0.05
UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Pair:
    """One question's answers: as read from each text ("" where none was found), and whether each is right."""

    answer_a: str
    answer_b: str
    right_a: bool
    right_b: bool


def mcnemar(only_a: int, only_b: int) -> float:
    """Exact two-sided p of McNemar's test: the questions that one side alone answers right are a fair coin's throws.

    1.0 when there is none.
    """
    throws = only_a + only_b
    return 1.0 if throws == 0 else float(stats.binomtest(only_a, throws, 0.5).pvalue)


def fewest() -> int:
    """Questions that A must answer right before a regression could show: losing them all must be significant.

    McNemar's exact test sees only questions that one side alone answers right, and B can lose no more of them than A
    has, so its p is at least 2 · 2^-right (Fagerland, Lydersen and Laake, BMC Med Res Methodol 13:91, 2013). Six.
    """
    return next(right for right in range(1, 64) if mcnemar(right, 0) < SIGNIFICANT)


def difference(only_a: int, only_b: int, questions: int) -> tuple[float, float, float]:
    """B's share of right answers less A's, with its 95 % interval (Wald's for paired proportions)."""
    value = (only_b - only_a) / questions
    error = math.sqrt(max(0.0, only_a + only_b - (only_b - only_a) ** 2 / questions)) / questions
    wide = float(stats.norm.ppf(0.975)) * error
    return value, value - wide, value + wide


def compare(suite: str, pairs: Sequence[Pair], errors: int) -> dict[str, Any]:
    """What one suite found. `errors`: questions that one side or both did not answer, which count for neither.

    `agreement`: the share of questions to which both gave the same answer; no answer is none. `unanswered`: how many
    each side ended without one. `verdict`: "no regression found", "the two differ", or "undecided" and why.
    """
    count = len(pairs)
    found: dict[str, Any] = {
        "questions": count,
        "correct": {"a": None, "b": None},
        "unanswered": {"a": sum(not p.answer_a for p in pairs), "b": sum(not p.answer_b for p in pairs)},
        "only_a": 0,
        "only_b": 0,
        "mcnemar_p": None,
        "agreement": None,
        "difference": None,
        "errors": errors,
    }
    if not pairs:
        verdict = f"{UNDECIDED}: no question was answered by both ({errors} errors)"
        return found | {"verdict": verdict, "says": f"{suite}: {verdict}."}
    only_a = sum(p.right_a and not p.right_b for p in pairs)
    only_b = sum(p.right_b and not p.right_a for p in pairs)
    right_a, right_b = sum(p.right_a for p in pairs), sum(p.right_b for p in pairs)
    p = mcnemar(only_a, only_b)
    value, low, high = difference(only_a, only_b, count)
    agreement = sum(bool(one.answer_a) and one.answer_a == one.answer_b for one in pairs) / count
    verdict = "no regression found" if p >= SIGNIFICANT else "the two differ"
    if errors:  # the questions that are missing may be those that the two would differ on
        verdict = f"{UNDECIDED}: {errors} errors"
    elif p >= SIGNIFICANT and right_a < fewest():
        verdict = f"{UNDECIDED}: A is right {right_a} times, fewer than the {fewest()} whose loss would show"
    silent = found["unanswered"]
    return found | {
        "correct": {"a": right_a / count, "b": right_b / count},
        "only_a": only_a,
        "only_b": only_b,
        "mcnemar_p": p,
        "agreement": agreement,
        "difference": {"value": value, "low": low, "high": high},
        "verdict": verdict,
        "says": (
            f"{suite}: {verdict} (McNemar p = {p:.2g}; {right_a / count:.2%} and {right_b / count:.2%} right of {count}, "
            f"the same answer to {agreement:.1%}, none to {silent['a']} and {silent['b']}; B less A lies in "
            f"[{low:+.2%}, {high:+.2%}])."
        ),
    }
