"""What rounds of equal endpoints may be like: for `benchmarks.ab.coverage`, which asks intervals of them for the truth.

Logarithms of rates, [trials, points, rounds, endpoints].
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from benchmarks.ab.comparison import drawn_orders
from benchmarks.ab.statistics import Values

SD = 0.1  # of most noises
#: What no interval of a few rounds can be right under as often as it says.
ALONE = "one endpoint alone"


def _moods(rng: np.random.Generator, size: tuple[int, ...], rho: float) -> Values:
    """A stationary autoregression of order 1 along the last axis, standard deviation 1."""
    found = rng.normal(0, 1, size)
    for i in range(1, size[-1]):
        found[..., i] = rho * found[..., i - 1] + np.sqrt(1 - rho**2) * found[..., i]
    return found


def noises(
    rng: np.random.Generator, trials: int, points: int, endpoints: int, rounds: int
) -> Iterator[tuple[str, Values]]:
    """Logarithms of the rates of equal endpoints, [trials, points, rounds, endpoints], by what they are called; the mean
    of each is the same. What changes with time does so in the order in which the harness asks.
    """
    shape = (trials, points, rounds, endpoints)
    drawer = random.Random(int(rng.integers(2**32)))
    orders = [drawn_orders(endpoints, rounds, drawer) for _ in range(trials * points)]
    place = np.argsort(orders, axis=-1).reshape(shape)
    at = np.arange(points * rounds).reshape(points, rounds, 1) * endpoints + place

    def normal() -> Values:
        return rng.normal(0, SD, shape)

    yield "normal", normal()
    yield "Student's t, 3 degrees", 0.6 * SD * rng.standard_t(3, shape)
    yield (
        "one round in ten stalls",
        normal() - np.where(rng.random(shape) < 0.1, rng.exponential(5 * SD, shape), 0),
    )
    yield "skewed (log-normal)", -SD * rng.lognormal(0, 1, shape)
    yield "rounds of unlike spread", normal() * rng.lognormal(0, 0.8, (trials, points, rounds, 1))
    yield (
        "the first in a round is slower, and a drift",
        normal() - SD * (place == 0) + 3 * SD * at / at.max(),
    )
    for rho in (0.5, 0.9):
        moods = _moods(rng, (trials, at[0].size), rho)
        found = np.take_along_axis(moods, at.reshape(trials, -1), axis=1).reshape(shape)
        yield f"moods of the machine, {rho} from one endpoint's turn to the next's", SD * found
    stalls = np.where(rng.random(shape) < 0.1, rng.exponential(5 * SD, shape), 0) - 0.5 * SD  # of mean 0
    yield f"{ALONE}: one of its rounds in ten stalls", normal() - stalls * (np.arange(endpoints) == 1)
    own = _moods(rng, (trials, points, endpoints, rounds), 0.5).swapaxes(2, 3)
    yield f"{ALONE}: moods of its own, 0.5 from round to round", SD * own


def resampled(
    rng: np.random.Generator, rates: Values, trials: int, points: int, endpoints: int, rounds: int
) -> Iterator[tuple[str, Values]]:
    """The same from rounds that were recorded, `rates` [trials, points, rounds, endpoints], less each one's mean."""
    rates = rates - rates.mean(axis=(0, 2), keepdims=True)
    for row in (1, 4):
        parts = -(-rounds // row)
        trial = rng.integers(0, len(rates), (trials, points, parts, 1))
        start = rng.integers(0, rates.shape[2] - row + 1, (trials, points, parts, 1))
        which = np.arange(points)[:, None, None] % rates.shape[1]
        drawn = rates[trial, which, start + np.arange(row)].reshape(trials, points, parts * row, -1)
        name = "recorded rounds" if row == 1 else f"recorded rounds, {row} in a row"
        yield name, drawn[:, :, :rounds, :endpoints]
