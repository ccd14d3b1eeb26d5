"""What all factors (Ž+ε)⁻¹ of a damped second moment share, and the exact one; other forms are files beside this one.

`Dense` is the exact inverse, by Cholesky: block by block, or coordinate by coordinate. Another form or another way to
compute it is a file of its own, such as `low_rank.py`, with a subclass of `Factor` and a function that makes it. A side
chooses between them, and the precision they are stored in is its layer's (`whitening/layer.py`: `solve` and `like`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from bprong.checks import number, one_of
from bprong.errors import LinAlgError, WhiteningError
from bprong.linalg.moments import Blocks, Moments, diagonal, finite, random_directions
from bprong.linalg.units import feature_units

RelativeTo = Literal["one", "mean", "variance"]
RELATIVES = get_args(RelativeTo)
NEVER_VARIES = 1e-37  # a variance up to this: its inverse is not finite in float32
NO_FACTOR = (0.0, 0.0, 0.0)  # the numbers of a factor that there is not
PROBES = 32  # random vectors that estimate the distance of a wide side from white


LOW_RANK_ERROR = 0.4  # what others cost is in docs/cost.md


@dataclass(frozen=True)
class Damping:
    """What is added to the diagonal of a second moment before it is inverted.

    relative_to="one"       ε                  the paper's ε
    relative_to="mean"      ε · tr(Ž)/d        independent of the common scale of the features
    relative_to="variance"  the same           in units of its own for each feature of the data (`units.py`), so that
                                               the step hardly depends on how features are scaled

    A side that never varies is damped as if its variance were one; its gradient is zero.

    rank_error  the error of a step, relative to the exact one, up to which a wide side is inverted by low rank
                (docs/cost.md); steps that whiten by half, with (Ž+ε)^(-1/2), feel half of it

    >>> Damping(0.1, relative_to="mean").amounts(torch.tensor([4.0, 0.0]))
    tensor([0.2000, 0.2000])
    """

    value: float
    relative_to: RelativeTo = "one"
    rank_error: float = LOW_RANK_ERROR

    def __post_init__(self) -> None:
        is_valid = isinstance(self.value, float) and 0 <= self.value < math.inf and self.relative_to in RELATIVES
        if not is_valid:  # or an integer, which is a valid number too
            number("damping", self.value, 0)
            one_of("relative_to", self.relative_to, RELATIVES)

    @classmethod
    def of(cls, value: float | Damping) -> Damping:
        """Return a damping; a plain number is the paper's ε."""
        return value if isinstance(value, Damping) else cls(value)

    def amounts(self, variances: Tensor) -> Tensor:
        """Return what is added to a diagonal, from the diagonal itself: (d,), or (n, d) for n blocks."""
        if self.relative_to == "one":
            return torch.full_like(variances, self.value)
        mean = variances.mean().expand_as(variances)
        return self.value * torch.where(mean > NEVER_VARIES, mean, 1.0)

    def units(self, moments: Moments) -> Tensor | None:
        """Return the units that features are to be in, like their variances; None: they stay as they are."""
        return feature_units(moments) if self.relative_to == "variance" else None


class Factor:
    """(Ž+ε)⁻¹ of one side.

    Matrices have the side's features in one dimension: (features, n) from the left, (n, features) from the right, with
    a leading dimension if the side has several groups. A product has the precision of the matrix, whatever the
    precision that the factor is stored in.

    tensor, numbers:
              what it is made of, for checkpoints and for messages between processes (`low_rank.restored`); the tensor
              has the shape of the second moment, or its first columns. A factor that another process keeps has its
              tensor on the device "meta", which has no memory
    cost:     operations that a product takes for each entry of the matrix it is applied to
    """

    tensor: Tensor
    numbers: tuple[float, float, float]
    cost: int

    def left(self, M: Tensor) -> Tensor:
        """(Ž+ε)⁻¹ M for a matrix, for a vector of features, or for (lead, size, n) block by block."""
        raise NotImplementedError

    def right(self, M: Tensor, overwrite: bool = False) -> Tensor:
        """M (Ž+ε)⁻¹; with `overwrite` the result may take M's memory."""
        raise NotImplementedError

    @property
    def root(self) -> Factor:
        """Its symmetric square root, (Ž+ε)^(-1/2), which is computed when it is first asked for."""
        raise NotImplementedError


