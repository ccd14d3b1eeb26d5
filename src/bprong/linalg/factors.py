"""Factors: the inverse (Ž+ε)⁻¹ of a damped second moment, in the form that is cheapest to apply.

A side is inverted exactly, block by block (`Dense`) or coordinate by coordinate (`Diagonal`), or by its leading
directions (`LowRank`). A new form is a subclass of `Factor`.

    (Ž+εI)⁻¹ ≈ I/s − BBᵀ,   s = ε + σ,  B = P diag((λ−σ)/(λ+ε)/s)^½      P, λ: top k eigenpairs of Ž, σ: the tail's mean

In the metric of Ž+ε itself, in which a step is judged, the leading k directions of a low-rank factor are exact, and a
direction of the tail with eigenvalue λ' is off by (λ'−σ)/s: the error of the factor is the largest of these. Nothing of
size d³ is computed: P comes from subspace iteration, started at the previous P, and the error is estimated by power
iteration.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bprong.linalg.blocks import Blocks
from bprong.linalg.damped_inverse import Damping, failures_named, inverse
from bprong.linalg.moments import Moments, to_float64

OVERSAMPLING = 16  # directions iterated beyond the rank, so that the last ones kept are accurate
COLD_ROUNDS = 4  # rounds of subspace iteration from random directions
WARM_ROUNDS = 2  # rounds of subspace iteration from the previous factor's directions
POWER_ROUNDS = 12  # rounds of power iteration that estimate the error
RANK_MULTIPLE = 16  # ranks are multiples of this: products with 96 columns take half the time of those with 95
SLACK = 1.25  # factor on the estimated error, which approaches the true one from below


class Factor(ABC):
    """(Ž+ε)⁻¹ of one side.

    Matrices have the side's features in one dimension: (features, n) from the left, (n, features) from the right, with
    a leading dimension if the side has several groups.

    cost:        operations that a product takes for each entry of the matrix it is applied to
    dtype:       of the factor
    directions:  (d, k) from which the search for the next low-rank factor can start; None: from random ones
    """

    cost: int
    dtype: torch.dtype
    directions: Tensor | None = None

    @abstractmethod
    def left(self, M: Tensor) -> Tensor:
        """(Ž+ε)⁻¹ M, for a matrix or for a vector of features."""

    @abstractmethod
    def right(self, M: Tensor, overwrite: bool = False) -> Tensor:
        """M (Ž+ε)⁻¹; with `overwrite` the result may take M's memory."""

    @abstractmethod
    def moments_left(self, second: Tensor) -> Tensor:
        """(Ž+ε)⁻¹ S for a second moment S as it is measured, block by block."""

    @abstractmethod
    def root(self) -> Tensor:
        """U with UᵀU = (Ž+ε)⁻¹, shaped like the second moment."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values; `factor_of_state` restores the factor."""


class Dense(Factor):
    """The inverse itself: (size, size), or (lead, size, size) block by block."""

    def __init__(self, inverse: Tensor, blocks: Blocks) -> None:
        self.inverse = inverse
        self.blocks = blocks
        self.cost = 2 * inverse.shape[-1]
        self.dtype = inverse.dtype

    def left(self, M: Tensor) -> Tensor:
        if self.blocks.lead or self.blocks.positions > 1:
            return (self.inverse @ M.reshape(*self.inverse.shape[:-1], -1)).reshape(M.shape)
        return self.inverse @ M

    def right(self, M: Tensor, overwrite: bool = False) -> Tensor:
        blocks = self.blocks
        if blocks.count == 1 and blocks.positions == 1:
            return M @ self.inverse
        split = M.reshape(blocks.groups, -1, blocks.count, blocks.size, blocks.positions)
        inverse = self.inverse.view(blocks.groups, blocks.count, blocks.size, blocks.size)
        return torch.einsum("goibt,gibc->goict", split, inverse).reshape(M.shape)

    def moments_left(self, second: Tensor) -> Tensor:
        return self.inverse @ second

    def root(self) -> Tensor:
        L: Tensor = torch.linalg.cholesky(self.inverse)
        return L.mT

    def state_dict(self) -> dict[str, Any]:
        # A slice of a group's inverses is saved as a tensor of its own: torch.save would store the whole group.
        return {"inverse": self.inverse if self.inverse._base is None else self.inverse.clone()}

    def __str__(self) -> str:
        return "exact"


class Diagonal(Dense):
    """The inverse of a side in blocks of one coordinate, (lead, 1, 1): products are by elements."""

    def left(self, M: Tensor) -> Tensor:
        return (self.inverse.view(-1, 1) * M.reshape(self.blocks.lead, -1)).reshape(M.shape)

    def right(self, M: Tensor, overwrite: bool = False) -> Tensor:
        features = self.inverse.view(self.blocks.groups, 1, -1).repeat_interleave(self.blocks.positions, dim=-1)
        return M * features if M.ndim == 3 else M * features[0]


