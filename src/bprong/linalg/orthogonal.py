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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bprong.linalg.factors import Factor, is_single_block, stacked

QUINTIC = (3.4445, -4.7750, 2.0315)  # Muon's a, b, c: chosen for a steep rise at zero
STEPS = 5
SHARED_UP_TO = 2**14  # entries: the product of a larger matrix takes much longer than its call, and sharing it copies


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


def whitened_msgn(matrices: Sequence[Whitened]) -> list[Tensor]:
    """Rᵀ msgn(R M Uᵀ) U of each matrix; matrices of one shape share their products.

    >>> M = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, -4.0]], dtype=torch.float64)
    >>> whitened_msgn([Whitened(M)])[0]
    tensor([[ 0.7229,  0.0000,  0.0000],
            [ 0.0000,  0.0000, -1.1192]], dtype=torch.float64)
    """
    places = _equal(map(_shape, matrices))
    stacks = [_Stack.of([matrices[i] for i in same]) for same in places]
    products = [stack.M if stack.Q is None else stack.Q.right(stack.M) for stack in stacks]  # M Q
    grams = [stack.between(product @ stack.M.mT) for stack, product in zip(stacks, products, strict=True)]
    smallest = torch.finfo(torch.float32).tiny  # M may be zero, and then stays so
    traces = [A.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp(min=smallest) for A in grams]
    polynomials = _polynomials([A / t for A, t in zip(grams, traces, strict=True)])
    found: dict[int, Tensor] = {}
    for same, stack, product, t, p in zip(places, stacks, products, traces, polynomials, strict=True):
        msgn = stack.between(p) @ (product * t.rsqrt())
        msgn = msgn.mT if stack.is_tall else msgn
        found |= dict(zip(same, msgn if stack.is_stacked else [msgn], strict=True))
    return [found[i] for i in range(len(matrices))]


@dataclass(frozen=True)
class _Stack:
    """Matrices of one shape as one, none of which has more rows than columns: tall ones are transposed.

    M: (n, rows, columns), or a single matrix; each is divided by its largest entry, so that squares stay ordinary
    S: the symmetric root of the factor of the rows
    Q: the factor of the columns
    """

    M: Tensor
    S: Factor | None
    Q: Factor | None
    is_tall: bool
    is_stacked: bool

    @classmethod
    def of(cls, matrices: Sequence[Whitened]) -> _Stack:
        is_tall = matrices[0].is_tall
        is_stacked = len(matrices) > 1
        M = torch.stack([own.M for own in matrices]) if is_stacked else matrices[0].M
        M = M / M.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(M.dtype).tiny)
        rows = [own.right if is_tall else own.left for own in matrices]
        columns = [own.left if is_tall else own.right for own in matrices]
        S = stacked([None if factor is None else factor.root for factor in rows])
        return cls(M.mT if is_tall else M, S, stacked(columns), is_tall, is_stacked)

    def between(self, A: Tensor) -> Tensor:
        """S A S."""
        return A if self.S is None else self.S.right(self.S.left(A))


def _shape(matrix: Whitened) -> object:
    """What matrices must have in common to share their products; unique for one that cannot share them."""
    factors = [factor for factor in (matrix.left, matrix.right) if factor is not None]
    if matrix.M.ndim > 2 or matrix.M.numel() > SHARED_UP_TO or not all(map(is_single_block, factors)):
        return object()
    return matrix.M.shape, matrix.M.dtype, matrix.M.device, matrix.left is None, matrix.right is None


def _equal(shapes: Iterable[object]) -> list[list[int]]:
    """The places of equal shapes, together."""
    places: dict[object, list[int]] = {}
    for i, shape in enumerate(shapes):
        places.setdefault(shape, []).append(i)
    return list(places.values())


def _polynomials(grams: Sequence[Tensor]) -> list[Tensor]:
    """The polynomials of stacks of matrices; matrices of one size share their products."""
    flat = [A.reshape(-1, *A.shape[-2:]) for A in grams]
    found: dict[int, Tensor] = {}
    for same in _equal((A.shape[1:], A.dtype, A.device) for A in flat):
        stack = polynomial(torch.cat([flat[i] for i in same]))
        parts = torch.split(stack, [len(flat[i]) for i in same])
        found |= {i: part.view_as(grams[i]) for i, part in zip(same, parts, strict=True)}
    return [found[i] for i in range(len(grams))]
