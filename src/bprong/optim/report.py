"""What an optimizer reports about itself: plain data underneath, a table when printed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bprong.capture.coverage import table
from bprong.whitening.layer import SIDES, Layer
from bprong.whitening.refresh import Damper

COLUMNS = {  # of each side, with the values of `layer_row`: heading, explanation
    "factor": ("factor", "how the second moment Ž of the inputs z, or D of the errors δ, is inverted, and its size"),
    "damping": ("ε", "what is added to each eigenvalue before it is inverted (mean)"),
    "age": ("age", "steps since the factor was computed"),
    "drift": ("drift", "distance of the moments from those behind the factor, ‖U(Ž+ε)Uᵀ−I‖ / ‖I‖, at the last test"),
}
STEP = ("step", "length of the weight's step at the last refresh")
RULE_NUMBERS = {"alpha": "α", "mu": "μ", "lambda": "λ", "ratio": "actual/predicted"}  # of lr="auto", as printed
RECENT = 60  # steps, of which
OFTEN = 3  # undone ones are often: with the steps that undo them they are a tenth
FAR = 1.0  # median drift at which natural steps are twice as long as new statistics ask for, and gain nothing


@dataclass(frozen=True)
class Report:
    """The state of an optimizer after `steps` steps; print it for a table.

    layers:    a row for each whitened layer: its `step_norm`, and the `COLUMNS` of its sides as forward_…, backward_…
    fallback:  the parameters that follow the fallback rule (Adam), with the reason
    time:      shares of the time since the first step that went to statistics, factorisation and steps
    rule:      numbers of the step rule. For lr="auto": the last coefficients alpha and mu of the whitened direction and
               of the last update, the damping lambda, the ratio of the actual to the predicted decrease of the loss,
               and the multiplier of the last step: its learning rate relative to the highest; None: not known yet
    races:     what was tried, and chosen
    undone:    how many of the last 60 steps were undone
    """

    steps: int
    layers: list[dict[str, Any]]
    fallback: dict[str, str]
    time: dict[str, float]
    rule: dict[str, float | None]
    races: Sequence[str] = ()
    undone: int = 0

    @property
    def judgement(self) -> str:
        """How training goes, in one sentence."""
        drifts = [row.get(f"{side}_drift") for row in self.layers for side in SIDES]
        drift = median([x for x in drifts if x is not None] or [0.0])
        if not self.steps:
            return "no step was made yet"
        if self.undone >= OFTEN:
            return f"steps undone often: {self.undone} of the last {RECENT}; look for outliers, or take larger batches"
        if drift > FAR and self.steps > RECENT:  # the first steps change statistics in any case
            return f"refreshes too rare: statistics change by {drift:.0%} in between; give a smaller every="
        return "training normally"

    def __str__(self) -> str:
        headings = {"layer": "layer"}
        for key, (heading, _) in COLUMNS.items():
            headings[f"forward_{key}"] = f"{heading} z"
            headings[f"backward_{key}"] = f"{heading} δ"
        headings["step_norm"] = STEP[0]
        used = [key for key in headings if any(row.get(key) is not None for row in self.layers)]
        rows = [[cell(row.get(key)) for key in used] for row in by_block(self.layers)]
        lines = [f"{self.steps} steps", table([headings[key] for key in used], rows)]
        lines += map(": ".join, [*COLUMNS.values(), STEP])
        if len(rows) < len(self.layers):
            lines.append("blocks: the largest values of their layers; report().layers has each layer")
        names_of: dict[str, list[str]] = {}
        for name, reason in self.fallback.items():
            names_of.setdefault(reason, []).append(name)
        for reason, names in names_of.items():
            lines.append(f"not whitened (Adam): {', '.join(names[:3])}{', …' * (len(names) > 3)} ({reason})")
        lines += [f"race: {result}" for result in self.races]
        if self.rule:
            lines.append("step rule: " + ", ".join(self.rule_numbers()))
        times = ", ".join(f"{purpose} {fraction:.1%}" for purpose, fraction in self.time.items())
        lines.append(f"share of time since the first step: {times}; the rest is your own code")
        return "\n".join([*lines, f"judgement: {self.judgement}"])

    def rule_numbers(self, digits: int = 3) -> list[str]:
        """Return each number of the step rule with its letter."""
        return [f"{RULE_NUMBERS.get(key, key)} {cell(value, digits)}" for key, value in self.rule.items()]

    def scalars(self) -> dict[str, float]:
        """Return all numbers in one flat dictionary for a logger, such as {"0/forward_age": 3.0, "time/step": 0.1}."""
        groups: dict[str, Mapping[str, Any]] = {"time/": self.time, "rule/": self.rule}
        groups |= {f"{row['layer']}/": row for row in self.layers}
        numbers = {"steps": float(self.steps)}
        for prefix, values in groups.items():
            numbers |= {prefix + key: float(value) for key, value in values.items() if isinstance(value, (int, float))}
        return numbers


def layer_row(layer: Layer, t: int, damping: Damper) -> dict[str, Any]:
    """Return the row of a layer at step t: its step, and the columns of its sides; None: not known yet."""
    row: dict[str, Any] = {"layer": layer.name, "step_norm": layer.step_norm}
    for side in layer.sides:
        moments = side.moments
        values = {
            "factor": f"{side.factor or 'identity'} {side.blocks}",
            "damping": None if moments is None else float(damping(layer, side).amounts(moments.variances).mean()),
            "age": None if side.refreshed_at is None else t - side.refreshed_at,
            "drift": side.last_drift,
        }
        row |= {f"{side.name}_{key}": value for key, value in values.items()}
    return row


def by_block(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of layers, where several layers in one numbered module, such as a transformer's block, have one row.

    >>> rows = [{"layer": name, "step_norm": 0.1} for name in ("h.0.q", "h.0.k", "h.1.q", "h.1.k", "head")]
    >>> [row["layer"] for row in by_block(rows)]
    ['h.0 (2 layers)', 'h.1 (2 layers)', 'head']
    """
    blocks: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        blocks.setdefault(re.sub(r"(.*\.\d+)\..*", r"\1", row["layer"]), []).append(row)
    return [layers[0] if len(layers) == 1 else _block(name, layers) for name, layers in blocks.items()]


def _block(name: str, layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row with the largest numbers of some layers, and the kinds of their factors without sizes."""
    block = {}
    for key in layers[0]:
        values = [row[key] for row in layers if row[key] is not None]
        kinds = {value.split()[0] for value in values if isinstance(value, str)}
        block[key] = ", ".join(sorted(kinds)) or max(values, default=None)
    return block | {"layer": f"{name} ({len(layers)} layers)"}


def cell(value: Any, digits: int = 3) -> str:
    """Return a value as text for a table."""
    if value is None:
        return "–"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)
