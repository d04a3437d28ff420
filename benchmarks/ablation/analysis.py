"""From rounds at every arm to shares and interaction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.ab.statistics import ratio
from benchmarks.ab.summary import ABOVE, BELOW, METRICS, aligned, by_round, speedup, summarise, verdict
from benchmarks.ab.summary import ALL as EVERY
from benchmarks.ablation.arms import ALL, NONE, STOCK, Arm


def speedups(
    records: Sequence[dict[str, Any]],
    names: Sequence[str],
    baseline: str,
    metric: str,
    label: str,
    judged: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Every endpoint's speed-up over the baseline at the sweep's first point, with its interval: the judged one's a
    verdict, the others' remarks.
    """
    of = aligned(records, names, records[0]["glm_ab"]["point"])
    found = {
        name: speedup(of[baseline], of[name], metric, label, verdicts=int(name == judged))
        for name in names
        if name != baseline
    }
    return {name: one for name, one in found.items() if one}


def share(alone: Mapping[str, Any], together: Mapping[str, Any]) -> float | None:
    """The share of all changes' gain that one brings alone, in logarithms, so that factors add up.

    None where the interval of all together holds 1, or nothing is decided: there is no gain to have a share of.
    """
    if together["says"] not in (ABOVE, BELOW):
        return None
    return math.log(alone["value"]) / math.log(together["value"])


def per_round(
    records: Sequence[dict[str, Any]], names: Sequence[str], metric: str, label: str
) -> dict[str, list[float]]:
    """Each arm's speed-up over `none` in every round in which all of them have one (the geometric mean of its pairs)."""
    of = aligned(records, [NONE, *names], records[0]["glm_ab"]["point"])
    found = [by_round(of[NONE], of[name], metric, label) for name in names]
    whole = [row for row in zip(*found, strict=True) if all(row)]
    means = [[math.exp(math.fsum(map(math.log, values)) / len(values)) for values in row] for row in whole]
    return {name: [row[i] for row in means] for i, name in enumerate(names)}


_WORDS = {
    "faster": "they help each other",
    "slower": "they take from each other",
    "no difference": "no interaction is seen",
}


def interaction(
    alone: Mapping[str, Sequence[float]], together: Sequence[float], doubt: str = ""
) -> dict[str, Any] | None:
    """All together over the product of each alone, round by round, with its interval: above 1 they help each other.

    None with fewer than two. Speed-ups over `none`, whose noise is in every one of them: only rounds tell what is noise.
    """
    if len(alone) < 2:
        return None
    products = [math.prod(row) for row in zip(*alone.values(), strict=True)]
    found = verdict(ratio([[t / p] for t, p in zip(together, products, strict=True)]), doubt)
    product, both = ratio([[p] for p in products]), ratio([[t] for t in together])
    if found is None or product is None or both is None:
        return None
    between = "" if found["low"] is None else f" [{found['low']:.3f}, {found['high']:.3f}]"
    return {
        **found,
        "product_of_singles": round(product.value, 4),
        "together": round(both.value, 4),
        "says": f"alone they would multiply to {product.value:.3f}×, together they give {both.value:.3f}×: "
        f"{_WORDS.get(found['says'], found['says'])} ({found['value']:.3f}{between})",
    }


