"""A matrix with all its singular values set to about one, in coordinates that two factors whiten.

    msgn(X) = (XXᵀ)^(-1/2) X                        all singular values of X become 1
    Rᵀ msgn(R M Uᵀ) U,   RᵀR = P,  UᵀU = Q          the same in whitened coordinates, written in ordinary ones

Muon (Jordan et al., 2024) approaches msgn by five steps X ← (a + bA + cA²) X with A = XXᵀ, which bring singular values
from 0.003 on to between 0.7 and 1.2. All of these steps are polynomials in the first A, so that X itself need not be
iterated: with R the root of the smaller side, say the left one,

    A = R (M Q Mᵀ) Rᵀ / t,  t = tr      and      Rᵀ msgn(R M Uᵀ) U = Rᵀ p(A) R (M Q) / √t

which takes products of small square matrices, one product with the larger factor, and no root of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bprong.linalg.factors import Factor

QUINTIC = (3.4445, -4.7750, 2.0315)  # Muon's a, b, c: chosen for a steep rise at zero
STEPS = 5


def polynomial(A: Tensor, steps: int = STEPS) -> Tensor:
    """p(A) with p(A) X ≈ msgn(X) for A = XXᵀ of trace one; (…, m, m).

    >>> A = torch.diag(torch.tensor([0.64, 0.36], dtype=torch.float64))
    >>> (polynomial(A) @ A.sqrt()).diagonal()
    tensor([1.1192, 0.7229], dtype=torch.float64)
    """
    a, b, c = QUINTIC
    p = torch.baddbmm(A, A, A, beta=b, alpha=c) if A.ndim == 3 else torch.addmm(A, A, A, beta=b, alpha=c)
    p.diagonal(dim1=-2, dim2=-1).add_(a)
    return p if steps == 1 else polynomial(p @ (A @ p), steps - 1) @ p  # A of the next step is that of p X


@dataclass(frozen=True)
class Whitened:
    """A matrix M (out, in), or (groups, out, in), between the factors of its sides; None: the identity.

    left:  P = RᵀR of the outputs
    right: Q = UᵀU of the inputs
    """

    M: Tensor
    left: Factor | None = None
    right: Factor | None = None

    @property
    def is_tall(self) -> bool:
        """Whether it has more outputs than inputs."""
        return self.M.shape[-2] > self.M.shape[-1]

    @property
    def wide(self) -> Whitened:
        """It or, if it is tall, its transpose; divided by its largest entry, so that squares stay ordinary numbers."""
        M = self.M / self.M.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(self.M.dtype).tiny)
        return Whitened(M.mT, self.right, self.left) if self.is_tall else replace(self, M=M)


def whitened_msgn(matrices: Sequence[Whitened]) -> list[Tensor]:
    """Rᵀ msgn(R M Uᵀ) U of each matrix; those whose smaller sides have the same size share their products.

    >>> M = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, -4.0]], dtype=torch.float64)
    >>> whitened_msgn([Whitened(M)])[0]
    tensor([[ 0.7229,  0.0000,  0.0000],
            [ 0.0000,  0.0000, -1.1192]], dtype=torch.float64)
    """
    wide = [matrix.wide for matrix in matrices]
    products = [own.M if own.right is None else own.right.right(own.M) for own in wide]  # M Q
    grams = [_between(product @ own.M.mT, own.left) for own, product in zip(wide, products, strict=True)]
    smallest = torch.finfo(torch.float32).tiny  # M may be zero, and then stays so
    traces = [A.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp(min=smallest) for A in grams]
    polynomials = _together([A / t for A, t in zip(grams, traces, strict=True)])
    found = []
    for matrix, own, product, t, p in zip(matrices, wide, products, traces, polynomials, strict=True):
        msgn = _between(p, own.left) @ (product * t.rsqrt())
        found.append(msgn.mT if matrix.is_tall else msgn)
    return found


def _between(A: Tensor, factor: Factor | None) -> Tensor:
    """S A S with the symmetric root S of a factor."""
    return A if factor is None else factor.root.right(factor.root.left(A))


def _together(grams: Sequence[Tensor]) -> list[Tensor]:
    """The polynomials of many matrices, stacked if they have the same shape."""
    found: dict[int, Tensor] = {}
    shapes: dict[tuple[object, ...], list[int]] = {}
    for i, A in enumerate(grams):
        shapes.setdefault((A.shape, A.dtype, A.device), []).append(i)
    for same in shapes.values():
        stacked = polynomial(torch.stack([grams[i] for i in same]).flatten(0, -3))
        found |= dict(zip(same, stacked.view(len(same), *grams[same[0]].shape), strict=True))
    return [found[i] for i in range(len(grams))]
