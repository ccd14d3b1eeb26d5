"""The low-rank factor of a wide side: its leading directions, and one number for the rest.

    (Ž+εI)⁻¹ ≈ I/s − BBᵀ,   s = ε + σ,  B = P diag((λ−σ)/(λ+ε)/s)^½      P, λ: top k eigenpairs of Ž, σ: the tail's mean

In the metric of Ž+ε itself, in which a step is judged, the leading k directions are exact, and a direction of the tail
with eigenvalue λ' is off by (λ'−σ)/s: the error of the factor is the largest of these. Nothing of size d³ is computed:
P comes from subspace iteration, started at the previous P. What P lacks in accuracy adds to the error at most
‖(ŽP − Pλ)(λ+ε)^-½‖ / √s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bprong.linalg.factors import Damping, Factor, eigenpairs
from bprong.linalg.moments import Blocks, Moments, random_directions

# Low rank pays for wide sides with small ranks. A step through a side of d features, with n rows on the other side,
# takes 2nd² operations exactly and 4ndk with rank k; products with a narrow factor run at about 0.7 of the speed of
# square ones (benchmarks/width_cost.py), and a large rank takes longer to find than Cholesky's factor.
LOW_RANK_FROM = 256  # features
LOW_RANK_SHARE = 0.25  # the largest rank, relative to the features
LOW_RANK_ERROR = 0.5  # the largest relative difference of a step from the exact one (`LowRank.error`)
LONGEST_BACKOFF = 16  # refreshes

OVERSAMPLING = 32  # directions iterated beyond the previous rank
FIRST_SIZE = 64  # directions iterated at first, without a previous factor to start from
ROUNDS = 3  # rounds of subspace iteration
RANK_MULTIPLE = 16  # ranks are multiples of this: products with 96 columns take half the time of those with 95
UNUSED = 16  # directions iterated beyond the rank at least, so that those kept, and the next eigenvalue, are accurate
SLACK = 1.25  # factor on the error of the tail, whose largest eigenvalue is approached from below


@dataclass
class Backoff:
    """Low rank is not tried for `skip` refreshes, and if it then fails again, not for the following `next_skip`."""

    skip: int = 0
    next_skip: int = 2

    def tries(self) -> bool:
        if self.skip == 0:
            return True
        self.skip -= 1
        return False

    def record(self, found: bool) -> None:
        self.skip = 0 if found else self.next_skip
        self.next_skip = 2 if found else min(2 * self.next_skip, LONGEST_BACKOFF)


class LowRank(Factor):
    """I/s − BBᵀ for a side of one block: leading directions exactly, one number for the rest.

    B:      (d, k)
    s:      ε + σ, σ the mean of the other eigenvalues
    error:  ‖(Ž+ε)^½ M (Ž+ε)^½ − I‖ of this M: an upper bound on the relative difference between a step through M and
            the exact step, in the metric of Ž+ε
    """

    kind = 2

    def __init__(self, B: Tensor, s: float, error: float = 0.0) -> None:
        self.B = B
        self.tensor = B
        self.s = s
        self.error = error
        self.numbers = (s, error)
        self.cost = 4 * B.shape[1]

    @classmethod
    def of(cls, tensor: Tensor, blocks: Blocks, numbers: Sequence[float]) -> LowRank:
        return cls(tensor, *numbers)

    def left(self, M: Tensor) -> Tensor:
        B = self.B.to(M.dtype)
        columns = M.reshape(len(B), -1)
        return torch.addmm(columns, B, B.T @ columns, beta=1 / self.s, alpha=-1).reshape(M.shape)

    def right(self, M: Tensor, overwrite: bool = False) -> Tensor:
        B = self.B.to(M.dtype)
        return torch.addmm(M, M @ B, B.T, beta=1 / self.s, alpha=-1, out=M if overwrite else None)

    @cached_property
    def root(self) -> LowRank:
        # The columns of B are orthogonal: I/s − BBᵀ has the eigenvalues 1/s − |b|² along them, and 1/s elsewhere.
        squares = self.B.square().sum(dim=0)
        shares = (1 - (1 - self.s * squares).clamp(min=0).sqrt()) / (self.s**0.5 * squares.clamp(min=1e-30))
        return LowRank(self.B * shares.sqrt(), self.s**0.5, self.error)

    def __str__(self) -> str:
        return f"rank {self.B.shape[1]} of"


def factor_by_low_rank(
    moments: Moments,
    damping: Damping,
    blocks: Blocks,
    like: Tensor,
    previous: Factor | None,
    backoff: Backoff,
    is_chosen: bool,
) -> LowRank | None:
    """Return the low-rank factor of a side; None: it is not one block, or flat.

    previous:  its factor before
    backoff:   when it is tried, unless `is_chosen`: the user asked for it
    """
    if blocks.lead or not (is_chosen or backoff.tries()):
        return None
    epsilon = float(damping.amounts(moments.variances)[0])
    largest_rank = blocks.size - 1 if is_chosen else int(LOW_RANK_SHARE * blocks.size)
    start = previous.B if isinstance(previous, LowRank) else None
    factor = low_rank(moments.second_in(like.dtype).to(like), epsilon, LOW_RANK_ERROR, largest_rank, start)
    backoff.record(factor is not None)
    return factor


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
        tail = _expected_tail(values, most)
        if size == largest or tail / (tail + epsilon) > tolerance:
            return None
        size *= 2


def _expected_tail(values: Tensor, rank: int) -> float:
    """The eigenvalue at this rank if the spectrum falls on until there as its last half does.

    Most spectra flatten out, so that this is a lower bound.
    """
    half = len(values) // 2
    middle, last = values[[half, -1]].clamp(min=1e-30).tolist()
    return float(last * (last / middle) ** ((rank - len(values)) / (len(values) - half)))


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
