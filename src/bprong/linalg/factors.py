"""Factors: the inverse (Ž+ε)⁻¹ of a damped second moment, in the form that is cheapest to apply.

A side is inverted exactly, block by block or coordinate by coordinate (`Dense`), or by its leading directions
(`LowRank`). A new form is a subclass of `Factor`.

    (Ž+εI)⁻¹ ≈ I/s − BBᵀ,   s = ε + σ,  B = P diag((λ−σ)/(λ+ε)/s)^½      P, λ: top k eigenpairs of Ž, σ: the tail's mean

In the metric of Ž+ε itself, in which a step is judged, the leading k directions of a low-rank factor are exact, and a
direction of the tail with eigenvalue λ' is off by (λ'−σ)/s: the error of the factor is the largest of these. Nothing of
size d³ is computed: P comes from subspace iteration, started at the previous P. What P lacks in accuracy adds to the
error at most ‖(ŽP − Pλ)(λ+ε)^-½‖ / √s.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from bprong.linalg.blocks import Blocks, joined, split
from bprong.linalg.damped_inverse import Damping, eigenpairs, inverse
from bprong.linalg.moments import Moments, random_directions

OVERSAMPLING = 32  # directions iterated beyond the previous rank
FIRST_SIZE = 64  # directions iterated at first, without a previous factor to start from
ROUNDS = 3  # rounds of subspace iteration
RANK_MULTIPLE = 16  # ranks are multiples of this: products with 96 columns take half the time of those with 95
UNUSED = 16  # directions iterated beyond the rank at least, so that those kept, and the next eigenvalue, are accurate
SLACK = 1.25  # factor on the error of the tail, whose largest eigenvalue is approached from below


class Factor(ABC):
    """(Ž+ε)⁻¹ of one side.

    Matrices have the side's features in one dimension: (features, n) from the left, (n, features) from the right, with
    a leading dimension if the side has several groups.

    cost:          operations that a product takes for each entry of the matrix it is applied to
    dtype:         of the factor
    kind:          a number for its class in checkpoints; 0: the factor itself is not here
    tensor, numbers
                   what it is made of, for exchange between processes and checkpoints: one tensor, up to two numbers
    """

    cost: int
    dtype: torch.dtype
    kind: ClassVar[int] = 0
    tensor: Tensor

    @property
    def numbers(self) -> tuple[float, ...]:
        return ()

    @abstractmethod
    def left(self, M: Tensor) -> Tensor:
        """(Ž+ε)⁻¹ M for a matrix, for a vector of features, or for (lead, size, n) block by block."""

    @abstractmethod
    def right(self, M: Tensor, overwrite: bool = False) -> Tensor:
        """M (Ž+ε)⁻¹; with `overwrite` the result may take M's memory."""

    @property
    @abstractmethod
    def root(self) -> Factor:
        """Its symmetric square root, (Ž+ε)^(-1/2), which is computed when it is first asked for."""

    @abstractmethod
    def to(self, dtype: torch.dtype) -> Factor:
        """The factor in another precision."""


class Dense(Factor):
    """The inverse itself: (size, size), or (lead, size, size) block by block.

    The products of blocks of one coordinate are taken by elements.
    """

    kind = 1

    def __init__(self, inverse: Tensor, blocks: Blocks) -> None:
        self.inverse = self.tensor = inverse
        self.blocks = blocks
        self.cost = 2 * inverse.shape[-1]
        self.dtype = inverse.dtype

    def left(self, M: Tensor) -> Tensor:
        if self.blocks.padding and M.shape[:2] != self.inverse.shape[:2]:
            return self.right(M.reshape(self.blocks.groups, self.blocks.features, -1).mT).mT.reshape(M.shape)
        product = torch.mul if self.blocks.size == 1 else torch.matmul
        return product(self.inverse, M.reshape(*self.inverse.shape[:-1], -1)).reshape(M.shape)

    def right(self, M: Tensor, overwrite: bool = False) -> Tensor:
        blocks = self.blocks
        if blocks.size > 1 and blocks.count == 1:
            return M @ self.inverse
        parts = split(M.reshape(blocks.groups, -1, blocks.features), blocks)
        inverse = self.inverse.view(blocks.groups, blocks.count, blocks.size, blocks.size)
        if blocks.size == 1:
            return (parts * inverse.squeeze(-1).unsqueeze(1)).reshape(M.shape)
        return joined(torch.einsum("goib,gibc->goic", parts, inverse), blocks).reshape(M.shape)

    @cached_property
    def root(self) -> Dense:
        if self.blocks.size == 1:
            return Dense(self.inverse.sqrt(), self.blocks)
        values, vectors = eigenpairs(self.inverse)
        return Dense((vectors * values.clamp(min=0).sqrt().unsqueeze(-2)) @ vectors.mT, self.blocks)

    def to(self, dtype: torch.dtype) -> Dense:
        return Dense(self.inverse.to(dtype), self.blocks)

    def __str__(self) -> str:
        return "exact"


