"""Draws the figures of docs/how-it-works.md and docs/architecture.md, from networks trained here. Prints their numbers.

    contours.png   the loss of one layer on two features of the irises, in ordinary and in whitened coordinates
    sides.png      eigenvalues of Ž and D of each layer of a network on digits: as they are, and after whitening
    layer.svg      a layer of the paper's network
    flow.svg       how a batch becomes a step

python benchmarks/explaining_figures.py
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.command_line import CommandLine
from harness.figures import BLUE, DASHED, DOTTED, DPI, GREEN, OCHRE, SOLID, VERMILION, frame
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import FancyBboxPatch
from sklearn.datasets import load_iris
from torch import Tensor, nn

import bprong
from bprong.audit import second_moments
from bprong.experiments.auditing import in_three_coordinates
from bprong.experiments.data import load
from bprong.experiments.figures import INK, LOOK, log_axis
from bprong.experiments.models import perceptron

WIDTH = 5.4  # inches: letters of 9 points are then legible on a phone too
GREY = "#7a7f87"
LAYERS = (VERMILION, BLUE, GREEN, OCHRE)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, out=True)
    parser.setting("steps", 30, 5, "steps of training before the sides are measured")
    options = parser.parse(arguments)
    folder = options.out / "figures"
    draw_contours(folder / "contours.png")
    draw_sides(folder / "sides.png", options.steps)
    draw_layer(folder / "layer.svg")
    draw_flow(folder / "flow.svg")


@contextmanager
def figure(path: Path, height: float, rows: int = 1) -> Iterator[list[Axes]]:
    """The axes of a narrow figure, one below the other; it is saved at the end."""
    settings = {"svg.hashsalt": path.stem, "svg.fonttype": "path"}
    with style.context(["default", LOOK | settings]):
        chart = Figure(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.07, h_pad=0.07))
        yield list(chart.subplots(rows, 1, squeeze=False).flat)
        path.parent.mkdir(parents=True, exist_ok=True)
        chart.savefig(path, dpi=DPI, metadata={"Date": None} if path.suffix == ".svg" else None)
    print(path)


# Contours of the loss -------------------------------------------------------------------------------------------------


def irises() -> tuple[Tensor, Tensor]:
    """Length and width of the petals of 150 irises, (150, 2), and the length of the sepals, (150, 1): cm, centred."""
    found = torch.tensor(load_iris().data, dtype=torch.float64)
    found = found - found.mean(dim=0)
    return found[:, 2:], found[:, :1]


def draw_contours(path: Path) -> None:
    x, y = irises()
    plain = nn.Sequential(nn.Linear(2, 1, bias=False, dtype=torch.float64))
    nn.init.constant_(plain[0].weight, 0.0)
    whitened = bprong.whiten_(copy.deepcopy(plain))
    optimizer = torch.optim.SGD(whitened.parameters(), lr=0.0)
    bprong.Rewhitening(
        whitened, optimizer, "mse", fisher="exact", backward_offset=0,
        forward_damping=0.0, backward_damping=0.0,
    ).step(x)  # fmt: skip
    views = {
        "ordinary coordinates W": (plain, plain[0].weight),
        "whitened coordinates W†": (whitened, whitened[0].weight_dagger),
    }
    with figure(path, 7.6, rows=2) as axes:
        for panel, (title, (model, parameter)) in zip(axes, views.items(), strict=True):
            draw_paths(panel, title, model, parameter, x, y)


def draw_paths(axes: Axes, title: str, model: nn.Module, parameter: nn.Parameter, x: Tensor, y: Tensor) -> None:
    """Contours of the loss over a parameter of two numbers, and thirty steps of gradient descent from zero."""
    lowest = _minimum(model, parameter, x, y)
    hessian = torch.autograd.functional.hessian(lambda w: _loss(model, parameter, w, x, y), lowest)
    eigenvalues = torch.linalg.eigvalsh(hessian.reshape(2, 2))
    rate = float(1.8 / eigenvalues[-1])  # just below what the steepest direction allows
    steps = _descent(model, parameter, x, y, rate, 30)
    condition = float(eigenvalues[-1] / eigenvalues[0])
    losses = [float(_loss(model, parameter, w, x, y)) for w in (*steps[[0, -1]], lowest)]
    print(f"{title}: condition {condition:.1f}, rate {rate:.3g}, losses {losses}")
    centre, reach = lowest.flatten().numpy(), 1.3 * float(lowest.abs().max())
    grid = np.linspace(-reach, reach, 161)
    values = [
        [float(_loss(model, parameter, torch.tensor([[centre[0] + a, centre[1] + b]]), x, y)) for a in grid]
        for b in grid
    ]
    levels = losses[2] + (losses[0] - losses[2]) * np.geomspace(0.002, 8, 12)
    axes.contour(centre[0] + grid, centre[1] + grid, values, levels=levels, colors=GREY, linewidths=0.8)
    look: dict[str, Any] = {"color": VERMILION, "linewidth": 1.2, "marker": "o", "markersize": 3}
    axes.plot(*steps.T.numpy(), label=f"30 steps of gradient descent, rate {rate:.2g}", **look)
    axes.plot(*centre, "*", color=INK, markersize=11, label="minimum", linestyle="none")
    labels = ("first whitened weight", "second whitened weight")
    if "†" not in title:
        labels = ("weight of petal length (cm / cm)", "weight of petal width (cm / cm)")
    frame(axes, f"{title}: condition number {condition:.3g}", *labels)
    axes.set(xlim=(centre[0] - reach, centre[0] + reach), ylim=(centre[1] - reach, centre[1] + reach), aspect="equal")
    axes.legend(frameon=False, fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


def _loss(model: nn.Module, parameter: nn.Parameter, values: Tensor, x: Tensor, y: Tensor) -> Tensor:
    name = next(name for name, p in model.named_parameters() if p is parameter)
    output = torch.func.functional_call(model, {name: values.reshape(1, 2)}, x)
    return nn.functional.mse_loss(output, y)


def _descent(model: nn.Module, parameter: nn.Parameter, x: Tensor, y: Tensor, rate: float, steps: int) -> Tensor:
    """The path of gradient descent from zero: (steps + 1, 2)."""
    path = [torch.zeros(1, 2, dtype=torch.float64)]
    gradient = torch.func.grad(lambda w: _loss(model, parameter, w, x, y))
    for _ in range(steps):
        path.append(path[-1] - rate * gradient(path[-1]))
    return torch.cat(path)


def _minimum(model: nn.Module, parameter: nn.Parameter, x: Tensor, y: Tensor) -> Tensor:
    w = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = _loss(model, parameter, w, x, y)
        loss.backward()
        return loss

    optimizer.step(closure)
    return w.detach()


# Eigenvalues of both sides --------------------------------------------------------------------------------------------


def draw_sides(path: Path, steps: int) -> None:
    """The network has the form of the paper's, and is trained on 8×8 digits for a while."""
    data = load("digits")
    model = perceptron([data.features, 100, 100, 100, data.classes], "relu", seed=0)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(data.x_train), (100,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.x_train[rows]), data.y_train[rows]).backward()
        optimizer.step()
    x = data.x_train[:500].double()
    networks = in_three_coordinates(model.double(), x, forward_damping=0.01, backward_damping=0.001)
    plain, both = (second_moments(networks[name], x, "cross_entropy") for name in ("plain", "bidirectional"))
    with figure(path, 7.4, rows=2) as axes:
        titles = ("inputs: second moments of (1, z)", "errors: second moments D of δ")
        for side, (panel, title) in enumerate(zip(axes, titles, strict=True)):
            log_axis(panel, "y", 1e6)
            panel.axhline(1, color=INK, linewidth=0.9, linestyle=DOTTED)
            for number, (name, colour) in enumerate(zip(plain, LAYERS, strict=True), start=1):
                for moments, dashes, words in ((plain, DASHED, ""), (both, SOLID, ", whitened")):
                    values = _eigenvalues(moments[name][side])
                    share = np.linspace(0, 100, len(values))
                    panel.plot(share, values, color=colour, linestyle=dashes, label=f"layer {number}{words}")
                    print(f"{title}, layer {number}{words}: {values[0]:.3g} to {values[-1]:.3g}, of {len(values)}")
            frame(panel, title, "eigenvalues, largest first (% of their number)", "eigenvalue")
            panel.set(xlim=(0, 100), ylim=(1e-6, 1e3))
        look: dict[str, Any] = {"ncols": 2, "frameon": False, "fontsize": 8.5, "loc": "upper center"}
        axes[1].legend(bbox_to_anchor=(0.5, -0.2), **look)