def analyse(
    arms: Sequence[Arm], records: Sequence[dict[str, Any]], metric: str, label: str
) -> dict[str, Any]:
    """The result's `arms`, `interaction`, `answer`, `speedup` (over stock, of all together). Where all together
    did not go, `speedup` is that of the most changes that did, and names them; of no records, there is none.

    `speedup` is the verdict, and where it says that there is a difference, `interaction` is the next one: in that order
    both are right together as often as the first alone. What else has an interval has a remark.
    """
    names = [arm.name for arm in arms if arm.spec]
    rounds = len(aligned(records, names, records[0]["glm_ab"]["point"])[STOCK]) if records else 0
    over_none = speedups(records, names, NONE, metric, label) if rounds and NONE in names else {}
    singles = [arm.name for arm in arms if arm.spec and len(arm.changes) == 1 and arm.name != ALL]
    whole = next(arm for arm in arms if arm.name == ALL)
    # With one usable change, that change is all of them; with more, nothing stands in for them.
    last = ALL if whole.spec else singles[0] if len(whole.changes) == 1 and singles else None
    together = over_none.get(last) if last else None
    best = last or _stand_in(arms, whole)
    over_stock = speedups(records, names, STOCK, metric, label, best) if rounds else {}
    endpoints = summarise(records, names, STOCK)[0]["endpoints"] if rounds else {}
    found = None
    # Where one of them did not start, the others' product says nothing of all together.
    if ALL in over_none and len(singles) == len(whole.changes):
        speeds = per_round(records, [*singles, ALL], metric, label)
        errors = sum(int(endpoints[name]["errors"]) for name in (NONE, *singles, ALL))
        doubt = f"{errors} errors" if errors else ""
        if over_stock.get(ALL, {}).get("says") == "no difference":
            doubt = doubt or f"all together are no different from {STOCK}"
        found = interaction({name: speeds[name] for name in singles}, speeds[ALL], doubt)
    rows = []
    for arm in arms:
        decided = together and arm.name in singles and arm.name in over_none
        part = share(over_none[arm.name], together) if decided and together else None
        own = endpoints.get(arm.name)
        rows.append(
            {
                "name": arm.name,
                "changes": list(arm.changes),
                "state": arm.state,
                "speedup": over_stock.get(arm.name),
                "speedup_over_none": over_none.get(arm.name),
                "share": None if part is None else round(part, 4),
                "cached_share": _cached(own, label) if own else None,
                "input_tokens_per_s": own["input_tokens_per_s"] if own else None,
                "errors": own["errors"] if own else None,
                "article": arm.article,
            }
        )
    return {
        "metric": METRICS[metric]
        + ("" if label == EVERY or metric == "input_tokens_per_s" else f", {label}"),
        "baseline": STOCK,
        "rounds_measured": rounds,
        "arms": rows,
        "interaction": found,
        "speedup": {"arm": best, **over_stock[best]} if best in over_stock else None,
        "answer": _answer(last, whole, over_stock, METRICS[metric]) if rounds else "No round was measured.",
        "not_measured": [
            f"ablation, {arm.name}: {arm.state.splitlines()[0]}" for arm in arms if not arm.spec
        ],
    }


def _stand_in(arms: Sequence[Arm], whole: Arm) -> str | None:
    """Who speaks for all changes where they were to be measured and were left out: most of them together."""
    several = [arm for arm in arms if arm.spec and len(arm.changes) > 1]
    return max(several, key=lambda arm: len(arm.changes)).name if several and not whole.spec else None


def without(arms: Sequence[Arm], left_out: Mapping[str, str]) -> list[Arm]:
    """The arms, less those that did not start or did not go on: their state says why."""
    return [
        replace(arm, spec=None, state=f"left out: {left_out[arm.name]}") if arm.name in left_out else arm
        for arm in arms
    ]


def _cached(endpoint: Mapping[str, Any], label: str) -> float | None:
    found = endpoint["by_label"].get(label) or endpoint["by_label"][EVERY]
    return found["cached_share"]  # type: ignore[no-any-return]


def _answer(last: str | None, whole: Arm, over_stock: Mapping[str, Mapping[str, Any]], metric: str) -> str:
    if last is None:
        if not whole.changes:
            return "No change of the five could be measured here."
        return f"All together could not be measured here: {whole.state.splitlines()[0]}"
    if last not in over_stock:
        return f"{last} against {STOCK}: no pair of requests succeeded at both."
    found = over_stock[last]
    return f"{last} against {STOCK}: {metric} {found['value']:.3f}× ({found['says']})."
