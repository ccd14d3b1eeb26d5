"""What the optimizer costs, measure by measure, beside the bar set for it and the aim, as a table in Markdown.

Ratios within one process, or between processes that take turns. Steps are the optimizer's with its defaults, from the
first one on, refreshes included: all of its time against all of SGD's, the two taking turns every few steps.

    python benchmarks/bars.py [--threads 2] [--only NAME …] [--quick]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import bprong
from bprong.experiments.data import load
from bprong.experiments.models import perceptron

EXACT_PERIODIC: dict[str, Any] = {"every": 100, "options": {"solver": "exact"}}
EVERY_STEP: dict[str, Any] = {"every": 1, "options": {"solver": "exact"}}
CODER = [784, 1000, 500, 250, 30, 250, 500, 1000, 784]
TURN = 20  # steps that SGD and BPRONG make before it is the other's turn
SEEDS = 8  # of the comparison of losses, which differ by a third from one seed to the next
DTYPES = (torch.float64, torch.float32)
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """What is trained: a network for a seed, the loss of its outputs, its learning rate and settings of BPRONG."""

    model: Callable[[int], nn.Module]
    loss: Loss
    lr: float
    batch: int
    settings: dict[str, Any]
    steps: int
    pixels: bool = False  # the input is the target

    def optimizer(self, model: nn.Module, name: str, **settings: Any) -> Optimizer:
        if name == "sgd":
            return SGD(model.parameters(), lr=self.lr)
        return bprong.BPRONG(model, lr=self.lr, **self.settings | settings)


def autoencoder(seed: int) -> nn.Sequential:
    """tanh, but for a linear code and linear output."""
    plain, code = perceptron(CODER, "tanh", seed), 2 * (CODER.index(30) - 1)
    return nn.Sequential(*(module for i, module in enumerate(plain) if i != code + 1))


def bits(output: Tensor, x: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, x, reduction="sum") / len(x)


def paper(batch: int) -> Problem:
    return Problem(
        lambda seed: perceptron([784, 100, 100, 100, 10], "relu", seed), F.cross_entropy, 0.01, batch, {}, 1800
    )


def coder() -> Problem:
    return Problem(autoencoder, bits, 0.001, 500, {"likelihood": "bernoulli"}, 300, pixels=True)


def batches(x: Tensor, y: Tensor, problem: Problem, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole batches of every epoch's own shuffle, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for chosen in torch.randperm(len(x), generator=generator).split(problem.batch):
            if len(chosen) == problem.batch:
                yield x[chosen], x[chosen] if problem.pixels else y[chosen]


def trainer(problem: Problem, data: tuple[Tensor, Tensor], name: str) -> tuple[Callable[[int], None], Any]:
    """What makes so many steps, and its optimizer."""
    model = problem.model(0)
    optimizer, source = problem.optimizer(model, name), batches(*data, problem)

    def train(steps: int) -> None:
        for _, (x, y) in zip(range(steps), source, strict=False):
            optimizer.zero_grad()
            problem.loss(model(x), y).backward()
            optimizer.step()

    return train, optimizer


def spent(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# Measures: each returns what was measured, by what it was measured on -------------------------------------------------


def step(problem: Problem, options: argparse.Namespace, data: tuple[Tensor, Tensor]) -> dict[str, float]:
    """A step of BPRONG, all included, in steps of SGD: of the whole run's time."""
    warm, _ = trainer(problem, data, "sgd")
    warm(TURN)  # not timed: the first steps of a process are slow
    (sgd, _), (ours, _) = (trainer(problem, data, name) for name in ("sgd", "bprong"))
    turns = 2 if options.quick else problem.steps // TURN
    pairs = [(spent(lambda: sgd(TURN)), spent(lambda: ours(TURN))) for _ in range(turns)]
    seconds = fmean(a for a, _ in pairs), fmean(b for _, b in pairs)
    return {f"{turns * TURN} steps, {1e3 * seconds[0] / TURN:.2f} ms for SGD": seconds[1] / seconds[0]}


def factorisation(options: argparse.Namespace) -> dict[str, float]:
    """All a refresh's factorisation of 1,000 inputs (of PRONG, which factors no other side) against `eigh` of them."""
    return {f"width 1000, {dtype}".replace("torch.", ""): _against_eigh(dtype, options) for dtype in DTYPES}


def _against_eigh(dtype: torch.dtype, options: argparse.Namespace) -> float:
    n = 200 if options.quick else 1000
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(0, -3, n, dtype=dtype)
    model = nn.Linear(n, 1, dtype=dtype)
    optimizer = bprong.PRONG(model, lr=1e-6, forward_damping=0.2, **EVERY_STEP)
    watch, before, found = optimizer.statistics.watch, 0.0, []
    for _ in range(options.rounds + 1):
        x = torch.randn(2 * n, n, generator=generator, dtype=dtype) * scale
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        Z = (x.T @ x) / len(x)
        took, before = watch.seconds["factorisation"] - before, watch.seconds["factorisation"]
        found.append(took / spent(lambda Z=Z: torch.linalg.eigh(Z)))
    return median(found[1:])


