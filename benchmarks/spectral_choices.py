"""Which power of whitening, which damping and which side do spectral steps want?

Training and validation loss after a fixed number of steps on seed 0, with a learning rate that falls to zero linearly,
an average of the last weights and momentum 0.95; each variant has the better of two learning rates. Damping is relative
to the mean eigenvalue. "none" is Muon with the same treatment of all other parameters: damping so large that nothing is
whitened.

    python benchmarks/spectral_choices.py            15 minutes on one core; runs what docs/spectral-choices.csv lacks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.command_line import CommandLine
from harness.methods import METHODS
from harness.recipes import Training
from problems.modern import MODERN

import bprong
from bprong.experiments.bench.rows import Log, grouped
from bprong.experiments.bench.tables import markdown

STEPS = {"gpt": 200, "vit": 80, "conv": 128, "paper-bn": 600}
RATES = {"gpt": [0.02, 0.04], "vit": [0.02, 0.04], "conv": [0.02, 0.04], "paper-bn": [0.01, 0.02]}
RECIPE = {"schedule": "linear", "average": 0.04, "weight_decay": 0.01}
NONE = 1e6  # a damping that leaves nothing of the whitening


@dataclass(frozen=True)
class Row:
    problem: str
    variant: str
    damping: float
    lr: float
    train_loss: float
    val_loss: float


VARIANTS = [
    ("none", NONE),
    *(("half", damping) for damping in (0.02, 0.1, 1.0, 10.0)),
    *(("whole", damping) for damping in (0.1, 1.0, 10.0)),
    ("half, inputs only", 1.0),
    ("half, refreshed every 10 steps", 1.0),
]


def settings_of(variant: str, damping: float) -> dict[str, Any]:
    own = bprong.Damping(damping, "mean")
    large = bprong.Damping(NONE, "mean")
    return {
        "step": "spectral",
        "momentum": 0.95,
        "forward_damping": own,
        "backward_damping": large if variant.endswith("inputs only") else own,
        "every": 10 if variant.endswith("10 steps") else None,
        "options": {"power": "whole" if variant == "whole" else "half"},
    }


def run(problem: str, variant: str, damping: float, lr: float, quick: bool) -> Row:
    method = replace(METHODS["spectral"], fixed=settings_of(variant, damping))
    end = Training(MODERN[problem], method, {"lr": lr, **RECIPE}, 4 if quick else STEPS[problem], 0).run()
    return Row(problem, variant, damping, lr, end.train_loss, end.val_loss)


def table(rows: Sequence[Row]) -> str:
    lines = []
    for variant, damping in VARIANTS:
        own = [row for row in rows if (row.variant, row.damping) == (variant, damping)]
        best = {name: min(group, key=lambda row: row.train_loss) for (name,), group in grouped(own, "problem").items()}
        cells = [f"{best[p].train_loss:.4g} / {best[p].val_loss:.4g}" if p in best else "–" for p in STEPS]
        lines.append([variant, "–" if damping == NONE else f"{damping:g}", *cells])
    return markdown(["whitening", "damping", *(f"{p}, {steps} steps" for p, steps in STEPS.items())], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, out=True)
    parser.setting("only", ",".join(STEPS), "vit", "problems")
    options = parser.parse(arguments)
    log = Log(options.out / "spectral-choices.csv", Row)
    known = {(row.problem, row.variant, row.damping, row.lr) for row in log.rows}
    for problem in options.only.split(","):
        for variant, damping in VARIANTS[:2] if options.quick else VARIANTS:
            for lr in RATES[problem]:
                if (problem, variant, damping, lr) not in known:
                    log.add([run(problem, variant, damping, lr, options.quick)])
                    print(log.rows[-1], flush=True)
    print(table(log.rows))


if __name__ == "__main__":
    main()
