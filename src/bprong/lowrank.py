"""Moments → a cheap inverse for wide sides whose spectrum decays: leading directions exactly, one shift for the rest.

    (Ž+εI)⁻¹ ≈ I/s − BBᵀ,   s = ε + σ,  B = P diag((λ−σ)/(λ+ε)/s)^½      P, λ: top k eigenpairs of Ž, σ: the tail's mean

In the metric of Ž+ε itself, which is the one a step is judged by, the leading k directions are exact, and a direction
of the tail with eigenvalue λ' is off by (λ'−σ)/s: the error of the whole is the largest of these. Nothing of size d³ is
computed: P comes from subspace iteration, begun at the previous one, and the error is measured by power iteration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bprong.moments import widened
from bprong.whitening import LinAlgError, WhiteningError

__all__ = ["LowRank", "low_rank", "restored", "saved", "shape_of"]

OVERSAMPLING = 16  # directions carried beyond the rank, so that the last ones kept are good
COLD, WARM = 4, 2  # rounds of subspace iteration from random directions, and from the previous ones
POWER = 12  # rounds of power iteration that measure the error
MULTIPLE = 16  # of which ranks are: products with a factor of 96 columns take half the time of those with 95
SLACK = 1.25  # what the measured error, which approaches the true one from below, is multiplied by


@dataclass(frozen=True)
class LowRank:
    """I/s − BBᵀ.

    B:      (d, k)
    s:      ε + σ
    error:  ‖(Ž+ε)^½ M (Ž+ε)^½ − I‖ of this M: how far, relatively, a step through M is from the exact one, at most,
            in the metric of Ž+ε
    """

    B: Tensor
    s: float
    error: float = 0.0

    def __len__(self) -> int:
        return len(self.B)

    @property
    def rank(self) -> int:
        return self.B.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.B.dtype

    def to(self, like: Tensor) -> LowRank:
        return LowRank(self.B.to(like), self.s, self.error)

    def __rmatmul__(self, M: Tensor) -> Tensor:
        """M (n, d) times this inverse: 4·n·d·k operations in place of 2·n·d²."""
        return torch.addmm(M, M @ self.B, self.B.T, beta=1 / self.s, alpha=-1)

    def right_(self, M: Tensor) -> Tensor:
        """The same, written over M."""
        return M.addmm_(M @ self.B, self.B.T, beta=1 / self.s, alpha=-1)

    def __matmul__(self, M: Tensor) -> Tensor:
        """This inverse times M (d, n) or (d,)."""
        if M.ndim == 1:
            return M / self.s - self.B @ (self.B.T @ M)
        return torch.addmm(M, self.B, self.B.T @ M, beta=1 / self.s, alpha=-1)


def saved(inverse: Tensor | LowRank | None) -> Any:
    """Tensors and plain values only; a slice of a stack of inverses as a tensor of its own."""
    if isinstance(inverse, LowRank):
        return {"B": inverse.B, "s": inverse.s, "error": inverse.error}
    return inverse if inverse is None or inverse._base is None else inverse.clone()


def restored(kept: Any, like: Tensor) -> Any:
    """What `saved` was given."""
    if kept is None or isinstance(kept, Tensor):
        return None if kept is None else kept.to(like)
    return LowRank(kept["B"].to(like), kept["s"], kept["error"])


def shape_of(kept: Any) -> tuple[int, ...] | None:
    """Of the matrix that `saved` was given."""
    if kept is None:
        return None
    return tuple(kept.shape) if isinstance(kept, Tensor) else (len(kept["B"]),) * 2


def low_rank(
    second: Tensor, epsilon: float, tolerance: float, most: int, start: Tensor | None = None
) -> LowRank | None:
    """The low-rank inverse of Ž+εI with the least rank whose error is within `tolerance`; None if that is above `most`.

    `second` is symmetric, in the precision to compute in.
    """
    if not epsilon > 0:
        return None
    d, total = len(second), float(second.trace())
    size = min(d, 64 if start is None else start.shape[1] + OVERSAMPLING)
    basis, rounds = _directions(second, size), COLD
    if start is not None:
        basis[:, : start.shape[1]], rounds = start.to(second), WARM
    while True:
        values, vectors = _leading(second, basis, rounds)
        k = _rank_for(values, total, d, epsilon, tolerance)
        if k is not None and k <= most:
            found = _inverse(second, values, vectors, k, total, epsilon)
            if found.error <= tolerance:
                return found
        needed = _extrapolated(values, tolerance * epsilon) if k is None else float(size)
        if size >= min(d, most + OVERSAMPLING) or needed > most:
            return None
        grown = min(d, most + OVERSAMPLING, max(2 * size, int(1.1 * needed)))
        basis, size, rounds = torch.cat([vectors, _directions(second, grown - size)], dim=1), grown, COLD


def _extrapolated(values: Tensor, least: float) -> float:
    """Where a spectrum comes down to `least` if it goes on as its last half; most flatten out, so not before that."""
    half, last = float(values[len(values) // 2]), float(values[-1])
    if last <= least:
        return float(len(values))
    rate = math.log(half / last) / (len(values) - len(values) // 2)
    return len(values) + math.log(last / least) / rate if rate > 0 else math.inf


def _directions(like: Tensor, count: int) -> Tensor:
    """(d, count) random directions, the same each time, and nothing drawn from torch's own stream."""
    generator = torch.Generator().manual_seed(count)
    return torch.randn(len(like), count, generator=generator, dtype=torch.float32, device="cpu").to(like)


