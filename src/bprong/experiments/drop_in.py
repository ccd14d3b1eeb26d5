"""The drop-in optimizer beside the paper's rows: how its loss compares with the literal network's, and its price.

The paper makes no claim about it, so nothing is judged here; `verdict.py` does that for the paper's own rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from bprong.experiments.records import Row, curve, label, methods
from bprong.experiments.verdict import HERO, divergence, number

__all__ = ["AUTO", "FAST", "HEADING", "beside"]

FAST, AUTO, PLAIN = "bprong-fast", "bprong-auto", "sgd"
EARLY = 3  # the epoch after which the first comparison is made; the other is after the last
HEADING = "BPRONG-fast and BPRONG-auto, the drop-in optimizer on the plain network, beside the paper’s"


def beside(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What is compared and what was measured; empty if the run has no drop-in optimizer."""
    return _beside(rows, FAST) + [(f"{label(AUTO)}: {text}", found) for text, found in _beside(rows, AUTO)]


def _beside(rows: Sequence[Row], method: str) -> list[tuple[str, str]]:
    if method not in methods(rows):
        return []
    losses = {name: {p.epoch: p.median for p in curve(rows, name, "train_loss")} for name in (method, HERO)}
    both = (set(losses[method]) & set(losses[HERO]) or set(losses[method])) - {0}
    pairs = []
    for epoch in sorted({EARLY, max(both)} & both) if both else []:
        text = f"Training loss after epoch {epoch}" + (", the last" if epoch == max(both) else "")
        pairs.append((text, _loss(losses[method][epoch], losses[HERO].get(epoch))))
    if pace := _paces(rows, method):
        ratios = [_ratio(pace, _paces(rows, name), name) for name in (PLAIN, HERO)]
        pairs.append(("Time of an update", "; ".join([f"{1e3 * median(pace.values()):.2f} ms", *ratios])))
    return pairs + ([("Divergence", end)] if (end := divergence(rows, method)) else [])


def _loss(mine: float, theirs: float | None) -> str:
    if theirs is None:
        return f"{number(mine)}; {label(HERO)} is not in this run"
    times = f"{mine / theirs:.2f} times " if math.isfinite(mine) and 0 < theirs < math.inf else ""
    return f"{number(mine)}, {times or 'against '}{label(HERO)}’s {number(theirs)}"


def _paces(rows: Sequence[Row], method: str) -> dict[tuple[int, int], float]:
    """Seconds an update took, by seed and epoch; an epoch in which a network diverged was cut short and is left out."""
    own = {(row.seed, row.epoch): row for row in rows if row.method == method and math.isfinite(row.train_loss)}
    paces = {}
    for (seed, epoch), row in own.items():
        before = own.get((seed, epoch - 1))
        if before is not None and row.step > before.step:
            paces[seed, epoch] = (row.seconds - before.seconds) / (row.step - before.step)
    return paces


def _ratio(pace: dict[tuple[int, int], float], other: dict[tuple[int, int], float], name: str) -> str:
    """Each epoch against the other method's same epoch, which ran right before or after it on the same machine."""
    ratios = [pace[key] / other[key] for key in pace if other.get(key, 0) > 0]
    if not ratios:
        return f"no epoch of {label(name)} to compare with"
    of = f"median of {len(ratios)} epochs, {min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else "one epoch"
    return f"{median(ratios):.2f} times {label(name)}’s ({of})"
