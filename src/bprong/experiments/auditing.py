"""`bprong audit`: the Fisher matrix of one function in plain, whitened and bidirectionally whitened coordinates."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bprong
from bprong.experiments.audit_figures import draw_matrices, draw_spectra
from bprong.experiments.data import load
from bprong.experiments.methods import METHODS, Problem
from bprong.experiments.models import perceptron
from bprong.experiments.records import write_atomically, write_json
from bprong.experiments.runner import load_trained, train_epoch
from bprong.fisher import block_eigenvalues, factors, fisher_matrices, second_moments

__all__ = ["in_three_coordinates", "run_audit", "table"]

MEASURES = {
    "condition": "condition",
    "distance": "‖G−I‖",
    "distance_scaled": "best scale",
    "off_block": "off-block",
    "near_one": "near one",
    "rank": "rank",
}
LEGEND = (
    "exact: G; kronecker: its Kronecker form with all blocks; block: the layers' own blocks of that",
    "condition: largest over smallest eigenvalue, of those that are not zero; rank: the share of those",
    "best scale: ‖sG−I‖ for the best s; near one: the share of eigenvalues in ½ … 2",
    "off-block: the share of ‖G‖² outside the layers' own blocks",
)


def run_audit(
    checkpoint: Path | None, source: str, examples: int, forward_damping: float, backward_damping: float, out: Path
) -> dict[str, Any]:
    """Audits a small network trained on digits, or a checkpoint; prints a table, leaves audit.json and pictures."""
    plain, x = _small() if checkpoint is None else _trained(checkpoint, source)
    # In float64 the null directions of the Fisher matrix are zero to rounding, and can be told from small ones.
    plain, x = plain.double(), x[:examples].double()
    networks = in_three_coordinates(plain, x, forward_damping, backward_damping)
    audits = {name: bprong.audit(model, x) for name, model in networks.items()}
    out.mkdir(parents=True, exist_ok=True)
    settings = {
        "examples": len(x), "forward_damping": forward_damping, "backward_damping": backward_damping,
        "checkpoint": None if checkpoint is None else checkpoint.name,
    }  # fmt: skip
    write_json(out / "audit.json", {"settings": settings, "networks": audits})
    _draw(networks, audits, x, out)
    print(table(audits))
    print(f"\nPictures and numbers: {out}")
    return audits


def in_three_coordinates(
    plain: nn.Module, x: Tensor, forward_damping: float, backward_damping: float
) -> dict[str, nn.Module]:
    """The same function three times: as it is, whitened forward (PRONG), whitened both ways (BPRONG)."""
    networks = {"plain": plain}
    for name, backward in (("whitened", False), ("bidirectional", True)):
        model = bprong.whiten_(copy.deepcopy(plain), backward=backward)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        bprong.Rewhitening(
            model, optimizer, fisher="exact", forward_every=1, backward_every=1, backward_offset=0,
            forward_damping=forward_damping, backward_damping=backward_damping,
        ).step(x)  # fmt: skip
        networks[name] = model
    return networks


def _small() -> tuple[nn.Module, Tensor]:
    """64-12-12-10 on the bundled digits, a few epochs into its training: 1,066 parameters."""
    data = load("digits")
    plain = perceptron([data.features, 12, 12, data.classes], "tanh", seed=0)
    trainee = METHODS["sgd"].prepare(Problem(plain, 0.1, data.x_train, data.y_train, 0, METHODS["sgd"].whitening))
    for epoch in range(5):
        order = torch.randperm(len(data.x_train), generator=torch.Generator().manual_seed(epoch))
        train_epoch(trainee, data.x_train, data.y_train, order, batch=20)
    return trainee.deployed(), data.x_train


def _trained(checkpoint: Path, source: str) -> tuple[nn.Module, Tensor]:
    data = load(source)
    return load_trained(checkpoint, data), data.x_train


def _draw(networks: Mapping[str, nn.Module], audits: Mapping[str, Any], x: Tensor, out: Path) -> None:
    spectra, matrices, sizes = {}, {}, []
    for name, model in networks.items():
        if "exact" in audits[name]["matrices"]:
            found = factors(model, x)
            matrices[name] = fisher_matrices(found)
            sizes = [f.parameters for f in found]
            spectra[name] = torch.linalg.eigvalsh(matrices[name]["exact"])
        else:
            spectra[name] = block_eigenvalues(second_moments(model, x)).sort().values
    which = "exact Fisher matrix G" if matrices else "block-diagonal Fisher matrix Ğ"
    for suffix in ("png", "svg"):
        write_atomically(out / f"spectra.{suffix}", draw_spectra(spectra, which, suffix))
        if matrices:
            write_atomically(out / f"matrices.{suffix}", draw_matrices(matrices, sizes, suffix))


def table(audits: Mapping[str, Any]) -> str:
    """The audit in print: the matrices of each network, then how white each layer is."""
    lines = [f"{'network':<15}{'matrix':<11}" + "".join(f"{title:>12}" for title in MEASURES.values())]
    for name, audit in audits.items():
        for kind, measures in audit["matrices"].items():
            cells = "".join(f"{_cell(key, measures[key]):>12}" for key in MEASURES)
            lines.append(f"{name:<15}{kind:<11}{cells}")
    lines += ["", "how far from white each layer is, ‖E[··ᵀ] − I‖ / ‖I‖"]
    lines += [f"{'network':<15}{'layer':<11}{'z':>12}{'δ':>12}"]
    for name, audit in audits.items():
        for layer, sides in audit["layers"].items():
            lines.append(f"{name:<15}{layer:<11}{sides['z']:>12.3g}{sides['delta']:>12.3g}")
    return "\n".join([*lines, "", *LEGEND])


def _cell(key: str, value: float) -> str:
    return f"{abs(value):.1%}" if key in ("off_block", "near_one", "rank") else f"{value:.3g}"
