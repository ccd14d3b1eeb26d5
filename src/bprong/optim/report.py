"""What an optimizer reports about itself: plain data underneath, a table when printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bprong.capture.coverage import table
from bprong.whitening.layer import SIDES, Layer, Side
from bprong.whitening.refresh import Damper

COLUMNS = {  # of each side, with the values of `side_values`: heading, explanation
    "factor": ("factor", "how the second moment Ž of the inputs z, or D of the errors δ, is inverted, and its size"),
    "damping": ("ε", "what is added to each eigenvalue before it is inverted (mean)"),
    "age": ("age", "steps since the factor was computed"),
    "drift": ("drift", "distance of the moments from those behind the factor, ‖U(Ž+ε)Uᵀ−I‖ / ‖I‖, at the last test"),
}
STEP = ("step", "length of the weight's step at the last refresh")
RULE_NUMBERS = {"alpha": "α", "mu": "μ", "lambda": "λ", "ratio": "actual/predicted"}  # of lr="auto", as printed


def side_values(layer: Layer, side: Side, t: int, damping: Damper) -> dict[str, Any]:
    """Return the values of a side of a layer at step t, in the columns; None: not known yet."""
    moments = side.moments
    return {
        "factor": f"{side.factor or 'identity'} {side.blocks}",
        "damping": None if moments is None else float(damping(layer, side).amounts(moments.variances).mean()),
        "age": None if side.refreshed_at is None else t - side.refreshed_at,
        "drift": side.last_drift,
    }


@dataclass(frozen=True)
class Report:
    """The state of an optimizer after `steps` steps; print it for a table.

    layers:    a row for each whitened layer: its `step_norm`, and the `COLUMNS` of its sides as forward_…, backward_…
    fallback:  the parameters that follow the fallback rule (Adam), with the reason
    time:      shares of the time since the first step that went to statistics, factorisation and steps
    rule:      numbers of the step rule. For lr="auto": the last coefficients alpha and mu of the whitened direction and
               of the last update, the damping lambda, and the ratio of the actual to the predicted decrease of the
               loss; None before there is one
    """

    steps: int
    layers: list[dict[str, Any]]
    fallback: dict[str, str]
    time: dict[str, float]
    rule: dict[str, float | None]

    def __str__(self) -> str:
        headings = {"layer": "layer"}
        for key, (heading, _) in COLUMNS.items():
            headings |= {f"{side}_{key}": f"{heading} {letter}" for side, letter in zip(SIDES, "zδ", strict=True)}
        headings["step_norm"] = STEP[0]
        used = [key for key in headings if any(row.get(key) is not None for row in self.layers)]
        rows = [[cell(row.get(key)) for key in used] for row in self.layers]
        lines = [f"{self.steps} steps", table([headings[key] for key in used], rows)]
        lines += [f"{heading}: {explanation}" for heading, explanation in (*COLUMNS.values(), STEP)]
        lines += [f"not whitened (Adam): {name} ({reason})" for name, reason in self.fallback.items()]
        if self.rule:
            lines.append("step rule: " + ", ".join(self.rule_numbers()))
        times = ", ".join(f"{purpose} {fraction:.1%}" for purpose, fraction in self.time.items())
        return "\n".join([*lines, f"share of time since the first step: {times}; the rest is your own code"])

    def rule_numbers(self, digits: int = 3) -> list[str]:
        """Return each number of the step rule with its letter."""
        return [f"{RULE_NUMBERS.get(key, key)} {cell(value, digits)}" for key, value in self.rule.items()]

    def scalars(self) -> dict[str, float]:
        """Return all numbers in one flat dictionary for a logger, such as {"0/forward_age": 3.0, "time/step": 0.1}."""
        groups: dict[str, Mapping[str, Any]] = {"time/": self.time, "rule/": self.rule}
        groups |= {f"{row['layer']}/": row for row in self.layers}
        numbers = {"steps": float(self.steps)}
        for prefix, values in groups.items():
            for key, value in values.items():
                if isinstance(value, (int, float)):
                    numbers[prefix + key] = float(value)
        return numbers


def layer_row(layer: Layer, t: int, damping: Damper) -> dict[str, Any]:
    """Return the row of a layer at step t."""
    row: dict[str, Any] = {"layer": layer.name, "step_norm": layer.step_norm}
    for side in layer.sides:
        row |= {f"{side.name}_{key}": value for key, value in side_values(layer, side, t, damping).items()}
    return row


def cell(value: Any, digits: int = 3) -> str:
    """Return a value as text for a table."""
    if value is None:
        return "–"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)