class LowRank(Factor):
    """I/s − BBᵀ for a side of one block: leading directions exactly, one number for the rest.

    B:      (d, k)
    s:      ε + σ, σ the mean of the other eigenvalues
    error:  ‖(Ž+ε)^½ M (Ž+ε)^½ − I‖ of this M: an upper bound on the relative difference between a step through M and
            the exact step, in the metric of Ž+ε
    """

    kind = 2

    def __init__(self, B: Tensor, s: float, error: float = 0.0) -> None:
        self.B = self.tensor = B
        self.s = s
        self.error = error
        self.cost = 4 * B.shape[1]
        self.dtype = B.dtype

    @property
    def numbers(self) -> tuple[float, ...]:
        return self.s, self.error

    def left(self, M: Tensor) -> Tensor:
        columns = M.reshape(len(self.B), -1)
        return torch.addmm(columns, self.B, self.B.T @ columns, beta=1 / self.s, alpha=-1).reshape(M.shape)

    def right(self, M: Tensor, overwrite: bool = False) -> Tensor:
        return torch.addmm(M, M @ self.B, self.B.T, beta=1 / self.s, alpha=-1, out=M if overwrite else None)

    @cached_property
    def root(self) -> LowRank:
        # The columns of B are orthogonal: I/s − BBᵀ has the eigenvalues 1/s − |b|² along them, and 1/s elsewhere.
        squares = self.B.square().sum(dim=0)
        shares = (1 - (1 - self.s * squares).clamp(min=0).sqrt()) / (self.s**0.5 * squares.clamp(min=1e-30))
        return LowRank(self.B * shares.sqrt(), self.s**0.5, self.error)

    def to(self, dtype: torch.dtype) -> LowRank:
        return LowRank(self.B.to(dtype), self.s, self.error)

    def __str__(self) -> str:
        return f"rank {self.B.shape[1]} of"


class Elsewhere(Factor):
    """A factor that another process keeps.

    owner: the rank of that process
    """

    def __init__(self, owner: int, cost: int, dtype: torch.dtype) -> None:
        self.owner = owner
        self.cost = cost
        self.dtype = dtype

    def left(self, M: Tensor) -> Tensor:
        raise RuntimeError(f"this factor is kept by rank {self.owner}")

    def right(self, M: Tensor, overwrite: bool = False) -> Tensor:
        return self.left(M)

    @property
    def root(self) -> Factor:
        return self

    def to(self, dtype: torch.dtype) -> Elsewhere:
        return Elsewhere(self.owner, self.cost, dtype)

    def __str__(self) -> str:
        return f"on rank {self.owner},"


