"""The progress of a command: one line on a terminal, a few lines elsewhere, with one estimate of the time left."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Hashable, Mapping
from statistics import mean

import rich.progress
from rich.table import Column

LEAST_STEP = 0.05  # without a terminal: a line after each 5 % of the jobs,
LEAST_SECONDS = 1.0  # at most one in this time,
MOST_SECONDS = 60.0  # and at least one in this time


class Progress:
    """Receives the progress of a command; this base class ignores it."""

    def show(self, done: int, total: int, left: float | None, running: str) -> None:
        """So many jobs are done, the rest takes about `left` seconds (None: not known yet), and these are running."""

    def message(self, line: str) -> None:
        """A message for the user."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Lines(Progress):
    """Now and then a line of text."""

    def __init__(self) -> None:
        self._share = 0.0
        self._time = -math.inf

    def show(self, done: int, total: int, left: float | None, running: str) -> None:
        waited = time.monotonic() - self._time
        advanced = done / total >= self._share + LEAST_STEP
        if waited >= MOST_SECONDS or (advanced and waited >= LEAST_SECONDS):
            self._share = done / total
            self._time = time.monotonic()
            self.message(f"{done / total:4.0%}  {_in_words(left):<15}  {running}")

    def message(self, line: str) -> None:
        print(line, flush=True)


class Line(Progress):
    """One line of a terminal, which is updated; messages appear above it."""

    def __init__(self) -> None:
        self._rich = rich.progress.Progress(
            rich.progress.BarColumn(bar_width=12, table_column=Column(min_width=12)),
            rich.progress.TextColumn("{task.percentage:>3.0f}%", markup=False, table_column=Column(min_width=4)),
            rich.progress.TextColumn("{task.fields[left]}", markup=False, table_column=Column(min_width=11)),
            rich.progress.TextColumn(
                "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
            ),
            refresh_per_second=4,  # drawing takes time from the training that is being timed
        )
        self._task = self._rich.add_task("", total=1, left="")

    def show(self, done: int, total: int, left: float | None, running: str) -> None:
        self._rich.update(self._task, completed=done, total=total, left=_in_words(left), description=running)

    def message(self, line: str) -> None:
        self._rich.console.print(line, markup=False, highlight=False)

    def __enter__(self) -> Progress:
        self._rich.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._rich.stop()


def progress_for_output() -> Progress:
    """One line if the output is a terminal, lines of text if it is not."""
    return Line() if sys.stdout.isatty() else Lines()


class Estimate:
    """The time that the rest of a command takes, from the seconds of the jobs so far.

    A kind of job of which none has been run yet is expected to take as long as the others, in proportion to its price.

    >>> estimate = Estimate(processes=2)
    >>> estimate.left({"slow": (4, 3.0)}) is None
    True
    >>> estimate.add("quick", 1.0, seconds=2.0)
    >>> estimate.left({"quick": (3, 1.0), "slow": (4, 3.0)})
    15.0
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._seconds: dict[Hashable, list[float]] = {}
        self._price = 0.0

    def add(self, kind: Hashable, price: float, seconds: float) -> None:
        """A job of this kind took so many seconds."""
        self._seconds.setdefault(kind, []).append(seconds)
        self._price += price

    def left(self, remaining: Mapping[Hashable, tuple[int, float]]) -> float | None:
        """The seconds that the remaining jobs take, by kind their number and the price of each."""
        if not self._seconds:
            return None
        pace = sum(map(sum, self._seconds.values())) / self._price
        each = {kind: mean(self._seconds.get(kind, [pace * price])) for kind, (_, price) in remaining.items()}
        return sum(number * each[kind] for kind, (number, _) in remaining.items()) / self._processes


def _in_words(left: float | None) -> str:
    return "" if left is None else f"{duration(left)} left"


def duration(seconds: float) -> str:
    """
    >>> duration(40), duration(600), duration(5400)
    ('40 s', '10 min', '1 h 30 min')
    """
    if seconds < 100:
        return f"{math.ceil(seconds)} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