def _eigenvalues(second: Tensor) -> np.ndarray:
    return torch.linalg.eigvalsh(second).flip(0).clamp(min=1e-9).numpy()


# Diagrams -------------------------------------------------------------------------------------------------------------


def draw_layer(path: Path) -> None:
    """A layer of the paper's network; the data go down, and errors come back up."""
    rows = (
        ("z", "inputs of the layer", GREY),
        ("z† = U (z − c)", "white: mean 0, second moment I", BLUE),
        ("a† = W† z† + b†", "the parameters that are trained", VERMILION),
        ("a = Rᵀ a†", "the outputs that the ordinary layer has", BLUE),
        ("φ(a)", "activation function: inputs of the next layer", GREY),
    )
    _chain(path, rows, ["U and c: from the moments of z", "", "R: from the moments of δ", ""], up="δ† = R δ, white")


def draw_flow(path: Path) -> None:
    rows = (
        ("your forward pass", "capture/: if statistics are due, records the inputs z of every weight", GREY),
        ("your backward pass", "capture/: errors δ of sampled targets, through the same graph", GREY),
        ("moments c, Ž, D", "linalg/: running averages in float64", BLUE),
        ("factors (Ž+ε₁)⁻¹, (D+ε₂)⁻¹", "whitening/: one Side for inputs, one for errors", BLUE),
        ("whitened direction", "whitening/: gradient times both factors", VERMILION),
        ("step rule", "optim/: fixed rate, spectral, or automatic", VERMILION),
        ("new parameters", "your model, unmodified", GREY),
    )
    notes = ["", "at steps where statistics are due", "for sides that have drifted", "", "", ""]
    _chain(path, rows, notes)


