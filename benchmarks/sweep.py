"""The sweep behind the defaults of `bprong reproduce` for PRONG and BPRONG; what it found is in docs/sweep.md.

Trained on the first 50,000 of MNIST's training images, judged on the other 10,000: the test images are not looked at.

    python benchmarks/sweep.py run damping --out docs/sweep.csv        a grid; rows are appended
    python benchmarks/sweep.py run one --method prong --set forward_damping=0.01 --out docs/sweep.csv
    python benchmarks/sweep.py table docs/sweep.csv                    settings of ten epochs, best first, as Markdown
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from bprong.experiments.data import Dataset, load
from bprong.experiments.methods import METHODS, Whitening
from bprong.experiments.progress import Progress
from bprong.experiments.runner import Config, run

SETTINGS = [
    "forward_damping",
    "backward_damping",
    "statistics",
    "average",
    "forward_every",
    "backward_offset",
    "fisher",
]
LOSSES = ["train_loss", "val_loss"]
COLUMNS = ["method", *SETTINGS, "seed", "epoch", *LOSSES, "val_accuracy"]
GRIDS: dict[str, dict[str, list[Any]]] = {
    "damping": {  # BPRONG, coarse
        "forward_damping": [0.03, 0.1, 0.3],
        "backward_damping": [0.003, 0.01, 0.03, 0.1],
        "statistics": [0, 5000],
    },
    "refine": {  # BPRONG, around the best of it
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
    "one": {},  # only what --set says
}


def split() -> Dataset:
    """MNIST's training images alone, the last 10,000 of them as validation."""
    mnist = load("mnist")
    x, y = mnist.x_train, mnist.y_train
    return Dataset("MNIST training split", x[:50_000], y[:50_000], x[50_000:], y[50_000:], None)


def combinations(grid: dict[str, list[Any]], fixed: dict[str, Any]) -> list[dict[str, Any]]:
    """Every combination; `period` stands for both periods, the backward one offset by half."""
    found = []
    for values in itertools.product(*grid.values()):
        setting = fixed | dict(zip(grid, values, strict=True))
        if (period := setting.pop("period", None)) is not None:
            setting |= {"forward_every": period, "backward_every": period, "backward_offset": period // 2}
        found.append(setting)
    return found


def run_grid(options: argparse.Namespace) -> None:
    torch.set_flush_denormal(True)
    kinds = {field.name: type(field.default) for field in fields(Whitening)}
    fixed = {name: kinds[name](value) for name, value in (item.split("=") for item in options.set)}
    data, fresh = split(), not options.out.exists()
    with options.out.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if fresh:
            writer.writerow(COLUMNS)
        for setting in combinations(GRIDS[options.grid], fixed):
            config = Config((options.method,), options.epochs, options.seeds, whitening=setting)
            with tempfile.TemporaryDirectory() as folder:
                rows = [row for row in run(config, data, Path(folder), Progress()) if row.epoch > 0]
            whole = asdict(replace(METHODS[options.method].whitening, **setting))
            if "backward" not in METHODS[options.method].sides:
                whole |= dict.fromkeys(("backward_damping", "backward_offset", "fisher"), "")
            for row in rows:
                losses = [f"{v:.5f}" for v in (row.train_loss, row.val_loss, row.val_accuracy)]
                writer.writerow([row.method, *(whole[name] for name in SETTINGS), row.seed, row.epoch, *losses])
            file.flush()
            print(
                f"{setting}: train {rows[-1].train_loss:.4f}, val {rows[-1].val_loss:.4f}", file=sys.stderr, flush=True
            )


def print_table(options: argparse.Namespace) -> None:
    """Ranked by the geometric mean of the validation loss over the first ten epochs."""
    runs: dict[tuple[str, ...], dict[str, dict[str, str]]] = defaultdict(dict)
    for row in csv.DictReader(options.file.open()):
        if row["seed"] == "0":
            runs[tuple(row[name] for name in ["method", *SETTINGS])][row["epoch"]] = row
    ranked = []
    for key, epochs in runs.items():
        if len(epochs) >= 10:
            mean = {c: math.exp(sum(math.log(float(r[c])) for r in epochs.values()) / len(epochs)) for c in LOSSES}
            ranked.append((mean["val_loss"], mean["train_loss"], epochs["1"], epochs["3"], key))
    titles = ["method", "ε₁", "ε₂", "sample", "average", "τ", "c₂", "labels", "train 1", "val 1", "train 3", "val 3"]
    print(f"| {' | '.join([*titles, 'train, mean', 'val, mean'])} |\n|{'---|' * 14}")
    for val, train, first, third, key in sorted(ranked, key=lambda r: (r[4][0], r[0])):
        cells = [first["train_loss"], first["val_loss"], third["train_loss"], third["val_loss"]]
        print(f"| {' | '.join([*key, *cells, f'{train:.4f}', f'{val:.4f}'])} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("run")
    command.set_defaults(call=run_grid)
    command.add_argument("grid", choices=GRIDS)
    command.add_argument("--method", default="bprong")
    command.add_argument("--epochs", type=int, default=10)
    command.add_argument("--seeds", type=int, default=1)
    command.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="hold a setting at a value")
    command.add_argument("--out", type=Path, required=True)
    command = commands.add_parser("table")
    command.set_defaults(call=print_table)
    command.add_argument("file", type=Path)
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    main()
