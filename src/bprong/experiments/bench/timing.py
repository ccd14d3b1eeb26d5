"""Seconds, measured such that two methods can be compared on a machine that others use as well."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleaved(
    calls: Mapping[str, Callable[[], object]], rounds: int, budget: float = math.inf, least_rounds: int = 1
) -> dict[str, list[float]]:
    """Seconds of every call in every round. All calls take turns, so that a slow spell of the machine hits them alike.

    After `budget` seconds in all, no round begins beyond the first `least_rounds`.

    >>> order = []
    >>> spent = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2)
    >>> "".join(order), len(spent["a"])
    ('abab', 2)
    """
    spent: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for done in range(rounds):
        if done >= least_rounds and time.perf_counter() - start > budget:
            break
        for name, call in calls.items():
            spent[name].append(seconds_of(call))
    return spent


class Clock:
    """Counts the seconds of training: a step counts as its wall time or its processor time, whichever is less.

    So the seconds in which another program holds all cores do not count.

    counts_waiting: always count wall time, because processes that train together wait for each other
    """

    def __init__(self, counts_waiting: bool = False) -> None:
        self.counts_waiting = counts_waiting
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        wall = time.perf_counter()
        processor = time.process_time()
        yield
        spent = time.perf_counter() - wall
        self.seconds += spent if self.counts_waiting else min(spent, time.process_time() - processor)


def seconds_on(optimizer: Any, part: str) -> float:
    """Seconds that BPRONG or PRONG has spent so far on one part: "statistics", "factorisation" or "step"."""
    return float(optimizer._whitening.seconds[part])  # internal: `report()` gives shares of time only
