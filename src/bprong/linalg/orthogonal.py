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

from bprong.linalg.factors import Dense, Factor
from bprong.linalg.moments import Blocks

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
        places: dict[object, list[int]] = {}  # of matrices of one shape
        for i, (M, metric) in enumerate(zip(matrices, metrics, strict=True)):
            places.setdefault(_shape(M, metric) or i, []).append(i)
        self._places = list(places.values())
        self._stacks: list[_Stack] = []
        for equals in self._places:
            self._stacks.append(_Stack([metrics[i] for i in equals], matrices[equals[0]]))

    def __call__(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        results = list(matrices)
        for stack, places in zip(self._stacks, self._places, strict=True):
            for i, msgn in zip(places, stack.msgn([matrices[i] for i in places]), strict=True):
                results[i] = msgn
        return results


class _Stack:
    """Matrices of one shape as one, none of which has more rows than columns: tall ones are transposed.

    S:  the symmetric root of the factor of the rows
    Q:  the factor of the columns
    """

    def __init__(self, metrics: Sequence[Metric], like: Tensor) -> None:
        self.is_tall = like.shape[-2] > like.shape[-1]
        rows = [metric.outputs for metric in metrics]
        columns = [metric.inputs for metric in metrics]
        if self.is_tall:
            rows, columns = columns, rows
        self.S = _stacked([None if factor is None else factor.root for factor in rows])
        self.Q = _stacked(columns)

    def msgn(self, matrices: list[Tensor]) -> Sequence[Tensor]:
        """Return Rᵀ msgn(R M Uᵀ) U of each of the matrices."""
        M = matrices[0] if len(matrices) == 1 else torch.stack(matrices)
        largest = M.abs().amax(dim=(-2, -1), keepdim=True)
        M = M / largest.clamp(min=torch.finfo(M.dtype).tiny)  # to avoid overflow
        if self.is_tall:
            M = M.mT
        MQ = M if self.Q is None else self.Q.right(M)
        A = self._between(MQ @ M.mT)
        trace = A.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        trace = trace.clamp(min=torch.finfo(torch.float32).tiny)  # M may be zero, and then stays so
        msgn = self._between(polynomial(A / trace)) @ (MQ * trace.rsqrt())
        if self.is_tall:
            msgn = msgn.mT
        return [msgn] if len(matrices) == 1 else msgn.unbind()

    def _between(self, A: Tensor) -> Tensor:
        """Return S A S."""
        return A if self.S is None else self.S.right(self.S.left(A))


def _shape(M: Tensor, metric: Metric) -> object:
    """Return what matrices must have in common to share their products; None for one that cannot."""
    if M.ndim > 2 or M.numel() > SHARED_UP_TO:
        return None
    for factor in metric:
        if factor is not None and (not isinstance(factor, Dense) or factor.blocks.lead):
            return None
    return M.shape, M.dtype, M.device, metric.outputs is None, metric.inputs is None


def _stacked(factors: Sequence[Factor | None]) -> Factor | None:
    """Return dense factors of one size as one factor of several groups; a single factor, or None for all, as it is."""
    if len(factors) == 1 or factors[0] is None:
        return factors[0]
    inverses = torch.stack([factor.inverse for factor in factors if isinstance(factor, Dense)])
    return Dense(inverses, Blocks(inverses.shape[-1], groups=len(factors)))
