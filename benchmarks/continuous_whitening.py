"""How white does continuous whitening keep the paper's network, against periodic refreshes, and what does each cost?

MNIST, 784-100-100-100-10 (ReLU), batch 100, SGD at 0.01, ε₁ = 0.2, ε₂ = 0.015. All runs see the same batches and take
turns of 50 steps. After each turn the distance from white, ‖U(Ž+ε)Uᵀ − I‖/√d (likewise R and D), is measured exactly on
5,000 images that are not trained on.

    python benchmarks/continuous_whitening.py                  docs/continuous.csv, then as below
    python benchmarks/continuous_whitening.py --draw           docs/figures/continuous.png, and a table in Markdown
    python benchmarks/continuous_whitening.py --damping        compares ways to add the damping in small parts
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from harness import figures
from harness.command_line import CommandLine
from matplotlib.ticker import MultipleLocator
from problems.data import mnist
from problems.networks import paper_network
from torch import Tensor, nn

import bprong
from bprong.experiments.bench.rows import Log, grouped
from bprong.experiments.bench.tables import markdown
from bprong.experiments.bench.timing import seconds_of
from bprong.experiments.continuous import ContinuousRewhitening

TURN = 50  # steps
BATCH = 100
TRAINED = 55_000  # the other 5,000 training images are those on which distances are measured
EPSILON = {"forward": 0.2, "backward": 0.015}


CHOLESKY = {"solver": "cholesky"}


def periodic(every: int, **options: Any) -> dict[str, Any]:
    return {"forward_every": every, "backward_every": every, "backward_offset": every // 2} | options


def continuous(every: int, rate: float) -> dict[str, Any]:
    return periodic(every, backward_offset=0, rate=rate, **CHOLESKY)


SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {  # colour, settings of Rewhitening
    "periodic 100, eigh": ("0.65", periodic(100)),
    "periodic 100, average 0.9": ("0.35", periodic(100, average=0.9, **CHOLESKY)),
    "periodic 10, average 0.95": (figures.VIOLET, periodic(10, average=0.95, **CHOLESKY)),
    "periodic 20, average 0.95": (figures.BLUE, periodic(20, average=0.95, **CHOLESKY)),
    "continuous every 1, rate 0.02": (figures.OCHRE, continuous(1, 0.02)),
    "continuous every 5, rate 0.05": (figures.VERMILION, continuous(5, 0.05)),
    "continuous every 10, rate 0.1": (figures.PURPLE, continuous(10, 0.1)),
}


@dataclass(frozen=True)
class Row:
    """A network after some steps.

    refresh_seconds:   the part of `seconds` that whitening took
    anchors:           factorisations so far
    train_loss:        mean over the last turn's batches
    forward, backward: distance from white of the inputs and of the errors, means over layers
    input:             distance from white of the first layer's inputs, the pixels
    """

    run: str
    step: int
    seconds: float
    refresh_seconds: float
    anchors: int
    train_loss: float
    forward: float
    backward: float
    input: float


class Run:
    """A network that is whitened by one schedule."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model = bprong.whiten_(paper_network(0))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        damping = {f"{side}_damping": epsilon for side, epsilon in EPSILON.items()}
        options = damping | SCHEDULES[name][1]
        kind = ContinuousRewhitening if "rate" in options else bprong.Rewhitening
        self.rewhitening = kind(self.model, self.optimizer, "cross_entropy", seed=0, **options)
        self.refresh_seconds = 0.0
        self.step_seconds = 0.0
        self.anchors = 0

    def train(self, x: Tensor, y: Tensor, batches: Tensor) -> float:
        """Trains on all batches and returns the mean loss."""
        losses = []
        for chosen in batches:
            self.refresh_seconds += seconds_of(lambda chosen=chosen: self._refresh(x[chosen]))
            self.step_seconds += seconds_of(lambda chosen=chosen: losses.append(self._step(x[chosen], y[chosen])))
        return mean(losses)

    def _refresh(self, x: Tensor) -> None:
        self.anchors += len(self.rewhitening.step(x))

    def _step(self, x: Tensor, y: Tensor) -> float:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def row(self, step: int, loss: float, held: Tensor) -> Row:
        inputs, errors = zip(*distances(self.model, held), strict=True)
        seconds = self.step_seconds + self.refresh_seconds
        whiteness = (mean(inputs), mean(errors), inputs[0])
        return Row(self.name, step, seconds, self.refresh_seconds, self.anchors, loss, *whiteness)