class LowRank(Factor):
    """I/s − BBᵀ for a side of one block: leading directions exactly, one number for the rest.

    B:      (d, k)
    s:      ε + σ, σ the mean of the other eigenvalues
    error:  ‖(Ž+ε)^½ M (Ž+ε)^½ − I‖ of this M: an upper bound on the relative difference between a step through M and
            the exact step, in the metric of Ž+ε
    """

    def __init__(self, B: Tensor, s: float, error: float = 0.0) -> None:
        self.B = B
        self.s = s
        self.error = error
        self.cost = 4 * B.shape[1]
        self.dtype = B.dtype
        self.directions = B

    def left(self, M: Tensor) -> Tensor:
        if M.ndim == 1:
            return M / self.s - self.B @ (self.B.T @ M)
        return torch.addmm(M, self.B, self.B.T @ M, beta=1 / self.s, alpha=-1)

    def right(self, M: Tensor, overwrite: bool = False) -> Tensor:
        return torch.addmm(M, M @ self.B, self.B.T, beta=1 / self.s, alpha=-1, out=M if overwrite else None)

    def moments_left(self, second: Tensor) -> Tensor:
        return self.left(second)

    def root(self) -> Tensor:
        """(I/s − BBᵀ)^½, symmetric: with B = P diag(β)^½ it is I/√s − P diag(1/√s − √(1/s − β)) Pᵀ."""
        P, sizes, _ = torch.linalg.svd(self.B, full_matrices=False)
        reduced = self.s**-0.5 - (1 / self.s - sizes.square()).clamp(min=0).sqrt()
        root: Tensor = torch.eye(len(P), dtype=P.dtype, device=P.device) * self.s**-0.5 - (P * reduced) @ P.mT
        return root

    def state_dict(self) -> dict[str, Any]:
        return {"B": self.B, "s": self.s, "error": self.error}

    def __str__(self) -> str:
        return f"rank {self.B.shape[1]} of"


