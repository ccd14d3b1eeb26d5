"""Live progress: a bar per method on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import rich.progress

from bprong.experiments.records import Row, label

NARROW = 120  # columns of a terminal below which the bars say less, so that they stay bars

__all__ = ["Bars", "Lines", "Progress", "progress_for"]


class Progress:
    """Says nothing; what a run reports to."""

    def show(self, method: str, rows: Sequence[Row], epochs: int) -> None:
        """A trial of `method` now has these rows."""

    def tick(self, method: str, share: float) -> None:
        """This share of the method's epoch under way is done."""

    def say(self, line: str) -> None:
        """Something a person should read."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Lines(Progress):
    """One line per epoch."""

    def __init__(self, trials: int) -> None:
        self._clock = _Clock(trials)

    def show(self, method: str, rows: Sequence[Row], epochs: int) -> None:
        left = self._clock.left(method, rows, epochs)
        if rows:
            row = rows[-1]
            self.say(
                f"{label(method):<11} seed {row.seed}  epoch {row.epoch:>3}/{epochs}  {_losses(row)}  "
                f"{_pace(rows):>6} updates/s  {left} left"
            )

    def say(self, line: str) -> None:
        print(line, flush=True)


class Bars(Progress):
    """A bar per method: loss, accuracy, updates per second, time left."""

    def __init__(self, trials: int, epochs: int, methods: Sequence[str]) -> None:
        self._clock = _Clock(trials)
        self._rich = rich.progress.Progress(
            rich.progress.TextColumn("{task.description:<11}"),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TextColumn("{task.fields[said]}"),
            refresh_per_second=4,  # each refresh takes time from the training that is being measured
        )
        total = trials // len(methods) * epochs
        self._tasks: dict[str, rich.progress.TaskID] = {
            m: self._rich.add_task(label(m), total=total, said="") for m in methods
        }
        self._seen: dict[tuple[str, int], int] = {}

    def show(self, method: str, rows: Sequence[Row], epochs: int) -> None:
        left = self._clock.left(method, rows, epochs)
        if rows:
            row = rows[-1]
            self._seen[method, row.seed] = row.epoch
            said = f"{_losses(row)}  {_pace(rows):>6} updates/s  {left} left"
            if self._rich.console.width < NARROW:
                said = f"{row.train_loss:<8.4g} {row.val_accuracy:6.2%} {left}"
            self._rich.update(self._tasks[method], completed=self._done(method), said=said)

    def tick(self, method: str, share: float) -> None:
        self._rich.update(self._tasks[method], completed=self._done(method) + share)

    def _done(self, method: str) -> int:
        return sum(epoch for (name, _), epoch in self._seen.items() if name == method)

    def say(self, line: str) -> None:
        self._rich.console.print(line, markup=False, highlight=False)

    def __enter__(self) -> Progress:
        self._rich.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._rich.stop()


class _Clock:
    """How long the rest of the run will take, from what the epochs so far took, evaluation included."""

    def __init__(self, trials: int) -> None:
        self._trials, self._start, self._base = trials, time.perf_counter(), 0
        self._done: dict[tuple[str, int], int] = {}

    def left(self, method: str, rows: Sequence[Row], epochs: int) -> str:
        fresh = not self._done
        if rows:
            self._done[method, rows[-1].seed] = rows[-1].epoch
        done = sum(self._done.values())
        if fresh or done <= self._base:  # resumed epochs cost nothing now
            self._base, self._start = done, time.perf_counter()
            return "–:––"
        rate = (time.perf_counter() - self._start) / (done - self._base)
        minutes, seconds = divmod(round(rate * max(0, self._trials * epochs - done)), 60)
        return f"{minutes}:{seconds:02}"


def _losses(row: Row) -> str:
    return f"train {row.train_loss:<8.4g} val {row.val_loss:<8.4g} acc {row.val_accuracy:6.2%}"


def _pace(rows: Sequence[Row]) -> str:
    if len(rows) < 2 or rows[-1].seconds <= rows[-2].seconds:
        return "–"
    return f"{(rows[-1].step - rows[-2].step) / (rows[-1].seconds - rows[-2].seconds):.0f}"


def progress_for(methods: Sequence[str], seeds: int, epochs: int) -> Progress:
    """Bars if a person is looking at a terminal, lines if not."""
    trials = seeds * len(methods)
    return Bars(trials, epochs, methods) if sys.stdout.isatty() else Lines(trials)