def distances(model: nn.Module, x: Tensor) -> list[tuple[float, float]]:
    """Distance from white of inputs and errors, for every layer."""
    layers = [module for module in model.modules() if isinstance(module, bprong.WhitenedLinear)]
    calls: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    hooks = [
        layer.register_forward_hook(lambda layer, args, output: calls.update({layer: (args[0], output)}))
        for layer in layers
    ]
    logits = model(x)
    for hook in hooks:
        hook.remove()
    D = error_moments(logits, [calls[layer][1] for layer in layers])
    found = []
    for layer, errors in zip(layers, D, strict=True):
        z = (calls[layer][0].detach() - layer.c).double()
        forward = off_white(layer.U.double(), z.T @ z / len(z), EPSILON["forward"])
        found.append((forward, off_white(layer.R.double(), errors, EPSILON["backward"])))
    return found


def error_moments(logits: Tensor, outputs: list[Tensor]) -> list[Tensor]:
    """D = E[δδᵀ] of every output, exactly: the expectation over all classes, each weighted by its probability."""
    p = logits.detach().softmax(-1)
    D = [torch.zeros(a.shape[-1], a.shape[-1], dtype=torch.float64) for a in outputs]
    for label in range(p.shape[-1]):
        error = p.clone()
        error[:, label] -= 1
        weighted = error * p[:, label : label + 1].sqrt()
        deltas = torch.autograd.grad(logits, outputs, weighted, retain_graph=True)
        for i, delta in enumerate(deltas):
            D[i] += delta.double().T @ delta.double() / len(delta)
    return D


def off_white(U: Tensor, second: Tensor, epsilon: float) -> float:
    """‖U(Ž+ε)Uᵀ − I‖ / √d."""
    one = torch.eye(len(U), dtype=U.dtype)
    return float((U @ (second + epsilon * one) @ U.T - one).norm()) / math.sqrt(len(U))


