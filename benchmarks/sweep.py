"""The sweep behind the defaults of `bprong reproduce` for PRONG and BPRONG; its table is docs/sweep.md.

Trained on the first 50,000 of MNIST's training images, judged on the other 10,000: the test images are not looked at.
Run: python benchmarks/sweep.py damping --methods bprong --out docs/sweep-damping.csv
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bprong.experiments.data import Dataset, load
from bprong.experiments.progress import Progress
from bprong.experiments.runner import Config, run

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
    "forward": {"forward_damping": [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1], "statistics": [0, 5000]},  # PRONG
    "edge": {"forward_damping": [0.002, 0.003, 0.005, 0.01], "statistics": [0, 1000]},  # PRONG, over seeds
    "periods": {"period": [20, 50, 100, 200, 400]},
    "fisher": {"fisher": ["sampled", "exact", "empirical"]},
    "average": {"average": [0.0, 0.5, 0.9]},
    "one": {},  # only what --fix says
}


def split() -> Dataset:
    """MNIST's training images alone, the last 10,000 of them as validation."""
    mnist = load("mnist")
    x, y = mnist.x_train, mnist.y_train
    return Dataset("MNIST training split", x[:50_000], y[:50_000], x[50_000:], y[50_000:], None)


def settings(grid: dict[str, list[Any]], fixed: dict[str, Any]) -> list[dict[str, Any]]:
    """Every combination; `period` stands for both periods, the backward one offset by half."""
    found = []
    for values in itertools.product(*grid.values()):
        setting = fixed | dict(zip(grid, values, strict=True))
        if (period := setting.pop("period", None)) is not None:
            setting |= {"forward_every": period, "backward_every": period, "backward_offset": period // 2}
        found.append(setting)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", choices=GRIDS)
    parser.add_argument("--method", default="bprong")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--fix", action="append", default=[], metavar="NAME=VALUE", help="hold a setting at a value")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    fixed: dict[str, Any] = {}
    for item in options.fix:
        name, _, value = item.partition("=")
        fixed[name] = value if name in ("fisher", "factorisation") else float(value) if "." in value else int(value)
    torch.set_flush_denormal(True)
    data = split()
    with options.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        chosen = settings(GRIDS[options.grid], fixed)
        writer.writerow(["method", *chosen[0], "seed", "epoch", "train_loss", "val_loss", "val_accuracy", "seconds"])
        for number, setting in enumerate(chosen, start=1):
            start = time.perf_counter()
            config = Config((options.method,), options.epochs, options.seeds, whitening=setting)
            with tempfile.TemporaryDirectory() as folder:
                rows = run(config, data, Path(folder), Progress())
            for row in rows[1:]:
                loss = [f"{v:.5f}" for v in (row.train_loss, row.val_loss, row.val_accuracy)]
                writer.writerow([row.method, *setting.values(), row.seed, row.epoch, *loss, f"{row.seconds:.2f}"])
            file.flush()
            last = rows[-1]
            print(
                f"{number}/{len(chosen)} {setting} train {last.train_loss:.4f} val {last.val_loss:.4f} "
                f"({time.perf_counter() - start:.0f} s)",
                file=sys.stderr, flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
