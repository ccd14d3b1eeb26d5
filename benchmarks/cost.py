"""What a step and a refresh of `bprong.BPRONG` cost beside a step of SGD, against width, depth and batch size, with the
exponents fitted to it beside what the arithmetic predicts.

All three are taken in turns within one process, on random numbers of the network's shape; medians over rounds. A
refresh is the difference between a step that refreshes every side and one that refreshes none; its two parts are in the
proportion that `optimizer.report().time` gives.

    python benchmarks/cost.py run --out docs [--threads 2] [--quick]     rows into docs/cost.csv, then as below
    python benchmarks/cost.py figure --out docs                          docs/figures/cost.png, and a table in Markdown
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from cost_results import Row, draw, network, read, table, write
from torch.optim import SGD, Optimizer

import bprong
from bprong.experiments.models import perceptron

SIZES = {
    "width": [100, 200, 400, 800, 1600, 4000],
    "depth": [2, 4, 8, 16, 32],
    "batch": [16, 32, 64, 128, 256, 512, 1024, 2048],
}
QUICK = {"width": [50, 100, 200, 400], "depth": [2, 4, 8], "batch": [16, 64, 256]}
EXACT = {"solver": "exact"}  # random numbers have no spectrum that decays
NEVER: dict[str, Any] = {"every": 10**9, "options": EXACT}  # settings with which only the first step refreshes
ALWAYS: dict[str, Any] = {"every": 1, "options": EXACT}  # settings with which every step refreshes all layers and sides
CHUNK = 0.03  # seconds: short steps are timed several at a time
LEAST_ROUNDS = 3


def stepper(panel: str, size: int, make: Callable[[torch.nn.Module], Optimizer]) -> tuple[Callable[[], None], Any]:
    """A whole training step, made twice already, and its optimizer."""
    widths, batch = network(panel, size)
    model = perceptron(widths, "relu", seed=0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, widths[0], generator=generator)
    y = torch.randint(widths[-1], (batch,), generator=generator)
    optimizer = make(model)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    step()
    step()
    return step, optimizer


def seconds(step: Callable[[], None], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start) / count


def measure(panel: str, size: int, rounds: int, budget: float) -> Row:
    """Medians over rounds of all three; after `budget` seconds no more rounds than the least."""
    lr = 1e-6  # what is timed does not depend on it, and nothing diverges
    steps = {
        "sgd": stepper(panel, size, lambda model: SGD(model.parameters(), lr=lr))[0],
        "plain": stepper(panel, size, lambda model: bprong.BPRONG(model, lr=lr, **NEVER))[0],
    }
    steps["refreshing"], optimizer = stepper(panel, size, lambda model: bprong.BPRONG(model, lr=lr, **ALWAYS))
    counts = {name: max(1, round(CHUNK / seconds(step, 1))) for name, step in steps.items()}
    spent: dict[str, list[float]] = {name: [] for name in steps}
    start = time.perf_counter()
    while len(spent["sgd"]) < rounds:
        for name, step in steps.items():
            spent[name].append(seconds(step, counts[name]))
        if len(spent["sgd"]) >= LEAST_ROUNDS and time.perf_counter() - start > budget:
            break
    extra = median(b - a for a, b in zip(spent["sgd"], spent["plain"], strict=True))
    refresh = median(b - a for a, b in zip(spent["plain"], spent["refreshing"], strict=True))
    shares = optimizer.report().time
    part = shares["statistics"] / (shares["statistics"] + shares["factorisation"])
    return Row(panel, size, median(spent["sgd"]), extra, part * refresh, (1 - part) * refresh)


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    rows: list[Row] = []
    for panel, sizes in (QUICK if options.quick else SIZES).items():
        for size in sizes:
            row = measure(panel, size, 3 if options.quick else options.rounds, options.budget)
            rows.append(row)
            parts = " ".join(f"{1e3 * s:>9.3f}" for s in (row.sgd, row.extra, row.statistics, row.factorisation))
            print(f"{panel:<6}{size:>6}{parts}  ms: SGD, extra, statistics, factorisation", flush=True)
    write(options.out, rows)
    show(options)


def show(options: argparse.Namespace) -> None:
    rows = read(options.out)
    path = draw(options.out, rows)
    print("", *table(rows), path, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("run")
    command.set_defaults(call=run)
    command.add_argument("--threads", type=int, default=2)
    command.add_argument("--rounds", type=int, default=15)
    command.add_argument("--budget", type=float, default=20, help="seconds a size, beyond three rounds (default: 20)")
    command.add_argument("--quick", action="store_true", help="small sizes, in seconds")
    command.add_argument("--out", type=Path, required=True)
    command = commands.add_parser("figure")
    command.set_defaults(call=show)
    command.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    main()