class Dense(Factor):
    """The inverse itself: (size, size), or (lead, size, size) block by block.

    The products of blocks of one coordinate are taken by elements.
    """

    def __init__(self, inverse: Tensor, blocks: Blocks) -> None:
        self.inverse = inverse
        self.tensor = inverse
        self.numbers = (inverse.shape[-1], 0, 0)
        self.blocks = blocks
        self.cost = 2 * inverse.shape[-1]

    def left(self, M: Tensor) -> Tensor:
        blocks = self.blocks
        inverse = self.inverse.to(M.dtype)
        if blocks.padding and M.shape[:2] != inverse.shape[:2]:
            columns = F.pad(M.reshape(blocks.groups, blocks.features, -1), (0, 0, 0, blocks.padding))
            product = self.left(columns.view(*inverse.shape[:-1], -1)).view(columns.shape)
            return product[:, : blocks.features].reshape(M.shape)
        multiply = torch.mul if blocks.size == 1 else torch.matmul
        return multiply(inverse, M.reshape(*inverse.shape[:-1], -1)).reshape(M.shape)

    def right(self, M: Tensor, overwrite: bool = False) -> Tensor:
        blocks = self.blocks
        if blocks.size > 1 and blocks.count == 1:
            return M @ self.inverse.to(M.dtype)
        return self.left(M.reshape(blocks.groups, -1, blocks.features).mT).mT.reshape(M.shape)

    @cached_property
    def root(self) -> Dense:
        if self.blocks.size == 1:
            return Dense(self.inverse.sqrt(), self.blocks)
        values, vectors = eigenpairs(self.inverse)
        return Dense((vectors * values.clamp(min=0).sqrt().unsqueeze(-2)) @ vectors.mT, self.blocks)

    def __str__(self) -> str:
        return "exact"


