"""Statistics of paired right and wrong answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats  # type: ignore[import-untyped]

#: Below this p the two endpoints count as different.
SIGNIFICANT = 0.05


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


def difference(only_a: int, only_b: int, questions: int) -> tuple[float, float, float]:
    """B's share of right answers less A's, with its 95 % interval (Wald's for paired proportions)."""
    value = (only_b - only_a) / questions
    error = math.sqrt(max(0.0, only_a + only_b - (only_b - only_a) ** 2 / questions)) / questions
    wide = float(stats.norm.ppf(0.975)) * error
    return value, value - wide, value + wide


def compare(suite: str, pairs: Sequence[Pair], errors: int) -> dict[str, Any]:
    """What one suite found. `errors`: questions that one side or both did not answer, which count for neither."""
    if not pairs:
        return {
            "questions": 0,
            "correct": {"a": None, "b": None},
            "only_a": 0,
            "only_b": 0,
            "mcnemar_p": None,
            "agreement": None,
            "difference": None,
            "errors": errors,
            "says": f"{suite}: no question was answered by both ({errors} errors).",
        }
    count = len(pairs)
    only_a = sum(p.right_a and not p.right_b for p in pairs)
    only_b = sum(p.right_b and not p.right_a for p in pairs)
    right = {"a": sum(p.right_a for p in pairs) / count, "b": sum(p.right_b for p in pairs) / count}
    p = mcnemar(only_a, only_b)
    value, low, high = difference(only_a, only_b, count)
    agreement = sum(one.answer_a == one.answer_b for one in pairs) / count
    verdict = "no regression found" if p >= SIGNIFICANT else "the two differ"
    if errors:  # the questions that are missing may be those that the two would differ on
        verdict = f"undecided: {errors} errors"
    return {
        "questions": count,
        "correct": right,
        "only_a": only_a,
        "only_b": only_b,
        "mcnemar_p": p,
        "agreement": agreement,
        "difference": {"value": value, "low": low, "high": high},
        "errors": errors,
        "says": (
            f"{suite}: {verdict} (McNemar p = {p:.2g}; {right['a']:.2%} and {right['b']:.2%} right of {count}, the "
            f"same answer to {agreement:.1%}; B less A lies in [{low:+.2%}, {high:+.2%}])."
        ),
    }
