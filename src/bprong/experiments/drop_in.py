"""The drop-in optimizer compared with the paper's network in the same run: its training loss and its time per update.

The paper makes no claim about the drop-in optimizer, so this comparison has no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from bprong.experiments.records import Row, curve, label, method_names
from bprong.experiments.verdict import BPRONG, divergence_text, number

METHODS = ("bprong-fast", "bprong-auto")
EARLY_EPOCH = 3  # losses are compared after this epoch and after the last one
HEADING = "The drop-in optimizer on the plain network, which is not in the paper"

Pairs = list[tuple[str, str]]  # what was measured, and the result
Paces = dict[tuple[int, int], float]  # seconds per update, by seed and epoch


def comparison(rows: Sequence[Row]) -> Pairs:
    """The comparison in words; empty if the run does not contain the drop-in optimizer."""
    return [
        (f"{label(name)}, {what}", result)
        for name in METHODS
        if name in method_names(rows)
        for what, result in _compare(rows, name)
    ]


def _compare(rows: Sequence[Row], method: str) -> Pairs:
    losses = {name: {p.epoch: p.median for p in curve(rows, name, "train_loss")} for name in (method, BPRONG)}
    epochs = (set(losses[method]) & set(losses[BPRONG]) or set(losses[method])) - {0}
    last = max(epochs, default=0)
    pairs = []
    for epoch in sorted({EARLY_EPOCH, last} & epochs):
        what = f"training loss after epoch {epoch}{' (the last)' * (epoch == last)}"
        pairs.append((what, _loss(losses[method][epoch], losses[BPRONG].get(epoch))))
    if paces := _paces(rows, method):
        ratios = [_ratio(paces, _paces(rows, name), name) for name in ("sgd", BPRONG)]
        pairs.append(("time per update", "; ".join([f"{1e3 * median(paces.values()):.2f} ms", *ratios])))
    end = divergence_text(rows, method)
    return [*pairs, ("divergence", end)] if end else pairs


def _loss(mine: float, theirs: float | None) -> str:
    if theirs is None:
        return f"{number(mine)} ({label(BPRONG)} is not in this run)"
    ratio = f", ratio {mine / theirs:.2f}" if math.isfinite(mine) and 0 < theirs < math.inf else ""
    return f"{number(mine)} ({label(BPRONG)} {number(theirs)}{ratio})"


def _paces(rows: Sequence[Row], method: str) -> Paces:
    """Seconds per update of every epoch, except the one in which a network diverged, which ended early."""
    own = {(row.seed, row.epoch): row for row in rows if row.method == method and math.isfinite(row.train_loss)}
    paces = {}
    for (seed, epoch), row in own.items():
        before = own.get((seed, epoch - 1))
        if before is not None and row.step > before.step:
            paces[seed, epoch] = (row.seconds - before.seconds) / (row.step - before.step)
    return paces


def _ratio(paces: Paces, others: Paces, name: str) -> str:
    """The ratio of the times per update, epoch by epoch, since methods train the same epoch right after each other."""
    ratios = [paces[key] / others[key] for key in paces if others.get(key, 0) > 0]
    if not ratios:
        return f"no epoch of {label(name)} to compare with"
    spread = f"median of {len(ratios)} epochs, range {min(ratios):.2f} to {max(ratios):.2f}"
    return f"{median(ratios):.2f} times that of {label(name)} ({spread if len(ratios) > 1 else 'one epoch'})"
