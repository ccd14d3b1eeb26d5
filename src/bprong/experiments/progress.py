"""The progress of a run: one bar per method on a terminal, one line per epoch elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import rich.progress

from bprong.experiments.records import Row, label

WIDE_TERMINAL = 120  # columns; the bars show fewer numbers on a narrower one


class Progress:
    """Receives the progress of a run; this base class ignores it."""

    def update(self, method: str, rows: Sequence[Row], epochs: int) -> None:
        """One network of `method` now has these rows, of `epochs` epochs in all."""

    def tick(self, method: str, fraction: float) -> None:
        """This fraction of the current epoch of `method` is done."""

    def message(self, line: str) -> None:
        """A message for the user."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Lines(Progress):
    """One line of text per epoch."""

    def __init__(self, trials: int) -> None:
        self._timer = _Timer(trials)

    def update(self, method: str, rows: Sequence[Row], epochs: int) -> None:
        left = self._timer.time_left(method, rows, epochs)
        if rows:
            row = rows[-1]
            self.message(f"{label(method):<13}  seed {row.seed}  epoch {row.epoch:>3}/{epochs}  {_numbers(rows, left)}")

    def message(self, line: str) -> None:
        print(line.rstrip(), flush=True)


class Bars(Progress):
    """One bar per method, with its losses, accuracy, speed and the time left."""

    def __init__(self, trials: int, epochs: int, methods: Sequence[str]) -> None:
        self._timer = _Timer(trials)
        self._rich = rich.progress.Progress(
            rich.progress.TextColumn("{task.description:<13}"),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TextColumn("{task.fields[numbers]}"),
            refresh_per_second=4,  # drawing takes time from the training that is being timed
        )
        total = trials // len(methods) * epochs
        self._tasks = {name: self._rich.add_task(label(name), total=total, numbers="") for name in methods}
        self._epochs: dict[tuple[str, int], int] = {}

    def update(self, method: str, rows: Sequence[Row], epochs: int) -> None:
        left = self._timer.time_left(method, rows, epochs)
        if rows:
            row = rows[-1]
            self._epochs[method, row.seed] = row.epoch
            numbers = _numbers(rows, left)
            if self._rich.console.width < WIDE_TERMINAL:
                numbers = f"loss {row.train_loss:<8.4g} accuracy {row.val_accuracy:6.2%}  {left}"
            self._rich.update(self._tasks[method], completed=self._done(method), numbers=numbers)

    def tick(self, method: str, fraction: float) -> None:
        self._rich.update(self._tasks[method], completed=self._done(method) + fraction)

    def _done(self, method: str) -> int:
        return sum(epoch for (name, _), epoch in self._epochs.items() if name == method)

    def message(self, line: str) -> None:
        self._rich.console.print(line, markup=False, highlight=False)

    def __enter__(self) -> Progress:
        self._rich.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._rich.stop()


class _Timer:
    """Estimates the time that the rest of the run will take from the time of the epochs so far."""

    def __init__(self, trials: int) -> None:
        self._trials = trials
        self._start = time.perf_counter()
        self._first: dict[tuple[str, int], int] = {}  # the first epoch reported; not 0 in a resumed run
        self._latest: dict[tuple[str, int], int] = {}

    def time_left(self, method: str, rows: Sequence[Row], epochs: int) -> str:
        """The estimate as text; empty while there is nothing to estimate from."""
        for row in rows[-1:]:
            self._first.setdefault((method, row.seed), row.epoch)
            self._latest[method, row.seed] = row.epoch
        trained = sum(self._latest.values()) - sum(self._first.values())
        if not trained:
            self._start = time.perf_counter()
            return ""
        rate = (time.perf_counter() - self._start) / trained
        minutes, seconds = divmod(round(rate * max(0, self._trials * epochs - sum(self._latest.values()))), 60)
        return f"{minutes}:{seconds:02} left"


def _numbers(rows: Sequence[Row], left: str) -> str:
    row = rows[-1]
    numbers = f"train loss {row.train_loss:<8.4g} val loss {row.val_loss:<8.4g} val accuracy {row.val_accuracy:6.2%}"
    return f"{numbers}  {_speed(rows):>14}  {left}"


def _speed(rows: Sequence[Row]) -> str:
    if len(rows) < 2 or rows[-1].seconds <= rows[-2].seconds:
        return ""
    return f"{(rows[-1].step - rows[-2].step) / (rows[-1].seconds - rows[-2].seconds):.0f} updates/s"


def progress_for(methods: Sequence[str], seeds: int, epochs: int) -> Progress:
    """Bars if the output is a terminal, lines if it is not."""
    trials = seeds * len(methods)
    return Bars(trials, epochs, methods) if sys.stdout.isatty() else Lines(trials)
