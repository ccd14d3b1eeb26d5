"""What does each mechanism of lr="auto" do? The sixty problems and ten others, with one mechanism removed at a time.

For each variant: how many runs diverge, and for each class of problems the geometric mean of its final losses divided
by those of the full rule. A thousandth of the initial loss is added to each, so that losses next to nothing count
little. The variant "other random targets" changes only the random numbers behind D: it shows how much of a difference
is chance.

    python benchmarks/auto_ablation.py             two hours on one core; runs what docs/auto-ablation.csv lacks
    python benchmarks/auto_ablation.py --only "no undo" --seeds 4
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest.mock import patch

from harness import training
from harness.command_line import CommandLine
from problems import sixty
from problems.standard import STANDARD
from problems.unseen import UNSEEN
from sixty_problems import train

from bprong.experiments.bench.rows import Log, grouped
from bprong.experiments.bench.tables import markdown
from bprong.optim.auto import evaluation, step
from bprong.optim.auto.rule import SETTINGS, AutoRule
from bprong.optim.auto.step import NaturalDirections

NEGLIGIBLE = 1e-3  # of the initial loss
SCALED = {name: STANDARD[name] for name in ("regression-linear", "regression-relu")}
CLASSES = {
    "layers": sixty.LAYERS,
    "raw features": sixty.RAW | SCALED,
    "targets": sixty.TARGETS,
    "noise": sixty.NOISE,
    "batch sizes": sixty.BATCHES,
    "shapes": sixty.SHAPES,
    "uses": sixty.USES,
    "unseen": UNSEEN,
}
PROBLEMS = {name: problem for problems in CLASSES.values() for name, problem in problems.items()}


@dataclass(frozen=True)
class Row:
    """A run with one mechanism removed; end: infinite if it failed."""

    variant: str
    problem: str
    seed: int
    start: float
    end: float
    undone: int

    @property
    def diverged(self) -> bool:
        return not self.end <= self.start


# Variants: changed constants, or methods that replace those of the rule -----------------------------------------------


def never_undone(self: AutoRule, *arguments: Any) -> bool:
    UPDATE_DAMPING(self, *arguments)
    return True


def plain_average(self: AutoRule, c: dict[str, float]) -> dict[str, float]:
    keep = self.settings.keep
    before = c | self.coefficients
    return {name: keep * before[name] + (1 - keep) * x for name, x in c.items()}


def part_without_slope_bound(self: AutoRule, alpha: float, length: float, slope: float) -> float:
    bound = self._bound() * self.caution
    return math.sqrt(bound / length) if length > bound else 1.0


def not_averaged(self: AutoRule, c: dict[str, float]) -> dict[str, float]:
    return c


def unbraked(self: AutoRule, t: int) -> None:
    brake = self.brake
    UNDONE(self, t)
    self.brake = brake


UPDATE_DAMPING = AutoRule.update_damping
UNDONE = AutoRule.undone
OPTIMIZER_FOR = training.optimizer_for

Change = dict[str, Any] | tuple[Any, str, Any]  # constants and initial values, or what patch.object takes
VARIANTS: dict[str, list[Change]] = {
    "full rule": [],
    "other random targets": [
        (training, "optimizer_for", lambda *a, **k: OPTIMIZER_FOR(*a, **k, options={"seed": 12345}))
    ],
    "no trust (s = 1)": [{"least_trust": 1.0}],
    "no bound on ½dᵀFd": [{"bound_share": 1e30, "bound_nats": 1e30, "bound_late": 1e30}],
    "bound without nats (0.1 L)": [{"bound_share": 0.1, "bound_nats": 0.0}],
    "no bound between evaluations": [(AutoRule, "_estimated_length", lambda self, c, slope: 0.0)],
    "no slope bound": [(AutoRule, "_allowed_part", part_without_slope_bound)],
    "first step as long as others": [{"caution": 1.0}],
    "no momentum Δ₀": [(NaturalDirections, "keeps_last_update", False)],
    "no bound on β": [{"most_fallback": 1e30}],
    "λ fixed": [{"raise_lambda": 1.0, "lower_lambda": 1.0, "leave_plateau": 1.0}],
    "no plateau rule": [(AutoRule, "curvature_ratio", property(lambda self: 1.0, lambda self, ratio: None))],
    "no lower bound on D": [{"faint": 0.0}],
    "no early refreshes": [(NaturalDirections, "early_steps", ())],
    "no sampling error in ε": [{"sampling": 0.0}],
    "no averages of α, β, μ": [(AutoRule, "_averaged", not_averaged)],
    "α not clamped": [(AutoRule, "_averaged", plain_average)],
    "no undo": [{"blow_up": 1e300}, (AutoRule, "update_damping", never_undone)],
    "no brake after an undo": [(AutoRule, "undone", unbraked)],
    "first steps not all evaluated": [(AutoRule, "evaluates", lambda self, t: t % self.settings.evaluate_every == 0)],
}


def run(variant: str, name: str, seed: int) -> Row:
    changes = VARIANTS[variant]
    changed = {name: value for change in changes if isinstance(change, dict) for name, value in change.items()}
    constants = {field.name for field in fields(SETTINGS)}
    settings = replace(SETTINGS, **{name: value for name, value in changed.items() if name in constants})
    initial = {name: value for name, value in changed.items() if name not in constants}
    with ExitStack() as stack:
        for change in changes:
            if not isinstance(change, dict):
                stack.enter_context(patch.object(*change))

        def rule(**arguments: Any) -> AutoRule:
            return AutoRule(settings=settings, **initial, **arguments)

        stack.enter_context(patch.object(evaluation, "SETTINGS", settings))
        stack.enter_context(patch.object(step, "AutoRule", rule))
        row, _ = train(name, PROBLEMS[name], "auto", seed)
    return Row(variant, name, seed, row.start, row.end, row.undone)


# The table ------------------------------------------------------------------------------------------------------------


def log_ratio(row: Row, full: Row) -> float:
    floor = PROBLEMS[row.problem].floor
    ends = [one.end - floor + NEGLIGIBLE * (one.start - floor) for one in (row, full)]
    return math.log(ends[0] / ends[1])


def cell(rows: Iterable[Row], full: dict[tuple[Any, ...], Row]) -> str:
    """The geometric mean of the ratios of those runs that did not diverge."""
    logs = [log_ratio(row, full[row.problem, row.seed]) for row in rows if not row.diverged]
    return f"{math.exp(sum(logs) / len(logs)):.2f}" if logs else "–"


def table(rows: Sequence[Row]) -> str:
    by_variant = grouped(rows, "variant")
    full = {(row.problem, row.seed): row for row in by_variant["full rule",]}
    full = {key: row for key, row in full.items() if not row.diverged}
    lines = []
    for (variant,), found in by_variant.items():
        own = [row for row in found if (row.problem, row.seed) in full]
        ratios = [cell([row for row in own if row.problem in problems], full) for problems in CLASSES.values()]
        gone = [row.problem for row in found if row.diverged]
        named = f"{len(gone)}: {', '.join(sorted(set(gone)))}" if gone else "0"
        lines.append([variant, *ratios, cell(own, full), named])
    return markdown(["variant", *CLASSES, "all", "diverged"], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, out=True)
    parser.setting("seeds", [4, 5], [4], "seeds")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, metavar="VARIANT", help=", ".join(VARIANTS))
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, metavar="NAME", help="by default all")
    options = parser.parse(arguments)
    variants = options.only or (["full rule", "no undo"] if options.quick else list(VARIANTS))
    names = options.problems or (["iris-raw"] if options.quick else list(PROBLEMS))
    log = Log(options.out / "auto-ablation.csv", Row)
    for seed in options.seeds:
        for variant in variants:
            done = log.grouped("variant", "problem", "seed")
            log.add(run(variant, name, seed) for name in names if (variant, name, seed) not in done)
            print(f"{variant}, seed {seed}", flush=True)
    print(table(log.rows))


if __name__ == "__main__":
    main()