def eigenpairs(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return λ and P of a symmetric matrix; raise WhiteningError where LAPACK fails."""
    try:
        return cast(tuple[Tensor, Tensor], torch.linalg.eigh(matrix))
    except LinAlgError as reason:
        raise WhiteningError(f"the factorisation failed: {reason}") from reason


# Products with both factors -------------------------------------------------------------------------------------------


def precondition(
    left: Factor | None,
    right: Factor | None,
    c: Tensor | None,
    g_W: Tensor | None,
    g_b: Tensor | None,
    u: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """(RᵀR)(g_W − g_b cᵀ)(UᵀU) and (RᵀR) g_b: the step for W, and for b as seen from the centre c.

    left: RᵀR; right: UᵀU; None: the identity, or nothing centred
    u:    (1, in) the units that right is in; None: as inputs are. The gradient and the step are divided by them

    The bias moves by the second minus the first times c. They are kept apart because weight and bias may have learning
    rates of their own.
    """
    if left is not None:
        g_W = g_W if g_W is None else left.left(g_W)
        g_b = g_b if g_b is None else left.left(g_b)
    if g_W is None or right is None:
        return g_W, g_b
    scratch = None if left is None else g_W  # what may be overwritten: not the user's own gradient
    matrix = centred(g_W, g_b, c, scratch)
    if u is None:
        return right.right(matrix, overwrite=scratch is not None), g_b
    u = u.to(matrix.dtype)
    return right.right(matrix / u, overwrite=True).div_(u), g_b


def centred(g_W: Tensor, g_b: Tensor | None, c: Tensor | None, out: Tensor | None = None) -> Tensor:
    """g_W − g_b cᵀ = E[δ (z−c)ᵀ], block by block if there is a leading dimension; `out` may be g_W."""
    if g_b is None or c is None:
        return g_W
    c = c.to(g_W.dtype)
    if g_W.ndim == 2:
        return torch.addr(g_W, g_b, c, alpha=-1, out=out)
    return torch.baddbmm(g_W, g_b.unsqueeze(-1), c.unsqueeze(-2), alpha=-1, out=out)


# Moments → the exact factor -------------------------------------------------------------------------------------------


def factor_by_cholesky(moments: Moments, damping: Damping, blocks: Blocks, like: Tensor) -> Dense | None:
    """Return the exact factor of a side, in the dtype and on the device of `like`.

    None: the moment is not finite, or not positive definite at its precision. `roots.py` then finds a factor, or says
    why there is none.
    """
    epsilon = damping.amounts(moments.variances)
    inverse = inverse_by_cholesky(moments.scatter, epsilon, like.dtype, moments.weight)
    return None if inverse is None else Dense(inverse.to(like), blocks)


def inverse_by_cholesky(scatter: Tensor, epsilon: Tensor, dtype: torch.dtype, weight: float = 1.0) -> Tensor | None:
    """Return (Ž + ε)⁻¹ for Ž = scatter / weight and ε of each coordinate.

    dtype:  the precision of the result; for float32 it is computed in float32 where that is safe, else in float64

    None if this is not positive definite at its precision.
    """
    if dtype != torch.float32 or not _safe_in_single(scatter, epsilon * weight):
        dtype = torch.float64
    damped = torch.div(scatter, weight, out=torch.empty_like(scatter, dtype=dtype))
    diagonal(damped).add_(epsilon)
    L = cholesky(damped)  # which reads one triangle, so that the moment is not symmetrised
    if L is None:
        return None
    # LAPACK's result is stored by columns; as it is symmetric, its transpose is the same matrix stored by rows.
    result = torch.cholesky_inverse(L).mT
    return result if finite(result) else None


def _safe_in_single(scatter: Tensor, epsilon: Tensor) -> bool:
    """Return whether an inverse in float32 has three digits, by its condition number: κ ≤ (‖Ž‖ + ε)/ε, error ∝ κ √d."""
    smallest = float(epsilon.min())
    largest = float(torch.linalg.vector_norm(scatter))  # the Frobenius norm of all blocks bounds every eigenvalue
    worst_condition = 1e-3 / (scatter.shape[-1] ** 0.5 * torch.finfo(torch.float32).eps)
    return bool(largest + smallest < worst_condition * smallest)  # False if one of them is NaN


def cholesky(damped: Tensor) -> Tensor | None:
    """Return L with Ž+ε = LLᵀ, or None if the matrix is not positive definite at its precision."""
    L, failed = torch.linalg.cholesky_ex(damped)
    # Without damping a singular matrix may pass with a pivot of pure rounding, so the pivots are tested too: beside the
    # entry that each of them was computed from, so that the scales of features do not matter.
    rounding = diagonal(damped) * damped.shape[-1] * torch.finfo(damped.dtype).eps
    return None if failed.any() or (diagonal(L).square() <= rounding).any() else L


def distance_from_white(factor: Factor, second: Tensor) -> float:
    """‖U Ž Uᵀ − I‖ / ‖I‖ for any root U of the factor: with M = (UᵀU) Ž its square is tr (M−I)² / tr I.

    The trace is Σ vᵀ(M−I)²v over the unit vectors v, or for a wide side an estimate from random ones, to some percent.

    second: Ž, in the precision to compute in
    """
    size = second.shape[-1]
    v = torch.eye(size, dtype=second.dtype, device=second.device)
    if size > 4 * PROBES:
        v = random_directions(size, PROBES, second) / PROBES**0.5
    off_white = v
    for _ in range(2):
        off_white = factor.left(second @ off_white) - off_white
    squared = float((v * off_white).sum())
    return math.sqrt(max(squared, 0.0) * size / second.numel())