def share(options: argparse.Namespace, data: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Of the time of training, nothing in between: statistics and factorisation."""
    problems = {"paper's network, batch 100": paper(100), "batch 500": paper(500), "autoencoder": coder()}
    found = {}
    for name, problem in problems.items():
        train, optimizer = trainer(problem, data, "bprong")
        train(20 if options.quick else problem.steps)
        shares = optimizer.report().time
        found[name] = shares["statistics"] + shares["factorisation"]
    return found


def loss(options: argparse.Namespace, data: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Training loss after three epochs, the mean over seeds, against exact inverses refreshed by the clock."""
    problem, ends = paper(100), {"defaults": [], "exact": []}
    steps = 100 if options.quick else 3 * (len(data[0]) // problem.batch)
    for seed in range(1 if options.quick else SEEDS):
        for name, settings in (("defaults", {}), ("exact", EXACT_PERIODIC)):
            torch.manual_seed(seed)
            model = problem.model(seed)
            optimizer = problem.optimizer(model, "bprong", **settings)
            for _, (x, y) in zip(range(steps), batches(*data, problem, seed), strict=False):
                optimizer.zero_grad()
                problem.loss(model(x), y).backward()
                optimizer.step()
            with torch.no_grad():
                ends[name].append(float(problem.loss(model(data[0]), data[1])))
    mean = {name: fmean(values) for name, values in ends.items()}
    return {f"{mean['defaults']:.4g} and {mean['exact']:.4g}": mean["defaults"] / mean["exact"]}


def memory(options: argparse.Namespace, data: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Peak memory of the autoencoder's run above a process with torch and the data, in processes of their own."""
    peaks: dict[str, list[int]] = {name: [] for name in ("none", "sgd", "bprong")}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.npy"
        np.save(path, data[0].numpy())
        for _ in range(1 if options.quick else 3):
            for name, own in peaks.items():
                command = [sys.executable, __file__, "--peak", name, str(path), "--threads", str(options.threads)]
                command += ["--quick"] if options.quick else []
                own.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    none, sgd, ours = (median(own) / 1024 for own in peaks.values())
    return {f"{ours - none:.0f} MB against SGD's {sgd - none:.0f}": (ours - none) / (sgd - none)}


def peak(name: str, path: str, quick: bool) -> None:
    """In a process of its own: trains, and prints the most kB it ever held; a second refresh by the clock included."""
    x = torch.from_numpy(np.load(path))
    if name != "none":
        trainer(coder(), (x, x), name)[0](5 if quick else 105)
    # Not ru_maxrss where there is better: a process starts with that of the one that started it.
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    most = next((line.split()[1] for line in lines if line.startswith("VmHWM")), None)
    print(most or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


# The table ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A measure, the most it may be, and what it should be."""

    text: str
    bar: float
    aim: float
    measure: Callable[[argparse.Namespace, tuple[Tensor, Tensor]], dict[str, float]]


BARS = {
    "paper-100": Bar("step / SGD's, paper's network, batch 100", 1.8, 1.3, lambda o, d: step(paper(100), o, d)),
    "paper-500": Bar("step / SGD's, paper's network, batch 500", 1.4, 1.15, lambda o, d: step(paper(500), o, d)),
    "autoencoder": Bar("step / SGD's, autoencoder, batch 500", 2.0, 1.5, lambda o, d: step(coder(), o, d)),
    "factorisation": Bar("factorisation / eigh in the same dtype", 0.25, 0.1, lambda o, d: factorisation(o)),
    "share": Bar("share of time in statistics and factorisation", 0.15, 0.10, share),
    "loss": Bar("training loss after 3 epochs / exact and periodic", 1.05, 1.0, loss),
    "memory": Bar("peak memory of the autoencoder / SGD's", 3.5, 2.5, memory),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7, help="of factorisations, whose median is taken")
    parser.add_argument("--only", nargs="+", choices=BARS, default=list(BARS), metavar="NAME", help=", ".join(BARS))
    parser.add_argument(
        "--quick", action="store_true", help="few steps, to see that all of it runs; its numbers say nothing"
    )
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    if options.peak:
        peak(*options.peak, options.quick)
        return
    mnist = load("mnist")
    print(f"{options.threads} threads\n")
    print("| measure | on | measured | bar | aim | |\n|---|---|---|---|---|---|")
    for name in options.only:
        bar = BARS[name]
        for on, value in bar.measure(options, (mnist.x_train, mnist.y_train)).items():
            reached = "aim" if value <= bar.aim else "bar" if value <= bar.bar else "missed"
            print(f"| {bar.text} | {on} | {value:.3f} | {bar.bar:g} | {bar.aim:g} | {reached} |", flush=True)


if __name__ == "__main__":
    main()
