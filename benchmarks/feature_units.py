"""In which units should the features of the data be damped at lr="auto"?

Each form gives v̂ᵢ, the square of a unit, from the moments of a running average; `bprong.linalg.units` has the one in
use. Measured are the steps to both targets of the badly scaled regression, and the training loss of the paper's network
on MNIST: workloads of `bprong bench`, on the tuning split and without its average of weights.

    python benchmarks/feature_units.py            6 minutes on one core; runs what docs/feature-units.csv lacks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

import torch
from harness.command_line import CommandLine
from torch import Tensor

import bprong
from bprong.experiments.bench.data import batches
from bprong.experiments.bench.rows import Log, grouped
from bprong.experiments.bench.tables import markdown
from bprong.experiments.bench.targets import TARGETS
from bprong.experiments.bench.workloads import WORKLOADS, Measurement
from bprong.linalg import factors
from bprong.linalg.moments import Moments
from bprong.linalg.units import examples_behind

Form = Callable[[Moments], Tensor | None]
STEPS = {"regression": 2000, "paper": 400}
MARKS = (100, 200, 400)  # steps after which the loss of the paper's network is measured
SPACING = 10  # steps between two looks at the target


@dataclass(frozen=True)
class Row:
    """steps: to the target, 0 if it was missed; loss_100 …: the training loss after so many steps."""

    workload: str
    step: str
    form: str
    seed: int
    steps: int
    loss_100: float
    loss_200: float
    loss_400: float


def behind(moments: Moments) -> Tensor | None:
    """The number of examples behind the variance of each feature of the data; None: there is none."""
    k = None if moments.tails is None else examples_behind(moments, moments.tails)
    return k if k is not None and k.any() else None


def with_the_same_mean(v: Tensor, squares: Tensor) -> Tensor:
    return (squares * (v / squares).mean() / v.mean()).sqrt()


def power(p: float) -> Form:
    """v̂ = vᵖ v̄¹⁻ᵖ with the arithmetic mean v̄."""

    def form(moments: Moments) -> Tensor | None:
        v = moments.variances
        return None if moments.tails is None else with_the_same_mean(v, torch.where(v > 0, v / v.mean(), 1.0) ** p)

    return form


def shrunk(examples: float, kurtosis: float, arithmetic: bool = False) -> Form:
    """Shrinkage in the logarithm with k = N/κ and k₀ = examples + N/kurtosis."""

    def form(moments: Moments) -> Tensor | None:
        k = behind(moments)
        if k is None:
            return None
        v = moments.variances
        logs = torch.where(k > 0, v, 1.0).log()
        centre = v.mean().log() if arithmetic else (k * logs).sum() / k.sum()
        trust = k / (k + examples + moments.weight / kurtosis)
        return with_the_same_mean(v, (centre + trust * (logs - centre)).exp())

    return form


def bayes(moments: Moments) -> Tensor | None:
    """Shrinkage by the sampling error of log v alone, (κ−1)/N, against its spread over the features."""
    k = behind(moments)
    if k is None:
        return None
    v = moments.variances
    used = k > 0
    error = 1 / k.clamp(min=1e-9)
    logs = torch.where(used, v, 1.0).log()
    centre = (k * logs).sum() / k.sum()
    spread = ((logs - centre).square() - error)[used].mean().clamp(min=1e-6)
    trust = torch.where(used, spread / (spread + error), 0.0)
    return with_the_same_mean(v, (centre + trust * (logs - centre)).exp())


FORMS: dict[str, Form] = {
    "one unit for all (p = 0)": lambda moments: None,
    "p = 1/2": power(0.5),
    "p = 3/4": power(0.75),
    "p = 1": power(1.0),
    "k₀ = 100": shrunk(100, float("inf")),
    "k₀ = 10 + N/10, arithmetic mean": shrunk(10, 10, arithmetic=True),
    "k₀ = 10 + N/3": shrunk(10, 3),
    "k₀ = 10 + N/5": shrunk(10, 5),
    "k₀ = 10 + N/10": shrunk(10, 10),
    "k₀ = 10 + N/30": shrunk(10, 30),
    "k₀ = N/10": shrunk(0, 10),
    "k₀ from the spread of log v": bayes,
}


def run(workload: str, step: str, form: str, seed: int, steps: int) -> Row:
    factors.feature_units = FORMS[form]
    chosen = WORKLOADS[workload]
    data = chosen.data("tuning")
    target = TARGETS[workload]["tuning"]
    model = chosen.model(seed)
    criterion = chosen.criterion()
    optimizer = bprong.BPRONG(model, criterion, step=step)
    measure = Measurement(chosen, "tuning")
    reached = [0, 0]
    losses = dict.fromkeys(MARKS, float("nan"))
    for t, (x, y) in zip(range(1, steps + 1), batches(data.x, data.y, chosen.batch, seed), strict=False):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        if t % SPACING == 0:
            now = measure(model)
            losses |= {t: now[0]} if t in MARKS else {}
            for i, (loss, enough) in enumerate(zip(now, (target.train_loss, target.val_loss), strict=True)):
                reached[i] = reached[i] or t * (loss <= enough)
        if workload == "regression" and all(reached):
            break
    return Row(workload, step, form, seed, max(reached) if all(reached) else 0, *losses.values())


def table(rows: Sequence[Row]) -> str:
    lines = []
    for (form,), group in grouped(rows, "form").items():
        cells = [form]
        for step in ("natural", "spectral"):
            of_step = [row for row in group if row.step == step]
            steps = [row.steps or STEPS["regression"] for row in of_step if row.workload == "regression"]
            cells.append("missed" if median(steps) == STEPS["regression"] else f"{median(steps):.0f}")
            images = [row for row in of_step if row.workload == "paper"]
            cells.append(", ".join(f"{mean(getattr(row, f'loss_{t}') for row in images):.4f}" for t in MARKS))
        lines.append(cells)
    titles = ["units", "natural: steps", "MNIST", "spectral: steps", "MNIST"]
    return markdown(titles, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, out=True)
    parser.setting("seeds", [0, 1, 2], [0], "seeds")
    parser.setting("only", ",".join(STEPS), "regression", "workloads")
    options = parser.parse(arguments)
    log = Log(options.out / "feature-units.csv", Row)
    known = {(row.workload, row.step, row.form, row.seed) for row in log.rows}
    for seed in options.seeds:
        for workload in options.only.split(","):
            for step in ("natural", "spectral"):
                for form in FORMS:
                    if (workload, step, form, seed) not in known:
                        steps = 10 if options.quick else STEPS[workload]
                        log.add([run(workload, step, form, seed, steps)])
                        print(log.rows[-1], flush=True)
    print(table(log.rows))


if __name__ == "__main__":
    main()
