"""Time several works alternately, and say how far apart they are.

A machine that slows down for a moment slows all of them: each round times every work once, in an
order that changes, and ratios are taken inside a round before they are summed up.
"""

import gc
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from statistics import median as middle
from statistics import quantiles
from time import perf_counter

__all__ = ["Prepared", "Ratio", "Work", "measure", "middle", "ratio"]

Clock = Callable[[], float]


@dataclass(frozen=True)
class Prepared:
    """A work that needs ``before`` ahead of each run, off the clock."""

    before: Callable[[], object]
    run: Callable[[], object]

    def __call__(self) -> object:
        self.before()
        return self.run()


Work = Callable[[], object] | Prepared


@dataclass(frozen=True)
class Ratio:
    """The ratio of two medians, and between what 10 % and 90 % of the rounds lie."""

    value: float
    low: float
    high: float


def measure(
    works: Mapping[str, Work], rounds: int, seconds: float = 1e-3, clock: Clock = perf_counter
) -> dict[str, list[float]]:
    """Return the seconds per call of each work in each of ``rounds`` rounds.

    Args:
        works: what to time, by name.
        rounds: how many rounds; every work runs once in each.
        seconds: how long a work is repeated in one round.
        clock: returns the time in seconds.
    """
    loops = {name: _loops(work, seconds, clock) for name, work in works.items()}
    times: dict[str, list[float]] = {name: [] for name in works}
    shuffled = random.Random(0)
    order = list(works)
    for _ in range(rounds):
        shuffled.shuffle(order)
        for name in order:
            times[name].append(_elapsed(works[name], loops[name], clock) / loops[name])
    return times


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Return how much longer ``over`` takes than ``under``, both timed in the same rounds."""
    pairs = [a / b for a, b in zip(over, under, strict=True)]
    tenths = quantiles(pairs, n=10, method="inclusive") if len(pairs) > 1 else pairs
    return Ratio(middle(over) / middle(under), tenths[0], tenths[-1])


def _loops(work: Work, seconds: float, clock: Clock) -> int:
    """Return how often to repeat a work for about ``seconds``; it is warm afterwards."""
    _elapsed(work, 3, clock)  # the first calls fill caches, and say little of the later ones
    loops = 1
    while (taken := _elapsed(work, loops, clock)) < seconds / 2:
        loops = max(loops * 2, int(loops * seconds / taken) if taken > 0 else 0)
    return loops


def _elapsed(work: Work, loops: int, clock: Clock) -> float:
    """Return the seconds that ``loops`` calls take, with no garbage collection among them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        if isinstance(work, Prepared):
            return sum(_once(work, clock) for _ in range(loops))
        start = clock()
        for _ in repeat(None, loops):
            work()
        return clock() - start
    finally:
        if was_on:
            gc.enable()


def _once(work: Prepared, clock: Clock) -> float:
    work.before()
    start = clock()
    work.run()
    return clock() - start
