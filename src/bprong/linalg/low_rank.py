"""The low-rank factor of a wide side: its leading directions, and one number for the rest.

    (Ž+εI)⁻¹ ≈ I/s − BBᵀ,   s = ε + σ,  B = P diag((λ−σ)/(λ+ε)/s)^½      P, λ: top k eigenpairs of Ž, σ: the tail's mean

In the metric of Ž+ε itself, in which a step is judged, the leading k directions are exact, and in a direction of the
tail with eigenvalue λ' a step is off by (λ'−σ)/s of itself. The error of the factor is the root mean square of this
over gradients whose covariance is Ž, as that of −log p is:  error² = Σ' λ'/(λ'+ε) ((λ'−σ)/s)² / Σ λ/(λ+ε), with Σ'
over the tail. Nothing of size d³ is computed: P comes from a subspace iteration that starts at the previous P. What P
lacks in accuracy is an off-diagonal block of norm ‖(ŽP − Pλ)(λ+ε)^-½‖ / √s, and adds to the error accordingly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bprong.linalg.factors import Dense, Factor, eigenpairs
from bprong.linalg.moments import Blocks, random_directions

# Low rank pays for small ranks. A step through a side of d features, with n rows on the other side, takes 2nd²
# operations exactly and 4ndk with rank k; products with a narrow factor run at about 0.7 of the speed of square ones
# (benchmarks/width_cost.py), and a large rank takes longer to find than Cholesky's factor. 100 features with rank 16
# take half the time; narrower sides are stacked.
LOW_RANK_FROM = 97  # features
LOW_RANK_SHARE = 0.25  # the largest rank, relative to the features
WORST = 4.0  # the largest error of a direction, relative to this
LONGEST_BACKOFF = 16  # refreshes

OVERSAMPLING = 32  # directions iterated beyond the previous rank
FIRST_SIZE = 48  # directions iterated at first, at least
RANK_MULTIPLE = 8  # ranks are multiples of this, which products are faster with
HOPELESS = 3.0  # times the tolerance: an error above which more directions are not tried
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
    error:  an upper bound on the relative difference between steps through this M and exact steps, in the metric of
            Ž+ε: ‖E W^½‖ / ‖W^½‖ with E = (Ž+ε)^½ M (Ž+ε)^½ − I, W = (Ž+ε)^-½ Ž (Ž+ε)^-½
    """

    def __init__(self, B: Tensor, s: float, error: float = 0.0) -> None:
        self.B = B
        self.tensor = B
        self.s = s
        self.error = error
        self.numbers = (B.shape[1], s, error)
        self.cost = 4 * B.shape[1]

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


def restored(numbers: Sequence[float], tensor: Tensor, blocks: Blocks) -> Factor:
    """Return the factor, of either form, that has these numbers.

    tensor: its tensor, or a wider one of which this is the first columns
    """
    columns, s, error = numbers
    tensor = tensor[..., : int(columns)].contiguous()
    return LowRank(tensor, s, error) if s else Dense(tensor, blocks)


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
    size = max(FIRST_SIZE, vectors.shape[1] + OVERSAMPLING)
    while True:
        size = min(size, largest)
        added = second @ random_directions(len(second), size - vectors.shape[1], second)
        values, vectors, residuals = _leading(second, torch.cat([vectors, added], dim=1))
        errors, shifts = _errors(second, values, residuals, epsilon)
        stated = errors.tolist()
        limit = min(most, len(stated))
        ranks = [*range(RANK_MULTIPLE, limit, RANK_MULTIPLE), limit]
        # The least rank whose error is within the tolerance or, if there is none, the one with the least error.
        k = min(ranks, key=lambda rank: max(stated[rank - 1], tolerance))
        error = stated[k - 1]
        if error <= tolerance:
            s = float(shifts[k - 1])
            weights = (1 / s - 1 / (values[:k] + epsilon)).clamp(min=0)
            return LowRank(vectors[:, :k] * weights.sqrt(), s, error)
        if size == largest or error > HOPELESS * tolerance:
            return None
        size += size // 2


def _leading(second: Tensor, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ritz values λ, largest first, vectors P and residuals ŽP − Pλ after a round of subspace iteration."""
    basis = torch.linalg.qr(second @ basis)[0]
    product = second @ basis
    ascending, rotation = eigenpairs(basis.T @ product)
    values = ascending.flip(0)
    rotation = rotation.flip(1)
    vectors = basis @ rotation
    residuals = product @ rotation
    return values, vectors, residuals.addcmul_(vectors, values, value=-1)


def _errors(second: Tensor, values: Tensor, residuals: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The error of each rank k = 1, 2, …, m − 1, and its s.

    values, residuals:
        (m,) and (d, m), of the leading directions

    The error has three parts. That of the tail: of eigenvalues beyond the m known ones only the sum is known, and that
    they are smaller, which bounds what they add. That of the residuals, with the next direction's, since the tail's
    largest eigenvalue is known to within it. And rounding, in proportion to the largest eigenvalue.
    """
    values = values.clamp(min=1e-30)
    damped = values + epsilon
    sums = (second.trace() - values.cumsum(0)[:-1]).clamp(min=0)
    beyond = (sums[-1] - values[-1]).clamp(min=0)
    s = sums / torch.arange(len(second) - 1, len(second) - len(values), -1, device=values.device) + epsilon
    weights = values / damped
    total = weights.sum() + beyond / damped[-1]
    offsets = (damped / s.unsqueeze(1) - 1).square()
    added = beyond * torch.maximum((epsilon / s - 1).square() / epsilon, offsets[:, -1] / damped[-1])
    tail = ((offsets.triu(1) @ weights + added) / total).sqrt()
    worst = damped[1:] / s - 1
    scaled = (residuals.square().sum(0) / damped).cumsum(0)[1:]
    rounding = torch.finfo(values.dtype).eps * values[0] / s
    return SLACK * torch.maximum(tail, worst / WORST) + (2 * scaled / s / total).sqrt() + rounding, s
