"""Moments → whitener: factors U of the inverse of a damped second moment, U (Ž+εI) Uᵀ = I.

Fujimoto & Ohira, eqs. for U and R:  U = (Λ+εI)^(-1/2) Pᵀ  from  Ž = P Λ Pᵀ.  Any U with UᵀU = (Ž+εI)⁻¹ whitens as
well, and under SGD follows the same path; the Cholesky factor is several times cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from bprong.moments import finite, outer

__all__ = ["Damping", "Factorisation", "LinAlgError", "Whitener", "WhiteningError", "inverse", "rank", "whitener"]

Factorisation = Literal["eigh", "cholesky", "symmetric"]
LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # torch's stubs forget it
RelativeTo = Literal["one", "mean", "variance"]


class WhiteningError(RuntimeError):
    """Statistics that cannot be whitened; the message says why."""


@dataclass(frozen=True)
class Damping:
    """What is added to the diagonal of a second moment before it is inverted.

    relative_to="one"       ε                  the paper's ε
    relative_to="mean"      ε · tr(Ž)/d        the same whatever the common scale of the features
    relative_to="variance"  ε · diag(Ž)        the same whatever the scale of each feature: the step is then exactly
                                               invariant to the scaling of features

    A coordinate (or a whole side) that never varies is damped as if its variance were one: its gradient is zero.
    """

    value: float
    relative_to: RelativeTo = "one"

    def __post_init__(self) -> None:
        if not (isinstance(self.value, (int, float)) and 0 <= self.value < float("inf")):
            raise ValueError(f"damping must be a finite number of at least 0, not {self.value}")
        if self.relative_to not in get_args(RelativeTo):
            raise ValueError(f"damping can be relative to {get_args(RelativeTo)}, not to {self.relative_to!r}")

    @classmethod
    def of(cls, value: float | Damping) -> Damping:
        """A plain number is the paper's ε."""
        return value if isinstance(value, Damping) else cls(value)

    def scale(self, second: Tensor) -> Tensor:
        """The unit of the damping for each coordinate, (d,), or (n, d) of n blocks."""
        return self.unit(second.diagonal(dim1=-2, dim2=-1))

    def unit(self, variance: Tensor) -> Tensor:
        """The same from the diagonal alone."""
        if self.relative_to == "mean":
            variance = variance.mean().expand_as(variance)
        unit = torch.ones_like(variance)
        return unit if self.relative_to == "one" else torch.where(variance > 0, variance, unit)


@dataclass(frozen=True)
class Whitener:
    """A root of an inverse: matrix @ (second + diag(damping)) @ matrix.T = I.

    matrix:   (d, d) U or R
    inverse:  (d, d) its inverse
    damping:  (d,) what was added to the diagonal
    second:   (d, d) the moment that was whitened
    scaled:   (d, d) the same in the units of the damping, which is what was factored

    Of a side in blocks each has a leading dimension for them.
    """

    matrix: Tensor
    inverse: Tensor
    damping: Tensor
    second: Tensor = field(repr=False)
    scaled: Tensor = field(repr=False)
    _spectrum: Tensor | None = field(default=None, repr=False)

    @cached_property
    def rank(self) -> int:
        """How many directions the statistics span, the damping apart, at float64's precision."""
        # The Cholesky factor does not know its eigenvalues: they are computed when somebody asks.
        return _rank(torch.linalg.eigvalsh(self.scaled) if self._spectrum is None else self._spectrum)


def whitener(second: Tensor, damping: float | Damping = 0.0, factorisation: Factorisation = "eigh") -> Whitener:
    """The whitener of a second moment (d, d), or of n at once (n, d, d), float64.

    Raises WhiteningError if the moment is not finite, or has no full rank and no damping.

    >>> w = whitener(torch.diag(torch.tensor([4.0, 0.0], dtype=torch.float64)), damping=1.0)
    >>> (w.matrix @ (w.second + torch.diag(w.damping)) @ w.matrix.T).round(decimals=12).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    >>> w.rank
    1
    """
    if factorisation not in _ROOTS:
        raise ValueError(f"factorisation must be one of {tuple(_ROOTS)}, not {factorisation!r}")
    second, damped = _symmetrised(second), Damping.of(damping)
    scale = damped.scale(second)
    # In units where the damping is a multiple of I: for damping relative to variances this is the correlation matrix,
    # which stays well conditioned when features differ by many orders of magnitude.
    unit = scale.sqrt()
    with _failures_named():
        scaled = second / outer(unit, unit)
        matrix, inverse, spectrum = _ROOTS[factorisation](scaled, damped.value)
    _check_finite(matrix, inverse)
    return Whitener(
        matrix / unit.unsqueeze(-2), inverse * unit.unsqueeze(-1), damped.value * scale, second, scaled, spectrum
    )


