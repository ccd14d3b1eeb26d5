"""A matrix with all its singular values set to about one, in coordinates that two factors whiten.

    msgn(X) = (XXᵀ)^(-1/2) X                        all singular values of X become 1
    Rᵀ msgn(R M Uᵀ) U,   RᵀR = P,  UᵀU = Q          the same in whitened coordinates, written in ordinary ones

Muon (Jordan et al., 2024) approaches msgn by five steps X ← (a + bA + cA²) X with A = XXᵀ, which bring singular values
from 0.003 on to between 0.7 and 1.2. All of these steps are polynomials in the first A, so that X itself need not be
iterated: with R the root of the smaller side, say that of the outputs,

    A = R (M Q Mᵀ) Rᵀ / t,  t = tr      and      Rᵀ msgn(R M Uᵀ) U = Rᵀ p(A) R (M Q) / √t

which takes products of small square matrices, one product with the larger factor, and no root of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bprong.linalg.factors import Factor, is_single_block, stacked

QUINTIC = (3.4445, -4.7750, 2.0315)  # Muon's a, b, c: chosen for a steep rise at zero
STEPS = 5
SHARED_UP_TO = 2**14  # entries: the product of a larger matrix takes much longer than its call, and sharing it copies


def polynomial(A: Tensor, steps: int = STEPS) -> Tensor:
    """Return p(A) with p(A) X ≈ msgn(X) for A = XXᵀ of trace one; (…, m, m).

    >>> A = torch.diag(torch.tensor([0.64, 0.36], dtype=torch.float64))
    >>> (polynomial(A) @ A.sqrt()).diagonal()
    tensor([1.1192, 0.7229], dtype=torch.float64)
    """
    a, b, c = QUINTIC
    add_product = torch.baddbmm if A.ndim == 3 else torch.addmm
    p = add_product(A, A, A, beta=b, alpha=c)
    p.diagonal(dim1=-2, dim2=-1).add_(a)
    return p if steps == 1 else polynomial(p @ (A @ p), steps - 1) @ p  # A of the next step is that of p X


class Metric(NamedTuple):
    """The factors of the two sides of a matrix; None: the identity.

    outputs: P = RᵀR
    inputs:  Q = UᵀU
    """

    outputs: Factor | None = None
    inputs: Factor | None = None


class WhitenedMsgn:
    """Rᵀ msgn(R M Uᵀ) U of matrices M (out, in), or (groups, out, in); those of one shape share their products.

    matrices: examples of what it is called with, for their shapes
    metrics:  the metric of each matrix

    >>> M = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, -4.0]], dtype=torch.float64)
    >>> WhitenedMsgn([M], [Metric()])([M])[0]
    tensor([[ 0.7229,  0.0000,  0.0000],
            [ 0.0000,  0.0000, -1.1192]], dtype=torch.float64)
    """

    def __init__(self, matrices: Sequence[Tensor], metrics: Sequence[Metric]) -> None:
        shapes = [_shape(M, metric) for M, metric in zip(matrices, metrics, strict=True)]
        self._stacks: list[_Stack] = []
        for places in _places_of_equals(shapes):
            self._stacks.append(_Stack([metrics[i] for i in places], places, matrices[places[0]]))

    def __call__(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        grams = []  # A
        products = []  # M Q / √t
        for stack in self._stacks:
            M = stack.join(matrices)
            MQ = M if stack.Q is None else stack.Q.right(M)
            A = stack.between(MQ @ M.mT)
            trace = A.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
            trace = trace.clamp(min=torch.finfo(torch.float32).tiny)  # M may be zero, and then stays so
            grams.append(A / trace)
            products.append(MQ * trace.rsqrt())
        results: list[Tensor] = list(matrices)
        for stack, product, p in zip(self._stacks, products, _polynomials(grams), strict=True):
            msgn = stack.between(p) @ product
            if stack.is_tall:
                msgn = msgn.mT
            for i, place in enumerate(stack.places):
                results[place] = msgn if len(stack.places) == 1 else msgn[i]
        return results


class _Stack:
    """Matrices of one shape as one, none of which has more rows than columns: tall ones are transposed.

    places:  of these matrices among all
    S:       the symmetric root of the factor of the rows
    Q:       the factor of the columns
    """

    def __init__(self, metrics: Sequence[Metric], places: Sequence[int], like: Tensor) -> None:
        self.places = places
        self.is_tall = like.shape[-2] > like.shape[-1]
        rows = [metric.outputs for metric in metrics]
        columns = [metric.inputs for metric in metrics]
        if self.is_tall:
            rows, columns = columns, rows
        self.S = stacked([None if factor is None else factor.root for factor in rows])
        self.Q = stacked(columns)

    def join(self, matrices: Sequence[Tensor]) -> Tensor:
        """Return (n, rows, columns), or a single matrix; each divided by its largest entry, to avoid overflow."""
        places = self.places
        M = matrices[places[0]] if len(places) == 1 else torch.stack([matrices[i] for i in places])
        largest = M.abs().amax(dim=(-2, -1), keepdim=True)
        M = M / largest.clamp(min=torch.finfo(M.dtype).tiny)
        return M.mT if self.is_tall else M

    def between(self, A: Tensor) -> Tensor:
        """Return S A S."""
        return A if self.S is None else self.S.right(self.S.left(A))


def _shape(M: Tensor, metric: Metric) -> object:
    """Return what matrices must have in common to share their products; a unique object for one that cannot."""
    factors = [factor for factor in metric if factor is not None]
    if M.ndim > 2 or M.numel() > SHARED_UP_TO or not all(map(is_single_block, factors)):
        return object()
    return M.shape, M.dtype, M.device, metric.outputs is None, metric.inputs is None


def _places_of_equals(shapes: Sequence[object]) -> list[list[int]]:
    """Return the places of each distinct shape."""
    places: dict[object, list[int]] = {}
    for i, shape in enumerate(shapes):
        places.setdefault(shape, []).append(i)
    return list(places.values())


def _polynomials(grams: Sequence[Tensor]) -> list[Tensor]:
    """Return the polynomials of stacks of matrices; matrices of one size share their products."""
    flat = [A.reshape(-1, *A.shape[-2:]) for A in grams]
    results: list[Tensor] = list(flat)
    for places in _places_of_equals([(A.shape[1:], A.dtype, A.device) for A in flat]):
        stack = [flat[i] for i in places]
        p = polynomial(stack[0] if len(stack) == 1 else torch.cat(stack))
        for i, part in zip(places, torch.split(p, list(map(len, stack))), strict=True):
            results[i] = part.view_as(grams[i])
    return results
