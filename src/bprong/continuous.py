"""Whitening that goes on continuously: every batch moves the whitener a little, by products and solves of its own size.

Cardoso & Laheld (1996) whiten by the relative gradient  U ← U − μ (E[z†z†ᵀ] − I) U.  Taken literally it diverges for
large μ, and on rank-deficient input for any. The stable form follows from the second moment that it tracks,

    S' = (1−μ) S + μ VᵀV,      UᵀU = S⁻¹,   V (n, d) a batch's rows, VᵀV its second moment, damping included,

whose whitener moves by a factor close to the identity. With V† = V Uᵀ, ρ = μ/(1−μ) and I + ρ V†V†ᵀ = L Lᵀ, (n, n),

    U' = T U,   T = (I − V†ᵀ A V†) / √(1−μ),   A = ρ (Lᵀ+I)⁻¹ L⁻¹,     T⁻¹ = √(1−μ) (I + ρ V†ᵀ (L+I)⁻¹ V†),

exactly, for any 0 < μ < 1 (Andrews' square root of Woodbury's identity). To first order T = I − μ/2 (V†ᵀV† − I), the
relative gradient with half of this μ; for one row, Cardoso & Laheld's normalised algorithm. T depends on V† alone, so
the iteration is equivariant: on inputs A z it gives U A⁻¹.

The damping ε I has full rank. It is fed as rows √(Kε) e_j, a K-th of the coordinates at each step, so that all have
their share within half of the time 1/μ after which the tracked moment forgets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bprong.moments import widened

__all__ = [
    "LOOKED_AT", "Factor", "Share", "centred_rows", "distance", "distance_of", "downdated", "factor", "inverse_step",
    "projected", "relative_step", "share", "whitened_rows",
]  # fmt: skip

TURNS = 2  # of the damping through all coordinates within 1/μ steps: ε of one then stays within 0.77 … 1.27 of itself
LOOKED_AT = 256  # rows from which a distance is estimated


@dataclass(frozen=True)
class Factor:
    """T = gain · (I − VᵀAV) with its inverse (I + VᵀBV) / gain: V (n, d), A and B (n, n)."""

    V: Tensor
    A: Tensor
    B: Tensor
    gain: float

    def times(self, M: Tensor) -> Tensor:
        """T M, for M (d, k): 4ndk operations."""
        return self._apply(self.A, M, -self.gain, self.gain)

    def transposed_times(self, M: Tensor) -> Tensor:
        """Tᵀ M."""
        return self._apply(self.A.mT, M, -self.gain, self.gain)

    def solve(self, M: Tensor) -> Tensor:
        """T⁻¹ M."""
        return self._apply(self.B, M, 1 / self.gain, 1 / self.gain)

    def transposed_solve(self, M: Tensor) -> Tensor:
        """T⁻ᵀ M."""
        return self._apply(self.B.mT, M, 1 / self.gain, 1 / self.gain)

    def dense(self) -> Tensor:
        """T itself, (d, d)."""
        return torch.diag(self.V.new_full(self.V.shape[-1:], self.gain)) - self.gain * (self.V.mT @ (self.A @ self.V))

    def _apply(self, middle: Tensor, M: Tensor, alpha: float, beta: float) -> Tensor:
        V = self.V.to(M)
        return torch.addmm(M, V.mT, middle.to(M) @ (V @ M), alpha=alpha, beta=beta)


@dataclass(frozen=True)
class Share:
    """The coordinates whose turn it is to be damped: rows sizes[i] · e_index[i], whose outer products average to ε."""

    index: Tensor  # (m,)
    sizes: Tensor  # (m,)
    turns: int  # K: how many shares make a whole


def share(d: int, epsilon: float | Tensor, mu: float, turn: int, like: Tensor) -> Share | None:
    """The damping's share in the step number `turn`, for ε one number or (d,); None without damping.

    The order of the coordinates is a fixed random one: a share is then a fair sample of them all.

    >>> [share(4, 0.1, 0.25, turn, torch.zeros(1)).index.tolist() for turn in range(3)]
    [[2, 3], [1, 0], [2, 3]]
    """
    epsilon = (epsilon.to(like) if isinstance(epsilon, Tensor) else like.new_tensor(epsilon)).expand(d)
    if not bool(epsilon.any()):
        return None
    turns = max(1, min(int(1 / (TURNS * mu)), d // 2))  # two coordinates at least, for `distance` to have pairs
    order = torch.randperm(d, generator=torch.Generator().manual_seed(d))
    index = order[turn % turns :: turns].to(like.device)
    return Share(index, (turns * epsilon[index]).sqrt(), turns)


def centred_rows(z: Tensor, c: Tensor, mu: float) -> tuple[Tensor, Tensor]:
    """Rows V of a centred second moment, and the mean that moves with it: c' = (1−μ)c + μ z̄.

    (1−μ)S + μVᵀV is then the moment about c' of the mixture of both, the distance between their means included.
    """
    mean = z.mean(dim=0)
    rows = torch.cat([(z - mean) / math.sqrt(len(z)), math.sqrt(1 - mu) * (mean - c).unsqueeze(0)])
    return rows, c + mu * (mean - c)


def whitened_rows(U: Tensor, rows: Tensor, damping: Share | None = None) -> Tensor:
    """V† = V Uᵀ with the damping's rows below; those are columns of U and need no product."""
    whitened = rows @ U.mT
    if damping is None:
        return whitened
    return torch.cat([whitened, (U[:, damping.index] * damping.sizes).mT])