def inverse(
    second: Tensor,
    damping: float | Damping = 0.0,
    dtype: torch.dtype = torch.float64,
    unit: Tensor | None = None,
    weight: float = 1.0,
) -> Tensor:
    """(Ž + ε)⁻¹ = UᵀU, all that a step in ordinary coordinates needs: by Cholesky, without forming U.

    dtype: the precision it is wanted in; it is computed in float32 for float32 where that is safe, else in float64.
    unit:  the damping's of each coordinate, where the moments of several sides are given at once, each with its own
    weight: what the moment given is still to be divided by

    >>> inverse(torch.diag(torch.tensor([3.0, 0.0], dtype=torch.float64)), damping=1.0).diagonal().tolist()
    [0.25, 1.0]
    """
    _check_square(second)
    second, damped = second.to(torch.float64), Damping.of(damping)
    # Only a damping that differs between coordinates asks for units of its own; one triangle is read, so neither is
    # the moment symmetrised: each would go through as much memory as the factorisation itself.
    unit = damped.unit(second.diagonal(dim1=-2, dim2=-1) / weight) if unit is None else unit
    root = unit.sqrt() if damped.relative_to == "variance" else torch.ones_like(unit[..., :1])
    scaled = second / outer(root, root) if damped.relative_to == "variance" else second
    epsilon = damped.value * unit / root.square()
    single = dtype == torch.float32 and _safe_in_single(scaled, epsilon * weight)
    precision = torch.float32 if single else torch.float64
    damped_moment = torch.div(scaled, weight, out=torch.empty_like(scaled, dtype=precision))
    damped_moment.diagonal(dim1=-2, dim2=-1).add_(epsilon)
    with _failures_named():
        found = _by_cholesky(damped_moment)
        if found is None or not finite(found):  # which a moment that is not finite leads to as well
            U = _eigh(_symmetrised(scaled) / weight, epsilon)[0]
            found = U.mT @ U
            _check_finite(found)
    return found.div_(outer(root, root).to(found)) if damped.relative_to == "variance" else found


def _by_cholesky(damped: Tensor) -> Tensor | None:
    """(Ž+ε)⁻¹, or None where rounding has cost it its definiteness."""
    L = _cholesky_factor(damped)
    # LAPACK's is stored by columns; being symmetric, its transpose is itself, stored by rows as everything else.
    return None if L is None else torch.cholesky_inverse(L).mT


def _safe_in_single(scaled: Tensor, epsilon: Tensor) -> bool:
    """Whether the condition number leaves an inverse in float32 three digits: κ ≤ (‖Ž‖ + ε)/ε, error ∝ κ √d."""
    d, least = scaled.shape[-1], float(epsilon.min())
    flat = scaled.reshape(-1)
    largest = float(torch.dot(flat, flat)) ** 0.5  # Frobenius's norm, of all blocks: no less than any eigenvalue
    return least > 0 and (largest / least + 1) * d**0.5 * torch.finfo(torch.float32).eps < 1e-3


@contextmanager
def _failures_named() -> Iterator[None]:
    try:
        yield
    except LinAlgError as reason:
        raise WhiteningError(f"the factorisation failed: {reason}") from reason


def _check_finite(*found: Tensor) -> None:
    if not all(map(finite, found)):
        raise WhiteningError("the factorisation is not finite although the statistics are; try a larger damping")


Root = tuple[Tensor, Tensor, Tensor | None]  # U, U⁻¹, and the eigenvalues where they are known