def run_all(path: Path, steps: int) -> list[Row]:
    """All runs on the same batches, in turns; a row of each after each turn."""
    path.unlink(missing_ok=True)
    log = Log(path, Row)
    runs = [Run(name) for name in SCHEDULES]
    x, y, *_ = mnist()
    generator = torch.Generator().manual_seed(0)
    for turn in range(1, max(1, steps // TURN) + 1):
        batches = torch.randint(TRAINED, (min(TURN, steps), BATCH), generator=generator)
        first = turn % len(runs)
        for run in (*runs[first:], *runs[:first]):
            loss = run.train(x[:TRAINED], y[:TRAINED], batches)
            log.add([run.row(turn * len(batches), loss, x[TRAINED:])])
    return log.rows


def table(rows: Sequence[Row]) -> str:
    """Costs and distances of the second half of each run, the loss of its last 500 steps."""
    lines = []
    paths = grouped(rows, "run")
    for name in SCHEDULES:
        path = paths[(name,)]
        half = path[len(path) // 2 :]
        steps = max(1, half[-1].step - half[0].step)
        refreshing = (half[-1].refresh_seconds - half[0].refresh_seconds) / steps
        everything = (half[-1].seconds - half[0].seconds) / steps
        white = [mean(getattr(row, side) for row in half) for side in ("forward", "backward", "input")]
        loss = mean(row.train_loss for row in path[-10:])
        cells = [f"{1e3 * refreshing:.1f}", f"{1e3 * everything:.1f}", path[-1].anchors, *(f"{w:.2f}" for w in white)]
        lines.append([name, *cells, f"{loss:.4f}"])
    titles = ["", "refreshing, ms a step", "all, ms a step", "factorisations", "inputs", "errors", "pixels", "loss"]
    return markdown(titles, lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    panels = {
        "forward": ("Inputs: ‖U(Ž+ε)Uᵀ − I‖ / √d", "distance from white"),
        "backward": ("Errors: ‖R(D+ε)Rᵀ − I‖ / √d", "distance from white"),
        "train_loss": (f"Training loss, means of {TURN} steps", "training loss, nats"),
    }
    with figures.drawing(path, 2, 2, 6.6) as (_, grid):
        for axes, (column, (title, label)) in zip(grid, panels.items(), strict=False):
            for name, (colour, _) in SCHEDULES.items():
                own = [row for row in rows if row.run == name]
                dashes = "-" if name.startswith("continuous") else "--"
                y = [getattr(row, column) for row in own]
                axes.plot([row.step for row in own], y, dashes, color=colour, linewidth=1.5, label=name)
            low, high = axes.dataLim.intervaly
            figures.log_axis(axes, "y", high / low)
            axes.xaxis.set_major_locator(MultipleLocator(500))
            figures.frame(axes, title, "steps", label)
        grid[-1].set_axis_off()
        handles = grid[0].get_legend_handles_labels()[0]
        title = "dashed: periodic, every n steps\nsolid: continuous, every n steps"
        grid[-1].legend(handles=handles, loc="center", frameon=False, fontsize=9, title=title, title_fontsize=9)


def damping_rows(kind: str, step: int, turns: int, epsilon: float, generator: torch.Generator, d: int) -> Tensor:
    """Rows whose second moment is ε I on average: a `turns`-th of the coordinates, or as many random vectors."""
    m = d // turns
    if kind == "random vectors":
        return torch.randn(m, d, generator=generator, dtype=torch.float64) * math.sqrt(epsilon / m)
    order = torch.randperm(d, generator=generator if kind == "drawn" else torch.Generator().manual_seed(d))
    index = {"none": order[:0], "all": order, "drawn": order[:m], "in turn": order[step % turns :: turns]}[kind]
    return torch.eye(d, dtype=torch.float64)[index] * math.sqrt(epsilon * d / max(1, len(index)))


def tracked_distance(kind: str, turns: int, mu: float, x: Tensor, epsilon: float) -> float:
    """The distance from white of the pixels' whitener after 4/μ steps.

    The whitener is a root of the inverse of S ← (1−μ)S + μVᵀV, V the batch's centred rows and the damping's rows. All
    roots have the same distance from white, so it is enough to track S.
    """
    d = x.shape[1]
    generator = torch.Generator().manual_seed(0)
    start = x[torch.randperm(len(x), generator=generator)[:2000]]
    c = start.mean(0)
    S = (start - c).T @ (start - c) / len(start) + epsilon * torch.eye(d, dtype=x.dtype)
    for step in range(int(4 / mu)):
        z = x[torch.randint(len(x), (BATCH,), generator=generator)]
        m = z.mean(0)
        rows = [(z - m) / math.sqrt(len(z)), math.sqrt(1 - mu) * (m - c)[None]]
        V = torch.cat([*rows, damping_rows(kind, step, turns, epsilon, generator, d)])
        c = c + mu * (m - c)
        S = (1 - mu) * S + mu * V.T @ V
    U = torch.linalg.inv(torch.linalg.cholesky(S))
    centred = x - x.mean(0)
    return off_white(U, centred.T @ centred / len(x), epsilon)


def damping_table(quick: bool) -> str:
    x = mnist().x.double()
    lines = []
    for mu in (0.1,) if quick else (0.02, 0.1):
        half = int(0.5 / mu)
        kinds = ["none", "all", "in turn", "in turn", "drawn", "random vectors"]
        for kind, turns in zip(kinds[: 2 if quick else 6], [1, 1, half, 2 * half, half, half], strict=False):
            rows = 0 if kind == "none" else x.shape[1] // turns
            lines.append([mu, kind, rows, f"{tracked_distance(kind, turns, mu, x, epsilon=0.1):.2f}"])
    return markdown(["μ", "damping rows", "how many", "distance from white"], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, out=True, draw=True)
    parser.setting("steps", 1500, 10, "steps")
    parser.add_argument("--damping", action="store_true", help="only compare ways to add the damping in small parts")
    options = parser.parse(arguments)
    if options.damping:
        print(damping_table(options.quick))
        return
    path = options.out / "continuous.csv"
    rows = Log(path, Row).rows if options.draw else run_all(path, options.steps)
    print(table(rows))
    draw(rows, options.out / "figures" / "continuous.png")


if __name__ == "__main__":
    main()
