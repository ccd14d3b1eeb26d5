"""What does a step of BPRONG cost, in steps of SGD? And its time shares, final loss and memory.

Steps are the optimizer's with its defaults, from the first one on, refreshes included: all of its time divided by all
of SGD's, the two taking turns every twenty steps. All results are ratios within one process, or between processes that
take turns.

    python benchmarks/step_price.py                            all measures, on two threads
    python benchmarks/step_price.py --only paper-100 paper-500 autoencoder
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from harness.command_line import CommandLine
from problems import Data, Problem
from problems.standard import coder, paper
from torch import nn
from torch.optim import SGD

import bprong
from bprong.experiments.bench.data import batches
from bprong.experiments.bench.tables import markdown
from bprong.experiments.bench.timing import interleaved, seconds_of, seconds_on

TURN = 20  # steps that SGD and BPRONG make before it is the other's turn
SEEDS = 8  # of the comparison of losses, which differ by a third from one seed to the next
DTYPES = {"float64": torch.float64, "float32": torch.float32}
EXACT_PERIODIC: dict[str, Any] = {"every": 100, "options": {"solver": "exact"}}
EVERY_STEP: dict[str, Any] = {"every": 1, "options": {"solver": "exact"}}
Measured = dict[str, float]  # by what was measured


Case = tuple[Problem, float]  # and the learning rate of both optimizers
CASES: dict[str, Case] = {
    "paper-100": (paper(100, 1800), 0.01),
    "paper-500": (paper(500, 1800), 0.01),
    "autoencoder": (coder(500, 300), 0.001),
}


class Training:
    """A network that SGD or BPRONG trains."""

    def __init__(self, case: Case, data: Data, method: str, seed: int = 0, **settings: Any) -> None:
        problem, lr = case
        self.loss = problem.loss
        self.model = problem.model(seed)
        self.optimizer: Any = SGD(self.model.parameters(), lr=lr)
        if method == "bprong":
            self.optimizer = bprong.BPRONG(self.model, problem.declared, lr, **settings)
        self.source = batches(data.x, data.y, problem.batch, seed)

    def train(self, steps: int) -> None:
        for x, y in islice(self.source, steps):
            self.optimizer.zero_grad()
            self.loss(self.model(x), y).backward()
            self.optimizer.step()


def step(case: Case, options: argparse.Namespace) -> Measured:
    """A step of BPRONG, everything included, in steps of SGD."""
    problem, _ = case
    data = problem.data()
    Training(case, data, "sgd").train(TURN)  # not timed: the first steps of a process are slow
    runs = {method: Training(case, data, method) for method in ("sgd", "bprong")}
    turns = 2 if options.quick else problem.steps // TURN
    spent = interleaved({method: lambda run=run: run.train(TURN) for method, run in runs.items()}, turns)
    sgd = fmean(spent["sgd"])
    return {f"{turns * TURN} steps, {1e3 * sgd / TURN:.2f} ms for SGD": fmean(spent["bprong"]) / sgd}


def factorisation(options: argparse.Namespace) -> Measured:
    """The factorisation of 1,000 inputs in a refresh (of PRONG, which factors no other side), divided by `eigh`."""
    width = 200 if options.quick else 1000
    return {f"width {width}, {name}": against_eigh(width, dtype, options.rounds) for name, dtype in DTYPES.items()}


def against_eigh(width: int, dtype: torch.dtype, rounds: int) -> float:
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(0, -3, width, dtype=dtype)
    model = nn.Linear(width, 1, dtype=dtype)
    optimizer = bprong.PRONG(model, lr=1e-6, forward_damping=0.2, **EVERY_STEP)
    ratios = []
    for _ in range(rounds + 1):
        x = torch.randn(2 * width, width, generator=generator, dtype=dtype) * scale
        optimizer.zero_grad()
        model(x).square().mean().backward()
        before = seconds_on(optimizer, "factorisation")
        optimizer.step()
        own = seconds_on(optimizer, "factorisation") - before
        second = (x.T @ x) / len(x)
        ratios.append(own / seconds_of(lambda second=second: torch.linalg.eigh(second)))
    return median(ratios[1:])


def share(options: argparse.Namespace) -> Measured:
    """The share of training time that statistics and factorisation take."""
    found = {}
    for name, case in CASES.items():
        problem, _ = case
        run = Training(case, problem.data(), "bprong")
        run.train(20 if options.quick else problem.steps)
        time = run.optimizer.report().time
        found[name] = time["statistics"] + time["factorisation"]
    return found


def loss(options: argparse.Namespace) -> Measured:
    """Training loss after three epochs, mean over seeds, divided by that of exact inverses every 100 steps."""
    case = CASES["paper-100"]
    data = case[0].data()
    steps = 20 if options.quick else 3 * (len(data.x) // case[0].batch)
    ends: dict[str, list[float]] = {"default": [], "exact": []}
    for seed in range(1 if options.quick else SEEDS):
        for name, settings in (("default", {}), ("exact", EXACT_PERIODIC)):
            torch.manual_seed(seed)
            run = Training(case, data, "bprong", seed, **settings)
            run.train(steps)
            with torch.no_grad():
                ends[name].append(float(run.loss(run.model(data.x), data.y)))
    default = fmean(ends["default"])
    exact = fmean(ends["exact"])
    return {f"{default:.4g} and {exact:.4g}": default / exact}


def memory(options: argparse.Namespace) -> Measured:
    """Peak memory of training the autoencoder, above that of a process with torch and the data, divided by SGD's."""
    peaks: dict[str, list[int]] = {"none": [], "sgd": [], "bprong": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.npy"
        np.save(path, CASES["autoencoder"][0].data().x.numpy())
        for _ in range(1 if options.quick else 3):
            for name, own in peaks.items():
                command = [sys.executable, __file__, "--peak", name, str(path), "--threads", str(options.threads)]
                command += ["--quick"] if options.quick else []
                own.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    none, sgd, ours = (median(own) / 1024 for own in peaks.values())
    return {f"{ours - none:.0f} MB, SGD {sgd - none:.0f} MB": (ours - none) / (sgd - none)}


def print_peak(method: str, path: str, quick: bool) -> None:
    """Trains in a process of its own, past a second refresh, and prints the most kB that the process has held."""
    x = torch.from_numpy(np.load(path))
    if method != "none":
        Training(CASES["autoencoder"], Data(x, x), method).train(5 if quick else 105)
    # ru_maxrss starts with that of the process that started this one, so it is used only where there is nothing better.
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    most = next((line.split()[1] for line in lines if line.startswith("VmHWM")), None)
    print(most or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


MEASURES: dict[str, tuple[str, Callable[[argparse.Namespace], Measured]]] = {
    "paper-100": ("step / SGD's, paper's network, batch 100", lambda options: step(CASES["paper-100"], options)),
    "paper-500": ("step / SGD's, paper's network, batch 500", lambda options: step(CASES["paper-500"], options)),
    "autoencoder": ("step / SGD's, autoencoder, batch 500", lambda options: step(CASES["autoencoder"], options)),
    "factorisation": ("factorisation / eigh in the same dtype", factorisation),
    "share": ("share of time in statistics and factorisation", share),
    "loss": ("training loss after 3 epochs / exact inverses every 100 steps", loss),
    "memory": ("peak memory of the autoencoder / SGD's", memory),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, threads=2)
    parser.setting("rounds", 7, 2, "rounds of factorisations, whose median is taken")
    parser.add_argument("--only", nargs="+", choices=MEASURES, metavar="NAME", help=", ".join(MEASURES))
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse(arguments)
    if options.peak:
        print_peak(*options.peak, options.quick)
        return
    lines = []
    for name in options.only or MEASURES:
        text, measure = MEASURES[name]
        for on, value in measure(options).items():
            print(f"{text}: {on}: {value:.3f}", flush=True)
            lines.append([text, on, f"{value:.3f}"])
    print(f"\n{options.threads} threads\n\n{markdown(['measure', 'on', 'measured'], lines)}")


if __name__ == "__main__":
    main()