def shape_of_state(state: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of the inverse that a factor's `state_dict` stands for."""
    return (len(state["B"]),) * 2 if "B" in state else tuple(state["inverse"].shape)


def factor_of_state(state: Mapping[str, Any], blocks: Blocks, like: Tensor) -> Factor:
    """The factor whose `state_dict` this is."""
    if "B" in state:
        return LowRank(state["B"].to(like), state["s"], state["error"])
    return _exact_form(state["inverse"].to(like), blocks)


def exact_factor(moments: Moments, damping: Damping, blocks: Blocks, like: Tensor) -> Factor:
    """The exact factor of a side, in the dtype and on the device of `like`."""
    return _exact_form(inverse(moments.scatter, damping, like.dtype, weight=moments.weight).to(like), blocks)


def _exact_form(inverse: Tensor, blocks: Blocks) -> Factor:
    return Diagonal(inverse, blocks) if blocks.size == 1 and blocks.lead else Dense(inverse, blocks)


PROBES = 32  # random vectors that estimate the distance of a wide side from white


def distance_from_white(factor: Factor | None, second: Tensor) -> float:
    """‖U Ž Uᵀ − I‖ / ‖I‖ for any root U of the factor: the eigenvalues of UŽUᵀ are those of (UᵀU) Ž.

    For a wide side it is estimated: E‖…v‖² over random v is the squared norm, to some percent with few of them.
    """

    def applied(M: Tensor) -> Tensor:
        return M if factor is None else factor.moments_left(M)

    if factor is not None:  # people read this number, so the layer's own precision is enough
        second = second.to(factor.dtype)
    if second.ndim == 2 and len(second) > 4 * PROBES:
        generator = torch.Generator().manual_seed(0)
        v = torch.randn(len(second), PROBES, generator=generator, dtype=torch.float32, device="cpu").to(second)
        w = applied(second @ v) - v  # (M − I) v with M = (UᵀU) Ž, and ‖UŽUᵀ − I‖² = tr (M−I)² = E vᵀ(M−I)²v
        squared = float((v * (applied(second @ w) - w)).sum()) / PROBES
        return math.sqrt(max(squared, 0.0) / len(second))
    product = applied(second)
    diagonal = product.diagonal(dim1=-2, dim2=-1)
    d = diagonal.numel()
    squared = float((product * product.mT).sum()) - 2 * float(diagonal.sum()) + d
    return math.sqrt(max(squared, 0.0) / d)


def low_rank(
    second: Tensor, epsilon: float, tolerance: float, most: int, start: Tensor | None = None
) -> LowRank | None:
    """The low-rank factor of Ž+εI with the least rank whose error is within `tolerance`; None if that exceeds `most`.

    second: (d, d), symmetric, in the precision to compute in
    start:  (d, k) directions to start from, such as the previous factor's B
    """
    if not epsilon > 0:
        return None
    d = len(second)
    total = float(second.trace())
    size = min(d, 64 if start is None else start.shape[1] + OVERSAMPLING)
    basis = _directions(second, size)
    rounds = COLD_ROUNDS
    if start is not None:
        basis[:, : start.shape[1]] = start.to(second)
        rounds = WARM_ROUNDS
    while True:
        values, vectors = _leading(second, basis, rounds)
        k = _rank_for(values, total, d, epsilon, tolerance)
        if k is not None and k <= most:
            found = _factor(second, values, vectors, k, total, epsilon)
            if found.error <= tolerance:
                return found
        needed = _extrapolated(values, tolerance * epsilon) if k is None else float(size)
        if size >= min(d, most + OVERSAMPLING) or needed > most:
            return None
        grown = min(d, most + OVERSAMPLING, max(2 * size, int(1.1 * needed)))
        basis = torch.cat([vectors, _directions(second, grown - size)], dim=1)
        size = grown
        rounds = COLD_ROUNDS


def _extrapolated(values: Tensor, least: float) -> float:
    """The index at which a spectrum falls to `least` if it continues as its last half does.

    Most spectra flatten out, so that this is a lower bound.
    """
    last = float(values[-1])
    if last <= least:
        return float(len(values))
    half = len(values) // 2
    decay = math.log(float(values[half]) / last) / (len(values) - half)
    return len(values) + math.log(last / least) / decay if decay > 0 else math.inf


def _directions(like: Tensor, count: int) -> Tensor:
    """(d, count) random directions from a generator of their own, the same at each call."""
    generator = torch.Generator().manual_seed(count)
    return torch.randn(len(like), count, generator=generator, dtype=torch.float32, device="cpu").to(like)


def _leading(second: Tensor, basis: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """Ritz values, largest first, and Ritz vectors after `rounds` of subspace iteration."""
    for _ in range(rounds):
        basis = _orthonormal(second @ basis)
    with failures_named():
        values, rotation = torch.linalg.eigh(basis.T @ second @ basis)
    return values.flip(0), basis @ rotation.flip(1)


def _orthonormal(Y: Tensor) -> Tensor:
    """An orthonormal basis of Y's columns, by Cholesky of YᵀY in float64: a third of the cost of Householder's QR."""
    double = to_float64(Y)
    L, failed = torch.linalg.cholesky_ex(double.T @ double)
    if failed or not float(L.diagonal().min()) > 1e-6 * float(L.diagonal().max()):  # YᵀY is singular to rounding
        basis: Tensor = torch.linalg.qr(Y)[0]
    else:
        basis = torch.linalg.solve_triangular(L.mT, double, upper=True, left=False).to(Y)
    return basis


def _rank_for(values: Tensor, total: float, d: int, epsilon: float, tolerance: float) -> int | None:
    """The least rank, rounded up to RANK_MULTIPLE, whose tail is within the tolerance of its mean as far as known."""
    sums = values.cumsum(0)[:-1]
    k = torch.arange(1, len(values), device=values.device)
    sigma = ((total - sums) / (d - k)).clamp(min=0)
    error = torch.maximum(sigma, values[1:] - sigma) / (sigma + epsilon)
    enough = (error <= tolerance / SLACK).nonzero()
    if not len(enough):
        return None
    return min(math.ceil((int(enough[0]) + 1) / RANK_MULTIPLE) * RANK_MULTIPLE, len(values) - 1)


def _factor(second: Tensor, values: Tensor, vectors: Tensor, k: int, total: float, epsilon: float) -> LowRank:
    sigma = max(0.0, (total - float(values[:k].sum())) / (len(second) - k))
    s = epsilon + sigma
    weights = ((values[:k] - sigma) / (values[:k] + epsilon) / s).clamp(min=0)
    found = LowRank(vectors[:, :k] * weights.sqrt(), s)
    return LowRank(found.B, s, SLACK * _error(found, second, epsilon))


def _error(found: LowRank, second: Tensor, epsilon: float) -> float:
    """‖(Ž+ε)^½ M (Ž+ε)^½ − I‖, by power iteration with the operator M(Ž+ε) − I, which has the same eigenvalues."""
    x = _directions(second, 1)[:, 0]
    damped = torch.addmv(x, second, x, beta=epsilon)
    size = 0.0
    for _ in range(POWER_ROUNDS):
        moved = found.left(damped) - x
        damped_moved = torch.addmv(moved, second, moved, beta=epsilon)
        squared = float(moved @ damped_moved)
        if not squared > 0:
            return 0.0
        size = (squared / float(x @ damped)) ** 0.5
        norm = float(moved.norm())
        x = moved / norm
        damped = damped_moved / norm
    return size
