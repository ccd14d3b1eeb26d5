"""Roots of the inverse of a damped second moment: U with U (Ž+ε) Uᵀ = I, which the paper's network needs.

Fujimoto & Ohira, eqs. for U and R:  U = (Λ+εI)^(-1/2) Pᵀ  from  Ž = P Λ Pᵀ.  Any U with UᵀU = (Ž+εI)⁻¹ whitens as
well, and under SGD follows the same path; the Cholesky factor is several times cheaper. A step in ordinary coordinates
needs UᵀU only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, cast

import torch
from torch import Tensor

from bprong.errors import WhiteningError
from bprong.linalg.factors import Damping, Dense, cholesky, eigenpairs
from bprong.linalg.moments import Blocks, Moments, diagonal, finite

RootSolver = Literal["eigh", "cholesky", "symmetric"]


@dataclass(frozen=True)
class Root:
    """A root of an inverse: matrix @ (second + diag(damping)) @ matrix.T = I.

    matrix:   (d, d) U or R
    damping:  (d,) what was added to the diagonal
    second:   (d, d) the moment that was whitened

    For a side in n blocks each has a leading dimension n.
    """

    matrix: Tensor
    damping: Tensor
    second: Tensor = field(repr=False)

    @cached_property
    def rank(self) -> int:
        """The rank of the second moment, without the damping, at float64's precision."""
        return _rank(torch.linalg.eigvalsh(self.second))


def root_of(second: Tensor, damping: float | Damping = 0.0, solver: RootSolver = "eigh") -> Root:
    """Return the root of the damped inverse of a second moment (d, d), or of n moments at once (n, d, d), float64.

    Raises WhiteningError if the moment is not finite, or is singular and not damped.

    >>> U = root_of(torch.diag(torch.tensor([4.0, 0.0], dtype=torch.float64)), damping=1.0)
    >>> (U.matrix @ (U.second + torch.diag(U.damping)) @ U.matrix.T).round(decimals=12).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    >>> U.rank
    1
    """
    # LAPACK's eigh returns numbers for NaN input without an error, so finiteness is tested here.
    if not finite(second):
        raise WhiteningError("the statistics are not finite (NaN or infinity in the layer's inputs or errors)")
    second = second.to(torch.float64)
    second = (second + second.mT) / 2
    damping = Damping.of(damping)
    epsilon = damping.amounts(diagonal(second))
    return Root(_root(second, float(epsilon.flatten()[0]), solver), epsilon, second)


def _root(second: Tensor, epsilon: float, solver: RootSolver) -> Tensor:
    """Return U with U (Ž+ε) Uᵀ = I.

    eigh:       (Λ+ε)^(-1/2) Pᵀ, the paper's
    cholesky:   L⁻¹ from Ž+ε = LLᵀ, triangular; the paper's if rounding made the matrix indefinite
    symmetric:  P (Λ+ε)^(-1/2) Pᵀ, the whitening closest to the identity
    """
    if solver == "cholesky":
        identity = torch.eye(second.shape[-1], dtype=second.dtype, device=second.device)
        L = cholesky(second + epsilon * identity)
        if L is not None:
            return cast(Tensor, torch.linalg.solve_triangular(L, identity, upper=False))
    eigenvalues, P = eigenpairs(second)
    damped = eigenvalues.clamp(min=0) + epsilon  # rounding leaves negative eigenvalues in a rank-deficient moment
    if (damped.amin(dim=-1) <= _rounding(damped)).any():
        raise WhiteningError(
            f"the statistics span {_rank(eigenvalues)} of {eigenvalues.numel()} directions and the damping "
            f"({epsilon:g}) is too small to fill the others; give a larger damping"
        )
    # The largest entry of each eigenvector is made positive, so that equal statistics give an equal U.
    largest = P.gather(-2, P.abs().argmax(dim=-2, keepdim=True))
    P = torch.where(largest < 0, -P, P)
    U = P.mT / damped.sqrt().unsqueeze(-1)
    if not finite(U):
        raise WhiteningError("the factorisation is not finite although the statistics are; try a larger damping")
    return P @ U if solver == "symmetric" else U


def _rank(eigenvalues: Tensor) -> int:
    """Return the number of eigenvalues that are not zero to rounding."""
    return int((eigenvalues > _rounding(eigenvalues).unsqueeze(-1)).sum())


def _rounding(eigenvalues: Tensor) -> Tensor:
    """Return the size below which an eigenvalue of a block counts as zero, as in numpy's matrix_rank."""
    return eigenvalues.amax(dim=-1).clamp(min=0) * eigenvalues.shape[-1] * torch.finfo(eigenvalues.dtype).eps


def factor_by_eigenvalues(moments: Moments, damping: Damping, blocks: Blocks, like: Tensor) -> Dense:
    """Return the exact factor of a side, UᵀU, for moments that Cholesky's method fails on.

    Raises WhiteningError if they are not finite, or are singular and not damped.
    """
    U = root_of(moments.second, damping).matrix
    return Dense((U.mT @ U).to(like), blocks)