def _chain(path: Path, rows: Sequence[tuple[str, str, str]], notes: Sequence[str], up: str = "") -> None:
    """Boxes one below the other, with arrows in between; notes: beside the arrows; up: on an arrow that goes up."""
    with figure(path, 0.95 * len(rows)) as (axes,):
        axes.set(xlim=(0, 10), ylim=(-len(rows) + 0.42, 0.42))
        axes.axis("off")
        arrow: dict[str, Any] = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.3, "mutation_scale": 12}
        right = 8.2 if up else 9.6
        for i, (title, text, colour) in enumerate(rows):
            box: dict[str, Any] = {"boxstyle": "round,pad=0.02,rounding_size=0.08", "linewidth": 1.4}
            box |= {"edgecolor": colour, "facecolor": "white"}
            axes.add_patch(FancyBboxPatch((0.4, -i - 0.3), right - 0.4, 0.6, **box))
            middle = (0.4 + right) / 2
            axes.text(middle, -i + 0.1, title, ha="center", va="center", fontsize=11, fontweight="bold", color=colour)
            axes.text(middle, -i - 0.15, text, ha="center", va="center", fontsize=8.5)
            if i + 1 < len(rows):
                axes.annotate("", (2.2, -i - 0.68), (2.2, -i - 0.32), arrowprops=arrow)
                axes.text(2.5, -i - 0.5, notes[i], va="center", fontsize=8.5, color=INK)
        if up:
            axes.annotate("", (9.0, 0.3), (9.0, -len(rows) + 0.7), arrowprops=arrow | {"linestyle": "--"})
            middle = -(len(rows) - 1) / 2
            axes.text(9.45, middle, f"errors: {up}", rotation=90, va="center", ha="center", fontsize=9)


if __name__ == "__main__":
    main()
