"""Moments → the exact inverse of a damped second moment, (Ž+ε)⁻¹, and its roots U, U (Ž+ε) Uᵀ = I.

Fujimoto & Ohira, eqs. for U and R:  U = (Λ+εI)^(-1/2) Pᵀ  from  Ž = P Λ Pᵀ.  Any U with UᵀU = (Ž+εI)⁻¹ whitens as
well, and under SGD follows the same path; the Cholesky factor is several times cheaper. The paper's network needs a
root; a step in ordinary coordinates needs UᵀU only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from bprong.checks import number, one_of
from bprong.errors import LinAlgError, WhiteningError
from bprong.linalg.moments import diagonal, finite, outer

RelativeTo = Literal["one", "mean", "variance"]
RootSolver = Literal["eigh", "cholesky", "symmetric"]
NEVER_VARIES = 1e-37  # a variance up to this: its inverse is not finite in float32


@dataclass(frozen=True)
class Damping:
    """What is added to the diagonal of a second moment before it is inverted.

    relative_to="one"       ε                  the paper's ε
    relative_to="mean"      ε · tr(Ž)/d        independent of the common scale of the features
    relative_to="variance"  ε · diag(Ž)        independent of the scale of each feature, so that the step is exactly
                                               invariant to a rescaling of features. For features that vary in most
                                               examples: one that is rarely active, such as a pixel at the border of
                                               an image, would make steps that are far too long

    A coordinate (or a whole side) that never varies is damped as if its variance were one; its gradient is zero.

    >>> Damping(0.1, relative_to="variance").amounts(torch.tensor([4.0, 0.0]))
    tensor([0.4000, 0.1000])
    """

    value: float
    relative_to: RelativeTo = "one"

    def __post_init__(self) -> None:
        number("damping", self.value, 0)
        one_of("relative_to", self.relative_to, get_args(RelativeTo))

    @classmethod
    def of(cls, value: float | Damping) -> Damping:
        """Return a damping; a plain number is the paper's ε."""
        return value if isinstance(value, Damping) else cls(value)

    def amounts(self, variances: Tensor) -> Tensor:
        """Return what is added to a diagonal, from the diagonal itself: (d,), or (n, d) for n blocks."""
        return self.value * self.units(variances)

    def units(self, variances: Tensor) -> Tensor:
        """Return the unit of ε for each coordinate."""
        if self.relative_to == "one":
            return torch.ones_like(variances)
        if self.relative_to == "mean":
            variances = variances.mean().expand_as(variances)
        return torch.where(variances > NEVER_VARIES, variances, 1.0)


def inverse(
    second: Tensor, damping: float | Damping = 0.0, dtype: torch.dtype = torch.float64, weight: float = 1.0
) -> Tensor:
    """Return (Ž + ε)⁻¹ = UᵀU by Cholesky, without forming U.

    dtype:  the precision of the result; for float32 it is computed in float32 where that is safe, else in float64
    weight: what `second` must still be divided by

    >>> inverse(torch.diag(torch.tensor([3.0, 0.0], dtype=torch.float64)), damping=1.0).diagonal().tolist()
    [0.25, 1.0]
    """
    damping = Damping.of(damping)
    second = second.to(torch.float64)
    result = _by_cholesky(second, damping.amounts(diagonal(second) / weight), dtype, weight)
    if result is None:  # a moment that is not finite ends here as well
        U = root_of(second / weight, damping).matrix
        result = U.mT @ U
    return result


def inverses_of_equals(seconds: list[Tensor], dampings: Sequence[Damping], dtype: torch.dtype) -> list[Tensor]:
    """Return the inverses of moments of one small shape, by one factorisation; an empty list if that fails."""
    amounts = [damping.amounts(diagonal(second)) for damping, second in zip(dampings, seconds, strict=True)]
    inverses = _by_cholesky(torch.stack(seconds), torch.stack(amounts), dtype)
    return [] if inverses is None else list(inverses)  # factored one by one, each reports for itself what is wrong


def _by_cholesky(second: Tensor, epsilon: Tensor, dtype: torch.dtype, weight: float = 1.0) -> Tensor | None:
    """Return (Ž + ε)⁻¹ for ε of each coordinate; None if this is not positive definite at its precision."""
    if dtype != torch.float32 or not _safe_in_single(second, epsilon * weight):
        dtype = torch.float64
    damped = torch.div(second, weight, out=torch.empty_like(second, dtype=dtype))
    diagonal(damped).add_(epsilon)
    L = _cholesky_factor(damped)  # which reads one triangle, so that the moment is not symmetrised
    if L is None:
        return None
    # LAPACK's result is stored by columns; as it is symmetric, its transpose is the same matrix stored by rows.
    result = torch.cholesky_inverse(L).mT
    return result if finite(result) else None


