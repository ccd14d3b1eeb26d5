"""`bprong audit`: the Fisher matrix of one function in plain, whitened and bidirectionally whitened coordinates."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bprong
from bprong.audit import block_eigenvalues, fisher_factors, fisher_matrices, second_moments
from bprong.experiments.audit_figures import eigenvalues_figure, matrices_figure
from bprong.experiments.data import Dataset, load
from bprong.experiments.figures import render
from bprong.experiments.methods import METHODS, Problem
from bprong.experiments.models import perceptron
from bprong.experiments.records import write_atomically, write_json
from bprong.experiments.training import load_trained, train_epoch

MEASURES = {
    "condition": "condition",
    "distance": "‖G−I‖",
    "distance_scaled": "‖sG−I‖",
    "off_block": "off-block",
    "near_one": "near one",
    "rank": "rank",
}
LEGEND = """\
matrix      exact: the Fisher matrix G; kronecker: its Kronecker form G̃; block: Ğ, the diagonal blocks of G̃
condition   largest eigenvalue divided by the smallest nonzero one
‖G−I‖       distance to the identity, relative to ‖I‖
‖sG−I‖      the same for the best multiple of the matrix
off-block   share of ‖G‖² outside the diagonal blocks, that is, between layers
near one    share of eigenvalues between ½ and 2
rank        share of eigenvalues that are not zero"""


def run_audit(
    checkpoint: Path | None, source: str, examples: int, forward_damping: float, backward_damping: float, out: Path
) -> dict[str, Any]:
    """Audit a checkpoint, or a small network trained on digits; print tables, write audit.json and the figures."""
    torch.set_num_threads(1)  # more threads make small networks slower, above all beside other programs
    data = load("digits" if checkpoint is None else source)
    trained = _small_network(data) if checkpoint is None else load_trained(checkpoint, data)
    x = data.x_train[:examples].double()  # in float64 the zero eigenvalues can be told from the small ones
    networks = in_three_coordinates(trained.double(), x, forward_damping, backward_damping)
    audits = {name: bprong.audit(model, x, "cross_entropy") for name, model in networks.items()}
    out.mkdir(parents=True, exist_ok=True)
    settings = {
        "examples": len(x), "forward_damping": forward_damping, "backward_damping": backward_damping,
        "checkpoint": None if checkpoint is None else checkpoint.name,
    }  # fmt: skip
    write_json(out / "audit.json", {"settings": settings, "networks": audits})
    _draw(networks, audits, x, out)
    print(f"{table(audits)}\n\nFigures and audit.json: {out}")
    return audits


def in_three_coordinates(
    plain: nn.Module, x: Tensor, forward_damping: float, backward_damping: float
) -> dict[str, nn.Module]:
    """The same function three times: plain, whitened forward (PRONG), and whitened in both directions (BPRONG)."""
    whitened = bprong.whiten_(copy.deepcopy(plain), backward=False)
    bidirectional = bprong.whiten_(copy.deepcopy(plain))
    both_sides: dict[str, Any] = {"fisher": "exact", "backward_offset": 0, "backward_damping": backward_damping}
    for model, options in ((whitened, {}), (bidirectional, both_sides)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        bprong.Rewhitening(model, optimizer, "cross_entropy", forward_damping=forward_damping, **options).step(x)
    return {"plain": plain, "whitened": whitened, "bidirectional": bidirectional}


def _small_network(data: Dataset) -> nn.Module:
    """A 64-12-12-10 network (1,066 parameters) after five epochs of training on the digits."""
    plain = perceptron([data.features, 12, 12, data.classes], "tanh", seed=0)
    state = METHODS["sgd"].prepare(Problem(plain, 0.1, data.x_train, data.y_train, 0, METHODS["sgd"].whitening))
    for epoch in range(5):
        order = torch.randperm(len(data.x_train), generator=torch.Generator().manual_seed(epoch))
        train_epoch(state, data.x_train, data.y_train, order, batch=20)
    return state.deployed()


def _draw(networks: Mapping[str, nn.Module], audits: Mapping[str, Any], x: Tensor, out: Path) -> None:
    """Write the figures; without the exact matrices, which only small networks have, only the eigenvalues of Ğ."""
    if all("exact" in audit["matrices"] for audit in audits.values()):
        layers = {name: fisher_factors(model, x, "cross_entropy") for name, model in networks.items()}
        matrices = {name: fisher_matrices(own) for name, own in layers.items()}
        eigenvalues = {name: torch.linalg.eigvalsh(own["exact"]) for name, own in matrices.items()}
        sizes = [layer.z_bar.shape[-1] * layer.delta.shape[-1] for layer in layers["plain"]]
        figures = {
            "matrices": partial(matrices_figure, matrices, sizes),
            "spectra": partial(eigenvalues_figure, eigenvalues, "Eigenvalues of the exact Fisher matrix G"),
        }
    else:
        eigenvalues = {
            name: block_eigenvalues(second_moments(model, x, "cross_entropy")).sort().values
            for name, model in networks.items()
        }
        title = "Eigenvalues of the block-diagonal Fisher matrix Ğ"
        figures = {"spectra": partial(eigenvalues_figure, eigenvalues, title)}
    for name, make in figures.items():
        for suffix in ("png", "svg"):
            write_atomically(out / f"{name}.{suffix}", render(make, suffix, {"svg.hashsalt": name}, dpi=150))


def table(audits: Mapping[str, Any]) -> str:
    """The audit as text: the matrices of each network, how white each layer is, and what the columns mean."""
    lines = [f"{'network':<15}{'matrix':<11}" + "".join(f"{title:>12}" for title in MEASURES.values())]
    for name, audit in audits.items():
        for kind, measures in audit["matrices"].items():
            cells = "".join(f"{_cell(key, measures[key]):>12}" for key in MEASURES)
            lines.append(f"{name:<15}{kind:<11}{cells}")
    lines += ["", LEGEND, "", "Distance of each layer's second moments to the identity, relative to ‖I‖"]
    lines += [f"{'network':<15}{'layer':<11}{'E[zzᵀ]':>12}{'E[δδᵀ]':>12}"]
    for name, audit in audits.items():
        for layer, sides in audit["layers"].items():
            lines.append(f"{name:<15}{layer:<11}{sides['z']:>12.3g}{sides['delta']:>12.3g}")
    return "\n".join(lines)


def _cell(key: str, value: float) -> str:
    return f"{abs(value):.1%}" if key in ("off_block", "near_one", "rank") else f"{value:.3g}"
