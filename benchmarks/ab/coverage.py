"""How often the intervals of an A/B run hold the truth, and what they cost in width: of equal endpoints, simulated under
many kinds of noise and with the rounds of real trials; for the interval in use and for those it was chosen over.

    python -m benchmarks.ab.coverage --trials 120 --records .bench/equal --json --save

A trial compares a null server with itself, as `--prove-statistics` does, with other seeds; seven seconds each. Those
that the folder holds already are not asked again. Whether an endpoint's place in the order shows in its rate is in the
result.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from benchmarks import _result
from benchmarks.ab import records
from benchmarks.ab.noises import ALONE, SD, noises, resampled
from benchmarks.ab.prove import EQUAL, POINTS, ROUNDS, equal_trial
from benchmarks.ab.rivals import METHODS
from benchmarks.ab.statistics import CONFIDENCE, Values, student

#: Of real trials; `--prove-statistics` has those from 0.
FIRST_SEED = 1000
#: Points, endpoints and rounds of a simulated run; every endpoint after the first has a verdict at every point.
RUNS = ((1, 2, 6), (1, 2, 8), (2, 3, 8))
_SHIFT = 2 * SD  # the difference that `finds` is about


def against_first(rates: Values) -> Values:
    """Log ratios of every endpoint over the first: [trials, points, endpoints − 1, rounds]."""
    return (rates[..., 1:] - rates[..., :1]).swapaxes(2, 3)


def judge(rates: Values, method: Any, shift: float = _SHIFT) -> dict[str, float]:
    """Of [trials, points, rounds, endpoints]: `right`, the share of runs in which every verdict holds the truth; `finds`,
    the share of verdicts that leave out 1 where one endpoint is exp(shift) times as fast; `width`, their mean.
    """
    ratios = against_first(rates)
    trials, verdicts, rounds = len(ratios), ratios.shape[1] * ratios.shape[2], ratios.shape[3]
    ends = method(ratios.reshape(-1, rounds), 1 - (1 - CONFIDENCE) / verdicts)
    low, high = ends[:, 0], ends[:, 1]
    return {
        "right": float(((low <= 0) & (high >= 0)).reshape(trials, -1).all(axis=1).mean()),
        "finds": float(((low + shift > 0) | (high + shift < 0)).mean()),
        "width": float((high - low).mean()),
    }


def simulated(trials: int, rates: Values | None = None) -> list[dict[str, Any]]:
    """Every method under every noise, for every kind of run."""
    found = []
    for points, endpoints, rounds in RUNS:
        rng = np.random.default_rng([points, endpoints, rounds])
        sizes = (trials, points, endpoints, rounds)
        kinds = [*noises(rng, *sizes), *(resampled(rng, rates, *sizes) if rates is not None else ())]
        rows = {
            kind: {
                name: {k: round(v, 4) for k, v in judge(noise, method).items()}
                for name, method in METHODS.items()
            }
            for kind, noise in kinds
        }
        verdicts = points * (endpoints - 1)
        found.append({"verdicts": verdicts, "rounds": rounds, "trials": trials, "noises": rows})
        print(f"{verdicts} verdict(s) of {rounds} rounds: simulated", file=sys.stderr, flush=True)
    return found


def real(folder: Path, trials: int) -> tuple[Values, Values]:
    """Logarithms of input rates, and who was asked before, [trials, points, rounds, endpoints]."""
    points, whole = [str(point) for point in POINTS], len(POINTS) * ROUNDS * len(EQUAL)
    rates = np.full((trials, len(POINTS), ROUNDS, len(EQUAL)), np.nan)
    places = np.zeros(rates.shape)
    folder.mkdir(parents=True, exist_ok=True)
    for trial in range(trials):
        seed = FIRST_SEED + trial
        file = folder / f"{seed}.jsonl"
        rows = records.read(file)
        if len(rows) != whole:
            file.unlink(missing_ok=True)
            rows = equal_trial(seed, folder)
            print(f"trial {trial + 1} of {trials}", file=sys.stderr, flush=True)
        for row in rows:
            own = row["glm_ab"]
            index = trial, points.index(own["point"]), own["round"], EQUAL.index(row["tag"])
            rates[index], places[index] = np.log(row["input_throughput"]), own["position"]
    return rates, places


def order(rates: Values, places: Values) -> list[dict[str, float]]:
    """How much faster than its round's mean the endpoint is that is asked first, second, …: logarithms, and a 95 %
    interval over trials.
    """
    relative = rates - rates.mean(axis=-1, keepdims=True)
    found = []
    for place in range(rates.shape[-1]):
        of = np.array([one[where == place].mean() for one, where in zip(relative, places, strict=True)])
        ends = zip(("log", "low", "high"), (of.mean(), *student(of)), strict=True)
        found.append({"asked_before": place, **{key: round(float(end), 4) for key, end in ends}})
    return found


def answer(found: dict[str, Any], simulations: Sequence[dict[str, Any]]) -> str:
    """In words: what was measured, and the noise under which most runs are wrong."""
    right = [
        (row["Student's t"]["right"], kind) for one in simulations for kind, row in one["noises"].items()
    ]
    among = [share for share, kind in right if not kind.startswith(ALONE)]
    alone = [share for share, kind in right if kind.startswith(ALONE)]
    return (
        f"Equal endpoints: all verdicts right in {found['right']} of {found['trials']} real trials (a true share of "
        f"{found['share_low']:.3f} to {found['share_high']:.3f}); simulated {min(among):.3f} to {max(among):.3f} of runs "
        f"with Student's t, down to {min(alone):.3f} where one endpoint has stalls or long moods that the other has not."
    )


def main() -> int:
    """Exit status 0 when measured."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--trials", type=int, default=120, help="real trials (120)")
    p.add_argument(
        "--records", type=Path, default=Path(".bench/equal"), help="where they are kept (.bench/equal)"
    )
    p.add_argument("--simulated", type=int, default=2000, help="runs of each kind (2000)")
    _result.add_arguments(p)
    args = p.parse_args()
    rates, places = real(args.records, args.trials)
    right = round(judge(rates, student)["right"] * args.trials)
    low, high = map(float, stats.binomtest(right, args.trials).proportion_ci(CONFIDENCE))
    found = {"trials": args.trials, "right": right, "share_low": round(low, 4), "share_high": round(high, 4)}
    simulations = simulated(args.simulated, rates)
    result = {
        "real": {**found, "order": order(rates, places)},
        "simulated": simulations,
        "answer": answer(found, simulations),
    }
    print(result["answer"], file=sys.stderr)
    _result.finish("ab_coverage", result, args, module="benchmarks.ab.coverage", device="cpu")
    return 0


if __name__ == "__main__":
    sys.exit(main())