def _safe_in_single(second: Tensor, epsilon: Tensor) -> bool:
    """Return whether an inverse in float32 has three digits, by its condition number: κ ≤ (‖Ž‖ + ε)/ε, error ∝ κ √d."""
    smallest = float(epsilon.min())
    largest = float(torch.linalg.vector_norm(second))  # the Frobenius norm of all blocks bounds every eigenvalue
    worst_condition = 1e-3 / (second.shape[-1] ** 0.5 * torch.finfo(torch.float32).eps)
    return bool(largest + smallest < worst_condition * smallest)  # False if one of them is NaN


@dataclass(frozen=True)
class Root:
    """A root of an inverse: matrix @ (second + diag(damping)) @ matrix.T = I.

    matrix:   (d, d) U or R
    damping:  (d,) what was added to the diagonal
    second:   (d, d) the moment that was whitened
    scaled:   (d, d) the same in units of the damping, which is what was factored

    For a side in n blocks each has a leading dimension n.
    """

    matrix: Tensor
    damping: Tensor
    second: Tensor = field(repr=False)
    scaled: Tensor = field(repr=False)

    @cached_property
    def rank(self) -> int:
        """The rank of the second moment, without the damping, at float64's precision."""
        return _rank(torch.linalg.eigvalsh(self.scaled))


def root_of(second: Tensor, damping: float | Damping = 0.0, solver: RootSolver = "eigh") -> Root:
    """Return the root of the damped inverse of a second moment (d, d), or of n moments at once (n, d, d), float64.

    Raises WhiteningError if the moment is not finite, or is singular and not damped.

    >>> U = root_of(torch.diag(torch.tensor([4.0, 0.0], dtype=torch.float64)), damping=1.0)
    >>> (U.matrix @ (U.second + torch.diag(U.damping)) @ U.matrix.T).round(decimals=12).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    >>> U.rank
    1
    """
    second = _symmetrised(second)
    damping = Damping.of(damping)
    units = damping.units(diagonal(second))
    # In these units the damping is a multiple of I. For damping relative to variances the scaled moment is the
    # correlation matrix, which stays well conditioned when features differ by many orders of magnitude.
    unit = units.sqrt()
    scaled = second / outer(unit, unit)
    return Root(_root(scaled, damping.value, solver) / unit.unsqueeze(-2), damping.value * units, second, scaled)


def eigenpairs(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return λ and P of a symmetric matrix; raise WhiteningError where LAPACK fails."""
    try:
        return cast(tuple[Tensor, Tensor], torch.linalg.eigh(matrix))
    except LinAlgError as reason:
        raise WhiteningError(f"the factorisation failed: {reason}") from reason


def _root(second: Tensor, epsilon: float, solver: RootSolver) -> Tensor:
    """Return U with U (Ž+ε) Uᵀ = I.

    eigh:       (Λ+ε)^(-1/2) Pᵀ, the paper's
    cholesky:   L⁻¹ from Ž+ε = LLᵀ, triangular; the paper's if rounding made the matrix indefinite
    symmetric:  P (Λ+ε)^(-1/2) Pᵀ, the whitening closest to the identity
    """
    if solver == "cholesky":
        identity = torch.eye(second.shape[-1], dtype=second.dtype, device=second.device)
        L = _cholesky_factor(second + epsilon * identity)
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


def _cholesky_factor(damped: Tensor) -> Tensor | None:
    """Return L with Ž+ε = LLᵀ, or None if the matrix is not positive definite at its precision."""
    L, failed = torch.linalg.cholesky_ex(damped)
    # Without damping a singular matrix may pass with a pivot of pure rounding, so the pivots are tested too: beside the
    # entry that each of them was computed from, so that the scales of features do not matter.
    rounding = diagonal(damped) * damped.shape[-1] * torch.finfo(damped.dtype).eps
    return None if failed.any() or (diagonal(L).square() <= rounding).any() else L


def _symmetrised(second: Tensor) -> Tensor:
    """Return (Ž + Žᵀ) / 2 in float64; raise WhiteningError if it is not finite."""
    # LAPACK's eigh returns numbers for NaN input without an error, so finiteness is tested here.
    if not finite(second):
        raise WhiteningError("the statistics are not finite (NaN or infinity in the layer's inputs or errors)")
    second = second.to(torch.float64)
    return (second + second.mT) / 2


def _rank(eigenvalues: Tensor) -> int:
    """Return the number of eigenvalues that are not zero to rounding."""
    return int((eigenvalues > _rounding(eigenvalues).unsqueeze(-1)).sum())


def _rounding(eigenvalues: Tensor) -> Tensor:
    """Return the size below which an eigenvalue of a block counts as zero, as in numpy's matrix_rank."""
    return eigenvalues.amax(dim=-1).clamp(min=0) * eigenvalues.shape[-1] * torch.finfo(eigenvalues.dtype).eps
