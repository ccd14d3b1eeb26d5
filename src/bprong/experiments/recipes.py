"""Methods that are trained for a low validation loss, with a schedule and averaged weights, compared with the others.

The paper makes no claim about them, so this comparison has no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bprong.experiments.records import Row, curve, label, method_names
from bprong.experiments.verdict import divergence_text, number

RECIPES = ("bprong-recipe", "bn-recipe")
HEADING = "With a learning-rate schedule and averaged weights, which are not in the paper"


def comparison(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What was measured and the result, in words; empty if the run does not contain a recipe."""
    pairs = [_result(rows, name) for name in in_run(rows)]
    others = _lowest_of_others(rows)
    return [*pairs, ("Lowest validation loss of the other methods, at any epoch", others)] if pairs else []


def in_run(rows: Sequence[Row]) -> list[str]:
    """The recipes that a run contains."""
    return [name for name in RECIPES if name in method_names(rows)]


def _result(rows: Sequence[Row], name: str) -> tuple[str, str]:
    last = curve(rows, name, "val_loss")[-1]
    if math.isinf(last.median):
        return f"{label(name)}, validation loss", divergence_text(rows, name)
    accuracy = curve(rows, name, "val_accuracy")[-1].median
    what = f"{label(name)}, validation loss after epoch {last.epoch} (the last)"
    return what, f"{number(last.median)}; accuracy {100 * accuracy:.2f} %"


def _lowest_of_others(rows: Sequence[Row]) -> str:
    found = [
        (point.median, name, point.epoch)
        for name in method_names(rows)
        if name not in RECIPES
        for point in curve(rows, name, "val_loss")
        if point.epoch > 0 and math.isfinite(point.median)
    ]
    if not found:
        return "no other method is in this run"
    loss, name, epoch = min(found)
    return f"{number(loss)}; {label(name)} after epoch {epoch}"
