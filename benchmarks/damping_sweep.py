"""Which damping, statistics and periods are best for PRONG and BPRONG? The sweep behind `bprong reproduce`'s defaults.

Trained on the first 50,000 of MNIST's training images and judged on the other 10,000; the test images are not used.

    python benchmarks/damping_sweep.py run damping             a grid; rows are added to docs/sweep.csv
    python benchmarks/damping_sweep.py run one --method prong --set forward_damping=0.01
    python benchmarks/damping_sweep.py table                   settings of ten epochs, the best first
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from harness.command_line import CommandLine
from problems.data import mnist

from bprong.experiments.bench.rows import Log, columns_of, grouped
from bprong.experiments.bench.tables import markdown
from bprong.experiments.data import Dataset
from bprong.experiments.methods import METHODS, WhiteningSettings
from bprong.experiments.progress import Progress
from bprong.experiments.runner import run
from bprong.experiments.training import Config

TRAINING = 50_000
BACKWARD_SETTINGS = ("backward_damping", "backward_offset", "fisher")  # without effect in PRONG
GRIDS: dict[str, dict[str, list[Any]]] = {
    "damping": {  # BPRONG, coarse
        "forward_damping": [0.03, 0.1, 0.3],
        "backward_damping": [0.003, 0.01, 0.03, 0.1],
        "statistics": [0, 5000],
    },
    "refine": {  # BPRONG, around the best of these
        "forward_damping": [0.2, 0.3, 1.0],
        "backward_damping": [0.003, 0.01, 0.02],
        "statistics": [1000, 5000],
    },
    "average": {  # BPRONG, with a running average over the batches of refreshes
        "forward_damping": [0.1, 0.2, 0.3],
        "backward_damping": [0.01, 0.015, 0.02, 0.03],
        "average": [0.7, 0.8, 0.9],
    },
    "forward": {"forward_damping": [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1], "statistics": [0, 5000]},  # PRONG
    "edge": {"forward_damping": [0.002, 0.003, 0.005, 0.01], "statistics": [0, 1000]},  # PRONG, over seeds
    "periods": {"period": [20, 50, 100, 200, 400]},
    "fisher": {"fisher": ["sampled", "exact", "empirical"]},
    "one": {},  # only what --set gives
}


@dataclass(frozen=True)
class Row:
    """A network after one epoch. Settings are kept as they are written; those without effect are empty."""

    method: str
    forward_damping: str
    backward_damping: str
    statistics: str
    average: str
    forward_every: str
    backward_offset: str
    fisher: str
    seed: int
    epoch: int
    train_loss: float
    val_loss: float
    val_accuracy: float


SETTINGS = columns_of(Row)[1:8]


def training_split() -> Dataset:
    """MNIST's training images alone, the last 10,000 of them for validation."""
    x, y, *_ = mnist()
    return Dataset("MNIST training split", x[:TRAINING], y[:TRAINING], x[TRAINING:], y[TRAINING:], None)


def combinations(grid: dict[str, list[Any]], fixed: dict[str, Any]) -> list[dict[str, Any]]:
    """Every combination. `period` sets both periods, with the backward refreshes half a period later."""
    found = []
    for values in itertools.product(*grid.values()):
        setting = fixed | dict(zip(grid, values, strict=True))
        period = setting.pop("period", None)
        if period is not None:
            setting |= {"forward_every": period, "backward_every": period, "backward_offset": period // 2}
        found.append(setting)
    return found


def run_grid(log: Log[Row], options: argparse.Namespace) -> None:
    kinds = {field.name: type(field.default) for field in fields(WhiteningSettings)}
    fixed = {name: kinds[name](value) for name, value in (item.split("=") for item in options.set)}
    data = training_split()
    if options.quick:
        data = replace(data, x_train=data.x_train[:1000], y_train=data.y_train[:1000])
    method = METHODS[options.method]
    settings = combinations(GRIDS[options.grid], fixed)
    for setting in settings[:1] if options.quick else settings:
        config = Config((options.method,), options.epochs, options.seeds, whitening=setting)
        with tempfile.TemporaryDirectory() as folder:
            found = [row for row in run(config, data, Path(folder), Progress()) if row.epoch > 0]
        whole = asdict(replace(method.whitening, **setting))
        if "backward" not in method.sides:
            whole |= dict.fromkeys(BACKWARD_SETTINGS, "")
        cells = [str(whole[name]) for name in SETTINGS]
        log.add(
            Row(row.method, *cells, row.seed, row.epoch, row.train_loss, row.val_loss, row.val_accuracy)
            for row in found
        )
        print(f"{setting}: train {found[-1].train_loss:.4f}, validation {found[-1].val_loss:.4f}", flush=True)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def table(rows: Sequence[Row]) -> str:
    """Ranked by the geometric mean of the validation loss over the first ten epochs, on seed 0."""
    ranked = []
    own = [row for row in rows if row.seed == 0]
    for key, path in grouped(own, "method", *SETTINGS).items():
        epochs = {row.epoch: row for row in path}
        if len(epochs) >= 10:
            val = geometric_mean([row.val_loss for row in epochs.values()])
            train = geometric_mean([row.train_loss for row in epochs.values()])
            losses = [epochs[1].train_loss, epochs[1].val_loss, epochs[3].train_loss, epochs[3].val_loss]
            ranked.append((key[0], val, [*key, *(f"{x:.5f}" for x in losses), f"{train:.4f}", f"{val:.4f}"]))
    titles = ["method", "ε₁", "ε₂", "sample", "average", "τ", "c₂", "labels", "train 1", "val 1", "train 3", "val 3"]
    return markdown([*titles, "train, mean", "val, mean"], [cells for *_, cells in sorted(ranked, key=lambda r: r[:2])])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, threads=2, out=True)
    parser.setting("epochs", 10, 1, "epochs")
    parser.setting("seeds", 1, 1, "number of seeds")
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("grid", nargs="?", choices=GRIDS, default="one")
    parser.add_argument("--method", choices=["prong", "bprong"], default="bprong")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of all runs")
    options = parser.parse(arguments)
    log = Log(options.out / "sweep.csv", Row)
    if options.command == "run":
        run_grid(log, options)
    print(table(log.rows))


if __name__ == "__main__":
    main()
