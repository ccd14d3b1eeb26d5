"""Which recipe generalises best on the paper's network? The search behind the recipes of `bprong reproduce`.

The trials of a method are all pairs of its learning rates and weight decays, with a cosine schedule over the whole run.
A run is measured twice: with its last weights and with their exponential average, which spans 4 % of the steps. Trained
on the first 50,000 of MNIST's training images and judged on the other 10,000; the test images are not used.

    python benchmarks/recipe_search.py                   20 epochs; runs what docs/recipes.csv lacks
    python benchmarks/recipe_search.py --epochs 3        the same over three epochs
    python benchmarks/recipe_search.py --draw            the table only
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.command_line import CommandLine
from harness.methods import METHODS
from harness.recipes import Training
from problems import Data, Problem
from problems.data import mnist
from problems.networks import paper_network, with_batch_norm
from torch import nn

import bprong
from bprong.experiments.bench.rows import Log, grouped
from bprong.experiments.bench.search import written
from bprong.experiments.bench.tables import markdown

TRAINING = 50_000
BATCH = 100
RECIPE = {"schedule": "cosine", "average": 0.04}
STRONG = bprong.Damping(10.0, "mean")


@dataclass(frozen=True)
class Candidate:
    """A method and its trials.

    name:  of the method, as `harness.methods` has it
    rates, decays: learning rates and weight decays, of which all pairs are tried
    fixed: further settings that are not tuned
    """

    name: str
    network: Callable[[int], nn.Module]
    rates: Sequence[float]
    decays: Sequence[float] = (0.1, 0.3, 0.5, 1.0)
    fixed: dict[str, Any] = field(default_factory=dict)


def paper_network_bn(seed: int) -> nn.Sequential:
    return with_batch_norm(paper_network(seed))


DAMPED = {"forward_damping": STRONG, "backward_damping": STRONG}
CANDIDATES = {
    "BPRONG, spectral": Candidate("spectral", paper_network, [0.005, 0.01]),
    "BPRONG, spectral, damping 10": Candidate("spectral", paper_network, [0.005, 0.01], fixed=DAMPED),
    "BN, BPRONG, spectral, damping 10": Candidate("spectral", paper_network_bn, [0.005, 0.01], fixed=DAMPED),
    "BN, AdamW": Candidate("adamw", paper_network_bn, [0.002, 0.004]),
    "Muon": Candidate("muon", paper_network, [0.005, 0.01], fixed={"rest_lr": 0.005}),
    "BN, Muon": Candidate("muon", paper_network_bn, [0.005, 0.01], fixed={"rest_lr": 0.005}),
}


@dataclass(frozen=True)
class Row:
    """A network at the end of a run, with its last weights or with averaged ones."""

    method: str
    settings: str
    weights: str
    epochs: int
    seed: int
    train_loss: float
    val_loss: float
    accuracy: float


def training_split() -> Data:
    """MNIST's training images alone, the last 10,000 of them for validation."""
    x, y, *_ = mnist()
    return Data(x[:TRAINING], y[:TRAINING], x[TRAINING:], y[TRAINING:])


def trials(candidate: Candidate) -> list[dict[str, float]]:
    return [{"lr": lr, "weight_decay": decay} for lr, decay in itertools.product(candidate.rates, candidate.decays)]


def run(title: str, settings: dict[str, float], epochs: int, seed: int, quick: bool) -> list[Row]:
    """One trial, measured with the last weights and with the averaged ones."""
    candidate = CANDIDATES[title]
    steps = 4 if quick else epochs * TRAINING // BATCH
    problem = Problem(title, candidate.network, training_split, BATCH, steps)
    training = Training(problem, METHODS[candidate.name], {**settings, **RECIPE, **candidate.fixed}, steps, seed)
    found = {"averaged": training.run()}
    training.average = None
    found["last"] = training.measure()
    return [
        Row(title, written(settings), weights, epochs, seed, own.train_loss, own.val_loss, own.accuracy)
        for weights, own in found.items()
    ]


def table(rows: Sequence[Row], epochs: int) -> str:
    """The best trial of each method, the lowest validation loss first."""
    own = [row for row in rows if row.epochs == epochs]
    best = [min(group, key=lambda row: row.val_loss) for group in grouped(own, "method", "weights").values()]
    lines = [
        [row.method, row.weights, row.settings, f"{row.train_loss:.4f}", f"{row.val_loss:.4f}", f"{row.accuracy:.2%}"]
        for row in sorted(best, key=lambda row: row.val_loss)
    ]
    return markdown(["method", "weights", "best trial", "training", "validation", "accuracy"], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, out=True, draw=True)
    parser.setting("epochs", 20, 1, "length of a run")
    parser.add_argument("--only", choices=CANDIDATES, action="append", help="this method only; may be repeated")
    options = parser.parse(arguments)
    log = Log(options.out / "recipes.csv", Row)
    for title in () if options.draw else options.only or CANDIDATES:
        for settings in trials(CANDIDATES[title])[: 1 if options.quick else None]:
            if (title, written(settings), options.epochs) not in log.grouped("method", "settings", "epochs"):
                log.add(run(title, settings, options.epochs, 0, options.quick))
                averaged, last = log.rows[-2:]
                print(f"{title}, {written(settings)}: averaged {averaged.val_loss:.4f}, last {last.val_loss:.4f}")
    print(table(log.rows, options.epochs))


if __name__ == "__main__":
    main()
