"""Directions in the space of the parameters, and their products.

Where a model is sharded, each process has slices of its parameters, and products are summed over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from bprong.linalg.moments import to_float64
from bprong.sharding import local, summed

Direction = Mapping[Tensor, Tensor]  # what each parameter moves by; others do not move


def dot(a: Direction, b: Direction, weights: Mapping[Tensor, float] | None = None) -> float:
    """The sum over all parameters that both name; of complex ones, over real and imaginary parts.

    weights: of the parameters; None: 1

    >>> p, q = torch.zeros(2), torch.zeros(1)
    >>> dot({p: torch.tensor([1.0, 2.0]), q: torch.ones(1)}, {p: torch.tensor([3.0, 4.0])})
    11.0
    """
    pairs = [(p, a[p], d) for p, d in b.items() if p in a]
    found = sum((1.0 if weights is None else weights.get(p, 0.0)) * _dot(local(x), local(y)) for p, x, y in pairs)
    return summed(found, (x for _, x, _ in pairs))


def _dot(x: Tensor, y: Tensor) -> float:
    """In float64 if it overflows otherwise."""
    product = x.flatten().vdot(y.flatten()) if x.dtype == y.dtype else (x.conj() * y).sum()
    found = float(product.real)
    return found if math.isfinite(found) else float((to_float64(x).conj() * to_float64(y)).sum().real)


def gram(vectors: Sequence[Direction], weights: Mapping[Tensor, float] | None = None) -> Tensor:
    """(k, k) the products of some directions with each other, float64."""
    lower = [[dot(b, a, weights) if i <= j else 0.0 for i, a in enumerate(vectors)] for j, b in enumerate(vectors)]
    found = torch.tensor(lower, dtype=torch.float64, device="cpu")
    return found + found.tril(-1).T


def norm(values: Tensor, own: Callable[[Tensor], Tensor]) -> float:
    """The length of a layer's own part of a tensor; of the whole tensor, if that is sharded."""
    if local(values) is values:
        return float(own(values).norm())
    return math.sqrt(summed(float(local(values).square().sum()), [values]))
