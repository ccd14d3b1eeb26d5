"""The progress of a benchmark: a bar on a terminal, a line for each run elsewhere, both with the time left."""

from __future__ import annotations

import math
import sys
import time

import rich.progress

from bprong.experiments.bench.plan import Job, duration
from bprong.experiments.bench.records import Record


class Lines:
    """One line of text for each run."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._first: int | None = None

    def __call__(self, job: Job, record: Record, done: int, total: int) -> None:
        print(f"{done}/{total}  {self.left(done, total)}  {job}: {result(record)}", flush=True)

    def left(self, done: int, total: int) -> str:
        """The estimated time left, from the mean time of a run since the start."""
        self._first = done - 1 if self._first is None else self._first
        each = (time.monotonic() - self._start) / max(1, done - self._first)
        return f"{duration(each * max(0, total - done))} left"

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Bar(Lines):
    """One bar for all runs; below it, what the last run gave."""

    def __init__(self) -> None:
        super().__init__()
        columns = [
            rich.progress.BarColumn(bar_width=30),
            rich.progress.TextColumn("{task.completed:.0f}/{task.total:.0f}  {task.fields[left]}  {task.description}"),
        ]
        self._rich = rich.progress.Progress(*columns, refresh_per_second=2)
        self._task = self._rich.add_task("", total=1, left="")

    def __call__(self, job: Job, record: Record, done: int, total: int) -> None:
        text = f"{job}: {result(record)}"
        self._rich.update(self._task, completed=done, total=total, left=self.left(done, total), description=text)

    def __enter__(self) -> Bar:
        self._rich.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._rich.stop()


def result(record: Record) -> str:
    """A run in words."""
    row = record.row
    if not record.points:
        return row.end
    parts = [
        f"{name} {f'in {steps:.0f} steps' if math.isfinite(steps) else 'missed'}"
        for name, steps in (("training", row.train_steps), ("validation", row.val_steps))
    ]
    return f"{', '.join(parts)} ({row.seconds:.1f} s)"


def progress_for_output() -> Lines:
    """A bar if the output is a terminal, lines if it is not."""
    return Bar() if sys.stdout.isatty() else Lines()
