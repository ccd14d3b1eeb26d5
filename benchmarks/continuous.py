"""How white continuous whitening keeps the paper's network, against periodic refresh, and what either costs.

MNIST, 784-100-100-100-10 (ReLU), batch 100, SGD at 0.01, ε₁ = 0.2, ε₂ = 0.015. Every run sees the same batches, and all
advance in turn, a chunk of steps each, so that a slow spell of the machine hits them alike. After each chunk the
distance from white ‖U(Ž+ε)Uᵀ − I‖/√d (R and D likewise) is measured exactly on 5,000 images that are not trained on.

    python benchmarks/continuous.py run --out docs       continuous.csv
    python benchmarks/continuous.py draw --out docs      figures/continuous.png, and a table in Markdown on stdout
    python benchmarks/continuous.py damping              which rows damp best, on stdout
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

import bprong
from bprong.continuous import Share, centred_rows, relative_step
from bprong.experiments.data import load
from bprong.experiments.figures import LOOK
from bprong.experiments.models import perceptron
from bprong.layers import WhitenedLinear
from bprong.recording import record

CHUNK, BATCH, HELD = 50, 100, 55_000
EPSILON = {"forward": 0.2, "backward": 0.015}


def periodic(every: int, **options: Any) -> dict[str, Any]:
    return {"forward_every": every, "backward_every": every, "backward_offset": every // 2} | options


def continuous(every: int, rate: float) -> dict[str, Any]:
    return {"refresh": "continuous", "rate": rate} | periodic(every, factorisation="cholesky", backward_offset=0)


RUNS: dict[str, dict[str, Any]] = {
    "periodic 100, eigh": periodic(100),
    "periodic 100, average 0.9": periodic(100, average=0.9, factorisation="cholesky"),
    "periodic 10, average 0.95": periodic(10, average=0.95, factorisation="cholesky"),
    "periodic 20, average 0.95": periodic(20, average=0.95, factorisation="cholesky"),
    "periodic 50, average 0.95 of every 5th": periodic(50, average=0.95, record_every=5, factorisation="cholesky"),
    "continuous every 1, rate 0.02": continuous(1, 0.02),
    "continuous every 5, rate 0.05": continuous(5, 0.05),
    "continuous every 10, rate 0.1": continuous(10, 0.1),
}
COLOURS = ["0.65", "0.4", "tab:purple", "tab:blue", "tab:cyan", "tab:green", "tab:red", "tab:orange"]
COLUMNS = ["run", "step", "seconds", "refresh_seconds", "anchors", "train_loss", "forward", "backward", "input"]


@dataclass
class Run:
    """One way of keeping the network white, and what it has cost so far."""

    name: str
    seconds: float = 0.0
    refreshing: float = 0.0
    anchors: int = 0
    loss: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = bprong.whiten_(perceptron([784, 100, 100, 100, 10], "relu", seed=0))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        damping = {f"{side}_damping": epsilon for side, epsilon in EPSILON.items()}
        self.rewhitening = bprong.Rewhitening(self.model, self.optimizer, seed=0, **damping, **RUNS[self.name])

    def train(self, x: Tensor, y: Tensor, batches: Tensor) -> None:
        start = time.perf_counter()
        for chosen in batches:
            self.refresh(x[chosen])
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x[chosen]), y[chosen])
            loss.backward()
            self.optimizer.step()
            self.loss.append(float(loss.detach()))
        self.seconds += time.perf_counter() - start

    def refresh(self, x: Tensor) -> None:
        before = time.perf_counter()
        self.anchors += len(self.rewhitening.step(x))
        self.refreshing += time.perf_counter() - before

    def distances(self, held: Tensor) -> dict[tuple[str, str], float]:
        return distances(self.model, held)

    def row(self, step: int, held: Tensor) -> list[Any]:
        white = self.distances(held)
        sides = [mean(v for (_, side), v in white.items() if side == wanted) for wanted in EPSILON]
        numbers = [mean(self.loss[-CHUNK:]), *sides, white["0", "forward"]]
        costs = [f"{self.seconds:.3f}", f"{self.refreshing:.3f}", self.anchors]
        return [self.name, step, *costs, *(f"{v:.5g}" for v in numbers)]


def distances(model: Any, x: Tensor) -> dict[tuple[str, str], float]:
    """‖U(Ž+ε)Uᵀ − I‖ / √d of every layer and side, Ž about the layer's own c."""
    layers = {name: (m, True) for name, m in model.named_modules() if isinstance(m, WhitenedLinear)}
    likelihood = bprong.likelihood.likelihood_of("categorical")
    seen = record(model, layers, x, None, likelihood=likelihood, fisher="exact", seed=0)
    found = {}
    for name, (layer, _) in layers.items():
        z, delta = seen[name].z, seen[name].delta
        off = z.mean - layer.c.double()
        forward, backward = z.second + torch.outer(off, off), delta.second
        for side, matrix, S in (("forward", layer.U, forward), ("backward", layer.R, backward)):
            U, one = matrix.double(), torch.eye(len(matrix), dtype=torch.float64)
            found[name, side] = float((U @ (S + EPSILON[side] * one) @ U.T - one).norm()) / math.sqrt(len(U))
    return found


