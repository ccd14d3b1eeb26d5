"""Could the estimators of scikit-learn train with `bprong.BPRONG` instead of their own engine in NumPy?

Both train the same network on tables that come with scikit-learn, with all rows in each step: the estimator until it
stops, the optimizer with lr="auto" until its training loss is at the estimator's last one, or for ten times as many
steps. Processor time of one thread; the two take turns, and medians of the ratios are given.

    python benchmarks/estimator_engines.py
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from harness.command_line import CommandLine
from sklearn import datasets
from torch import nn

import bprong
from bprong.experiments.bench.tables import markdown
from bprong.sklearn import MLPClassifier, MLPRegressor

HIDDEN = 100
TABLES: dict[str, tuple[Callable[..., Any], bool]] = {
    "iris": (datasets.load_iris, True),
    "wine": (datasets.load_wine, True),
    "breast cancer": (datasets.load_breast_cancer, True),
    "digits": (datasets.load_digits, True),
    "diabetes": (datasets.load_diabetes, False),
}


def estimated(X: np.ndarray, y: np.ndarray, classes: bool, seed: int) -> tuple[float, int, float]:
    """Seconds, steps and the last training loss of the estimator, without its penalty."""
    kind = MLPClassifier if classes else MLPRegressor
    estimator = kind(hidden_layer_sizes=(HIDDEN,), alpha=0.0, random_state=seed)
    start = time.process_time()
    estimator.fit(X, y)
    return time.process_time() - start, estimator.n_iter_, estimator.loss_


def optimized(
    X: np.ndarray, y: np.ndarray, classes: bool, seed: int, loss: float, steps: int
) -> tuple[float, int, float]:
    """Seconds, steps and the last loss of the optimizer."""
    torch.manual_seed(seed)
    x = torch.tensor((X - X.mean(0)) / np.where(X.std(0) > 0, X.std(0), 1.0), dtype=torch.float32)
    scaled = y if classes else (y - y.mean()) / y.std()
    target = torch.tensor(scaled, dtype=torch.long if classes else torch.float32)
    target = target if classes else target.unsqueeze(1)
    outputs = len(np.unique(y)) if classes else 1
    model = nn.Sequential(nn.Linear(X.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs))
    criterion: nn.Module = nn.CrossEntropyLoss() if classes else nn.MSELoss()
    start = time.process_time()
    optimizer = bprong.BPRONG(model, criterion)
    value = torch.tensor(np.inf)
    made = 0
    while made < 10 * steps and float(value.detach()) > loss:
        optimizer.zero_grad()
        value = criterion(model(x), target)
        value.backward()
        optimizer.step()
        made += 1
    return time.process_time() - start, made, float(value.detach())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__)
    parser.setting("turns", 3, 1, "networks that each of the two trains, by seed")
    options = parser.parse(arguments)
    warnings.simplefilter("ignore")
    rows = []
    for name, (load, classes) in TABLES.items():
        X, y = load(return_X_y=True)
        ratios = []
        by_step = []
        for seed in range(options.turns):
            seconds, steps, loss = estimated(X, y, classes, seed)
            others, made, end = optimized(X, y, classes, seed, loss if classes else 2 * loss, steps)
            ratios.append(others / seconds)
            by_step.append((others / made) / (seconds / steps))
        reached = f"{made} steps" if made < 10 * steps else f"not in {made} steps ({end:.3g})"
        rows.append([name, steps, f"{loss:.3g}", f"{median(by_step):.1f}", reached, f"{median(ratios):.1f}"])
    headings = [
        "table",
        "steps",
        "loss",
        "a step of the optimizer, in steps",
        "it reaches the loss in",
        "ratio of time",
    ]
    print(markdown(headings, rows))


if __name__ == "__main__":
    main()
