"""Products of directions, each a tensor for every parameter that it moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from bprong.moves import Groups
from bprong.preconditioner import Layer

__all__ = ["dot", "metric"]

Vector = Mapping[Tensor, Tensor]


def dot(a: Vector, b: Vector) -> float:
    """The sum over all parameters that both name.

    >>> p, q = torch.zeros(2), torch.zeros(1)
    >>> dot({p: torch.tensor([1.0, 2.0]), q: torch.ones(1)}, {p: torch.tensor([3.0, 4.0])})
    11.0
    """
    return sum(_inner(a[p], d) for p, d in b.items() if p in a)


def _inner(a: Tensor, b: Tensor) -> float:
    if a.dtype == b.dtype and a.is_contiguous() and b.is_contiguous():
        return float(torch.dot(a.view(-1), b.view(-1)))
    return float((a * b).sum())


def metric(parts: Mapping[str, Vector], layers: Iterable[Layer], groups: Groups) -> tuple[Tensor, Tensor]:
    """Products of the directions, weights whose inputs have units of their own counting in these; ½ weight_decay ‖θ‖²'s
    curvature: (k, k) each."""
    units = {layer.weight: layer.units for layer in layers if layer.units is not None}
    decay = {p: group["weight_decay"] for p, group in groups.items() if group["weight_decay"]}
    decayed = {name: {p: d for p, d in directions.items() if p in decay} for name, directions in parts.items()}
    return _gram(parts, units), _gram(decayed, decay)


def _gram(parts: Mapping[str, Vector], weights: Mapping[Tensor, Tensor | float]) -> Tensor:
    """dᵢᵀ diag(weights) dⱼ, one where there is none."""
    vectors, found = list(parts.values()), torch.zeros(len(parts), len(parts), dtype=torch.float64)
    for j, other in enumerate(vectors):
        weighted = {p: d * weights[p] if p in weights else d for p, d in other.items()} if weights else other
        for i in range(j + 1):
            found[i, j] = found[j, i] = dot(vectors[i], weighted)
    return found
