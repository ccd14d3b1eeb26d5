"""Directions in the space of the parameters, and their products.

Where a model is sharded, each process has slices of its parameters, and products are summed over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from bprong.linalg.moments import to_float64
from bprong.parallel.slices import is_sliced, local, summed

Direction = Mapping[Tensor, Tensor]  # what each parameter moves by; others do not move


def dot(a: Direction, b: Direction, weights: Mapping[Tensor, float] | None = None) -> float:
    """Return the dot product over the parameters of both; of complex ones, over real and imaginary parts.

    weights: of the parameters; None: 1

    >>> p, q = torch.zeros(2), torch.zeros(1)
    >>> dot({p: torch.tensor([1.0, 2.0]), q: torch.ones(1)}, {p: torch.tensor([3.0, 4.0])})
    11.0
    """
    parameters = [p for p in b if p in a]
    pairs = [(a[p], b[p]) for p in parameters]
    is_sharded = bool(pairs) and type(pairs[0][0]) is not Tensor and is_sliced(pairs[0][0])
    if is_sharded:
        pairs = [(local(x), local(y)) for x, y in pairs]
    total = 0.0
    for p, product in zip(parameters, products(pairs), strict=True):
        total += product if weights is None else weights.get(p, 0.0) * product
    return summed(total, a.values()) if is_sharded else total


def products(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """Return the dot product of each pair of tensors; they are read at once."""
    scalars = []
    for x, y in pairs:
        is_plain = x.dtype is y.dtype and not x.is_complex()
        scalars.append(x.flatten().dot(y.flatten()) if is_plain else _mixed(x, y))
    numbers = read(scalars)
    for i, product in enumerate(numbers):
        if not math.isfinite(product):  # the sum may have overflowed
            numbers[i] = float(_mixed(*map(to_float64, pairs[i])))
    return numbers


def _mixed(x: Tensor, y: Tensor) -> Tensor:
    """Return the product of tensors that are complex or differ in precision."""
    return (x.conj() * y).sum().real


def read(numbers: Sequence[Tensor]) -> list[float]:
    """Return the values of 0-dimensional tensors, which takes one synchronisation with their device."""
    if not numbers:
        return []
    if len({(x.dtype, x.device) for x in numbers}) > 1:
        numbers = [x.to("cpu", torch.float64) for x in numbers]
    return torch.stack(list(numbers)).tolist()


def gram(vectors: Sequence[Direction], weights: Mapping[Tensor, float] | None = None) -> Tensor:
    """Return the products of k directions with each other: (k, k), float64."""
    lower = []
    for j, b in enumerate(vectors, 1):
        row = [dot(b, a, weights) for a in vectors[:j]]
        lower.append(row + [0.0] * (len(vectors) - j))
    matrix = torch.tensor(lower, dtype=torch.float64, device="cpu")
    return matrix + matrix.tril(-1).T


def norm(values: Tensor, select: Callable[[Tensor], Tensor]) -> float:
    """Return the length of the part of a tensor that a layer selects; of the whole tensor, if that is sharded."""
    if local(values) is values:
        return float(select(values).norm())
    return math.sqrt(summed(float(local(values).square().sum()), [values]))