def _eigh(second: Tensor, epsilon: float | Tensor) -> Root:
    """The paper's root: U = (Λ+ε)^(-1/2) Pᵀ, U⁻¹ = P (Λ+ε)^(1/2)."""
    eigenvalues, P = torch.linalg.eigh(second)
    root = _damped(eigenvalues, epsilon).sqrt()
    P = P * _signs(P)
    return P.mT / root.unsqueeze(-1), P * root.unsqueeze(-2), eigenvalues


def _symmetric(second: Tensor, epsilon: float) -> Root:
    """The symmetric root: U = P (Λ+ε)^(-1/2) Pᵀ, the whitening closest to doing nothing."""
    eigenvalues, P = torch.linalg.eigh(second)
    root = _damped(eigenvalues, epsilon).sqrt()
    return (P / root.unsqueeze(-2)) @ P.mT, (P * root.unsqueeze(-2)) @ P.mT, eigenvalues


def _cholesky(second: Tensor, epsilon: float) -> Root:
    """The triangular root: U = L⁻¹ from Ž+ε = LLᵀ; the paper's where rounding has cost the matrix its definiteness."""
    L = _cholesky_factor(second + epsilon * _identity(second))
    if L is None:
        return _eigh(second, epsilon)
    return torch.linalg.solve_triangular(L, _identity(second), upper=False), L, None


def _cholesky_factor(damped: Tensor) -> Tensor | None:
    """L with Ž+ε = LLᵀ, or None where there is none to the precision at hand."""
    L, failed = torch.linalg.cholesky_ex(damped)
    # Without damping a singular matrix may pass with a pivot of pure rounding, so the smallest pivot is looked at.
    pivots = L.diagonal(dim1=-2, dim2=-1) ** 2
    return None if failed.any() or (pivots.amin(dim=-1) <= _rounding(pivots)).any() else L


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


_ROOTS: dict[str, Callable[[Tensor, float], Root]] = {"eigh": _eigh, "cholesky": _cholesky, "symmetric": _symmetric}


def _check_square(second: Tensor) -> None:
    if second.ndim not in (2, 3) or second.shape[-2] != second.shape[-1] or second.numel() == 0:
        raise ValueError(f"a second moment is a square matrix, not a tensor of {tuple(second.shape)}")


def _check_second(second: Tensor) -> None:
    _check_square(second)
    # LAPACK's eigh returns numbers for NaN input without complaint, so finiteness is tested here.
    if not finite(second):
        raise WhiteningError("the statistics are not finite (NaN or infinity in the layer's inputs or errors)")


def _symmetrised(second: Tensor) -> Tensor:
    _check_second(second)
    second = second.to(torch.float64)
    return (second + second.mT) / 2


def _damped(eigenvalues: Tensor, epsilon: float | Tensor) -> Tensor:
    """Λ + ε, with the negative eigenvalues that rounding leaves in a rank-deficient moment taken as zero."""
    damped = eigenvalues.clamp(min=0) + epsilon
    if (damped.amin(dim=-1) <= _rounding(damped)).any():
        raise WhiteningError(
            f"the statistics span {_rank(eigenvalues)} of {eigenvalues.numel()} directions and the damping "
            f"({float(torch.as_tensor(epsilon).min()):g}) is too small to fill the others; give a larger damping"
        )
    return damped


def rank(second: Tensor) -> int:
    """How many directions a second moment spans, at float64's precision."""
    return _rank(torch.linalg.eigvalsh(_symmetrised(second)))


def _rank(eigenvalues: Tensor) -> int:
    return int((eigenvalues > _rounding(eigenvalues).unsqueeze(-1)).sum())


def _rounding(eigenvalues: Tensor) -> Tensor:
    """What cannot be told from zero beside a block's largest eigenvalue, as in numpy's matrix_rank."""
    return eigenvalues.amax(dim=-1).clamp(min=0) * eigenvalues.shape[-1] * torch.finfo(eigenvalues.dtype).eps


def _signs(P: Tensor) -> Tensor:
    """±1 for each column: its largest entry is made positive, so that equal statistics give an equal U."""
    largest = P.gather(-2, P.abs().argmax(dim=-2, keepdim=True))
    return torch.where(largest < 0, -1.0, 1.0).to(P)