def factor(V: Tensor, mu: float) -> Factor:
    """T with T ((1−μ)I + μVᵀV) Tᵀ = I, from rows V (n, d) in whitened coordinates."""
    if len(V) > V.shape[-1]:
        V = torch.linalg.qr(V, mode="r").R  # as many rows as coordinates have the same VᵀV
    rho, gram = mu / (1 - mu), widened(V @ V.mT)
    one = torch.eye(len(V), dtype=gram.dtype, device=gram.device)
    L = torch.linalg.cholesky(one + rho * (gram + gram.mT) / 2)
    # Triangular solves of the batch's size; float64 here costs nothing, the products with V are in its own precision.
    half = torch.linalg.solve_triangular(L + one, rho * one, upper=False)
    A = torch.linalg.solve_triangular(L.mT, half, upper=True)
    return Factor(V, A.mT.to(V), half.to(V), (1 - mu) ** -0.5)


def relative_step(U: Tensor, rows: Tensor, mu: float, damping: Share | None = None) -> Tensor:
    """U' = T U, a root of the inverse of (1−μ)S + μ(VᵀV + damping), from a root U of the inverse of S.

    Three products of n · d² and no d³.

    >>> U = relative_step(torch.eye(2), torch.tensor([[3.0, 0.0]]), mu=0.5)
    >>> (U.T @ U).diagonal().round(decimals=5).tolist()  # the inverse of 0.5 · 1 + 0.5 · 9, and of 0.5
    [0.20000000298023224, 2.0]
    """
    return factor(whitened_rows(U, rows, damping), mu).times(U)


def inverse_step(UU: Tensor, rows: Tensor, mu: float, damping: Share | None = None) -> Tensor:
    """The same for the inverse S⁻¹ = UᵀU alone: UU' = (UU − UU Vᵀ (V UU Vᵀ + (1−μ)/μ)⁻¹ V UU) / (1−μ), symmetric.

    Two products of n · d². Rows beyond d are not compressed: give at most d of them.
    """
    return downdated(UU, *projected(UU, rows, damping), mu)


def projected(UU: Tensor, rows: Tensor, damping: Share | None = None) -> tuple[Tensor, Tensor]:
    """V UU and, in float64, V UU Vᵀ, the damping's rows below V: all that whitened rows tell of one another."""
    P = rows @ UU
    gram = widened(P @ rows.mT)
    if damping is None:
        return P, gram
    index, sizes = damping.index, damping.sizes
    own = sizes.unsqueeze(-1) * UU[index]
    cross = widened(P[:, index] * sizes)
    corner = widened(own[:, index] * sizes)
    gram = torch.cat([torch.cat([gram, cross], dim=1), torch.cat([cross.mT, corner], dim=1)])
    return torch.cat([P, own]), gram


def downdated(UU: Tensor, P: Tensor, gram: Tensor, mu: float) -> Tensor:
    """`inverse_step` from what `projected` has found."""
    one = torch.eye(len(P), dtype=gram.dtype, device=gram.device)
    L = torch.linalg.cholesky((gram + gram.mT) / 2 + one * ((1 - mu) / mu))
    Q = torch.linalg.solve_triangular(L.to(P), P, upper=False)
    found = torch.addmm(UU, Q.mT, Q, alpha=-1 / (1 - mu), beta=1 / (1 - mu))
    return (found + found.mT) / 2


def distance(z: Tensor, damped: Tensor | None = None) -> float:
    """‖M + E − I‖² / d for M = E[z†z†ᵀ] and E = ε UUᵀ, estimated from few rows without bias; it may come out below 0.

    z: (n, d) rows z†. damped: (m, d) rows √ε U e_j of a fair sample of coordinates, None without damping.

    tr M² is estimated by (z†ᵢ·z†ⱼ)² over pairs i ≠ j: a row's product with itself would add a term of tr(M)²/n, the
    sampling noise that a moment of few rows is never white for. The rows must not be those that chose U.
    """
    z, d = z[:LOOKED_AT], z.shape[-1]
    if damped is None:
        return distance_of(d, z @ z.mT)
    return distance_of(d, z @ z.mT, z @ damped.mT, damped @ damped.mT)


def distance_of(d: int, gram: Tensor, cross: Tensor | None = None, corner: Tensor | None = None) -> float:
    """The same from the products of z† with one another, with the rows of the damping, and of those with themselves."""
    own, n = gram.diagonal(), len(gram)
    trace, squares = own.mean(), (gram.square().sum() - own.square().sum()) / max(1, n * (n - 1))
    if cross is not None and corner is not None:
        diagonal, m = corner.diagonal(), len(corner)
        apart = (corner.square().sum() - diagonal.square().sum()) / max(1, m * (m - 1))
        squares = squares + d * diagonal.square().mean() + d * (d - 1) * apart
        squares = squares + 2 * d * cross.square().mean()
        trace = trace + d * diagonal.mean()
    return float(squares - 2 * trace) / d + 1
