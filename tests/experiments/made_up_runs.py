"""Rows of runs that were never trained, for the tests of tables, figures and verdicts."""

from __future__ import annotations

import math

from bprong.experiments.records import Row

NAN = math.nan
INF = math.inf


def run_of(losses, seed=0, pace=1.0, val=None) -> list[Row]:
    """Rows from the training losses of each method after epochs 0, 1, …; `pace` seconds and 600 steps per epoch."""
    rows = []
    for method, values in losses.items():
        seconds = pace[method] if isinstance(pace, dict) else pace
        checks = (val or losses)[method]
        for epoch, (loss, check) in enumerate(zip(values, checks, strict=True)):
            rows.append(Row(method, seed, epoch, 600 * epoch, seconds * epoch, loss, check, 1 / (1 + check)))
    return rows
