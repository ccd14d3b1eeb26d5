"""Exact and approximate Fisher matrices, and how far they are from the identity.

Fujimoto & Ohira, section 2.3: G_ij = E[z̄z̄ᵀ ⊗ δδᵀ] is the exact matrix, G̃_ij = E[z̄z̄ᵀ] ⊗ E[δδᵀ] its Kronecker form with
all blocks, Ğ the block-diagonal part of G̃. z̄ = (1, z) and δ are taken in each layer's own coordinates, which for a
whitened layer are z̄† and δ†: the audit sees what the optimizer sees.

The expectation over labels is exact (every class weighted by its probability); the expectation over inputs is the mean
over x.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from bprong.capture.measure import record
from bprong.capture.request import LayerMoments, Request
from bprong.capture.weights import WeightMatrix, weight_matrix_of
from bprong.likelihood.declared import Declaration, declared_loss
from bprong.linalg.moments import Limits, Moments, finite, float64_copy
from bprong.network.layers import WhitenedLinear

EXACT_UP_TO = 3000  # parameters: a matrix of 72 MB, and a few seconds for its eigenvalues


@dataclass(frozen=True)
class FisherFactors:
    """What the Fisher matrix of one layer is computed from, in the layer's own coordinates, float64.

    z_bar:   (n, rows, in+1), or (n, rows, in) without a bias
    errors:  moments of δ: of the errors of all roots, examples and rows, or of their products alone
    """

    name: str
    z_bar: Tensor
    errors: Moments

    @property
    def delta(self) -> Tensor:
        """δ: (roots, n, rows, out); the sum over roots takes the expectation over labels."""
        return self.errors.values.view(-1, *self.z_bar.shape[:2], self.errors.values.shape[-1])

    def Z(self, other: FisherFactors) -> Tensor:
        """Return E[z̄z̄ᵀ] between this layer and another, the mean over rows."""
        return torch.einsum("nri,nrj->ij", self.z_bar, other.z_bar) / self.z_bar.shape[:2].numel()

    def D(self, other: FisherFactors) -> Tensor:
        """Return E[δδᵀ] between this layer and another, summed over rows, per target."""
        return torch.einsum("knro,knrp->op", self.delta, other.delta) / self.errors.weight


def fisher_factors(model: nn.Module, x: Any, loss: Declaration, rows: bool = True) -> list[FisherFactors]:
    """Return z̄ and δ of every `nn.Linear` and `WhitenedLinear` of the model on x. The model stays as it was.

    Convolutions, and layers that are whitened in several blocks, are left out.

    rows: whether to store the errors of all examples
    """
    weights = []
    for name, module in model.named_modules():
        if type(module) in (nn.Linear, WhitenedLinear):
            weight = weight_matrix_of(name, module, Limits(sys.maxsize))
            if not (weight.inputs.lead or weight.outputs.lead):
                weights.append(weight)
    if not weights:
        raise ValueError("the model has no nn.Linear or WhitenedLinear, the layers that the audit supports")
    names = {weight.name for weight in weights}
    likelihood = declared_loss(loss).likelihood
    request = Request(dict.fromkeys(weights, False), names, names, likelihood, "exact", rows=rows, precise=True)
    measured = record(model, request, x)
    return [_factors_of(weight, measured[weight.name]) for weight in weights if measured[weight.name].delta]


def second_moments(model: nn.Module, x: Any, loss: Declaration) -> dict[str, tuple[Tensor, Tensor]]:
    """Return E[z̄z̄ᵀ] and E[δδᵀ] of every linear layer in its own coordinates; errors of examples are not stored."""
    return {layer.name: (layer.Z(layer), layer.errors.second) for layer in fisher_factors(model, x, loss, rows=False)}


def _factors_of(weight: WeightMatrix, measured: LayerMoments) -> FisherFactors:
    """Return what was measured of a layer, in its own coordinates."""
    z = float64_copy(cast(Tensor, measured.probe))
    z = z.reshape(len(z), -1, z.shape[-1])
    if cast(Moments, measured.z).weight > z.shape[:2].numel():
        raise ValueError(f"{weight.name} is called more than once in a forward pass; the audit supports one call")
    errors = cast(Moments, measured.delta)
    if not (finite(z) and errors.finite):
        raise ValueError("a layer's inputs or errors on x are not finite, so the Fisher matrix is not defined")
    values = float64_copy(errors.values)
    layer = weight.module
    if layer is not None:
        z = (z - float64_copy(layer.c)) @ float64_copy(layer.U).T
        if layer.R is not None:
            R = float64_copy(layer.R)
            values = values @ R.T if errors.as_rows else R @ values @ R.T
    z_bar = z if weight.bias is None else nn.functional.pad(z, (1, 0), value=1.0)
    return FisherFactors(weight.name, z_bar, replace(errors, values=values))


def fisher_matrices(layers: Sequence[FisherFactors]) -> dict[str, Tensor]:
    """Return G ("exact"), G̃ ("kronecker") and Ğ ("block"), each (parameters, parameters).

    G̃ relates layers example by example and is left out if layers see several rows for an example.
    """
    # ∂(−log p)/∂(b, W) for every root and example, stacked by columns as vec does: (roots · n, parameters)
    scores = torch.cat([torch.einsum("nri,knro->knio", a.z_bar, a.delta).flatten(2) for a in layers], dim=2).flatten(
        0, 1
    )
    matrices = {"exact": scores.T @ scores / layers[0].errors.weight}
    if all(a.z_bar.shape[1] == 1 for a in layers):
        matrices["kronecker"] = torch.cat(
            [torch.cat([torch.kron(a.Z(b), a.D(b)) for b in layers], dim=1) for a in layers]
        )
    matrices["block"] = torch.block_diag(*(torch.kron(a.Z(a), a.D(a)) for a in layers))  # type: ignore[no-untyped-call]
    return matrices


def identity_measures(eigenvalues: Tensor, off_block: float = 0.0, eps: float = 0.0) -> dict[str, float]:
    """Return how close a matrix G with these eigenvalues is to the identity.

    distance         ‖G − I‖ / ‖I‖, in Frobenius norm
    distance_scaled  the same for the best multiple of G, which a learning rate can provide
    condition        largest over smallest eigenvalue, without those that are zero to rounding
    rank             the fraction of eigenvalues that are not zero to rounding
    near_one         the fraction of eigenvalues within a factor of two of one
    off_block        the fraction of ‖G‖² outside the layers' own blocks, as given

    eps is the precision of z and δ, whose rounding enters the matrix squared and does not count as rank.
    """
    n = len(eigenvalues)
    double = torch.finfo(torch.float64)
    largest = float(eigenvalues.max())
    nonzero = eigenvalues[eigenvalues > largest * n * max(double.eps, eps**2)]
    root_mean_square = eigenvalues.square().mean().clamp(min=double.tiny).sqrt()
    return {
        "distance": float((eigenvalues - 1).norm()) / n**0.5,
        "distance_scaled": float(eigenvalues.std(correction=0) / root_mean_square),
        "condition": largest / float(nonzero.min()) if len(nonzero) else float("inf"),
        "rank": len(nonzero) / n,
        "near_one": float(((eigenvalues >= 0.5) & (eigenvalues <= 2)).double().mean()),
        "off_block": off_block,
    }


def matrix_measures(G: Tensor, blocks: Sequence[int], eps: float = 0.0) -> dict[str, float]:
    """Return the `identity_measures` of a matrix whose diagonal blocks have these sizes."""
    is_own = torch.block_diag(*(G.new_ones(size, size) for size in blocks))  # type: ignore[no-untyped-call]
    off_block = float((G * (1 - is_own)).norm() / G.norm().clamp(min=torch.finfo(G.dtype).tiny)) ** 2
    return identity_measures(torch.linalg.eigvalsh(G), off_block, eps)


def audit(model: nn.Module, x: Any, loss: Declaration) -> dict[str, Any]:
    """Measure how close to the identity the model's Fisher matrix on x is, in the coordinates its optimizer sees.

    Returns plain numbers: "parameters", how many there are; "matrices", the measures of `identity_measures` for each of
    "exact", "kronecker" and "block"; "layers", how far from white z̄ and δ of each layer are (0: white, relative to
    ‖I‖). Above 3,000 parameters "matrices" has "block" only, computed from its factors without forming a matrix.

    >>> report = audit(nn.Sequential(nn.Linear(3, 2)), torch.randn(20, 3), "cross_entropy")
    >>> report["parameters"], sorted(report["matrices"])
    (8, ['block', 'exact', 'kronecker'])
    """
    sides = second_moments(model, x, loss)
    sizes = [len(Z) * len(D) for Z, D in sides.values()]
    eps = max(torch.finfo(p.dtype).eps for p in model.parameters())
    if sum(sizes) <= EXACT_UP_TO:
        matrices = fisher_matrices(fisher_factors(model, x, loss))
        measures = {kind: matrix_measures(G, sizes, eps) for kind, G in matrices.items()}
    else:
        measures = {"block": identity_measures(block_eigenvalues(sides), eps=eps)}
    white = {name: {"z": _distance_from_white(Z), "delta": _distance_from_white(D)} for name, (Z, D) in sides.items()}
    return {"parameters": sum(sizes), "matrices": measures, "layers": white}


def block_eigenvalues(sides: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
    """Return the eigenvalues of Ğ: all products of an eigenvalue of E[z̄z̄ᵀ] and one of E[δδᵀ]."""
    products = [torch.outer(torch.linalg.eigvalsh(Z), torch.linalg.eigvalsh(D)).flatten() for Z, D in sides.values()]
    return torch.cat(products).clamp(min=0)


def _distance_from_white(second: Tensor) -> float:
    """Return ‖S − I‖ / ‖I‖ of a second moment S."""
    return float((second - torch.ones_like(second[0]).diag()).norm() / len(second) ** 0.5)
