"""The figures of the audit: the Fisher matrices side by side, and their eigenvalues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter
from torch import Tensor

MATRICES = {"exact": "exact G", "kronecker": "Kronecker form G̃", "block": "block-diagonal Ğ"}
NETWORKS = {"plain": "plain", "whitened": "whitened (PRONG)", "bidirectional": "both ways (BPRONG)"}
COLOURS = {"plain": "#7f7f7f", "whitened": "#0072b2", "bidirectional": "#d55e00"}
STYLES = {"plain": ":", "whitened": "--", "bidirectional": "-"}
WINDOW = 48  # rows and columns of the part that is enlarged
PIXELS = 400  # a larger matrix is drawn with this many pixels in width and height


def matrices_figure(matrices: Mapping[str, Mapping[str, Tensor]], sizes: Sequence[int]) -> Figure:
    """|entry| / mean eigenvalue of each Fisher matrix on a logarithmic scale, one column per network.

    The first row shows the whole exact matrix. The other rows enlarge a window at the boundary between the last two
    layers, whose numbers of parameters are the end of `sizes`, one row for each kind of matrix.
    """
    edges = [0, *accumulate(sizes)]
    start = max(0, edges[-2] - WINDOW // 2)
    window = slice(start, min(start + WINDOW, edges[-1]))
    kinds = [kind for kind in MATRICES if kind in next(iter(matrices.values()))]
    figure = Figure(figsize=(7.4, 2.1 * len(kinds) + 2.6), layout="constrained")
    axes = figure.subplots(len(kinds) + 1, len(matrices), squeeze=False)
    for column, (name, own) in enumerate(matrices.items()):
        _show(axes[0, column], own["exact"], slice(0, edges[-1]), edges)
        axes[0, column].add_patch(Rectangle((start, start), WINDOW, WINDOW, fill=False, edgecolor="#00ffff"))
        for row, kind in enumerate(kinds, start=1):
            _show(axes[row, column], own[kind], window, edges)
        axes[0, column].set(title=NETWORKS[name], xlabel="□ enlarged below")
        axes[-1, column].set_xlabel("parameters of layer")
    for row, title in enumerate(["exact G, whole", *(f"{MATRICES[kind]}, enlarged" for kind in kinds)]):
        axes[row, 0].set_ylabel(title)
    bar = figure.colorbar(axes[0, 0].images[0], ax=axes, shrink=0.5, ticks=[-3, -2, -1, 0, 1])
    bar.ax.set_yticklabels(["≤ 0.001", "0.01", "0.1", "1", "≥ 10"])
    bar.set_label("|entry| / mean eigenvalue")
    return figure


def _show(axes: Axes, G: Tensor, window: slice, edges: Sequence[int]) -> None:
    """Draw a window of a matrix, with white lines between layers and the layers' numbers on the axes."""
    part = G[window, window].abs()
    if len(part) > PIXELS:  # the largest entry under each pixel, so that thin lines remain visible
        part = torch.nn.functional.adaptive_max_pool2d(part[None, None], PIXELS)[0, 0]
    scaled = (part / G.diagonal().mean()).clamp(min=1e-9).log10()
    extent = (window.start, window.stop, window.stop, window.start)
    axes.imshow(scaled.numpy(), cmap="magma", vmin=-3, vmax=1, interpolation="nearest", extent=extent)
    inside = [min(max(edge, window.start), window.stop) for edge in edges]
    for edge in set(inside) - {window.start, window.stop}:
        axes.axhline(edge, color="white", linewidth=0.7)
        axes.axvline(edge, color="white", linewidth=0.7)
    ticks = {(a + b) / 2: str(i) for i, (a, b) in enumerate(pairwise(inside), start=1) if a < b}
    names = list(ticks.values())
    axes.set(xticks=list(ticks), xticklabels=names, yticks=list(ticks), yticklabels=names)
    axes.tick_params(length=0)


def eigenvalues_figure(eigenvalues: Mapping[str, Tensor], title: str) -> Figure:
    """The eigenvalues of each network's Fisher matrix, largest first; those of the identity are all one."""
    figure = Figure(figsize=(7.4, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.axhspan(0.5, 2, color="#009e73", alpha=0.15, linewidth=0, label="within a factor of two of one")
    for name, values in eigenvalues.items():
        fraction = torch.linspace(0, 1, len(values))
        descending = values.flip(0).clamp(min=1e-12)
        axes.plot(fraction, descending, STYLES[name], color=COLOURS[name], linewidth=2, label=NETWORKS[name])
    low = min(float(values[values > values.max() * 1e-8].min()) for values in eigenvalues.values())
    high = max(float(values.max()) for values in eigenvalues.values())
    axes.set(title=title, ylabel="eigenvalue", yscale="log", ylim=(max(low / 3, 1e-9), 3 * high))
    axes.set(xlabel="eigenvalues from the largest to the smallest, in % of their number", xlim=(0, 1))
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure
