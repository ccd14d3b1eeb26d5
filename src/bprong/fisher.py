"""Exact and approximate Fisher matrices, and how far they are from the identity.

Fujimoto & Ohira, section 2.3: G_ij = E[z̄z̄ᵀ ⊗ δδᵀ] is the exact matrix, G̃_ij = E[z̄z̄ᵀ] ⊗ E[δδᵀ] its Kronecker form with
all blocks, Ğ the block-diagonal part of G̃. Here z̄ = (1, z) and δ are taken in each layer's own coordinates, so that a
whitened network is judged by what its optimizer sees: z̄† and δ†.

The expectation over labels is exact (every class weighted by its probability), over inputs it is the mean over x.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bprong.errors import errors_of, roots_of
from bprong.layers import WhitenedLinear
from bprong.likelihood import Likelihood, likelihood_of
from bprong.listening import unheard
from bprong.moments import Moments, wide
from bprong.recording import observed, record
from bprong.taps import Call

__all__ = [
    "Factors",
    "audit",
    "block_eigenvalues",
    "factors",
    "fisher_matrices",
    "measure",
    "measure_matrix",
    "second_moments",
]

Layer = nn.Linear | WhitenedLinear
EXACT_UP_TO = 3000  # parameters: a matrix of 72 MB, and a few seconds for its eigenvalues


@dataclass(frozen=True)
class Factors:
    """What the Fisher matrix of one layer is made of, in the layer's own coordinates, float64.

    z_bar:  (n, rows, in+1), or (n, rows, in) without a bias
    delta:  (roots, n, rows, out)
    """

    name: str
    z_bar: Tensor
    delta: Tensor
    targets: int

    @property
    def parameters(self) -> int:
        return self.z_bar.shape[-1] * self.delta.shape[-1]

    @property
    def Z(self) -> Tensor:
        """E[z̄z̄ᵀ], the mean over rows."""
        return self.Z_with(self)

    @property
    def D(self) -> Tensor:
        """E[δδᵀ], summed over rows, per target."""
        return self.D_with(self)

    def Z_with(self, other: Factors) -> Tensor:
        rows = self.z_bar.shape[0] * self.z_bar.shape[1]
        return torch.einsum("nri,nrj->ij", self.z_bar, other.z_bar) / rows

    def D_with(self, other: Factors) -> Tensor:
        return torch.einsum("knro,knrp->op", self.delta, other.delta) / self.targets

    def scores(self) -> Tensor:
        """∂(−log p)/∂(b, W) of every example and root, as vec stacks columns: (roots · n, parameters)."""
        return torch.einsum("nri,knro->knio", self.z_bar, self.delta).flatten(0, 1).flatten(1)


def factors(model: nn.Module, x: Any, likelihood: str | Likelihood = "categorical") -> list[Factors]:
    """z̄ and δ of every `nn.Linear` and `WhitenedLinear` of the model, on x, without a trace.

    Convolutions, and layers too wide to be whitened as one block, are left out.
    """
    law, layers = likelihood_of(likelihood), _layers(model)
    with unheard(), observed(model, layers, x, seed=0, errors=True) as (output, calls):
        law.check(output)
        _refuse_non_finite(output)
        once = {call.layer: call for call in calls}
        if len(once) != len(calls):
            raise ValueError("a layer is called more than once in a pass; its Fisher matrix does not factor by calls")
        deltas: dict[str, list[Tensor]] = {name: [] for name in once}
        for call, delta in errors_of(output, calls, roots_of(output, None, law, "exact")):
            deltas[call.layer].append(wide(delta))
        targets = law.targets(output)
    return [_factors(layers[name], call, deltas[name], targets) for name, call in once.items() if deltas[name]]


def _layers(model: nn.Module) -> dict[str, Layer]:
    layers: dict[str, Layer] = {
        name: m
        for name, m in model.named_modules()
        if type(m) is nn.Linear
        or (isinstance(m, WhitenedLinear) and not m.forward_blocks.lead and not m.backward_blocks.lead)
    }
    if not layers:
        raise ValueError("the model has no nn.Linear or WhitenedLinear whose Fisher matrix could be taken")
    return layers


def _refuse_non_finite(output: Tensor) -> None:
    if not torch.isfinite(output).all():
        raise ValueError("the model's output is not finite on x; there is no Fisher matrix to speak of")


def _factors(layer: Layer, call: Call, deltas: list[Tensor], targets: int) -> Factors:
    z, delta = wide(call.z), torch.stack(deltas)
    if isinstance(layer, WhitenedLinear):
        z = (z - wide(layer.c)) @ wide(layer.U).T
        delta = delta if layer.R is None else delta @ wide(layer.R).T
    if layer.bias is not None:
        z = torch.cat([torch.ones_like(z[..., :1]), z], dim=-1)
    rows = z.shape[1:-1].numel()
    return Factors(
        call.layer,
        z.reshape(len(z), rows, z.shape[-1]),
        delta.reshape(len(delta), len(z), rows, delta.shape[-1]),
        targets,
    )


def fisher_matrices(found: list[Factors]) -> dict[str, Tensor]:
    """G ("exact"), G̃ ("kronecker") and Ğ ("block"), each (parameters, parameters).

    G̃ joins layers example by example and is left out where layers see different numbers of rows.
    """
    scores = torch.cat([f.scores() for f in found], dim=1)
    matrices = {"exact": scores.T @ scores / found[0].targets}
    if all(f.z_bar.shape[1] == 1 for f in found):
        matrices["kronecker"] = torch.cat(
            [torch.cat([torch.kron(f.Z_with(g), f.D_with(g)) for g in found], dim=1) for f in found]
        )
    matrices["block"] = torch.block_diag(*(torch.kron(f.Z, f.D) for f in found))  # type: ignore[no-untyped-call]
    return matrices


def measure(eigenvalues: Tensor, off_block: float = 0.0, eps: float = 0.0) -> dict[str, float]:
    """How close a matrix with these eigenvalues is to the identity.

    distance         ‖G − I‖ / ‖I‖, in Frobenius norm
    distance_scaled  the same for the best multiple of G, which is what a learning rate can reach
    condition        largest over smallest eigenvalue, of those that are not zero to rounding
    rank             the share of those
    near_one         the share of eigenvalues within a factor two of one
    off_block        the share of ‖G‖² outside the layers' own blocks

    eps is the precision of z and δ: their rounding enters the matrix squared, and is not counted as rank.
    """
    n, largest = len(eigenvalues), float(eigenvalues.max())
    positive = eigenvalues[eigenvalues > largest * n * max(torch.finfo(torch.float64).eps, eps**2)]
    norm2, trace = float(eigenvalues.square().sum()), float(eigenvalues.sum())
    return {
        "distance": float((eigenvalues - 1).norm()) / n**0.5,
        "distance_scaled": max(0.0, 1 - trace**2 / (n * norm2)) ** 0.5 if norm2 > 0 else 1.0,
        "condition": largest / float(positive.min()) if len(positive) else float("inf"),
        "rank": len(positive) / n,
        "near_one": float(((eigenvalues >= 0.5) & (eigenvalues <= 2)).double().mean()),
        "off_block": off_block,
    }


def measure_matrix(G: Tensor, blocks: Sequence[int], eps: float = 0.0) -> dict[str, float]:
    """The measures of a whole matrix whose diagonal blocks have these sizes."""
    inside = sum(float(block.square().sum()) for block in _diagonal_blocks(G, blocks))
    total = float(G.square().sum())
    return measure(torch.linalg.eigvalsh(G), 1 - inside / total if total > 0 else 0.0, eps)


def _diagonal_blocks(G: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    start = 0
    for size in sizes:
        yield G[start : start + size, start : start + size]
        start += size


def audit(model: nn.Module, x: Any, likelihood: str | Likelihood = "categorical") -> dict[str, Any]:
    """How close to the identity the Fisher matrix of the model is on x, in the coordinates its optimizer sees.

    Returns plain numbers: `parameters`; for each of the matrices "exact", "kronecker" and "block" the measures of
    `fisher.measure`; and for each layer how far from white its z̄ and δ are (0: white, relative to ‖I‖). Above 3,000
    parameters only "block" is given, from its factors: no full matrix is formed.

    >>> report = audit(nn.Sequential(nn.Linear(3, 2)), torch.randn(20, 3))
    >>> report["parameters"], sorted(report["matrices"])
    (8, ['block', 'exact', 'kronecker'])
    """
    parameters = sum(m.out_features * (m.in_features + (m.bias is not None)) for m in _layers(model).values())
    eps = max(torch.finfo(p.dtype).eps for p in model.parameters())
    if parameters <= EXACT_UP_TO:
        found = factors(model, x, likelihood)
        sizes = [f.parameters for f in found]
        matrices = {kind: measure_matrix(G, sizes, eps) for kind, G in fisher_matrices(found).items()}
        sides = {f.name: (f.Z, f.D) for f in found}
    else:
        sides = second_moments(model, x, likelihood)
        matrices = {"block": measure(block_eigenvalues(sides), eps=eps)}
    layers = {name: {"z": _from_white(Z), "delta": _from_white(D)} for name, (Z, D) in sides.items()}
    return {"parameters": parameters, "matrices": matrices, "layers": layers}


def second_moments(
    model: nn.Module, x: Any, likelihood: str | Likelihood = "categorical"
) -> dict[str, tuple[Tensor, Tensor]]:
    """E[z̄z̄ᵀ] and E[δδᵀ] of every layer in its own coordinates, without keeping an error per example."""
    law, layers = likelihood_of(likelihood), _layers(model)
    with unheard():
        seen = record(
            model, {name: (m, m.bias is not None) for name, m in layers.items()}, x, None,
            likelihood=law, fisher="exact", errors=True, seed=0,
        )  # fmt: skip
    sides = {}
    for name, m in seen.items():
        if m.z is not None and m.delta is not None:
            sides[name] = _in_own_coordinates(layers[name], m.z, m.delta)
            _refuse_non_finite(sides[name][1])
    return sides


def _in_own_coordinates(layer: Layer, z: Moments, delta: Moments) -> tuple[Tensor, Tensor]:
    mean, Z, D = z.mean, z.second, delta.second
    if isinstance(layer, WhitenedLinear):
        U = wide(layer.U)
        mean, Z = None if mean is None else U @ (mean - wide(layer.c)), U @ Z @ U.T
        D = D if layer.R is None else wide(layer.R) @ D @ wide(layer.R).T
    if mean is None:
        return Z, D
    bar = nn.functional.pad(mean, (1, 0), value=1.0)  # E[z̄] = (1, E[z])
    return nn.functional.pad(Z, (1, 0, 1, 0)) + torch.outer(bar, bar), D


def block_eigenvalues(sides: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
    """Those of Ğ: all products of an eigenvalue of E[z̄z̄ᵀ] with one of E[δδᵀ]."""
    products = [torch.outer(torch.linalg.eigvalsh(Z), torch.linalg.eigvalsh(D)).flatten() for Z, D in sides.values()]
    return torch.cat(products).clamp(min=0)


def _from_white(second: Tensor) -> float:
    identity = torch.eye(len(second), dtype=second.dtype, device=second.device)
    return float((second - identity).norm() / identity.norm())