def precondition(
    left: Factor | None, right: Factor | None, c: Tensor | None, g_W: Tensor | None, g_b: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """(RᵀR)(g_W − g_b cᵀ)(UᵀU) and (RᵀR) g_b: the step for W, and for b as seen from the centre c.

    left: RᵀR; right: UᵀU; None: the identity, or nothing centred

    The bias moves by the second minus the first times c. They are kept apart because weight and bias may have learning
    rates of their own.
    """
    if left is not None:
        g_W = g_W if g_W is None else left.left(g_W)
        g_b = g_b if g_b is None else left.left(g_b)
    if g_W is None or right is None:
        return g_W, g_b
    scratch = None if left is None else g_W  # what may be overwritten: not the user's own gradient
    return right.right(centred(g_W, g_b, c, scratch), overwrite=scratch is not None), g_b


def centred(g_W: Tensor, g_b: Tensor | None, c: Tensor | None, out: Tensor | None = None) -> Tensor:
    """g_W − g_b cᵀ = E[δ (z−c)ᵀ], block by block if there is a leading dimension; `out` may be g_W."""
    if g_b is None or c is None:
        return g_W
    if g_W.ndim == 2:
        return torch.addr(g_W, g_b, c, alpha=-1, out=out)
    return torch.baddbmm(g_W, g_b.unsqueeze(-1), c.unsqueeze(-2), alpha=-1, out=out)


# Numbers that describe a factor, so that it can be restored from its tensor -------------------------------------------

DESCRIPTION = 6  # its kind (0: none), up to three sizes of its tensor, up to two numbers


def description(factor: Factor | None) -> list[float]:
    """DESCRIPTION numbers; zeros if there is no factor here."""
    if factor is None or not factor.kind:
        return [0.0] * DESCRIPTION
    sizes = [*factor.tensor.shape, 0, 0][:3]
    numbers = [*factor.numbers, 0.0, 0.0][:2]
    return [float(factor.kind), *map(float, sizes), *numbers]


def described_shape(numbers: Sequence[float]) -> list[int]:
    """The shape of the tensor of a factor that was described."""
    return [int(size) for size in numbers[1:4] if size]


def described(numbers: Sequence[float], tensor: Tensor, blocks: Blocks) -> Factor | None:
    """The factor that was described, from its tensor; None if there is none.

    tensor: it may have further columns to the right of those of the factor
    """
    kind, *_ = numbers
    if kind == LowRank.kind:
        return LowRank(tensor[..., : described_shape(numbers)[-1]].contiguous(), *numbers[4:])
    return Dense(tensor, blocks) if kind == Dense.kind else None


def exact_factor(moments: Moments, damping: Damping, blocks: Blocks, like: Tensor) -> Factor:
    """The exact factor of a side, in the dtype and on the device of `like`."""
    return Dense(inverse(moments.scatter, damping, like.dtype, weight=moments.weight).to(like), blocks)


PROBES = 32  # random vectors that estimate the distance of a wide side from white


def distance_from_white(factor: Factor | None, second: Tensor) -> float:
    """‖U Ž Uᵀ − I‖ / ‖I‖ for any root U of the factor: with M = (UᵀU) Ž its square is tr (M−I)² / tr I.

    The trace is Σ vᵀ(M−I)²v over the unit vectors v, or for a wide side an estimate from random ones, to some percent.

    second: Ž, in the precision of the factor
    """

    def off_white(v: Tensor) -> Tensor:
        product = second @ v
        return (product if factor is None else factor.left(product)) - v

    size = second.shape[-1]
    v = torch.eye(size, dtype=second.dtype, device=second.device)
    if size > 4 * PROBES:
        v = random_directions(size, PROBES, second) / PROBES**0.5
    squared = float((v * off_white(off_white(v))).sum())
    return math.sqrt(max(squared, 0.0) * size / second.numel())


def low_rank(
    second: Tensor, epsilon: float, tolerance: float, most: int, start: Tensor | None = None
) -> LowRank | None:
    """The low-rank factor of Ž+εI with the least rank whose error is within `tolerance`; None if that exceeds `most`.

    second: (d, d), symmetric, in the precision to compute in
    start:  (d, k) directions to start from, such as the previous factor's B
    """
    if not epsilon > 0 or most < 1:
        return None
    largest = min(len(second), most + OVERSAMPLING)
    vectors = second[:, :0] if start is None else start.to(second)
    size = FIRST_SIZE if start is None else start.shape[1] + OVERSAMPLING
    while True:
        size = min(size, largest)
        added = random_directions(len(second), size - vectors.shape[1], second)
        values, vectors, residuals = _leading(second, torch.cat([vectors, added], dim=1))
        factor = _truncated(second, values, vectors, residuals, epsilon, tolerance, most)
        if factor.error <= tolerance:
            return factor
        if size == largest or _expected_error(values, most, epsilon) > tolerance:
            return None
        size *= 2


def _expected_error(values: Tensor, rank: int, epsilon: float) -> float:
    """The error at this rank if the spectrum falls on until there as its last half does, and is flat from there on.

    Most spectra flatten out, so that this is a lower bound.
    """
    positive = values.clamp(min=1e-30)
    half = len(values) // 2
    last = float(positive[-1])
    decay = (last / float(positive[half])) ** (1 / (len(values) - half))
    tail = last * decay ** (rank - len(values))
    return float(tail / (tail + epsilon))


def _leading(second: Tensor, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ritz values λ, largest first, vectors P and residuals ŽP − Pλ after some rounds of subspace iteration."""
    for _ in range(ROUNDS):
        basis = torch.linalg.qr(second @ basis)[0]
    product = second @ basis
    ascending, rotation = eigenpairs(basis.T @ product)
    values = ascending.flip(0)
    rotation = rotation.flip(1)
    vectors = basis @ rotation
    residuals = product @ rotation
    return values, vectors, residuals.addcmul_(vectors, values, value=-1)


def _truncated(
    second: Tensor, values: Tensor, vectors: Tensor, residuals: Tensor, epsilon: float, tolerance: float, most: int
) -> LowRank:
    """The factor of the least rank, a multiple of RANK_MULTIPLE, whose error is within the tolerance.

    Its rank is chosen by the error that the tail can make, of whose eigenvalues the mean and the largest are known; it
    is the largest rank allowed if none is enough. The factor states this error, what the residuals add to it, and what
    rounding adds, which is in proportion to the largest eigenvalue.
    """
    ranks = torch.arange(1, len(values), device=values.device)
    means = ((second.trace() - values.cumsum(0)[:-1]) / (len(second) - ranks)).clamp(min=0)
    errors = torch.maximum(means, values[1:] - means) / (means + epsilon)
    too_low = int((errors > tolerance / SLACK).cumprod(0).sum())
    accurate = len(ranks) if len(values) == len(second) else len(values) - UNUSED
    k = min(math.ceil((too_low + 1) / RANK_MULTIPLE) * RANK_MULTIPLE, accurate, most)
    sigma = float(means[k - 1])
    s = epsilon + sigma
    weights = ((values[:k] - sigma) / (values[:k] + epsilon) / s).clamp(min=0)
    # The residual of the next direction too: the tail's largest eigenvalue is known to within it.
    scaled = residuals[:, : k + 1] / (values[: k + 1].clamp(min=0) + epsilon).sqrt() / s**0.5
    inaccuracy = torch.linalg.matrix_norm(scaled.T @ scaled, 2).sqrt()  # ‖scaled‖ of a (k + 1)² matrix, not of d · k
    rounding = torch.finfo(values.dtype).eps * float(values[0]) / s
    error = float(errors[k - 1])
    return LowRank(vectors[:, :k] * weights.sqrt(), s, max(SLACK * error, error + float(inaccuracy)) + rounding)
