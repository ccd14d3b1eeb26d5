"""The audit's pictures: the Fisher matrices side by side, and their spectra."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import pairwise

import matplotlib
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

__all__ = ["draw_matrices", "draw_spectra"]

TITLES = {"exact": "G, exact", "kronecker": "G̃, Kronecker form", "block": "Ğ, block-diagonal"}
NETWORKS = {"plain": "plain network", "whitened": "whitened (PRONG)", "bidirectional": "both ways (BPRONG)"}
COLOURS = {"plain": "#7f7f7f", "whitened": "#0072b2", "bidirectional": "#d55e00"}
STYLES = {"plain": ":", "whitened": "--", "bidirectional": "-"}


def draw_matrices(matrices: Mapping[str, Mapping[str, Tensor]], sizes: Sequence[int], suffix: str) -> bytes:
    """|G| in units of its own mean eigenvalue, on a log scale: a row per matrix, a column per network."""
    kinds = [kind for kind in TITLES if kind in next(iter(matrices.values()))]
    figure = Figure(figsize=(3.3 * len(matrices) + 0.9, 3.4 * len(kinds)), layout="constrained")
    axes = figure.subplots(len(kinds), len(matrices), squeeze=False)
    for column, (name, own) in enumerate(matrices.items()):
        for row, kind in enumerate(kinds):
            G, axis = own[kind], axes[row, column]
            scaled = (_shrunk(G.abs(), 400) / G.diagonal().mean()).clamp(min=1e-9).log10()
            image = axis.imshow(scaled.numpy(), cmap="magma", vmin=-3, vmax=1, interpolation="nearest",
                                extent=(0, len(G), len(G), 0))  # fmt: skip
            _mark_blocks(axis, sizes)
            axis.set_title(NETWORKS[name] if row == 0 else "", fontsize=11)
            axis.set_xlabel("parameters, layer by layer" if row == len(kinds) - 1 else "")
            axis.set_ylabel(TITLES[kind] if column == 0 else "", fontsize=11)
    bar = figure.colorbar(image, ax=axes, shrink=0.5, ticks=[-3, -2, -1, 0, 1])
    bar.ax.set_yticklabels(["≤ 0.001", "0.01", "0.1", "1", "≥ 10"])
    bar.set_label("|entry| / mean eigenvalue")
    figure.suptitle("The Fisher matrix of one function in three coordinate systems", fontsize=13)
    return _bytes(figure, suffix)


def _shrunk(G: Tensor, size: int) -> Tensor:
    """A picture of at most size × size pixels: the largest entry under each, so that thin structure survives."""
    if len(G) <= size:
        return G
    return torch.nn.functional.adaptive_max_pool2d(G[None, None], size)[0, 0]


def _mark_blocks(axis: matplotlib.axes.Axes, sizes: Sequence[int]) -> None:
    """White lines between layers; ticks number the layers."""
    edges = torch.tensor([0, *sizes]).cumsum(0).tolist()
    for edge in edges[1:-1]:
        axis.axhline(edge, color="white", linewidth=0.7)
        axis.axvline(edge, color="white", linewidth=0.7)
    middles = [(a + b) / 2 for a, b in pairwise(edges)]
    names = [str(i + 1) for i in range(len(sizes))]
    axis.set_xticks(middles, names)
    axis.set_yticks(middles, names)
    axis.tick_params(length=0)


def draw_spectra(spectra: Mapping[str, Tensor], which: str, suffix: str) -> bytes:
    """Eigenvalues, largest first; one is where natural-gradient descent needs no preconditioning."""
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axis = figure.subplots()
    axis.axhspan(0.5, 2, color="#009e73", alpha=0.15, linewidth=0, label="within a factor two of one")
    for name, eigenvalues in spectra.items():
        values = eigenvalues.flip(0).clamp(min=1e-12)
        share = torch.linspace(0, 1, len(values))
        axis.plot(share.numpy(), values.numpy(), STYLES[name], color=COLOURS[name], linewidth=2, label=NETWORKS[name])
    axis.set_yscale("log")
    low = min(float(e[e > e.max() * 1e-8].min()) for e in spectra.values())
    axis.set_ylim(max(low / 3, 1e-9), 3 * max(float(e.max()) for e in spectra.values()))
    axis.set_xlim(0, 1)
    axis.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
    axis.set_xlabel("eigenvalues, largest first")
    axis.set_ylabel("eigenvalue")
    axis.set_title(f"Spectrum of the {which}")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    return _bytes(figure, suffix)


def _bytes(figure: Figure, suffix: str) -> bytes:
    FigureCanvasAgg(figure)
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "bprong"}):
        figure.savefig(file, format=suffix, dpi=100, metadata={"Date": None} if suffix == "svg" else None)
    return file.getvalue()