def measure(options: argparse.Namespace) -> None:
    advance([Run(name) for name in RUNS], options.out / "continuous.csv", options.steps)


def advance(runs: Sequence[Run], path: Path, steps: int) -> None:
    """All runs on the same batches, in turn; a row of each after each chunk."""
    data = load("mnist")
    x, y, held = data.x_train[:HELD], data.y_train[:HELD], data.x_train[HELD:]
    generator = torch.Generator().manual_seed(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for chunk in range(1, steps // CHUNK + 1):
            batches = torch.randint(HELD, (CHUNK, BATCH), generator=generator)
            for run in (*runs[chunk % len(runs) :], *runs[: chunk % len(runs)]):
                run.train(x, y, batches)
                writer.writerow(run.row(chunk * CHUNK, held))
            file.flush()


def read(path: Path) -> dict[str, list[dict[str, float]]]:
    rows = defaultdict(list)
    for row in csv.DictReader(path.open()):
        rows[row["run"]].append({k: float(v) for k, v in row.items() if k != "run"})
    return rows


def draw(options: argparse.Namespace) -> None:
    rows = read(options.out / "continuous.csv")
    with style.context(LOOK):
        chart = Figure(figsize=(11, 4.2), layout="constrained")
        FigureCanvasAgg(chart)
        panels = {
            "forward": "inputs: distance from white",
            "backward": "errors: distance from white",
            "train_loss": "training loss",
        }
        for axes, (key, title) in zip(chart.subplots(1, 3), panels.items(), strict=True):
            for i, name in enumerate(RUNS):
                points = rows[name]
                dashed, steps = "-" if name.startswith("continuous") else "--", [p["step"] for p in points]
                axes.plot(steps, [p[key] for p in points], dashed, color=COLOURS[i], label=name, lw=1.4)
            axes.set(title=title, xlabel="steps", yscale="log")
        chart.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
        chart.savefig(options.out / "figures" / "continuous.png", dpi=130)
    table(rows, RUNS)


def table(rows: dict[str, list[dict[str, float]]], names: Iterable[str]) -> None:
    """Costs and distances of the second half of each run, the loss of its last 500 steps."""
    titles = ["", "refreshing, ms a step", "all, ms a step", "factorisations", "inputs", "errors", "pixels", "loss"]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for name in names:
        points = rows[name]
        last, half = points[-1], points[len(points) // 2 :]
        white = [f"{mean(p[key] for p in half):.2f}" for key in ("forward", "backward", "input")]
        steps = last["step"] - half[0]["step"]
        each = [f"{(last[key] - half[0][key]) / steps * 1e3:.1f}" for key in ("refresh_seconds", "seconds")]
        loss = f"{mean(p['train_loss'] for p in points[-10:]):.4f}"
        print(f"| {' | '.join([name, *each, str(int(last['anchors'])), *white, loss])} |")


def damping(options: argparse.Namespace) -> None:
    """The distance from white of the pixels' whitener after 4/μ steps, for several kinds of damping rows."""
    x, d, epsilon = load("mnist").x_train.double(), 784, 0.1
    one = torch.eye(d, dtype=x.dtype)
    S = (x - x.mean(0)).T @ (x - x.mean(0)) / len(x) + epsilon * one

    def extra(kind: str, t: int, turns: int, generator: torch.Generator) -> Tensor | Share | None:
        m = d // turns
        if kind == "random vectors":
            return torch.randn(m, d, generator=generator, dtype=x.dtype) * math.sqrt(epsilon / m)
        drawn = torch.randperm(d, generator=generator if kind == "drawn" else torch.Generator().manual_seed(d))
        index = {"none": drawn[:0], "all": drawn, "drawn": drawn[:m], "in turn": drawn[t % turns :: turns]}[kind]
        size = math.sqrt(epsilon * d / max(1, len(index)))
        return Share(index, torch.full((len(index),), size, dtype=x.dtype), turns)

    for mu in (0.02, 0.1):
        for kind, turns in (("none", 1), ("all", 1), ("in turn", int(0.5 / mu)), ("in turn", int(1 / mu)),
                            ("drawn", int(0.5 / mu)), ("random vectors", int(0.5 / mu))):  # fmt: skip
            generator = torch.Generator().manual_seed(0)
            start = x[torch.randperm(len(x), generator=generator)[:2000]]
            c = start.mean(0)
            U = torch.linalg.inv(torch.linalg.cholesky((start - c).T @ (start - c) / 2000 + epsilon * one))
            for t in range(int(4 / mu)):
                V, c = centred_rows(x[torch.randint(len(x), (100,), generator=generator)], c, mu)
                more = extra(kind, t, turns, generator)
                V, damped = (torch.cat([V, more]), None) if isinstance(more, Tensor) else (V, more)
                U = relative_step(U, V, mu, damped)
            off = float((U @ S @ U.T - one).norm()) / math.sqrt(d)
            print(f"| {mu} | {kind} | {d // turns if kind != 'none' else 0} | {off:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "draw", "damping"])
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    {"run": measure, "draw": draw, "damping": damping}[options.command](options)


if __name__ == "__main__":
    main()