def _leading(second: Tensor, basis: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """Ritz values, largest first, and vectors of the subspace that `rounds` products take the basis to."""
    for _ in range(rounds):
        basis = _orthonormal(second @ basis)
    try:
        values, rotation = torch.linalg.eigh(basis.T @ second @ basis)
    except LinAlgError as reason:
        raise WhiteningError(f"the factorisation failed: {reason}") from reason
    return values.flip(0), basis @ rotation.flip(1)


def _orthonormal(Y: Tensor) -> Tensor:
    """A basis of what Y's columns span: by Cholesky of YᵀY in float64, a third of the price of Householder's QR."""
    wide = widened(Y)
    L, failed = torch.linalg.cholesky_ex(wide.T @ wide)
    if failed or not float(L.diagonal().min()) > 1e-6 * float(L.diagonal().max()):  # its square has no digits left
        basis: Tensor = torch.linalg.qr(Y)[0]
    else:
        basis = torch.linalg.solve_triangular(L.mT, wide, upper=True, left=False).to(Y)
    return basis


def _rank_for(values: Tensor, total: float, d: int, epsilon: float, tolerance: float) -> int | None:
    """The least k whose tail, as far as it is known, is within the tolerance of its mean, and a little more."""
    sums = values.cumsum(0)[:-1]
    k = torch.arange(1, len(values), device=values.device)
    sigma = ((total - sums) / (d - k)).clamp(min=0)
    error = torch.maximum(sigma, values[1:] - sigma) / (sigma + epsilon)
    enough = (error <= tolerance / SLACK).nonzero()
    return min(math.ceil((int(enough[0]) + 1) / MULTIPLE) * MULTIPLE, len(values) - 1) if len(enough) else None


def _inverse(second: Tensor, values: Tensor, vectors: Tensor, k: int, total: float, epsilon: float) -> LowRank:
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
    for _ in range(POWER):
        moved = found @ damped - x
        damped_moved = torch.addmv(moved, second, moved, beta=epsilon)
        before, after = float(x @ damped), float(moved @ damped_moved)
        if not after > 0:
            return 0.0
        scale = float(moved.norm())
        size, x, damped = (after / before) ** 0.5, moved / scale, damped_moved / scale
    return size
